"""HellaSwag against the plain way of computing it, and its file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_runs
from tiny_models import model_of, transformers_copy

from trainer.errors import UserError
from trainer.families.gpt2 import Gpt2Config
from trainer.families.gpt2_module import GPT
from trainer.hellaswag import (
    Encode,
    HellaSwagItem,
    HellaSwagScore,
    hellaswag,
    hellaswag_rows,
    read_hellaswag,
    read_hellaswag_file,
)
from trainer.model import LanguageModel
from trainer.parallel import World
from trainer.scoring import score_rows

ALONE = World(0, 0, 1, torch.device("cpu"))
GPT2 = Gpt2Config(n_layer=1, n_head=2, n_embd=16, block_size=128, vocab_size=50_257)

_one_thread = trainer_runs._one_thread


def each(encode: Callable[[str], list[int]]) -> Encode:
    return lambda texts: [encode(text) for text in texts]


@pytest.fixture
def gpt2_tokens(shared_data: Path) -> Callable[[str], list[int]]:
    tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken (pip)")
    return tiktoken.get_encoding("gpt2").encode_ordinary


@pytest.fixture
def real_items(shared_data: Path) -> list[HellaSwagItem]:
    return read_hellaswag_file(shared_data / "hellaswag_val.jsonl")[:40]


@torch.no_grad()
def naive_hellaswag(
    model: LanguageModel, items: list[HellaSwagItem], encode: Callable[[str], list[int]], logits_of: Any = None
) -> tuple[HellaSwagScore, list[list[float]]]:
    """One ending at a time, all logits, probabilities looked up one by one."""
    sums, means = [], []
    for item in items:
        losses, lengths = [], []
        for ending in item.endings:
            end = encode(" " + ending)
            tokens = encode(item.context) + end
            tokens = tokens[-(model.config.block_size + 1) :]
            logits = (logits_of or model)(torch.tensor([tokens[:-1]]))[0]
            scored = range(len(tokens) - len(end), len(tokens))
            log_p = {t: logits[t - 1].double().log_softmax(-1)[tokens[t]].item() for t in scored}
            losses.append(-sum(log_p.values()))
            lengths.append(len(end))
        sums.append(losses)
        means.append([loss / n for loss, n in zip(losses, lengths, strict=True)])
    labels = [item.label for item in items]
    return HellaSwagScore(
        acc=sum(row.index(min(row)) == label for row, label in zip(sums, labels, strict=True)) / len(items),
        acc_norm=sum(row.index(min(row)) == label for row, label in zip(means, labels, strict=True)) / len(items),
        items=len(items),
    ), sums


def test_hellaswag_equals_scoring_one_ending_at_a_time(
    real_items: list[HellaSwagItem], gpt2_tokens: Callable[[str], list[int]]
) -> None:
    model = model_of(GPT2)
    expected, _ = naive_hellaswag(model, real_items, gpt2_tokens)
    assert expected.acc != expected.acc_norm  # the two differ
    for tokens_at_once in (300, 16_384):
        assert hellaswag(model, real_items, each(gpt2_tokens), ALONE, tokens_at_once) == expected


def test_every_item_agrees_with_a_plain_loop_over_transformers(
    real_items: list[HellaSwagItem], gpt2_tokens: Callable[[str], list[int]]
) -> None:
    model = model_of(GPT2.model_copy(update={"block_size": 40}))  # some are truncated
    theirs = transformers_copy(model)
    for item in real_items[:15]:
        expected, _ = naive_hellaswag(model, [item], gpt2_tokens, logits_of=lambda tokens: theirs(tokens).logits)
        assert hellaswag(model, [item], each(gpt2_tokens), ALONE) == expected


def test_hellaswag_cuts_contexts_that_are_too_long_from_the_left(
    real_items: list[HellaSwagItem], gpt2_tokens: Callable[[str], list[int]]
) -> None:
    short = GPT2.model_copy(update={"block_size": 48})
    model = model_of(short)
    long = [item for item in real_items if len(gpt2_tokens(item.context)) > 30][:12]
    longest = max(len(gpt2_tokens(i.context)) + len(gpt2_tokens(" " + e)) for i in long for e in i.endings)
    assert longest > short.block_size + 1
    expected, _ = naive_hellaswag(model, long, gpt2_tokens)
    assert hellaswag(model, long, each(gpt2_tokens), ALONE) == expected


def as_bytes(text: str) -> list[int]:
    return list(text.encode())


BYTES = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=257)


def test_the_losses_of_endings_do_not_depend_on_their_neighbours_in_a_batch() -> None:
    model = model_of(BYTES)
    items = [HellaSwagItem("a" * n, ("b", "some longer ending " * 2, "xyz"), 0) for n in (1, 7, 20)]
    _, expected = naive_hellaswag(model, items, as_bytes)
    rows = hellaswag_rows(items, each(as_bytes), BYTES.block_size)
    expected_losses = [loss for losses in expected for loss in losses]
    for row, score, loss in zip(rows, score_rows(model, rows, ALONE), expected_losses, strict=True):
        assert score.loss == pytest.approx(loss, rel=1e-5)
        assert score_rows(model, [row], ALONE)[0].loss == pytest.approx(loss, rel=1e-5)


def test_an_ending_longer_than_the_block_is_still_scored() -> None:
    items = [HellaSwagItem("context", ("x" * 200, "y" * 100), 0)]
    score = hellaswag(model_of(BYTES), items, each(as_bytes), ALONE)
    assert score.items == 1 and score.acc_norm in (0.0, 1.0)


def test_items_may_have_different_numbers_of_endings() -> None:
    items = [HellaSwagItem("one", ("a", "b", "c", "d"), 2), HellaSwagItem("two", ("e", "f"), 1)]
    model = model_of(BYTES)
    assert hellaswag(model, items, each(as_bytes), ALONE) == naive_hellaswag(model, items, as_bytes)[0]


def test_a_model_that_prefers_the_right_endings_scores_one() -> None:
    # This model depends on the last token only; its head prefers 'r' for every token.
    model = GPT(BYTES)
    model.initialize(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("h.") and "c_proj" in name:
                p.zero_()
        model.ln_f.weight.zero_()
        model.ln_f.bias.zero_()
        model.ln_f.bias[0] = 1.0
        model.wte.weight[:, 0] = 0.0
        model.wte.weight[ord("r"), 0] = 5.0
    # The right ending is longer, so that its sum is larger while its mean is smaller.
    endings = ("w", "r" * 30, "ww", "wr")
    items = [HellaSwagItem("what is right?", (*endings[k:], *endings[:k]), (1 - k) % 4) for k in range(4)]
    seen: list[int] = []
    score = hellaswag(model, items, each(as_bytes), ALONE, tokens_at_once=100, progress=seen.append)
    assert score.acc_norm == 1.0 and score.items == 4
    assert seen == sorted(seen) and seen[-1] == 4


def test_the_shared_file_has_all_items(shared_data: Path) -> None:
    items = read_hellaswag_file(shared_data / "hellaswag_val.jsonl")
    assert len(items) == 10_042
    assert items[0] == HellaSwagItem(
        "A man is sitting on a roof. he",
        (
            "is using wrap to wrap a pair of skis.",
            "is ripping level tiles off.",
            "is holding a rubik's cube.",
            "starts pulling up roofing on a roof.",
        ),
        3,
    )


def test_a_label_may_be_text_as_on_the_hub() -> None:
    row = {"ctx": "a", "endings": ["b", "c"], "label": "1", "ind": 4}
    assert read_hellaswag(iter([row]), "hub") == [HellaSwagItem("a", ("b", "c"), 1)]


GOOD_ROW = {"ctx": "a", "endings": ["b", "c"], "label": 1}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"label": 2}, "label 2 is not the index of one of the 2 endings"),
        ({"label": -1}, "label -1 is not the index of one of the 2 endings"),
        ({"label": ""}, "an item needs ctx, endings and a label"),
        ({"label": None}, "an item needs ctx, endings and a label"),
        ({"endings": None}, "an item needs ctx, endings and a label"),
        ({"endings": "bc"}, "endings a list of strings"),
        ({"endings": ["b", 3]}, "endings a list of strings"),
        ({"endings": ["b", ""]}, "none may be empty"),
        ({"endings": []}, "label 1 is not the index of one of the 0 endings"),
        ({"ctx": None}, "ctx must be a string"),
        ({"ctx": ""}, "none may be empty"),
    ],
)
def test_a_bad_item_is_named(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (GOOD_ROW, GOOD_ROW | change)))
    with pytest.raises(UserError) as mistake:
        read_hellaswag_file(path)
    message = str(mistake.value)
    assert message.startswith(f"{path}: item 2: ") and complaint in message and "\n" not in message


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "contains no HellaSwag items"),
        (b"ctx,label\n", "not a jsonl file"),
        (b"\xff\xfe\x00", "not a jsonl file"),
        (b"[1, 2]\n", "an item needs ctx, endings and a label"),
        (b'{"ctx": "a", "endings": ["b"]}\n', "an item needs ctx, endings and a label"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, body: bytes, complaint: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(body)
    with pytest.raises(UserError, match=complaint):
        read_hellaswag_file(path)


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.jsonl: No such file or directory; give a jsonl file"):
        read_hellaswag_file(tmp_path / "gone.jsonl")
