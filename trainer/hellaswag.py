"""HellaSwag (Zellers et al. 2019) in completion style, scored as in build-nanogpt and llm.c.

Each of four endings follows the context, and the model chooses the ending with the lowest mean loss a token
(`acc_norm`) or the lowest sum (`acc`). GPT-2 124M scores .2945 and 1558M .4889 in acc_norm. EleutherAI's harness
normalizes by bytes and gives other numbers (.3114 for 124M): never mix them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import UserError
from trainer.parallel import World
from trainer.scoring import Row, Scored, score_rows

# Token ids of each text, without special tokens.
Encode = Callable[[list[str]], Sequence[Sequence[int] | np.ndarray]]


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
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a jsonl file: {error}") from error


@dataclass(frozen=True)
class HellaSwagScore:
    """Fractions of items whose correct ending has the lowest sum of losses (`acc`) or the lowest mean (`acc_norm`)."""

    acc: float
    acc_norm: float
    items: int


def hellaswag(
    model: Scored,
    items: list[HellaSwagItem],
    encode: Encode,
    world: World,
    tokens_at_once: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda done: None,
) -> HellaSwagScore:
    """Accuracy over all items. `progress` gets the number of scored items; for the other arguments see `score_rows`."""
    rows = hellaswag_rows(items, encode, model.config.block_size)

    def items_done(done: int) -> None:
        progress(done * len(items) // len(rows))

    scores = score_rows(model, rows, world, tokens_at_once, before_batch, items_done)
    sums = np.full((len(items), max(len(item.endings) for item in items)), np.inf)
    means = sums.copy()
    places = ((i, e) for i, item in enumerate(items) for e in range(len(item.endings)))
    for place, score in zip(places, scores, strict=True):
        sums[place], means[place] = score.loss, score.mean
    labels = np.array([item.label for item in items])
    return HellaSwagScore(
        acc=float((sums.argmin(1) == labels).mean()),
        acc_norm=float((means.argmin(1) == labels).mean()),
        items=len(items),
    )


def hellaswag_rows(items: list[HellaSwagItem], encode: Encode, block_size: int) -> list[Row]:
    """A row for every ending of every item, in their order."""
    contexts = encode([item.context for item in items])
    endings = iter(encode([" " + ending for item in items for ending in item.endings]))
    return [
        _cut(context, next(endings), block_size)
        for item, context in zip(items, contexts, strict=True)
        for _ in item.endings
    ]


def _cut(context: Sequence[int] | np.ndarray, ending: Sequence[int] | np.ndarray, block_size: int) -> Row:
    """Context and ending as one sequence. A too long context loses its oldest tokens."""
    tokens = np.concatenate((context, ending))[-(block_size + 1) :].astype(np.int32)
    return Row(tokens, start=max(1, len(tokens) - len(ending)))
