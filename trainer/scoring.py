"""Scores of token sequences: the summed loss of a part of each, and whether the model's first choice is every token.

HellaSwag (trainer/hellaswag.py) and CORE (trainer/core.py) are rows of tokens with a part that counts. Neighbouring
rows with the same beginning, such as the choices of a question, are one strip: the beginning is computed once. Strips
of similar length form a batch, and each batch is padded to one of a few shapes, so that libraries which prepare a plan
for every shape prepare few. Only the hidden states before counted tokens go through the head, which for short rows is
the most expensive layer. The ranks divide the strips.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data import PendingNumbers
from trainer.model import HEAD_ROWS, Branches
from trainer.model_config import ModelConfig
from trainer.parallel import World

TOKENS_AT_ONCE = {"cuda": 65_536}  # a GPU is busy with them for 30 ms (124M) to 0.5 s (1558M)
TOKENS_AT_ONCE_CPU = 4_096
WIDTH_STEP = 32  # widths of batches are its multiples
HEAD_STEP = 128  # the numbers of positions that go through the head at once are its multiples
SHARED_LEAST = 16  # tokens: a shorter common beginning does not pay for the mask
LONGEST_STRIP = 2  # block sizes


class Scored(Protocol):
    """A model to score with: a plain module, or an engine, which computes with its weights in place."""

    config: ModelConfig
    branching: bool  # `hidden` takes branches
    tokens_at_once: int | None  # an upper limit, if memory is short

    def hidden(self, tokens: Tensor, branches: Branches | None = None) -> Tensor:
        """The input of the head: (B, T) token ids -> (B, T, n_embd)."""
        ...

    def head(self, x: Tensor) -> Tensor:
        """Logits of hidden states (N, n_embd) -> (N, padded_vocab_size), padding at -inf."""
        ...


NO_TOKENS = np.zeros(0, dtype=np.int32)


class Row(NamedTuple):
    """A sequence of at most block_size + 1 tokens, whose tokens [start:end] count; start is at least 1. Without an
    `end` all tokens from `start` on count.

    The sequence is `before` and then `tokens`. Neighbouring rows that begin alike may have one array as `before`.
    """

    tokens: Sequence[int] | np.ndarray
    start: int
    end: int | None = None
    before: np.ndarray = NO_TOKENS

    @property
    def length(self) -> int:
        return len(self.before) + len(self.tokens)

    @property
    def stop(self) -> int:
        return self.length if self.end is None else self.end

    def part(self, begin: int, end: int) -> Sequence[int] | np.ndarray:
        """The tokens [begin:end] of the sequence."""
        n = len(self.before)
        if begin >= n:
            return self.tokens[begin - n : end - n]
        if end <= n:
            return self.before[begin:end]
        return np.concatenate((self.before[begin:], self.tokens[: end - n]))


class RowScore(NamedTuple):
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

    `tokens_at_once` limits a batch; without it, the device and the model decide. `before_batch` is called equally often
    on every rank, so it may communicate; it may raise to end the measurement. `progress` gets the number of rows done.
    """
    if tokens_at_once is None:
        tokens_at_once = TOKENS_AT_ONCE.get(world.device.type, TOKENS_AT_ONCE_CPU)
        tokens_at_once = min(tokens_at_once, model.tokens_at_once or tokens_at_once)
    block_size = model.config.block_size
    for i, row in enumerate(rows):
        length, stop = row.length, row.stop
        assert 1 <= row.start < stop <= length, f"row {i} counts the tokens {row.start} to {stop}"
        assert length <= block_size + 1, f"row {i} has {length} tokens"
    strips = _sorted(_strips(rows, LONGEST_STRIP * block_size if model.branching else 0))
    shares = [_batches(strips[rank :: world.world_size], tokens_at_once) for rank in range(world.world_size)]
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
class Strip:
    """Neighbouring rows, the number of tokens with which all begin, and the length of that beginning with the rest of
    each row behind it. A row's last token is only a target, and in no length."""

    rows: list[int]
    shared: int
    length: int


def _strips(rows: Sequence[Row], longest: int) -> list[Strip]:
    """All rows in strips of up to `longest` tokens; 0: each row alone."""
    strips: list[Strip] = []
    for i, row in enumerate(rows):
        inputs = row.length - 1
        if strips and longest:
            last = strips[-1]
            shared = _shared(rows[last.rows[0]], row, min(last.shared, inputs))
            # Besides the new row's rest, all rests but one grow by what the beginning loses.
            rest = inputs - shared + (len(last.rows) - 1) * (last.shared - shared)
            if shared >= SHARED_LEAST and rest < inputs and last.length + rest <= longest:
                strips[-1] = Strip([*last.rows, i], shared, last.length + rest)
                continue
        strips.append(Strip([i], inputs, inputs))
    return strips


def _sorted(strips: list[Strip]) -> list[Strip]:
    """By width, which decides the padding, then by beginnings: the shortest one of a batch decides the mask's size."""
    return sorted(strips, key=lambda strip: (len(strip.rows) > 1, strip.length // -WIDTH_STEP, -strip.shared))


def _shared(a: Row, b: Row, most: int) -> int:
    """The number of tokens, at most `most`, with which both rows begin."""
    known = len(b.before) if a.before is b.before else 0
    return min(most, known + _common(a.part(known, most), b.part(known, most))) if most > known else most


def _common(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """The number of tokens with which both begin."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    same = np.asarray(a[:n]) == np.asarray(b[:n])
    return n if same.all() else int(same.argmin())


@dataclass(frozen=True)
class Batch:
    """Strips of one row or of several, and the shape (height, width) to which they are padded."""

    strips: list[Strip]
    height: int
    width: int

    @property
    def rows(self) -> list[int]:
        return [i for strip in self.strips for i in strip.rows]

    @property
    def branching(self) -> bool:
        return len(self.strips[0].rows) > 1


def _batches(strips: list[Strip], tokens_at_once: int) -> list[Batch]:
    """Batches of strips of similar length. A width has one height, except that of a last batch."""
    batches: list[Batch] = []
    begin = 0
    while begin < len(strips):
        part: list[Strip] = []
        several, width, height = len(strips[begin].rows) > 1, 0, 1
        for strip in strips[begin:]:
            wider = max(width, WIDTH_STEP * -(-strip.length // WIDTH_STEP))
            room = max(1, tokens_at_once // wider)
            if (len(strip.rows) > 1) != several or len(part) >= room:
                break
            part.append(strip)
            width, height = wider, room
        batches.append(Batch(part, min(height, 1 << (len(part) - 1).bit_length()), width))
        begin += len(part)
    return batches


def _losses(model: Scored, rows: Sequence[Row], batch: Batch, device: torch.device) -> Tensor:
    """(2, n): the loss of every counted token of a batch, row by row, and whether it has the largest logit."""
    width = batch.width if batch.branching else min(batch.width, model.config.block_size)
    parts = _packed(rows, batch, width)
    numbers = _to_device(np.concatenate(parts, dtype=np.int32), device)
    ids, chosen, labels, *more = numbers.long().split([len(part) for part in parts])
    branches = None
    if more:
        causal = min(strip.shared for strip in batch.strips) // WIDTH_STEP * WIDTH_STEP
        places, branch = (part.view(batch.height, width) for part in more)
        branches = Branches(places, branch, causal)
    x = model.hidden(ids.view(batch.height, width), branches).flatten(0, 1)[chosen]
    results = []
    for some, answers in zip(x.split(HEAD_ROWS), labels.split(HEAD_ROWS), strict=True):
        logits = model.head(some).float()
        losses = F.cross_entropy(logits, answers, reduction="none")
        results.append(torch.stack((losses, (logits.argmax(-1) == answers).float())))
    return torch.cat(results, 1)[:, : sum(rows[i].stop - rows[i].start for i in batch.rows)]


def _packed(rows: Sequence[Row], batch: Batch, width: int) -> list[np.ndarray]:
    """The numbers of a batch: its tokens (height x width), the places in front of counted tokens, and these tokens;
    with several rows a strip also the position and the branch of every token, as `Branches` has them.

    Padding of the tokens is on the right, where a causal model does not see it; that of the places is their last one.
    """
    # One array operation for all rows of a batch: CORE has 275,000 rows.
    of = [rows[i] for i in batch.rows]
    counts = np.array([len(strip.rows) for strip in batch.strips])
    shared = np.array([strip.shared for strip in batch.strips])
    lengths, starts, stops = np.array([(row.length - 1, row.start, row.stop) for row in of]).T
    row_shared = shared.repeat(counts)
    rest = lengths - row_shared
    # Where each rest begins: behind its strip's beginning and the rests before it.
    behind = rest.cumsum() - rest
    strip_at = np.arange(len(counts)) * width
    rest_at = behind + (strip_at + shared - behind[counts.cumsum() - counts]).repeat(counts)
    places = np.concatenate((_ranges(strip_at, shared), _ranges(rest_at, rest)))
    tokens = np.zeros(batch.height * width, dtype=np.int32)
    tokens[places] = np.concatenate(
        [rows[strip.rows[0]].part(0, strip.shared) for strip in batch.strips]
        + [row.part(n, end) for row, n, end in zip(of, row_shared.tolist(), lengths.tolist(), strict=True) if n < end]
    )
    fronts = _ranges(starts - 1, stops - starts)
    row_of = np.arange(len(of)).repeat(stops - starts)
    moved = np.where(fronts < row_shared[row_of], strip_at.repeat(counts)[row_of], (rest_at - row_shared)[row_of])
    fill = (0, -len(fronts) % HEAD_STEP)
    counted = np.pad(fronts + moved, fill, "edge")
    wanted = np.pad(np.concatenate([row.part(row.start, row.stop) for row in of]), fill, "edge")
    if not batch.branching:
        return [tokens, counted, wanted]
    positions, branch = np.zeros_like(tokens), np.full_like(tokens, -1)
    positions[places] = np.concatenate((_ranges(0 * shared, shared), _ranges(row_shared, rest)))
    number = np.arange(len(of)) - (counts.cumsum() - counts).repeat(counts) + 1
    branch[places] = np.concatenate((np.zeros(shared.sum(), dtype=np.int32), number.repeat(rest)))
    return [tokens, counted, wanted, positions, branch]


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, … for each start, `count` of them."""
    ends = counts.cumsum()
    return np.arange(ends[-1] if len(ends) else 0) + (starts - ends + counts).repeat(counts)


def _to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on the device; the host does not wait for a GPU."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _read(rows: Sequence[Row], batch: tuple[Batch, PendingNumbers] | None) -> list[tuple[int, float, bool]]:
    """Index, loss and greediness of each row of a batch."""
    if batch is None:
        return []
    indices, (losses, first) = batch[0].rows, np.array(batch[1].values(), dtype=np.float64)
    begins = np.cumsum([0, *(rows[i].stop - rows[i].start for i in indices)])[:-1]
    sums, all_first = np.add.reduceat(losses, begins), np.minimum.reduceat(first, begins)
    return list(zip(indices, sums.tolist(), (all_first > 0).tolist(), strict=True))
