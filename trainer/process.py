"""How a process is told to stop, and how it makes sure not to outlive who started it."""

import ctypes
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1  # prctl(2)


class Interrupted(Exception):
    """Asked to stop, and stopped where the same command can go on."""


class StaleAttempt(Exception):
    """A newer attempt has taken over: this one may neither commit nor delete."""


class StopSignal:
    """Set by SIGTERM, SIGINT or SIGUSR1: finish what can't be cut short, save, leave."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def check(self) -> None:
        """Raise Interrupted if asked to stop."""
        if self.asked:
            raise Interrupted

    def _ask(self, _number: int, _frame: Any) -> None:
        self.asked = True


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent dies, however it dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
