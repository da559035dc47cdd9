"""HellaSwag (Zellers et al. 2019) in completion style, scored as in build-nanogpt and llm.c.

Each of four endings follows the context, and the model chooses the ending with the lowest mean loss a token
(`acc_norm`) or the lowest sum (`acc`). GPT-2 124M scores .2945 and 1558M .4889 in acc_norm. EleutherAI's harness
normalizes by bytes and gives other numbers (.3114 for 124M): never mix them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.parallel import World
from trainer.eval.scoring import Chat, Encode, Scored, ScoredRow, cropped_row, read_jsonl, score_items


@dataclass(frozen=True)
class HellaSwagItem:
    """A context, its endings, and the index of the correct one."""

    context: str
    endings: tuple[str, ...]
    label: int


def read_hellaswag(path: Path) -> list[HellaSwagItem]:
    """The items of a jsonl file with the data set's fields `ctx`, `endings` and `label`. UserError for any other."""
    return read_jsonl(path, "a HellaSwag item (ctx: a text, endings: texts, label: the index of one)", _item)


def _item(row: dict[str, Any]) -> HellaSwagItem:
    item = HellaSwagItem(row["ctx"], tuple(row["endings"]), int(row["label"]))
    texts = (item.context, *item.endings)
    if isinstance(row["endings"], str) or not all(isinstance(text, str) and text for text in texts):
        raise TypeError("not texts")
    if not 0 <= item.label < len(item.endings):
        raise ValueError("not the index of an ending")
    return item


def hellaswag(
    model: Scored,
    world: World,
    before_batch: Callable[[], None],
    items: Sequence[HellaSwagItem],
    encode: Encode,
    chat: Chat | None = None,
) -> dict[str, float]:
    """The accuracies over all items by metric; for `before_batch` see `score_items`. With `chat`,
    contexts are questions and endings their answers. A collective call."""

    def rows_of(indices: Sequence[int]) -> list[list[ScoredRow]]:
        some = [items[i] for i in indices]
        contexts: Sequence[Any] = encode([item.context for item in some])
        if chat:
            contexts = [chat([{"role": "user", "content": item.context}]) for item in some]
        space = "" if chat else " "
        endings = iter(encode([space + ending for item in some for ending in item.endings]))
        longest = model.config.block_size + 1
        return [
            [cropped_row(np.concatenate((context, next(endings))), len(context), longest) for _ in item.endings]
            for item, context in zip(some, contexts, strict=True)
        ]

    scores = score_items(model, len(items), rows_of, world, before_batch)
    pairs, name = list(zip(items, scores, strict=True)), "eval/hellaswag_chat" if chat else "eval/hellaswag"
    return {
        f"{name}_acc_norm": float(np.mean([np.argmin([s.mean for s in of]) == item.label for item, of in pairs])),
        f"{name}_acc": float(np.mean([np.argmin([s.loss for s in of]) == item.label for item, of in pairs])),
    }
