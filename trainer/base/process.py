"""A process: the request to stop, the end of its parent, its threads, its log lines, and the failpoints of tests."""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config.errors import Interrupted, UserError, cut

PR_SET_PDEATHSIG = 1  # prctl(2)
BOOTED = "SKYTRAIN_BOOTED"  # unix seconds of the boot, from a command to its children


class StopSignal:
    """The request to finish the current step, save and exit. SIGTERM, SIGINT, SIGUSR1 and `ask` set it."""

    asked = False
    reason: str | None = None  # of the first request
    ending: type[Interrupted] = Interrupted  # the exception with which the first request ends the process
    grace_seconds = 30.0  # to save, until torchrun or Kubernetes kills the process

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def check(self) -> None:
        """Raise `interruption` if the process was asked to stop."""
        if self.asked:
            raise self.interruption()

    def interruption(self) -> Interrupted:
        """The exception that ends this process early. Without a request, it is a plain Interrupted."""
        return Interrupted() if self.ending is Interrupted else self.ending(self.reason)

    def ask(self, reason: str, ending: type[Interrupted] = Interrupted) -> None:
        """Request a stop, as a signal does. From any thread."""
        if self.reason is None:
            self.reason, self.ending = reason, ending
        self.asked = True

    def _ask(self, number: int, _frame: Any) -> None:
        self.ask(signal.Signals(number).name)


def log_line(line: str) -> None:
    """Print a line to the log. Errors, such as a full disk, are ignored."""
    with suppress(OSError):
        print(line, flush=True)


def log_crash(thread: "Background") -> None:
    """Print that a thread crashed, with the traceback."""
    assert thread.error
    log_line(f"the thread {thread.name!r} CRASHED:\n{''.join(traceback.format_exception(thread.error))}")


def steady_time() -> float:
    """Unix seconds that never jump: the wall clock when a command begins, and the boot clock from then on.

    For durations and bills. The wall clock is for dates alone. UserError for an impossible SKYTRAIN_BOOTED."""
    text = os.environ.setdefault(BOOTED, repr(time.time() - since_boot()))  # the ranks inherit it
    with suppress(ValueError):
        if 0 <= (booted := float(text)) < 1e11:  # the year 5138: records hold dates up to 9999
            return booted + since_boot()
    raise UserError(f"{BOOTED}={cut(text)}: must be the unix seconds of the boot; unset it, and skytrain computes them")


def since_boot() -> float:
    """Seconds since the boot of this machine, also those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Background(threading.Thread):
    """A thread that cannot crash unseen: `error` keeps the exception that ended `work`, and `crashed` reports it.

    `crashed` runs in the thread itself. Without one, the traceback goes to the log.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        crashed: Callable[["Background"], None] = log_crash,
        daemon: bool = True,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self.error: BaseException | None = None
        self._work, self._crashed = work, crashed

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # SystemExit too: threading would ignore it silently
            self.error = error
            self._crashed(self)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Make the kernel send a signal to this process when its parent dies, even by SIGKILL. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


FAILPOINTS = "SKYTRAIN_FAILPOINTS"  # set only by tests: the folder in which they arm failpoints
FAILPOINT_SECONDS = 300.0  # the longest wait, in case the test died


def failpoint(name: str) -> None:
    """Wait here if a test has armed this point; otherwise do nothing.

    A test arms a failpoint by creating the file `name`. The first process at this point renames it to `name.here`, so
    that the test knows, and waits until that file is removed. Other processes continue.
    """
    folder = os.environ.get(FAILPOINTS)
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
