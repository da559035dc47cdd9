"""CORE against a plain loop over transformers' GPT-2, and its bundle."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_bundle import make_bundle
from tiny_models import model_of, transformers_copy
from trainer_runs import ALONE

from trainer.config.errors import UserError
from trainer.eval.core import CoreTask, answers, bundle_digest, core, item_rows, read_bundle, read_items
from trainer.eval.scoring import score_rows
from trainer.models.gpt2 import Gpt2Config
from trainer.models.gpt2_module import GPT
from trainer.models.language_model import LanguageModel
from trainer.models.modern import ModernConfig

Encode = Callable[[list[str]], list[list[int]]]


def as_bytes(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def nothing() -> None:
    """A check that never ends the evaluation."""


@torch.no_grad()
def naive_answers(theirs: Any, task: CoreTask, encode: Encode, end_of_text: int, as_chat: bool) -> list[bool]:
    """The rules of nanochat's core_eval.py, word by word: a prompt is one text, and one sequence a forward pass. As a
    chat, every example and the item are a question and its answer."""
    rows = [json.loads(line) for line in task.file.read_text().splitlines()]
    random.Random(1337).shuffle(rows)
    limit = theirs.config.n_positions

    def text(row: dict[str, Any], choice: int | None = None) -> str:
        if task.kind == "multiple_choice":
            return row["query"] + task.delimiter + row["choices"][row["gold"] if choice is None else choice]
        if task.kind == "schema":
            begin = row["context_options"][row["gold"] if choice is None else choice]
            return begin + task.delimiter + row["continuation"]
        return row["context"].strip() + task.delimiter + row["continuation"]

    def question_and_answer(row: dict[str, Any], choice: int | None = None) -> tuple[str, str]:
        n = row.get("gold") if choice is None else choice
        begin = row.get("query") or row.get("context") or row["context_options"][n]
        return (begin + task.delimiter).strip(), row["continuation"] if "continuation" in row else row["choices"][n]

    rights = []
    for i, row in enumerate(rows):
        shots = random.Random(1234 + i).sample([j for j in range(len(rows)) if j != i], task.examples)
        before = "".join(text(rows[j]) + "\n\n" for j in shots)
        if as_chat:
            earlier = "".join(f"Q{q}\nA{a}\n" for q, a in (question_and_answer(rows[j]) for j in shots))
            options = row.get("choices") or row.get("context_options") or [""]
            asked = [question_and_answer(row, c) for c in range(len(options))]
            begins = [[end_of_text, *encode([f"{earlier}Q{q}\nA"])[0]] for q, _ in asked]
            sequences = [begin + encode([a])[0] for begin, (_, a) in zip(begins, asked, strict=True)]
            starts = [len(begin) for begin in begins]
        elif task.kind == "language_modeling":
            whole = before + text(row)
            without = (before + row["context"].strip() + task.delimiter).strip()
            sequences = [[end_of_text, *encode([whole])[0]]]
            starts = [1 + len(encode([without])[0])]
        else:
            options = row["choices"] if task.kind == "multiple_choice" else row["context_options"]
            sequences = [[end_of_text, *encode([before + text(row, c)])[0]] for c in range(len(options))]
            backwards = -1 if task.kind == "schema" else 1
            common = 0
            while len({tuple(ids[::backwards][: common + 1]) for ids in sequences}) == 1:
                common += 1
            starts = [len(ids) - common if task.kind == "schema" else common for ids in sequences]
        means, greedy = [], []
        for ids, start in zip(sequences, starts, strict=True):
            lost = max(0, len(ids) - limit)
            ids, start = ids[lost:], max(1, start - lost)
            logits = theirs(torch.tensor([ids])).logits[0, start - 1 : -1].double().log_softmax(-1)
            losses = [-float(row[target]) for row, target in zip(logits, ids[start:], strict=True)]
            means.append(sum(losses) / len(losses) if losses else float("inf"))
            greedy.append(logits.argmax(-1).tolist() == ids[start:])
        rights.append(greedy[0] if task.kind == "language_modeling" else means.index(min(means)) == row["gold"])
    return rights


def lean_towards(model: LanguageModel, *tokens: int) -> LanguageModel:
    """The model with these tokens as its likely choices, so that some continuations are right."""
    with torch.no_grad():
        assert isinstance(model, GPT)
        model.ln_f.bias[0] = 4.0
        model.wte.weight[:, 0] = 0.0
        model.wte.weight[list(tokens), 0] = 2.0
    return model


def chat_tokens(messages: Any) -> list[int]:
    turns = [f"{'Q' if one['role'] == 'user' else 'A'}{one['content']}\n" for one in messages]
    return [256, *"".join([*turns, "A"]).encode()]


@pytest.mark.parametrize("chat", [None, chat_tokens])
def test_every_task_agrees_item_by_item_with_a_plain_loop_over_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: Any
) -> None:
    model = model_of(Gpt2Config(n_layer=2, n_head=2, n_embd=16, block_size=128, vocab_size=257))
    lean_towards(model, *b"ab ")
    theirs, tasks = transformers_copy(model), read_bundle(make_bundle(tmp_path / "bundle", items=5))
    monkeypatch.setattr("trainer.eval.scoring.ITEMS_AT_ONCE", 2)
    centred, name = {}, "core_chat" if chat else "core"
    seen = {kind: set[bool]() for kind in ("multiple_choice", "schema", "language_modeling")}
    for task in tasks:
        expected = naive_answers(theirs, task, as_bytes, 256, chat is not None)
        assert answers(model, ALONE, nothing, task, read_items(task), as_bytes, 256, chat) == expected, task.name
        seen[task.kind] |= set(expected)
        centred[f"{name}/{task.name}"] = (sum(expected) / 5 - task.baseline) / (1 - task.baseline)
    assert all(rights == {True, False} for rights in seen.values())
    scores = core(model, ALONE, nothing, tasks, as_bytes, 256, chat)
    assert scores == pytest.approx(centred | {f"eval/{name}": sum(centred.values()) / 22})


def test_a_choice_that_begins_another_is_never_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    rows = [{"query": "q", "choices": ["yes", "yes or no"], "gold": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = CoreTask("x", "multiple_choice", 0, " ", 0.5, path)
    model = model_of(Gpt2Config(n_layer=1, n_head=2, n_embd=16, block_size=32, vocab_size=257))
    assert answers(model, ALONE, nothing, task, read_items(task), as_bytes, 256) == [True]


@pytest.mark.parametrize("window", [None, 6])
def test_a_model_with_rotary_positions_sees_a_whole_prompt(window: int | None) -> None:
    config = ModernConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=257, window=window)
    model, ids = model_of(config), np.arange(40, dtype=np.int32)
    (row,) = item_rows("language_modeling", [ids[:30], ids], config.reach)
    assert list(row.tokens) == list(ids) and row.start == 30
    (score,) = score_rows(model, [row], ALONE)
    with torch.no_grad():
        logits = model.head(model.hidden(torch.tensor(ids[None, :-1], dtype=torch.int64)))[0, 29:]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[30:], dtype=torch.int64), reduction="sum")
    assert score.loss == pytest.approx(float(expected), rel=1e-5)
    cropped = item_rows("language_modeling", [ids[:30], ids], 16)
    assert list(cropped[0].tokens) == list(ids[-16:]) and cropped[0].start == 6


# --- the bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


def test_the_digest_follows_everything_that_decides_the_scores(bundle: Path, tmp_path: Path) -> None:
    digest = bundle_digest(read_bundle(bundle))
    assert (
        digest == "c8d29e618ec4494258ce90bc5f8170e39273e6dcfe59038a88ab13953bc1e5ad"
    )  # fingerprints of today's runs hold it
    other = bundle.rename(tmp_path / "elsewhere")
    (other / "README").write_text("no part of it")
    assert bundle_digest(read_bundle(other)) == digest
    for name, old, new in (
        ("core.yaml", "Answer", "Solution"),
        ("eval_meta_data.csv", "copa,5,25", "copa,5,26"),
        ("eval_data/all/copa.jsonl", '"gold": ', '"gold":  '),
    ):
        text = (other / name).read_text()
        assert old in text
        (other / name).write_text(text.replace(old, new, 1))
        assert bundle_digest(read_bundle(other)) != digest
        (other / name).write_text(text)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"label": "copal"}, "core.yaml or eval_meta_data.csv is not as in nanochat's bundle .KeyError"),
        ({"label": "piqa"}, r"copa, piqa: core.yaml must have each of CORE's 22 tasks once"),
        ({"icl_task_type": "chat"}, r"copa: its type must be one of \('multiple_choice'"),
        ({"dataset_uri": "../../secrets"}, "of the task copa is missing; use a whole bundle"),
        ({"dataset_uri": "no.jsonl"}, r"the file .*eval_data/no.jsonl of the task copa is missing"),
    ],
)
def test_a_bad_task_of_a_bundle_is_named_in_one_line(bundle: Path, fields: dict[str, Any], complaint: str) -> None:
    path = bundle / "core.yaml"
    entries = json.loads(path.read_text())["icl_tasks"]
    changed = [entry | fields if entry["label"] == "copa" else entry for entry in entries]
    path.write_text(json.dumps({"icl_tasks": changed}))
    with pytest.raises(UserError, match=complaint) as mistake:
        read_bundle(bundle)
    assert "\n" not in str(mistake.value)
