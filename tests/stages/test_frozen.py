"""An attempt that is frozen between its upload and its commit, while gc works elsewhere."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_runs import FOLDER_NAME, MARK, Project, committed, sums

from pipelines.drill.command import Command
from pipelines.drill.outages import wait_until

HOUR = 3600.0


@pytest.mark.slow
def test_an_attempt_that_was_frozen_before_its_commit_while_gc_worked_commits_nothing(
    tmp_path: Path, undisturbed: Callable[[int], Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    monkeypatch.chdir(project.folder)
    arguments = ["tiny.yaml", "--store", project.store.uri, "--set", "runtime.keep_last=1"]
    # Without the mark by which `project.run` kills what it started.
    environment = {name: value for name, value in project.environment.items() if name != MARK}
    environment["SKYTRAIN_DRILL_MACHINE"] = "first"
    run = Command(arguments, environment, project.home, tmp_path / "command")
    try:
        wait_until(committed(project, 20), "a commit", 100)
        run.arm("uploaded")
        wait_until(lambda: run.waits_at("uploaded"), "an upload", 60)
        run.freeze()
        folders = {path.parent for path in project.found("train/*/checkpoints/*/*")}
        older = {path.parent for path in project.found("train/*/checkpoints/*/COMMIT.json")}
        (pending,) = folders - older
        for path in project.found("**/*"):
            os.utime(path, (time.time() - 2 * HOUR,) * 2)
        project.environment["SKYTRAIN_DRILL_MACHINE"] = "elsewhere"
        project.run("gc", "--store", project.store.uri)
        assert not pending.exists()
        assert {path.parent for path in project.found("train/*/checkpoints/*/COMMIT.json")} == older and len(older) == 1
        run.thaw()
        run.release("uploaded")
        assert run.wait(200) == 0, run.log_tail()
    finally:
        run.kill()
    states = [beat["state"] for beat in project.heartbeats() if beat["stage"] == "train"]
    assert states == ["stale", "interrupted", "done"]  # the second one is gc
    assert not (pending / "COMMIT.json").exists()
    assert sums(project.artifact("train")) == sums(undisturbed(1).artifact("train"))
