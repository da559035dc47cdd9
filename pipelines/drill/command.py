"""The command that a drill strikes, from outside: its processes, its moments, and how far it is."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipelines.drill.outages import wait_until
from pipelines.drill.verdict import Life
from trainer.process import DRILL, die_with_parent

COMMAND = "from pipelines.cli import main; main()"
LOG_LINES = 30
# What may be left of a command when it has ended: MLflow's shipper looks for its parent twice a second.
ORPHAN_SECONDS = 60.0
TAIL_BYTES = 1 << 14  # of an event file: some thirty rows


class Command:
    """`skytrain run`, started, with all that it starts: known by the folder of moments in their environment."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], home: Path, folder: Path) -> None:
        self.home, self.moments, self.log = home, folder / "moments", folder / "command.log"
        self.moments.mkdir(parents=True)
        self.life: Life | None = None
        self.armed: set[str] = set()
        self._began = time.time()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "run", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment, "SKYTRAIN_HOME": str(home), DRILL: str(self.moments)},
                start_new_session=True,  # Ctrl-C is for the drill, which ends it
                preexec_fn=die_with_parent,
            )

    def arm(self, place: str) -> None:
        """Until it is released: armed twice it would hold the next process that passes, too."""
        if place not in self.armed:
            self.armed.add(place)
            (self.moments / place).touch()

    def disarm(self, place: str) -> None:
        self.armed.discard(place)
        (self.moments / place).unlink(missing_ok=True)

    def waits_at(self, place: str) -> bool:
        return (self.moments / f"{place}.here").exists()

    def release(self, place: str) -> None:
        self.armed.discard(place)
        (self.moments / f"{place}.here").unlink(missing_ok=True)

    def processes(self) -> list[psutil.Process]:
        """All that is alive of it, whatever its parents are now."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(DRILL) == str(self.moments):
                    found.append(process)
        return found

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)  # first, so that it starts nothing meanwhile
        self._all(psutil.Process.suspend)

    def thaw(self) -> None:
        self._all(psutil.Process.resume)

    def kill(self) -> None:
        """SIGKILL to everything at once, so that nobody can clean up."""
        if self.process.poll() is None:
            self.freeze()
        while self.processes():
            self._all(psutil.Process.kill)
        self.process.wait()
        self._over(killed=True)

    def wait(self, limit_seconds: float) -> int:
        code = self.process.wait(limit_seconds)
        wait_until(lambda: not self.processes(), f"the end of what {self.process.pid} has started", ORPHAN_SECONDS)
        self._over(killed=False)
        return code

    def told(self) -> str:
        """The end of what it said."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def _over(self, killed: bool) -> None:
        self.life = self.life or Life(self.process.pid, self._began, time.time(), killed)

    def _all(self, act: Callable[[psutil.Process], None]) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                act(process)


@dataclass(frozen=True)
class Standing:
    """How far the training processes of an attempt are, by their event file."""

    attempt: int
    resumed_from: int | None
    step: int | None
    time: float  # of the last row, unix seconds

    @classmethod
    def of(cls, home: Path) -> "Standing | None":
        """The newest attempt's on this machine, None if there is none."""
        logs = sorted(home.glob("work/*/train/*/a*/events.jsonl"))
        if not logs:
            return None
        with suppress(FileNotFoundError), logs[-1].open("rb") as file:  # gone once the stage is finished
            first = _events(file.read(TAIL_BYTES))
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            rows = [e for e in _events(file.read()) if e["event"] == "row"]
            start = next((e["step"] for e in first if e["event"] == "start"), None)
            step, at = (rows[-1]["step"], rows[-1]["time"]) if rows else (start, 0.0)
            return cls(int(logs[-1].parent.name[1:]), start, step, at)
        return None


def _events(text: bytes) -> list[dict[str, Any]]:
    """The lines that are there completely."""
    found = []
    for line in text.split(b"\n"):
        with suppress(ValueError):
            found.append(json.loads(line))
    return [event for event in found if isinstance(event, dict) and "event" in event]
