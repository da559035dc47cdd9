"""A run begins with the weights of another one, or with its whole state: through the command, in one store."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline_runs import FOLDER_NAME, PRICE, SERIES, STEPS, Project, sums

from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.run.gc import collect
from pipelines.run.runs import Run, read_run, read_runs
from pipelines.run.weight_sources import pinned
from pipelines.store.layout import run_key
from pipelines.store.manifest import Manifest
from trainer.checkpoint.commits import committed_folders
from trainer.checkpoint.layout import step_of
from trainer.config.errors import UserError

SHORT = ["--set", "train.max_steps=4", "--set", "train.warmup_steps=1", "--set", "name=tuned"]


@pytest.fixture
def finished(undisturbed: Callable[[int], Project], tmp_path: Path) -> Project:
    """A copy of a finished run, its own to change."""
    return undisturbed(1).copy(tmp_path / FOLDER_NAME)


def test_a_run_is_fine_tuned_from_its_own_export(finished: Project) -> None:
    export = finished.path("export", "model.safetensors").parent
    parent, weights = finished.series(), finished.artifact("train").facts["val/loss"]
    source = f"train.init_from={export}"
    plan = json.loads(finished.run("plan", "tiny.yaml", *SHORT, "--set", source, "--json").stdout)
    made = finished.result("--stage", "train", *SHORT, "--set", source)
    assert made["run"] == plan["run"] and made["run"].startswith("tuned-")
    series = read_run(finished.store, made["run"]).series
    assert series[0]["step"] == 0 and series[0]["val/loss"] == pytest.approx(weights, abs=1e-6)
    assert series[-1]["step"] == 4 and parent[-1]["step"] == STEPS

    # By content: another path is the same run, another file is another one, and the source may go.
    moved = export.rename(finished.folder / "elsewhere")
    again = finished.result("--stage", "train", *SHORT, "--set", "train.init_from=elsewhere")
    assert again["run"] == made["run"] and again["artifacts"]["train"]["skipped"]
    (moved / "model.safetensors").unlink()
    recorded = finished.result("--stage", "train", recipe=f"run:{made['run']}")
    assert recorded["artifacts"]["train"]["skipped"]


def test_weights_that_cannot_be_a_runs_are_refused_in_a_line_before_anything_starts(finished: Project) -> None:
    export = finished.path("export", "model.safetensors").parent
    run, before = json.loads(finished.run("report", "--json").stdout)[0]["run"], finished.attempts()
    tokenizer = json.loads((export / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (finished.folder / "own.json").write_text(json.dumps(tokenizer))
    cases = {
        str(export): (["--set", "model.n_layer=3"], "its n_layer is 2, and model.n_layer is 3; --set model.n_layer=2"),
        "nowhere": ([], "train.init_from: "),
        "openai-community/gpt2": ([], "write hf://openai-community/gpt2@ and the 40 hex digits"),
        "run:nobody": ([], "nobody: no such run"),
        "run:tiny": ([], f"once begun, this run is the newest 'tiny'; write run:{run}"),  # "the same command" resumes
        f"run:{run}@7": ([], f"step 7 is not a commit of {run}; its commits are at"),
        f"run:{run}": (["--set", "model.n_head=4"], "its n_head is 2, and model.n_head is 4"),
        f"run:{run}@{STEPS}": (["--set", "tokens.tokenizer=own.json"], "has other ids than tokens.tokenizer 'own, sha"),
    }
    for source, (changes, words) in cases.items():
        for verb in (["plan", "tiny.yaml"], ["run", "tiny.yaml"])[: 1 + (source == str(export))]:
            done = finished.run(*verb, *changes, "--set", f"train.init_from={source}", expect=2)
            assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert finished.attempts() == before


def test_a_branch_goes_on_as_its_parent_did(finished: Project) -> None:
    (parent,) = read_runs(finished.store)
    step = last_commit_before_the_end(parent)
    branch = ["--set", f"train.branch_from=run:{parent.name}@{step}"]
    plan = finished.run("plan", "tiny.yaml", *branch)
    assert f"begins with the whole state of run:{parent.name}@{step}" in " ".join(plan.stdout.split())

    made = finished.result("--stage", "train", "--price-per-hour", str(PRICE), *branch)
    run = read_run(finished.store, made["run"])
    expected = [{key: row[key] for key in SERIES} for row in parent.series if row["step"] > step]
    assert [{key: row[key] for key in SERIES} for row in run.series if "train/loss" in row] == expected
    assert sums(finished_train(run))["model.safetensors"] == sums(finished_train(parent))["model.safetensors"]
    assert {one.prefix for one in run.account.attempts} == {finished_train(run).prefix}  # its own time alone
    assert run.account.tokens == (STEPS - step) * 1024


def test_gc_keeps_the_commit_that_a_run_begins_with_until_that_run_has_trained(finished: Project) -> None:
    (parent,) = read_runs(finished.store)
    step = last_commit_before_the_end(parent)

    def removable() -> bool:
        going = collect(finished.store, 0, dry_run=True)
        return any(f"/step-{step:08d}-" in one.key for one in going)

    assert removable()
    child = replace(
        parent.record, run="child-12345678", prefixes=parent.record.prefixes | {"train": "train/child-12345678"}
    )
    child.recipe["train"]["branch_from"] = f"run:{parent.name}@{step}"
    finished.store.put(run_key(child.run), child.to_json())
    assert not removable()
    finished.store.delete(run_key(child.run))
    assert removable()


def last_commit_before_the_end(run: Run) -> int:
    steps = map(step_of, committed_folders(run.store, run.record.prefixes["train"]))
    return max(step for step in steps if step < STEPS)


def finished_train(run: Run) -> Manifest:
    made = run.manifests["train"]
    assert made
    return made


def test_a_change_that_the_state_cannot_bear_is_refused_with_the_reason(
    finished: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.folder)
    (parent,) = read_runs(finished.store)
    step = last_commit_before_the_end(parent)

    def branch(*changes: str, at: int = step) -> Recipe:
        recipe = load_recipe("tiny.yaml", [f"train.branch_from=run:{parent.name}@{at}", *changes])
        return pinned(recipe, finished.store)

    cases = {
        "model.n_layer=3": "its n_layer is 2, and model.n_layer is 3",
        "train.batch_tokens=2048": "train.batch_tokens is 1024 in the parent: the state counts its text in batches",
        "train.beta1=0.8": "train.beta1 is 0.9 in the parent: the moments of the optimizer were made with it",
        "train.optimizer=muon": "train.optimizer is adamw in the parent: the state of another optimizer",
        "train.seed=1": "the state is a position in the order that the seed gives",
        f"train.max_steps={step}": f"max_steps {step} ends before the branch begins",
    }
    for change, words in cases.items():
        with pytest.raises(UserError) as mistake:
            branch(change)
        assert words in str(mistake.value) and "\n" not in str(mistake.value)
    with pytest.raises(UserError, match=f"step 7 is not a commit of {parent.name}; its commits are at"):
        branch(at=7)
    recipe = branch("train.schedule=linear", "train.max_steps=80", "name=decay")
    assert (recipe.name, recipe.train.max_steps, recipe.train.first_step) == ("decay", 80, step)
    assert recipe.train_tokens == (80 - step) * 1024
