"""Two finished runs that version 0.1 recorded (commit ca0c40e, torch 2.13, one CPU thread): this version loads them."""

import tarfile
from pathlib import Path
from shutil import rmtree

import pytest
from pipeline_runs import Project

from pipelines.tracking.runs import Run, read_runs

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


@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_a_finished_run_of_version_0_1_is_skipped_audited_and_sampled(recorded: Project, recipe: str) -> None:
    run = run_of(recorded, recipe)
    result = recorded.result(recipe=f"{recipe}.yaml")
    assert result["run"] == run.name and result["attempts"] == 1
    assert [one["skipped"] for one in result["artifacts"].values()] == [True] * 4
    assert "40 steps, 320 sequences: every step read exactly" in recorded.run("report", run.name, "--audit").stdout
    assert recorded.run("sample", run.name, "--tokens", "5", "--seed", "1").stdout


@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_a_commit_of_version_0_1_is_continued_as_that_version_continued_it(recorded: Project, recipe: str) -> None:
    run, store = run_of(recorded, recipe), recorded.home / "store"
    losses, digests = ({r["step"]: r[key] for r in run.series if key in r} for key in ("train/loss", "data/digest"))
    train = store / "train" / run.name
    for later in (store / "evaluate", store / "export", train / "a0001", train / "metrics"):
        rmtree(later)
    rmtree(train / "checkpoints" / "step-00000040-a0001")
    (train / "MANIFEST.json").unlink()
    recorded.run("run", f"{recipe}.yaml")
    rows = [row for row in run_of(recorded, recipe).series if "train/loss" in row and row["step"] > 20]
    assert [row["step"] for row in rows] == list(range(21, 41))
    assert all(row["data/digest"] == digests[row["step"]] for row in rows)
    assert [row["train/loss"] for row in rows] == pytest.approx([losses[row["step"]] for row in rows], rel=1e-5)
