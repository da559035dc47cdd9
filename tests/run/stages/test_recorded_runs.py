"""Two finished runs that version 0.1 recorded (commit ca0c40e, torch 2.13, one CPU thread): this version loads them."""

import tarfile
from pathlib import Path
from shutil import rmtree

import pytest
from pipeline_runs import Project

from pipelines.store.runs import Run, read_runs

RECORDED = Path(__file__).with_name("recorded_runs_0_1.tar.xz")


@pytest.fixture
def recorded(tmp_path: Path) -> Project:
    """A folder with text.jsonl, the recipes and the store of version 0.1."""
    folder = tmp_path / "recorded"
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    (folder / ".skytrain").mkdir()
    (folder / "store").rename(folder / ".skytrain" / "store")
    return Project(folder)


def run_of(project: Project, name: str) -> Run:
    (run,) = [one for one in read_runs(project.store) if one.name.startswith(f"{name}-")]
    return run


def reset_to_its_commit(project: Project, run: Run) -> None:
    """Remove all that the run made after its commit at step 20."""
    store = project.home / "store"
    train = store / "train" / run.name
    for later in (store / "evaluate", store / "export", train / "a0001", train / "metrics"):
        rmtree(later)
    rmtree(train / "checkpoints" / "step-00000040-a0001")
    (train / "MANIFEST.json").unlink()


def test_a_finished_run_of_version_0_1_is_skipped(recorded: Project) -> None:
    result = recorded.result(recipe="gpt2.yaml")
    assert result["run"] == run_of(recorded, "gpt2").name and result["attempts"] == 1
    assert [one["skipped"] for one in result["artifacts"].values()] == [True] * 4


@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_a_finished_run_of_version_0_1_is_sampled(recorded: Project, recipe: str) -> None:
    run = run_of(recorded, recipe)
    assert recorded.run("sample", run.name, "--tokens", "5", "--seed", "1").stdout


def test_a_commit_of_version_0_1_is_continued_as_that_version_continued_it(recorded: Project) -> None:
    run = run_of(recorded, "gpt2")
    losses = {row["step"]: row["train/loss"] for row in run.series if "train/loss" in row}
    reset_to_its_commit(recorded, run)
    recorded.run("run", "gpt2.yaml")
    again = run_of(recorded, "gpt2")
    rows = [row for row in again.series if "train/loss" in row and row["step"] > 20]
    assert [row["step"] for row in rows] == list(range(21, 41))
    assert again.manifests["train"] and again.manifests["train"].facts["threads"] == 1
    assert [row["train/loss"] for row in rows] == pytest.approx([losses[row["step"]] for row in rows], rel=1e-5)


def test_a_run_of_version_0_1_with_muon_is_not_continued_and_says_why(recorded: Project) -> None:
    """0.1 moved matrices and embeddings by other rules: continued by today's, its losses would be of neither."""
    run = run_of(recorded, "modern")
    reset_to_its_commit(recorded, run)
    for words in (["run", f"run:{run.name}"], ["run", "modern.yaml", "--set", f"train.branch_from=run:{run.name}@20"]):
        (line,) = recorded.run(*words, "--stage", "train", expect=2).stderr.splitlines()[-1:]
        assert "another version of skytrain recorded it" in line or "another model or version may have made it" in line
    assert recorded.run("sample", run.name, "--tokens", "5", "--seed", "1").stdout  # the weights of its commit
