"""CORE against a plain loop over transformers' GPT-2, and its bundle."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_runs
from core_bundle import make_bundle
from tiny_models import model_of, transformers_copy

from trainer.core import (
    TASKS,
    CoreScore,
    Task,
    _cut,
    answers,
    bundle_digest,
    core,
    few_shot,
    prompts,
    read_bundle,
    read_items,
)
from trainer.errors import Interrupted, UserError
from trainer.families.gpt2 import Gpt2Config
from trainer.families.gpt2_module import GPT
from trainer.model import LanguageModel
from trainer.parallel import World

ALONE = World(0, 0, 1, torch.device("cpu"))
Encode = Callable[[list[str]], list[list[int]]]

_one_thread = trainer_runs._one_thread


def as_bytes(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


@pytest.fixture
def gpt2_tokens(shared_data: Path) -> Encode:
    tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken (pip)")
    return tiktoken.get_encoding("gpt2").encode_ordinary_batch


@torch.no_grad()
def naive_answers(theirs: Any, task: Task, encode: Encode, end_of_text: int) -> list[bool]:
    """The rules of nanochat's core_eval.py, word by word: a prompt is one text, and one sequence a forward pass."""
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

    rights = []
    for i, row in enumerate(rows):
        shots = random.Random(1234 + i).sample([j for j in range(len(rows)) if j != i], task.examples)
        before = "".join(text(rows[j]) + "\n\n" for j in shots)
        if task.kind == "language_modeling":
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
            logits = theirs(torch.tensor([ids])).logits[0]
            losses = [-logits[t - 1].double().log_softmax(-1)[ids[t]].item() for t in range(start, len(ids))]
            means.append(sum(losses) / len(losses) if losses else float("inf"))
            greedy.append(all(int(logits[t - 1].argmax()) == ids[t] for t in range(start, len(ids))))
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


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_every_task_agrees_item_by_item_with_a_plain_loop_over_transformers(
    tokenizer: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode: Encode = request.getfixturevalue("gpt2_tokens") if tokenizer == "gpt2" else as_bytes
    size, block = (50_257, 48) if tokenizer == "gpt2" else (257, 128)
    model = model_of(Gpt2Config(n_layer=2, n_head=2, n_embd=16, block_size=block, vocab_size=size))
    lean_towards(model, *(ids[0] for ids in encode(["a", "b", " a", " b", " "])))
    theirs = transformers_copy(model)
    tasks = read_bundle(make_bundle(tmp_path / "bundle", items=5))
    longest, seen = 0, {kind: set[bool]() for kind in ("multiple_choice", "schema", "language_modeling")}
    expected = {}
    for task in tasks:
        items = read_items(task)
        expected[task.name] = naive_answers(theirs, task, encode, size - 1)
        assert answers(model, task, items, encode, size - 1, ALONE, 512) == expected[task.name], task.name
        seen[task.kind] |= set(expected[task.name])
        made = prompts(task, items, encode, size - 1)
        longest = max(longest, *(len(begin) + len(rest) for begin, rests in made for rest in rests))
    assert longest > block  # some were truncated
    assert all(kinds == {True, False} for kinds in seen.values())
    monkeypatch.setattr("trainer.core.PART", 2)
    score = core(model, tasks, encode, size - 1, ALONE)
    assert score.accuracy == pytest.approx({name: sum(rights) / 5 for name, rights in expected.items()})


def test_a_stop_ends_core_between_two_batches(tmp_path: Path) -> None:
    model, left = model_of(Gpt2Config(n_layer=1, n_head=2, n_embd=16, block_size=64, vocab_size=257)), [30]

    def before_batch() -> None:
        left[0] -= 1
        if not left[0]:
            raise Interrupted

    with pytest.raises(Interrupted):
        core(model, read_bundle(make_bundle(tmp_path / "bundle")), as_bytes, 256, ALONE, 64, before_batch)
    assert left == [0]


def test_prompts_of_pieces_are_the_tokens_of_whole_texts(tmp_path: Path, gpt2_tokens: Encode) -> None:
    for task in read_bundle(make_bundle(tmp_path / "bundle", items=8, examples=5)):
        items = read_items(task)
        for i, (begin, rests) in enumerate(prompts(task, items, gpt2_tokens, 50_256)):
            shots = [items[j].prompts(task.delimiter)[items[j].right] + "\n\n" for j in few_shot(i, 8, task.examples)]
            texts = items[i].prompts(task.delimiter)
            if task.kind == "language_modeling":
                texts.insert(0, (items[i].beginnings[0] + task.delimiter).strip())
            whole = gpt2_tokens(["".join(shots) + text for text in texts])
            assert [[*begin.tolist(), *rest.tolist()] for rest in rests] == [[50_256, *ids] for ids in whole]


def test_a_text_cut_in_front_of_an_ending_has_the_tokens_of_the_whole(gpt2_tokens: Encode) -> None:
    chance, cuts = random.Random(0), 0
    for _ in range(3000):
        before, ending = ("".join(chance.choices("ab1'.s \n\tß東\x1c\u3000", k=chance.randint(0, 8))) for _ in range(2))
        if cut := _cut(before + " ", [ending]):
            cuts += 1
            assert cut[0] + cut[1][0] == f"{before} {ending}"
            first, second, whole = gpt2_tokens([cut[0], cut[1][0], f"{before} {ending}"])
            assert [*first, *second] == whole, (before, ending)
    assert 500 < cuts < 2500


def test_each_piece_of_text_is_encoded_once_in_however_many_prompts_it_is(tmp_path: Path) -> None:
    path, chance, texts = tmp_path / "items.jsonl", random.Random(0), list[str]()
    queries = ["".join(chance.choices("abc", k=100)) for _ in range(30)]
    rows = [{"query": query, "choices": list("ABCDEFGHIJK"), "gold": 3} for query in queries]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Task("x", "multiple_choice", 10, "\nAnswer: ", 0.5, path)

    def encode(some: list[str]) -> list[list[int]]:
        texts.extend(some)
        return as_bytes(some)

    for begin, rests in prompts(task, read_items(task), encode, 256):
        assert len(begin) > 1000 and [bytes(rest.tolist()) for rest in rests] == [
            f" {c}".encode() for c in "ABCDEFGHIJK"
        ]
    expected = {f"{query}\nAnswer:" for query in queries} | {f" {c}" for c in "ABCDEFGHIJK"} | {" D\n\nA"}
    assert len(texts) == len(set(texts)) and set(texts) == expected


def test_few_shot_examples_are_those_of_a_sample_over_the_other_items() -> None:
    for index in range(12):
        expected = random.Random(1234 + index).sample([i for i in range(12) if i != index], 5)
        assert few_shot(index, 12, 5) == expected and index not in expected
    assert few_shot(3, 12, 0) == []


def test_core_is_the_mean_of_the_accuracies_above_guessing() -> None:
    tasks = [Task(name, "schema", 0, " ", b, Path()) for name, b in (("a", 0.5), ("b", 0.0), ("c", 0.25))]
    score = CoreScore.of(tasks, {"a": 0.75, "b": 0.1, "c": 0.1})
    assert score.centred == pytest.approx({"a": 0.5, "b": 0.1, "c": -0.2})
    assert score.core == pytest.approx(0.4 / 3)


def test_a_choice_that_begins_another_is_never_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    rows = [{"query": "q", "choices": ["yes", "yes or no", "never"][:n], "gold": 1} for n in (2, 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Task("x", "multiple_choice", 0, " ", 0.5, path)
    model = model_of(Gpt2Config(n_layer=1, n_head=2, n_embd=16, block_size=32, vocab_size=257))
    right = answers(model, task, read_items(task), as_bytes, 256, ALONE)
    assert any(right) and len(right) == 2


# --- the bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


def test_the_digest_follows_everything_that_decides_the_scores(bundle: Path, tmp_path: Path) -> None:
    digest = bundle_digest(read_bundle(bundle))
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
    assert bundle_digest(read_bundle(other)) == digest


def change(bundle: Path, task: str, **fields: Any) -> None:
    """Change fields of a task in core.yaml; a task that becomes empty is removed."""
    path = bundle / "core.yaml"
    entries = json.loads(path.read_text())["icl_tasks"]
    changed = [entry | fields if entry["label"] == task else entry for entry in entries]
    path.write_text(json.dumps({"icl_tasks": [entry for entry in changed if entry["label"]]}))


@pytest.mark.parametrize(
    ("task", "fields", "complaint"),
    [
        ("copa", {"label": None}, r"core\.yaml: 1 of CORE's 22 tasks are missing: copa; use a whole bundle"),
        ("copa", {"label": "copal"}, r"core\.yaml: CORE has no task 'copal'; it has hellaswag_zeroshot, "),
        ("copa", {"label": "piqa"}, r"core\.yaml: 1 of CORE's 22 tasks are missing: copa"),
        ("copa", {"icl_task_type": "chat"}, r"core\.yaml: copa: icl_task_type 'chat' is not one of multiple_choice"),
        ("copa", {"num_fewshot": [10, 20]}, r"core\.yaml: copa: num_fewshot must be one number"),
        ("copa", {"num_fewshot": [-1]}, r"core\.yaml: copa: num_fewshot must be one number"),
        ("copa", {"dataset_uri": "../../secrets"}, r"core\.yaml: copa: dataset_uri '\.\./\.\./secrets' must be a path"),
        (
            "copa",
            {"dataset_uri": "no.jsonl"},
            r"items of 1 of CORE's 22 tasks are missing: copa; .* eval_data/no.jsonl",
        ),
    ],
)
def test_a_bad_task_of_a_bundle_is_named_in_one_line(
    bundle: Path, task: str, fields: dict[str, Any], complaint: str
) -> None:
    change(bundle, task, **fields)
    with pytest.raises(UserError, match=complaint) as mistake:
        read_bundle(bundle)
    assert "\n" not in str(mistake.value)


def test_missing_and_damaged_files_of_a_bundle_are_named(bundle: Path) -> None:
    (bundle / "eval_data" / "all" / "squad.jsonl").unlink()
    (bundle / "eval_data" / "all" / "coqa.jsonl").unlink()
    with pytest.raises(UserError, match=r"2 of CORE's 22 tasks are missing: squad, coqa; there is no file eval_data/"):
        read_bundle(bundle)
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\ncopa,many\n")
    with pytest.raises(UserError, match=r"eval_meta_data.csv: copa: the column 'Random baseline' must be a number"):
        read_bundle(bundle)
    (bundle / "eval_meta_data.csv").write_text("Eval Task,Random baseline\ncopa,50\n")
    with pytest.raises(UserError, match=r"eval_meta_data.csv: has no random baseline of the task hellaswag_zeroshot"):
        read_bundle(bundle)
    (bundle / "core.yaml").write_text("tasks: []")
    with pytest.raises(UserError, match=r"core.yaml: is not a list of tasks under icl_tasks"):
        read_bundle(bundle)
    (bundle / "core.yaml").unlink()
    with pytest.raises(UserError, match=r"core.yaml: No such file or directory; a CORE bundle has this file"):
        read_bundle(bundle)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("multiple_choice", {"query": "q", "choices": ["a", "b"], "gold": 2}),
        ("multiple_choice", {"query": "q", "choices": ["a", "b"], "gold": True}),
        ("multiple_choice", {"query": "q", "choices": ["a"], "gold": 0}),
        ("multiple_choice", {"query": 3, "choices": ["a", "b"], "gold": 0}),
        ("multiple_choice", {"choices": ["a", "b"], "gold": 0}),
        ("schema", {"context_options": ["a", None], "continuation": "c", "gold": 0}),
        ("language_modeling", {"context": "c", "continuation": " "}),
        ("language_modeling", {"context": "c"}),
        ("language_modeling", ["c"]),
    ],
)
def test_a_bad_item_is_named_with_its_line(tmp_path: Path, kind: Any, row: Any) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=rf"items\.jsonl: line 2: is not an item of kind {kind} \(") as mistake:
        read_items(Task("x", kind, 0, " ", 0.5, path))
    assert "\n" not in str(mistake.value)


def test_too_few_items_for_the_examples_are_refused(bundle: Path) -> None:
    task = next(task for task in read_bundle(bundle) if task.examples)
    task.file.write_text("".join(task.file.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(UserError, match="3 items are too few: an item needs 3 others as examples"):
        read_items(task)


def test_all_tasks_of_core_are_22() -> None:
    assert len(set(TASKS)) == 22
