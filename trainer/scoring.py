"""Scores of token sequences: the summed loss of a part of each, and whether the model's first choice is every token.

HellaSwag (trainer/hellaswag.py) and CORE (trainer/core.py) are rows of tokens with a part that counts. Rows of similar
length form a batch, and each batch is padded to one of a few shapes, so that libraries which prepare a plan for every
shape prepare few. Only the hidden states before counted tokens go through the head, which for short rows is the most
expensive layer. The ranks divide the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import ModelConfig
from trainer.data import PendingNumbers
from trainer.model import HEAD_ROWS
from trainer.parallel import World

TOKENS_AT_ONCE = {"cuda": 65_536}  # a GPU is busy with them for 30 ms (124M) to 0.5 s (1558M)
TOKENS_AT_ONCE_CPU = 4_096
WIDTH_STEP = 32  # widths of batches are its multiples
HEAD_STEP = 128  # the numbers of positions that go through the head at once are its multiples


class Scored(Protocol):
    """A model to score with: `GPT`, or an engine, which computes with its weights in place."""

    config: ModelConfig

    def hidden(self, tokens: Tensor) -> Tensor:
        """The last layer's output after ln_f: (B, T) token ids -> (B, T, n_embd)."""
        ...

    def head(self, x: Tensor) -> Tensor:
        """Logits of hidden states (N, n_embd) -> (N, padded_vocab_size), padding at -inf."""
        ...


@dataclass(frozen=True)
class Row:
    """A sequence of at most block_size + 1 tokens, whose tokens [start:end] count; start is at least 1. Without an
    `end` all tokens from `start` on count."""

    tokens: Sequence[int] | np.ndarray
    start: int
    end: int | None = None

    @property
    def stop(self) -> int:
        return len(self.tokens) if self.end is None else self.end


@dataclass(frozen=True)
class RowScore:
    """The summed loss in nats of the tokens that count, their number, and whether each has the largest logit."""

    loss: float
    tokens: int
    greedy: bool

    @property
    def mean(self) -> float:
        return self.loss / self.tokens


@torch.no_grad()
def score_rows(
    model: Scored,
    rows: Sequence[Row],
    world: World,
    tokens_at_once: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[RowScore]:
    """The scores of all rows, in their order, on every rank. A collective call.

    `tokens_at_once` limits a batch; without it, the device decides. `before_batch` is called equally often on every
    rank, so it may communicate; it may raise to end the measurement. `progress` gets the number of scored rows.
    """
    if tokens_at_once is None:
        tokens_at_once = TOKENS_AT_ONCE.get(world.device.type, TOKENS_AT_ONCE_CPU)
    longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    shares = [
        _batches(rows, longest_first[rank :: world.world_size], tokens_at_once, model.config.block_size)
        for rank in range(world.world_size)
    ]
    mine = shares[world.rank]
    found: list[tuple[int, float, bool]] = []
    waiting: tuple[Batch, PendingNumbers] | None = None
    for number in range(max(map(len, shares))):
        before_batch()
        ahead = waiting
        batch = mine[number] if number < len(mine) else None
        # The GPU computes a batch while the host reads the one before it: never more, so that a stop waits for two.
        waiting = (batch, PendingNumbers(_losses(model, rows, batch, world.device))) if batch else None
        found += _read(rows, ahead)
        progress(min(len(rows), len(found) * world.world_size))
    found += _read(rows, waiting)
    scores: list[RowScore | None] = [None] * len(rows)
    for i, loss, greedy in (each for share in world.gather(found) for each in share):
        scores[i] = RowScore(loss, rows[i].stop - rows[i].start, greedy)
    progress(len(rows))
    return [score for score in scores if score is not None]


@dataclass(frozen=True)
class Batch:
    """Indices of rows, and the shape (height, width) to which they are padded."""

    rows: list[int]
    height: int
    width: int


def _batches(rows: Sequence[Row], longest_first: list[int], tokens_at_once: int, block_size: int) -> list[Batch]:
    """Batches of rows of similar length. A width has one height, except that of the last batch."""
    batches, begin = [], 0
    while begin < len(longest_first):
        inputs = len(rows[longest_first[begin]].tokens) - 1
        assert inputs <= block_size, f"{inputs} tokens do not fit into block_size {block_size}"
        width = min(block_size, WIDTH_STEP * -(-inputs // WIDTH_STEP))
        height = max(1, tokens_at_once // width)
        part = longest_first[begin : begin + height]
        batches.append(Batch(part, min(height, 1 << (len(part) - 1).bit_length()), width))
        begin += height
    return batches


def _losses(model: Scored, rows: Sequence[Row], batch: Batch, device: torch.device) -> Tensor:
    """(2, n): the loss of every counted token of a batch, row by row, and whether it has the largest logit."""
    # Padding is on the right, where a causal model does not see it.
    padded = np.zeros((batch.height, batch.width + 1), dtype=np.int64)
    counted = []
    for r, i in enumerate(batch.rows):
        row = rows[i]
        assert 1 <= row.start < row.stop <= len(row.tokens), f"row {i} counts the tokens {row.start} to {row.stop}"
        padded[r, : len(row.tokens)] = row.tokens
        counted.append(r * batch.width + np.arange(row.start - 1, row.stop - 1))
    at = np.concatenate(counted)
    targets = padded[:, 1:].reshape(-1)[at]
    steps = -len(at) % HEAD_STEP  # the last position once more
    numbers = np.concatenate((padded[:, :-1].reshape(-1), np.pad(at, (0, steps), "edge"), np.pad(targets, (0, steps))))
    sizes = (batch.height * batch.width, len(at) + steps, len(at) + steps)
    tokens, positions, wanted = _to_device(numbers, device).split(sizes)
    x = model.hidden(tokens.view(batch.height, batch.width)).flatten(0, 1)[positions]
    parts = []
    for some, ids in zip(x.split(HEAD_ROWS), wanted.split(HEAD_ROWS), strict=True):
        logits = model.head(some).float()
        losses = F.cross_entropy(logits, ids, reduction="none")
        parts.append(torch.stack((losses, (logits.argmax(-1) == ids).float())))
    return torch.cat(parts, 1)[:, : len(at)]


def _to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """int64 numbers on the device; the host does not wait for a GPU."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _read(rows: Sequence[Row], batch: tuple[Batch, PendingNumbers] | None) -> list[tuple[int, float, bool]]:
    """Index, loss and greediness of each row of a batch."""
    if batch is None:
        return []
    losses, first = np.array(batch[1].values(), dtype=np.float64)
    begins = np.cumsum([0, *(rows[i].stop - rows[i].start for i in batch[0].rows)])[:-1]
    sums, all_first = np.add.reduceat(losses, begins), np.minimum.reduceat(first, begins)
    return list(zip(batch[0].rows, sums.tolist(), (all_first > 0).tolist(), strict=True))
