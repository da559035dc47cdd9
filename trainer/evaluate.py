"""Two measures of a model: the loss on held-out tokens, and HellaSwag in completion style.

HellaSwag (Zellers et al. 2019) is scored as in build-nanogpt and llm.c: each of four endings follows the context, and
the model chooses the ending with the lowest mean loss a token (`acc_norm`) or the lowest sum (`acc`). GPT-2 124M scores
.2945 and 1558M .4889 in acc_norm. EleutherAI's harness normalizes by bytes and gives other numbers (.3114 for 124M):
never mix them.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.data import TokenData, to_device
from trainer.errors import UserError
from trainer.model import GPT
from trainer.parallel import World


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
    count = min(sum(s.windows(data.block_size) for s in data.shards), max(1, max_tokens // data.block_size))
    places = ((s, w) for s, shard in enumerate(data.shards) for w in range(shard.windows(data.block_size)))
    windows = list(islice(places, world.rank, count, world.world_size))
    total = torch.zeros((), dtype=torch.float64 if world.device.type != "mps" else torch.float32, device=world.device)
    largest_share = -(-count // world.world_size)
    for start in range(0, largest_share, batch_size):
        on_batch()
        if batch := windows[start : start + batch_size]:
            tokens, targets = to_device(data.windows(batch), world.device)
            total += loss_of(tokens, targets) * targets.numel()
    loss, tokens_seen = world.sum(float(total), len(windows) * data.block_size)
    return loss / tokens_seen


@dataclass(frozen=True)
class HellaSwagItem:
    """A context, its four endings, and the index of the correct one."""

    context: str
    endings: tuple[str, ...]
    label: int


def read_hellaswag(rows: Iterator[dict[str, Any]], where: str) -> list[HellaSwagItem]:
    """Items from rows with the data set's fields `ctx`, `endings` and `label`. UserError for any other row."""
    items = []
    for number, row in enumerate(rows, 1):
        try:
            item = HellaSwagItem(row["ctx"], tuple(row["endings"]), int(row["label"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where}: item {number}: {error!r}; an item needs ctx, endings and a label") from error
        texts = (item.context, *item.endings)
        if isinstance(row["endings"], str) or not all(isinstance(text, str) and text for text in texts):
            raise UserError(
                f"{where}: item {number}: ctx must be a string, endings a list of strings, and none may be empty"
            )
        if not 0 <= item.label < len(item.endings):
            raise UserError(
                f"{where}: item {number}: label {item.label} is not the index of one of the {len(item.endings)} endings"
            )
        items.append(item)
    if not items:
        raise UserError(f"{where}: contains no HellaSwag items")
    return items


def read_hellaswag_file(path: Path) -> list[HellaSwagItem]:
    """Items of a jsonl file. UserError if the file does not exist or has another format."""
    try:
        with path.open(encoding="utf8") as file:
            return read_hellaswag((json.loads(line) for line in file if line.strip()), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a jsonl file of HellaSwag items") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a jsonl file: {error}") from error


@dataclass(frozen=True)
class HellaSwagScore:
    """Fractions of items whose correct ending has the lowest sum of losses (`acc`) or the lowest mean (`acc_norm`)."""

    acc: float
    acc_norm: float
    items: int


@torch.no_grad()
def hellaswag(
    model: GPT,
    items: list[HellaSwagItem],
    encode: Callable[[str], list[int]],
    device: torch.device,
    tokens_at_once: int = 16_384,
    progress: Callable[[int], None] = lambda done: None,
) -> HellaSwagScore:
    """Accuracy over all items. `encode` turns text into token ids without special tokens."""
    model.eval()
    rows = [
        _Row(i, e, *_cut(encode(item.context), encode(" " + ending), model.config.block_size))
        for i, item in enumerate(items)
        for e, ending in enumerate(item.endings)
    ]
    sums = np.zeros((len(items), max(len(item.endings) for item in items)))
    sums.fill(np.inf)
    means = sums.copy()
    done = 0
    for batch in _batches_by_length(rows, tokens_at_once):
        for row, loss in zip(batch, _ending_losses(model, batch, device).tolist(), strict=True):
            sums[row.item, row.ending] = loss
            means[row.item, row.ending] = loss / (len(row.tokens) - row.start)
        done += len(batch)
        progress(done * len(items) // len(rows))
    labels = np.array([item.label for item in items])
    return HellaSwagScore(
        acc=float((sums.argmin(1) == labels).mean()),
        acc_norm=float((means.argmin(1) == labels).mean()),
        items=len(items),
    )


@dataclass(frozen=True)
class _Row:
    item: int
    ending: int
    tokens: list[int]
    start: int  # where the ending begins


def _cut(context: list[int], ending: list[int], block_size: int) -> tuple[list[int], int]:
    """Context and ending as one sequence, and the start of the ending. A too long context loses its oldest tokens."""
    tokens = (context + ending)[-(block_size + 1) :]
    return tokens, max(1, len(tokens) - len(ending))


def _batches_by_length(rows: list[_Row], tokens_at_once: int) -> Iterator[list[_Row]]:
    """Batches of rows of similar length, which need little padding."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda r: len(r.tokens), reverse=True):
        if batch and len(batch[0].tokens) * (len(batch) + 1) > tokens_at_once:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _ending_losses(model: GPT, batch: list[_Row], device: torch.device) -> Tensor:
    """Summed loss of each row's ending (rows,). Only the endings go through the head, which is the expensive part."""
    width = len(batch[0].tokens)
    # Padding is on the right, where a causal model does not see it.
    padded = np.array([row.tokens + [0] * (width - len(row.tokens)) for row in batch], dtype=np.int64)
    tokens = torch.from_numpy(padded).to(device)
    positions = [(r, t) for r, row in enumerate(batch) for t in range(row.start, len(row.tokens))]
    rows, targets_at = (torch.tensor(p, device=device) for p in zip(*positions, strict=True))
    hidden = model.hidden(tokens[:, :-1])[rows, targets_at - 1]
    losses = F.cross_entropy(model.head(hidden).float(), tokens[rows, targets_at], reduction="none")
    return torch.zeros(len(batch), device=device).index_add_(0, rows, losses)
