"""What a model is measured by: the loss on held-out tokens, benchmarks, and a few texts.

All ranks take part and get the same scores. Nothing of a training changes: no weight, no random number, no data.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.base.parallel import World
from trainer.data.batches import TokenData, to_device
from trainer.eval.scoring import Scored

# Measures a model on all ranks, which share the work: every rank gets the same scores, by metric. It calls the last
# argument before each batch, equally often on every rank; that call may raise to end the evaluation.
Measure = Callable[[Scored, World, Callable[[], None]], dict[str, float]]

TOP_K = 50


@dataclass(frozen=True)
class TextSampler:
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
        ids = torch.full((max(1, len(mine)), width + 1), self.start)
        for at in range(width):
            check()
            hidden = model.hidden(ids[:, :-1].to(world.device))[:, at]  # on every rank: an engine may need that
            if mine:
                logits, tokens = model.head(hidden).float().cpu().topk(min(TOP_K, model.config.vocab_size))
                for i, generator in enumerate(generators):
                    ids[i, at + 1] = tokens[i, torch.multinomial(logits[i].softmax(0), 1, generator=generator)]
        decoded = [(number, self.decode(ids[i, 1:].tolist())) for i, number in enumerate(mine)]
        return [text for _, text in sorted(one for ours in world.gather(decoded) for one in ours)]


@dataclass(frozen=True)
class Evaluation:
    """The measurements of a run after every `every` steps and after the last one; None: never."""

    every: int | None = None
    measures: tuple[Measure, ...] = ()
    sampling: TextSampler | None = None

    def scores(self, model: Scored, world: World, check: Callable[[], None]) -> dict[str, float]:
        """The scores of all measures, equal on all ranks. A collective call."""
        return {name: value for measure in self.measures for name, value in measure(model, world, check).items()}

    def texts(self, model: Scored, world: World, check: Callable[[], None]) -> list[str]:
        """A few generated texts, equal on all ranks. A collective call."""
        return self.sampling.texts_of(model, world, check) if self.sampling else []


@torch.no_grad()
def validation_loss(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    data: TokenData,
    max_tokens: int,
    batch_size: int,
    world: World,
    on_batch: Callable[[], None] = lambda: None,
) -> float:
    """Mean cross-entropy in nats over the first `max_tokens` tokens of a split, in file order.

    `loss_of` returns the mean loss of inputs and targets (B, T). The ranks divide the windows. The mean is over tokens,
    so it does not depend on the number of ranks. `on_batch` is called before each batch, equally often on every rank,
    so it may communicate; it may raise to end the measurement.
    """
    total, count = _zero(world.device), 0
    for tokens, targets, counts in _batches(data, max_tokens, batch_size, world, on_batch):
        loss = loss_of(tokens, targets)
        if counts:
            total += loss * targets.numel()
            count += targets.numel()
    summed, tokens_seen = world.sum(float(total), count)
    return summed / tokens_seen


@torch.no_grad()
def validation(
    losses_of: Callable[[Tensor, Tensor], Tensor],
    data: TokenData,
    max_tokens: int,
    batch_size: int,
    world: World,
    token_bytes: Tensor,
    on_batch: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """The loss in nats per token, as `validation_loss`, and the loss in bits per byte of text.

    `losses_of` returns the losses of inputs and targets (B, T), token by token; `token_bytes` has the bytes of every
    token id. Bits per byte do not depend on the tokenizer, so runs with different ones compare. As in nanochat, tokens
    without bytes (end-of-text) do not count for them, neither their losses nor their number.
    """
    bytes_of = token_bytes.to(world.device)
    total, in_text, size, count = (_zero(world.device) for _ in range(4))
    for tokens, targets, counts in _batches(data, max_tokens, batch_size, world, on_batch):
        losses, sizes = losses_of(tokens, targets), bytes_of[targets]
        if not counts:
            continue
        total += losses.sum()
        in_text += (losses * (sizes > 0)).sum()
        size += sizes.sum()
        count += targets.numel()
    nats, text_nats, text_bytes, tokens_seen = world.sum(*map(float, (total, in_text, size, count)))
    return nats / tokens_seen, text_nats / math.log(2) / text_bytes if text_bytes else math.inf


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)


def _batches(
    data: TokenData, max_tokens: int, batch_size: int, world: World, on_batch: Callable[[], None]
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """This rank's share of the first windows, as inputs and targets, and whether they count. Every rank gets as many:
    an engine may need equally many forward passes on all ranks."""
    places = data.first_windows(max(1, max_tokens // data.block_size))
    windows = places[world.rank :: world.world_size]
    largest_share = -(-len(places) // world.world_size)
    for start in range(0, largest_share, batch_size):
        on_batch()
        batch = windows[start : start + batch_size]
        yield *to_device(data.windows(batch or places[:1]), world.device), bool(batch)
