"""A rank that no longer progresses: a hung collective, a dead peer, a frozen disk. Its process exits, and its command
begins a new attempt."""

import faulthandler
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Self, TypeVar

from trainer.base.metrics import PhaseClock
from trainer.base.process import Background
from trainer.config.config import RuntimeConfig
from trainer.config.errors import EXIT_INTERRUPTED

STUCK = "no progress"  # marks the line in which a rank reports why it exits
STUCK_MINUTES, STUCK_STEPS = 10.0, 20
# Compiling, loading 19 GB and the last upload report no progress of their own.
OUTSIDE_STEPS_FACTOR = 6.0
# The phases of a start: reading packages, finding the other ranks, and the first exchange over the GPUs' links.
START_PHASES = ("imports", "rendezvous", "first exchange")
START_MINUTES = 10.0  # of each
STARTED = "started"

T = TypeVar("T")


class Watchdog:
    """Ends the process after too long a time without progress.

    Calls of `progress` and changes of phase are progress. A thread polls for them. It adds up its own polling
    intervals instead of reading the clock: a machine that was suspended, or a process that was stopped, did not poll.
    The thread needs the interpreter: a rank that hangs while it holds the GIL is ended by its peers, which wait for it,
    or by its command (pipelines/run/nodes/ranks.py).
    """

    def __init__(
        self,
        runtime: RuntimeConfig,
        clock: PhaseClock,
        rank: int = 0,
        on_stuck: Callable[[str], None] | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        self.minutes, self.clock, self.rank = runtime.watchdog_minutes, clock, rank
        self.on_stuck, self.poll_seconds = on_stuck or exit_stuck, poll_seconds
        self.step_seconds: deque[float] = deque(maxlen=101)
        self.count = 0  # of calls of `progress`
        self._ended = threading.Event()
        self._thread = Background("watchdog", self._watch, crashed=self._crashed)

    def __enter__(self) -> Self:
        if self.minutes is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def enter(self, phase: str) -> None:
        """Begin a phase of the start, or end the watch of the start with STARTED."""
        self.clock.enter(phase)
        if phase == STARTED:
            self._ended.set()

    def progress(self) -> None:
        """Record that the run moves."""
        self.count += 1

    def step_done(self, seconds: float) -> None:
        """Record a step, and how long it took."""
        self.step_seconds.append(seconds)
        self.progress()

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items. Each one is progress."""
        for item in items:
            self.progress()
            yield item

    def limit_seconds(self) -> float:
        """The longest time without progress: in a step 10 min or 20 median steps, in other phases six times that. A
        phase of the start may take START_MINUTES, or six times the `watchdog_minutes` of the recipe if that is less."""
        if self.minutes is None:
            return math.inf
        if self.clock.current in START_PHASES:
            return 60 * min(START_MINUTES, math.inf if self.minutes == "auto" else OUTSIDE_STEPS_FACTOR * self.minutes)
        usual = median(list(self.step_seconds)) if self.step_seconds else 0.0
        limit = max(60 * STUCK_MINUTES, STUCK_STEPS * usual) if self.minutes == "auto" else 60 * float(self.minutes)
        return limit if self.clock.current in ("train", "redone") else OUTSIDE_STEPS_FACTOR * limit

    def _crashed(self, thread: Background) -> None:
        self.on_stuck(
            f"rank {self.rank}: the watchdog failed ({thread.error!r}), so nothing would notice a hang; exiting"
        )

    def _watch(self) -> None:
        last, idle_seconds, polled = (self.count, self.clock.current), 0.0, time.monotonic()
        while not self._ended.wait(self.poll_seconds):
            passed, polled = time.monotonic() - polled, time.monotonic()
            idle_seconds += min(passed, 2 * self.poll_seconds)
            if last != (self.count, self.clock.current):
                last, idle_seconds = (self.count, self.clock.current), 0.0
            elif idle_seconds > self.limit_seconds():
                self.on_stuck(f"rank {self.rank}: {STUCK} in phase '{last[1]}' for {idle_seconds:.0f} s; exiting")
                return


def exit_stuck(reason: str) -> None:
    """Exit at once with the traceback of every thread: a process that hangs cannot clean up.

    It exits as after an interruption: the same command resumes the run.
    """
    print(reason, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr)
    os._exit(EXIT_INTERRUPTED)
