"""Evaluation while a run trains, through whole runs: its rows, its texts, and a target that ends the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import FOLDER_NAME, TINY, Project

from pipelines.run.runs import read_runs

SCORE = "eval/hellaswag_acc_norm"
ITEMS = [
    {"ctx": f"the store keeps {i}", "endings": [" a run", " what ist", " the Dorf", " größer als"], "label": i % 4}
    for i in range(12)
]


def evaluating(**train: Any) -> dict[str, Any]:
    """The recipe `tiny` with an evaluation every 15 steps."""
    evaluate = TINY["evaluate"] | {"hellaswag": "items.jsonl", "every": 15}
    return TINY | {"train": TINY["train"] | train, "evaluate": evaluate}


def write_items(path: Path) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in ITEMS), encoding="utf8")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run whose first evaluation passes its target."""
    project = Project(tmp_path_factory.mktemp("during") / FOLDER_NAME, evaluating(stop_at={"hellaswag": 0.01}))
    write_items(project.folder / "items.jsonl")
    made = project.result()
    assert made["state"] == "done" and not any(artifact["skipped"] for artifact in made["artifacts"].values())
    return project


def test_a_target_that_an_evaluation_passes_ends_the_run_as_an_artifact(finished: Project) -> None:
    project = finished
    facts = project.artifact("train").facts
    assert (facts["steps"], facts["tokens"], facts["stopped_by"]) == (15, 15 * 1024, "hellaswag")
    (run,) = read_runs(project.store)
    (score,) = [row for row in run.series if SCORE in row]
    assert score["step"] == 15 and facts[SCORE] == score[SCORE] == project.artifact("evaluate").facts[SCORE]
    assert len(score["samples"]) == 3
    assert project.report()["steps"] == 15 and project.report()["tokens"] == 15 * 1024
    assert all(artifact["skipped"] for artifact in project.result()["artifacts"].values())
    (status,) = json.loads(project.run("status", "--json").stdout)
    assert (status["state"], status["step"], status["max_steps"], status["to_come"]) == ("done", 15, 15, None)


@pytest.mark.slow
def test_ranks_that_evaluate_leave_when_the_command_is_asked_to_stop(finished: Project, tmp_path: Path) -> None:
    project = finished.copy(tmp_path / FOLDER_NAME)
    shutil.rmtree(project.store.root / project.artifact("evaluate").prefix)
    with project.started("run", "tiny.yaml", "--set", "runtime.processes=2") as process:
        project.wait_until(lambda: list(project.home.glob("work/**/task.json")), process)
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert not project.artifacts("evaluate") and not project.alive()
    assert project.result()["state"] == "done"
