"""A full disk: training continues while it can; otherwise one line names the fault and the folder."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trainer_runs
from pipeline_runs import Project
from trainer_runs import EVERY_STEP, Runner, configured, weights

from trainer.errors import FULL
from trainer.events import CheckpointFailed
from trainer.store import LocalStore

_one_thread, data = trainer_runs._one_thread, trainer_runs.data


class Disk:
    """A file system of 8 MB at `root`, which can be filled up."""

    def __init__(self, root: Path) -> None:
        self.root, self._ballast = root, root / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    assert error.strerror == "No space left on device"

    def empty(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield Disk(tmp_path / "disk")
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path / "disk")], check=True)


class Filling(LocalStore):
    """A store on a disk that is full from the fourth checkpoint to the seventh."""

    def __init__(self, root: Path, disk: Disk) -> None:
        super().__init__(root)
        self.disk, self.checkpoints = disk, 0

    def write(self, parts: Sequence[memoryview], key: str, length: int) -> list[str]:
        self.checkpoints += 1
        if self.checkpoints == 4:
            self.disk.fill()
        elif self.checkpoints == 8:
            self.disk.empty()
        return super().write(parts, key, length)


def test_a_disk_that_is_full_for_a_while_stops_no_step_and_nothing_is_missing_afterwards(
    data: Path, tmp_path: Path, disk: Disk
) -> None:
    whole = Runner(data, tmp_path / "whole", configured())
    model, _ = whole.attempt()
    run = Runner(data, disk.root / "run", configured(checkpoint_minutes=EVERY_STEP))  # with its event file
    same, _ = run.attempt(store=Filling(run.out, disk))
    assert {e.step for e in run.events_of(CheckpointFailed)} >= {4, 5}
    assert run.commits() == [12, 11]
    assert run.rows() == whole.rows() and weights(same) == weights(model)


def test_a_command_whose_folder_is_full_fails_with_one_line(tmp_path: Path, disk: Disk) -> None:
    project = Project(tmp_path / "project")
    project.environment["SKYTRAIN_HOME"] = str(disk.root)
    store = ("--store", str(tmp_path / "store"))
    disk.fill()
    printed = project.run("run", "tiny.yaml", *store, expect=2).stderr
    assert printed.splitlines()[-1].startswith(f"error: {disk.root}") and printed.endswith(f": {FULL}\n")
    assert "Traceback" not in printed
