"""Scores of token sequences: the summed loss of the end of each, and whether the model's first choice is every token.

HellaSwag (trainer/eval/hellaswag.py) and CORE (trainer/eval/core.py) are items of a few such rows, and the ranks divide
the items. Rows of similar length form a batch. Only the hidden states before counted tokens go through the head, which
for short rows is the most expensive layer.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.base.parallel import World
from trainer.config.errors import UserError
from trainer.config.model_config import HEAD_ROWS, ModelConfig

TOKENS_AT_ONCE = {"cuda": 65_536}  # a GPU is busy with them for 30 ms (124M) to 0.5 s (1558M)
TOKENS_AT_ONCE_CPU = 4_096
WIDTH_STEP = 32  # widths of batches are its multiples: a library that plans for each shape plans for few
ITEMS_AT_ONCE = 500  # of a rank: their texts and tokens are in memory, and a stop waits while they are encoded

# Token ids of each text, without special tokens.
Encode = Callable[[list[str]], Sequence[Sequence[int] | np.ndarray]]
# Token ids of a conversation, messages of {role, content}, up to where the next answer begins.
Chat = Callable[[Sequence[Mapping[str, str]]], list[int]]
T = TypeVar("T")


class Scored(Protocol):
    """A model to score with: a plain module, or an engine, which computes with its weights in place."""

    config: ModelConfig
    tokens_at_once: int | None  # an upper limit, if memory is short

    def hidden(self, tokens: Tensor) -> Tensor:
        """The input of the head: (B, T) token ids -> (B, T, n_embd)."""

    def head(self, x: Tensor) -> Tensor:
        """Logits of hidden states (N, n_embd) -> (N, padded_vocab_size), padding at -inf."""


class ScoredRow(NamedTuple):
    """At most `reach` + 1 tokens, of which those from `start` on count; `start` is at least 1."""

    tokens: Sequence[int] | np.ndarray
    start: int


def cropped_row(tokens: np.ndarray, start: int, longest: int | None) -> ScoredRow:
    """A row without its oldest tokens, if it has more than `longest`."""
    left_out = max(0, len(tokens) - (longest or len(tokens)))
    return ScoredRow(tokens[left_out:].astype(np.int32), max(1, start - left_out))


class RowScore(NamedTuple):
    """The summed loss in nats of the tokens that count, their number, and whether each has the largest logit. A row
    without such a token has an infinite loss."""

    loss: float
    tokens: int
    greedy: bool

    @property
    def mean(self) -> float:
        return self.loss / max(1, self.tokens)


def score_items(
    model: Scored,
    count: int,
    rows_of: Callable[[Sequence[int]], list[list[ScoredRow]]],
    world: World,
    before_batch: Callable[[], None] = lambda: None,
) -> list[list[RowScore]]:
    """Score the rows of `count` items, on every rank; the ranks divide the items. A collective call.

    `rows_of` makes the rows of some items, given their indices. `before_batch` is called equally often on every rank,
    so it may communicate; it may raise to end the measurement.
    """
    scores: list[list[RowScore]] = []
    for begin in range(0, count, ITEMS_AT_ONCE * world.world_size):
        part = range(begin, min(count, begin + ITEMS_AT_ONCE * world.world_size))
        groups = rows_of(part[world.rank :: world.world_size])
        found = iter(score_rows(model, [row for group in groups for row in group], world, before_batch))
        shares = world.gather([[next(found) for _ in group] for group in groups])
        scores += [shares[i % world.world_size][i // world.world_size] for i in range(len(part))]
    return scores


def score_rows(
    model: Scored, rows: Sequence[ScoredRow], world: World, before_batch: Callable[[], None] = lambda: None
) -> list[RowScore]:
    """The scores of this rank's own rows. A collective call; for `before_batch` see `score_items`."""
    limit = TOKENS_AT_ONCE.get(world.device.type, TOKENS_AT_ONCE_CPU)
    batches = list(_batches(rows, min(limit, model.tokens_at_once or limit)))
    scores = [RowScore(math.inf, 0, False)] * len(rows)
    for number in range(max(world.gather(len(batches)))):
        before_batch()
        batch = batches[number] if number < len(batches) else []
        # A row that does not count: an engine may need equally many forward passes on all ranks.
        of_batch = _batch_scores(model, [rows[i] for i in batch] or [ScoredRow([0, 0], 1)], world.device)
        for i, score in zip(batch, of_batch, strict=False):
            scores[i] = score
    return scores


def _batches(rows: Sequence[ScoredRow], tokens_at_once: int) -> Iterator[list[int]]:
    """The indices of rows with tokens that count, the longest rows first."""
    order = sorted((i for i, row in enumerate(rows) if row.start < len(row.tokens)), key=lambda i: -len(rows[i].tokens))
    begin = 0
    while begin < len(order):
        height = max(1, tokens_at_once // _width(rows[order[begin]]))
        yield order[begin : begin + height]
        begin += height


def _width(row: ScoredRow) -> int:
    return -(-(len(row.tokens) - 1) // WIDTH_STEP) * WIDTH_STEP


@torch.no_grad()
def _batch_scores(model: Scored, rows: Sequence[ScoredRow], device: torch.device) -> list[RowScore]:
    """The scores of the rows of a batch, whose first one is the longest."""
    width = min(_width(rows[0]), model.config.reach or _width(rows[0]))
    ids = np.zeros((len(rows), width), dtype=np.int64)  # padded on the right, where a causal model does not see it
    for line, row in zip(ids, rows, strict=True):
        line[: len(row.tokens) - 1] = row.tokens[:-1]
    counts = [len(row.tokens) - row.start for row in rows]
    places = [n * width + np.arange(row.start - 1, len(row.tokens) - 1) for n, row in enumerate(rows)]
    wanted = torch.from_numpy(np.concatenate([row.tokens[row.start :] for row in rows]).astype(np.int64)).to(device)
    x = model.hidden(torch.from_numpy(ids).to(device)).flatten(0, 1)
    x = x[torch.from_numpy(np.concatenate(places)).to(device)]
    losses, first = [], []
    for some, answers in zip(x.split(HEAD_ROWS), wanted.split(HEAD_ROWS), strict=True):
        logits = model.head(some).float()
        losses.append(F.cross_entropy(logits, answers, reduction="none"))
        first.append(logits.argmax(-1) == answers)
    each = zip(torch.cat(losses).cpu().double().split(counts), torch.cat(first).cpu().split(counts), strict=True)
    return [RowScore(float(loss.sum()), len(loss), bool(greedy.all())) for loss, greedy in each]


def read_jsonl(path: Path, what: str, item_of: Callable[[Any], T]) -> list[T]:
    """The items of a jsonl file, each made of a line's JSON by `item_of`. UserError names the line that is not `what`,
    such as "an item"."""
    items, number = [], 0
    try:
        with path.open(encoding="utf8") as file:
            for line in file:
                number += 1
                if line.strip():
                    items.append(item_of(json.loads(line)))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "is not text in UTF-8")
        raise UserError(f"{path}: {reason}; it must be a jsonl file, each line {what}") from error
    except Exception as error:  # whatever a stranger's values raise
        raise UserError(f"{path}: line {number}: must be {what}") from error
    if not items:
        raise UserError(f"{path}: is empty; each line must be {what}")
    return items
