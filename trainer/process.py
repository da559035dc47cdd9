"""How a process is told to stop, and how it makes sure not to outlive who started it."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.errors import Interrupted

PR_SET_PDEATHSIG = 1  # prctl(2)


class StopSignal:
    """Set by SIGTERM, SIGINT, SIGUSR1 or `ask`: finish what can't be cut short, save, leave."""

    asked = False
    reason: str | None = None  # of who asked first
    ending: type[Interrupted] = Interrupted  # what who asked first wants to come of it
    grace_seconds = 30  # to save, before whoever asked cuts it off: what torchrun and Kubernetes give

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def check(self) -> None:
        """Raise Interrupted (or what it is to end as) if asked to stop."""
        if self.asked:
            raise self.interruption()

    def interruption(self) -> Interrupted:
        """What to raise once asked to stop, or cut off without having been asked."""
        return Interrupted() if self.ending is Interrupted else self.ending(self.reason)

    def ask(self, reason: str, ending: type[Interrupted] = Interrupted) -> None:
        """Do what a signal does. From any thread."""
        if self.reason is None:
            self.reason, self.ending = reason, ending
        self.asked = True

    def _ask(self, number: int, _frame: Any) -> None:
        self.ask(signal.Signals(number).name)


def log_line(line: str) -> None:
    """Print for whoever reads the log. Where the disk that holds it is full, nobody does."""
    with suppress(OSError):
        print(line, flush=True)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent dies, however it dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


DRILL = "SKYTRAIN_DRILL"  # set by `skytrain drill` alone: the folder in which it arms moments
FAILPOINT_SECONDS = 60.0  # a drill that died must not hold its run for longer


def failpoint(name: str) -> None:
    """A place where a blow of `skytrain drill` may fall; without a drill, nothing.

    The drill arms a moment by making the file `name`. The first process that comes by renames it to
    `name.here`, which tells the drill, and waits until that file is gone. Others run on.
    """
    folder = os.environ.get(DRILL)
    if not folder:
        return
    here = Path(folder, f"{name}.here")
    try:
        os.rename(Path(folder, name), here)
    except FileNotFoundError:
        return
    deadline = time.monotonic() + FAILPOINT_SECONDS
    while here.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
