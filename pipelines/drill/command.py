"""The command under test, from outside: its processes, its failpoints and its progress."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipelines.drill.outages import wait_until
from pipelines.drill.verdict import CommandRun
from trainer.events import Event, Row, Started, event_from_json
from trainer.process import DRILL, die_with_parent

COMMAND = "from pipelines.cli import main; main()"
# Python reads a module of this name at its start: in all processes of a command whose clock is wrong.
WRONG_CLOCK = """import time
right, right_ns = time.time, time.time_ns
time.time = lambda: right() + {0}
time.time_ns = lambda: right_ns() + int({0} * 1e9)
"""
LOG_LINES = 30
# Its child processes may outlive it this long: MLflow's shipper checks for its parent twice a second.
ORPHAN_SECONDS = 60.0
TAIL_BYTES = 1 << 14  # of an event file: some thirty rows


class Command:
    """A running `skytrain run` and its descendants. All have the folder of failpoints in their environment."""

    def __init__(
        self, arguments: Sequence[str], environment: dict[str, str], home: Path, folder: Path, skew: float = 0.0
    ) -> None:
        """`skew`: so many seconds its wall clock is fast."""
        self.skew = skew
        self.home, self.failpoints, self.log = home, folder / "failpoints", folder / "command.log"
        self.failpoints.mkdir(parents=True)
        self.finished_run: CommandRun | None = None
        self.armed: set[str] = set()
        if skew:
            (folder / "sitecustomize.py").write_text(WRONG_CLOCK.format(skew))
            path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
            environment = environment | {"PYTHONPATH": path}
        self._began = time.time()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment, "SKYTRAIN_HOME": str(home), DRILL: str(self.failpoints)},
                start_new_session=True,  # Ctrl-C reaches the drill, which ends the command
                preexec_fn=die_with_parent,
            )

    def arm(self, failpoint: str) -> None:
        """Hold the first process that reaches the failpoint. Armed twice, it would hold a second one too."""
        if failpoint not in self.armed:
            self.armed.add(failpoint)
            (self.failpoints / failpoint).touch()

    def disarm(self, failpoint: str) -> None:
        self.armed.discard(failpoint)
        (self.failpoints / failpoint).unlink(missing_ok=True)

    def waits_at(self, failpoint: str) -> bool:
        return (self.failpoints / f"{failpoint}.here").exists()

    def release(self, failpoint: str) -> None:
        self.armed.discard(failpoint)
        (self.failpoints / f"{failpoint}.here").unlink(missing_ok=True)

    def processes(self) -> list[psutil.Process]:
        """All its live processes, orphans too."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(DRILL) == str(self.failpoints):
                    found.append(process)
        return found

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)  # first, so that it starts no more processes
        self._all(psutil.Process.suspend)

    def thaw(self) -> None:
        self._all(psutil.Process.resume)

    def kill(self) -> None:
        """SIGKILL to all processes at once: none can clean up."""
        if self.process.poll() is None:
            self.freeze()
        while self.processes():
            self._all(psutil.Process.kill)
        self.process.wait()
        self._ended(killed=True)

    def wait(self, limit_seconds: float) -> int:
        code = self.process.wait(limit_seconds)
        wait_until(
            lambda: not self.processes(), f"the end of the processes that {self.process.pid} started", ORPHAN_SECONDS
        )
        self._ended(killed=False)
        return code

    def log_tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def _ended(self, killed: bool) -> None:
        self.finished_run = self.finished_run or CommandRun(
            self.process.pid, self._began, time.time(), killed, self.skew
        )

    def _all(self, act: Callable[[psutil.Process], None]) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                act(process)


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of an attempt's training processes, from their event file."""

    attempt: int
    resumed_from: int | None
    step: int | None
    time: float  # of the last row, unix seconds

    @classmethod
    def of(cls, home: Path) -> "TrainingProgress | None":
        """The progress of the newest attempt on this machine; None without one."""
        logs = sorted(home.glob("work/*/train/*/a*/events.jsonl"))
        if not logs:
            return None
        with suppress(FileNotFoundError), logs[-1].open("rb") as file:  # a finished stage removes it
            first = _events(file.read(TAIL_BYTES))
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            rows = [event for event in _events(file.read()) if isinstance(event, Row)]
            start = next((event.step for event in first if isinstance(event, Started)), None)
            step, at = (rows[-1].step, rows[-1].time) if rows else (start, 0.0)
            return cls(int(logs[-1].parent.name[1:]), start, step, at)
        return None


def _events(text: bytes) -> list[Event]:
    """The events of the complete lines."""
    events = []
    for line in text.decode(errors="replace").split("\n"):
        with suppress(ValueError):
            events.append(event_from_json(line))
    return events
