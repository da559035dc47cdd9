"""The evaluation of a run while it trains: scores and a few texts from the engine's weights in place.

All ranks take part and get the same scores. Nothing of the training changes: no weight, no random number, no data.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.parallel import World
from trainer.scoring import Scored

# Measures a model on all ranks, which share the work: every rank gets the same scores, by metric. It calls the last
# argument before each batch, equally often on every rank; that call may raise to end the evaluation.
Measure = Callable[[Scored, World, Callable[[], None]], dict[str, float]]

TOP_K = 50


@dataclass(frozen=True)
class Sampling:
    """Texts from the start of a document, each with a seed of its own: the same seeds at every evaluation."""

    start: int  # the token id that begins a document
    decode: Callable[[list[int]], str]
    seed: int
    texts: int = 3
    tokens: int = 64  # of each text, at most block_size

    @torch.no_grad()
    def texts_of(self, model: Scored, world: World, check: Callable[[], None]) -> list[str]:
        """The texts, on every rank; the ranks share the work. A collective call."""
        mine = range(world.rank, self.texts, world.world_size)
        width = min(self.tokens, model.config.block_size)
        generators = [torch.Generator().manual_seed(self.seed + number) for number in mine]
        # One shape from the first token to the last: a causal model does not see what follows.
        ids = torch.full((len(mine), width + 1), self.start)
        for at in range(width):
            check()
            if mine:
                hidden = model.hidden(ids[:, :-1].to(world.device))[:, at]
                logits, tokens = model.head(hidden).float().cpu().topk(min(TOP_K, model.config.vocab_size))
                for i, generator in enumerate(generators):
                    ids[i, at + 1] = tokens[i, torch.multinomial(logits[i].softmax(0), 1, generator=generator)]
        decoded = [(number, self.decode(ids[i, 1:].tolist())) for i, number in enumerate(mine)]
        return [text for _, text in sorted(one for ours in world.gather(decoded) for one in ours)]


@dataclass(frozen=True)
class Evaluation:
    """The measurements of a run after every `every` steps and after the last one."""

    every: int
    measures: tuple[Measure, ...] = ()
    sampling: Sampling | None = None

    def scores(self, model: Scored, world: World, check: Callable[[], None]) -> dict[str, float]:
        """The scores of all measures, equal on all ranks. A collective call."""
        return {name: value for measure in self.measures for name, value in measure(model, world, check).items()}

    def texts(self, model: Scored, world: World, check: Callable[[], None]) -> list[str]:
        """A few generated texts, equal on all ranks. A collective call."""
        return self.sampling.texts_of(model, world, check) if self.sampling else []
