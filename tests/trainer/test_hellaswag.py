"""HellaSwag against the plain way of computing it, and its file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import model_of, transformers_copy
from trainer_runs import ALONE

from trainer.config.errors import UserError
from trainer.eval.hellaswag import HellaSwagItem, hellaswag, read_hellaswag
from trainer.eval.scoring import Encode
from trainer.models.gpt2 import Gpt2Config

GPT2 = Gpt2Config(n_layer=1, n_head=2, n_embd=16, block_size=128, vocab_size=50_257)


def each(encode: Callable[[str], list[int]]) -> Encode:
    return lambda texts: [encode(text) for text in texts]


@pytest.fixture
def gpt2_tokens(shared_data: Path) -> Callable[[str], list[int]]:
    tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken (pip)")
    return tiktoken.get_encoding("gpt2").encode_ordinary


@pytest.fixture
def real_items(shared_data: Path) -> list[HellaSwagItem]:
    return read_hellaswag(shared_data / "hellaswag_val.jsonl")[:40]


def score(
    items: list[HellaSwagItem], model: Any, encode: Callable[[str], list[int]], chat: Any = None
) -> dict[str, float]:
    return hellaswag(model, ALONE, lambda: None, items, each(encode), chat)


@torch.no_grad()
def naive_hellaswag(
    theirs: Any, items: list[HellaSwagItem], encode: Callable[[str], list[int]], chat: Any
) -> dict[str, float]:
    """One ending at a time by transformers, probabilities looked up one by one."""
    by_mean, by_sum = (f"eval/hellaswag{'_chat' if chat else ''}_{name}" for name in ("acc_norm", "acc"))
    right = {by_mean: 0, by_sum: 0}
    for item in items:
        sums, means = [], []
        for ending in item.endings:
            end = encode(ending if chat else " " + ending)
            begin = chat([{"role": "user", "content": item.context}]) if chat else encode(item.context)
            tokens = (begin + end)[-(theirs.config.n_positions + 1) :]
            scored = range(max(1, len(tokens) - len(end)), len(tokens))
            logits = theirs(torch.tensor([tokens[:-1]])).logits[0, scored.start - 1 :].double().log_softmax(-1)
            sums.append(-sum(logits[t - scored.start, tokens[t]].item() for t in scored))
            means.append(sums[-1] / len(scored))
        right[by_mean] += means.index(min(means)) == item.label
        right[by_sum] += sums.index(min(sums)) == item.label
    return {name: count / len(items) for name, count in right.items()}


# Of 40 tokens: contexts lose their oldest tokens.
@pytest.mark.parametrize("block_size, as_chat", [(128, False), (40, False), (128, True)])
def test_every_item_agrees_with_a_plain_loop_over_transformers(
    real_items: list[HellaSwagItem], gpt2_tokens: Callable[[str], list[int]], block_size: int, as_chat: bool
) -> None:
    model = model_of(GPT2.model_copy(update={"block_size": block_size}))
    items = real_items[: 40 if block_size == 128 and not as_chat else 12]
    chat = (lambda messages: [50_256, *gpt2_tokens(f"user\n{messages[0]['content']}\n")]) if as_chat else None
    expected = naive_hellaswag(transformers_copy(model), items, gpt2_tokens, chat)
    assert score(items, model, gpt2_tokens, chat) == expected


GOOD_ROW = {"ctx": "a", "endings": ["b", "c"], "label": "1", "ind": 4}  # a label may be text, as on the Hub


@pytest.mark.parametrize(
    "change", [{"label": 2}, {"label": ""}, {"endings": "bc"}, {"endings": ["b", ""]}, {"ctx": None}, {"endings": None}]
)
def test_a_bad_item_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(GOOD_ROW) + "\n")
    assert read_hellaswag(path) == [HellaSwagItem("a", ("b", "c"), 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in (GOOD_ROW, GOOD_ROW | change)))
    with pytest.raises(UserError) as mistake:
        read_hellaswag(path)
    message = str(mistake.value)
    assert message.startswith(f"{path}: line 2: must be a HellaSwag item (ctx: ") and "\n" not in message
