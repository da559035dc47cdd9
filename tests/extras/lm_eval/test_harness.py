"""Promises of `evaluate.lm_eval`: lm-eval's own scores of the trained weights, and errors before any work."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from pipelines.extras.lm_eval import harness
from pipelines.extras.lm_eval.harness import scores_in
from pipelines.recipe.loader import load_recipe
from pipelines.run.stage import Work
from pipelines.run.stages import evaluate
from pipelines.run.text.tokenizer import tokenizer
from pipelines.store.manifest import ArtifactPlan
from pipelines.store.secrets import SECRETS
from trainer.config.errors import Interrupted, UserError
from trainer.models.family import plain_model

ITEMS: list[dict[str, Any]] = [  # the model's context is 8 bytes
    {"question": "one", "choices": [" two", " no", " x"], "answer": 1},
    {"question": "sky", "choices": [" blue", " is", " a"], "answer": 0},
    {"question": "a", "choices": ["b", "cdefg", "hij"], "answer": 2},
    {"question": "1 2", "choices": [" 3", " 444", " x"], "answer": 0},
]
TRAIN = ArtifactPlan("train", "smoke", {"stage": "train"})


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with lm-eval's task `four_items`, of multiple choice."""
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    values = {
        "task": "four_items",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "items.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (tmp_path / "four_items.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def own_scores(weights: Path, work: Work) -> tuple[float, float]:
    """acc and acc_norm as the harness defines them: the choice with the largest log-likelihood, in sum, and by length
    in characters."""
    model = plain_model(work.recipe.model).eval()
    model.load_state_dict(load_file(weights))
    encoding = tokenizer(work.recipe.tokens.tokenizer)
    right = [0, 0]
    for item in ITEMS:
        sums, norms = [], []
        for choice in item["choices"]:
            prompt, ending = encoding.encode_ordinary(item["question"]), encoding.encode_ordinary(choice)
            tokens = torch.tensor([prompt + ending])
            logits = model(tokens)[0, :, : work.recipe.model.vocab_size].log_softmax(-1)
            places = range(len(prompt), tokens.shape[1])
            sums.append(sum(logits[at - 1, tokens[0, at]].item() for at in places))
            norms.append(sums[-1] / len(choice))
        for n, values in enumerate((sums, norms)):
            right[n] += values.index(max(values)) == item["answer"]
    return right[0] / len(ITEMS), right[1] / len(ITEMS)


def asking(work: Work, *tasks: str) -> Work:
    evaluate = work.recipe.evaluate.model_copy(update={"lm_eval": list(tasks)})
    work.recipe = work.recipe.model_copy(update={"evaluate": evaluate})
    return work


@pytest.mark.slow
def test_the_harness_scores_the_trained_weights_as_a_plain_loop_does(
    work: Callable[..., Work], tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the family whose export brings code of its own."""
    changes = ("model.family=modern", "model.smear=true", "model.value_embeddings=true")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    mine, popen = asking(work("evaluate", *changes), "four_items"), harness.subprocess.Popen
    monkeypatch.setattr(
        harness.subprocess, "Popen", lambda command, **how: popen([*command, "--include_path", str(tasks)], **how)
    )
    weights = mine.fetch("train", "model.safetensors")
    facts = harness.facts(mine, weights)
    acc, acc_norm = own_scores(weights, mine)
    assert facts["lm_eval/four_items/acc"] == pytest.approx(acc)
    assert facts["lm_eval/four_items/acc_norm"] == pytest.approx(acc_norm)
    assert facts["lm_eval_version"]


def test_a_stop_ends_the_harness_which_gets_no_secret_but_that_of_the_hub(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, started, popen = asking(work("evaluate"), "piqa"), list[Any](), harness.subprocess.Popen
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret")

    def start(command: list[str], **how: Any) -> Any:
        assert [name for name, value in how["env"].items() if value == "a secret"] == ["HF_TOKEN"]
        started.append(popen(["sleep", "1000"], **how))
        mine.stop.asked = True
        return started[0]

    weights = mine.fetch("train", "model.safetensors")
    monkeypatch.setattr(harness.subprocess, "Popen", start)
    with pytest.raises(Interrupted):
        harness.facts(mine, weights)
    assert started[0].returncode is not None


def test_an_unknown_task_is_refused_before_the_weights_are_fetched(
    work: Callable[[str], Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "UNKNOWN", "import json, sys; print(json.dumps(sys.argv[1:]))")  # knows no task
    monkeypatch.setattr(Work, "fetch", lambda *arguments: pytest.fail("fetches"))
    with pytest.raises(UserError, match=r"evaluate.lm_eval: lm-eval has no task 'hellaswagg'"):
        evaluate.build(asking(work("evaluate"), "hellaswagg"))
    for name in ("mine.yaml", "arc_[e,mine.yaml,]asy"):
        with pytest.raises(UserError, match=rf"evaluate.lm_eval: '{re.escape(name)}': name tasks .*; for tasks of"):
            evaluate.plan(load_recipe("smoke", [f"evaluate.lm_eval=['{name}']"]), {"train": TRAIN})


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match=r"make install, or pip install -e '\.\[eval\]'"):
        harness.check(["piqa"])


def test_a_recipe_without_the_harness_keeps_its_fingerprint_and_names_of_tasks_are_a_set() -> None:
    assert "lm_eval" not in evaluate.plan(load_recipe("smoke"), {"train": TRAIN}).identity
    asked = load_recipe("smoke", ["evaluate.lm_eval=[piqa, arc_easy, piqa]"])
    assert evaluate.plan(asked, {"train": TRAIN}).identity["lm_eval"] == ["arc_easy", "piqa"]


def test_scores_have_the_names_of_task_and_metric_and_no_standard_errors() -> None:
    results = {"results": {"piqa": {"alias": "piqa", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1}}}
    assert scores_in(results) == {"lm_eval/piqa/acc": 0.5, "lm_eval/piqa/em@strict": 1.0}
