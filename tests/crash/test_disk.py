"""A full disk: training continues while it can; otherwise one line names the fault and the folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trainer_runs
from interfering import Interfering
from pipeline_runs import SHIPPED_CLI, Project
from small_disk import Disk, small_disk
from trainer_runs import EVERY_STEP, Runner, Runners, configured

from trainer.base.events import CheckpointFailed
from trainer.config.errors import FULL

_one_thread, data = trainer_runs._one_thread, trainer_runs.data
endings, runner = trainer_runs.endings, trainer_runs.runner


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", "8m") as root:
        yield Disk(root)


def test_a_disk_that_is_full_for_a_while_stops_no_step_and_nothing_is_missing_afterwards(
    runner: Runners, disk: Disk
) -> None:
    run = Runner(runner.data, disk.root / "run", configured(checkpoint_minutes=EVERY_STEP))  # with its event file
    checkpoints: list[str] = []

    def write(key: str) -> None:
        """The disk is full from the fourth checkpoint to the seventh."""
        checkpoints.append(key)
        if len(checkpoints) == 4:
            disk.fill()
        elif len(checkpoints) == 8:
            disk.empty()

    same, _ = run.attempt(store=Interfering(run.out, write=write))
    assert {e.step for e in run.events_of(CheckpointFailed)} >= {4, 5}
    assert run.commits() == [12, 11]
    assert run.ended(same) == runner.undisturbed()


def test_a_command_whose_folder_is_full_fails_with_one_line(tmp_path: Path, disk: Disk) -> None:
    project = Project(tmp_path / "project")
    project.environment["SKYTRAIN_HOME"] = str(disk.root)
    store = ("--store", str(tmp_path / "store"))
    disk.fill()
    printed = project.run("run", "tiny.yaml", *store, expect=2).stderr
    assert printed.splitlines()[-1].startswith(f"error: {disk.root}") and printed.endswith(f": {FULL}\n")
    assert "Traceback" not in printed


@pytest.mark.parametrize("blocks", [0, 20])
def test_a_command_whose_files_exceed_the_limit_of_the_shell_fails_with_one_line(tmp_path: Path, blocks: int) -> None:
    project = Project(tmp_path / "project")
    limited = f'ulimit -f {blocks}; exec "{sys.executable}" -P -c "{SHIPPED_CLI}" run tiny.yaml'
    with project.started(command=["bash", "-c", limited]) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and err.endswith(f": {FULL}\n" if blocks else f"; {FULL}\n") and "Trace" not in err
