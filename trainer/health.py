"""Anomalies of a run, and the reaction to each.

- *A bad batch*: a loss or gradient that is not finite, or far above its own recent window. The run skips the update;
  weights and moments do not change.
- *Divergence*: the loss is not finite many times in a row. The run stops with a diagnosis; its commits stay.
- *A step that never ends*: a hung collective, a dead peer, a frozen disk. The process exits, and its launcher starts
  it again.

All ranks judge the same numbers, those of `World.agree`, and Health is a frozen value inside the commit. So every rank
decides alike, and a resumed run decides like an undisturbed one.
"""

import faulthandler
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Self, TypeVar

from trainer.config import RuntimeConfig, TrainConfig
from trainer.errors import EXIT_INTERRUPTED
from trainer.metrics import PhaseClock
from trainer.process import Background
from trainer.record import StoredRecord

OUTLIER_WINDOW = 128  # values that a z-score compares with, as in llm.c; with fewer values nothing is an outlier
NOT_FINITE_IN_A_ROW = 8  # bad batches do not come in such rows: by then the weights are ruined

STUCK = "no progress"  # marks the line in which a rank reports why it exits
STUCK_MINUTES, STUCK_STEPS = 10.0, 20
# Compiling, loading 19 GB and the last upload report no progress of their own.
OUTSIDE_STEPS_FACTOR = 6.0
# The phases of a start: reading packages, finding the other ranks, and the first exchange over the GPUs' links.
START_PHASES = ("imports", "rendezvous", "first exchange")
START_MINUTES = 10.0  # of each
STARTED = "started"

T = TypeVar("T")


@dataclass(frozen=True)
class Health(StoredRecord):
    """The recent numbers that a run judges the next ones by. Every commit holds them."""

    losses: tuple[float, ...] = ()  # the last OUTLIER_WINDOW finite ones
    grad_norms: tuple[float, ...] = ()  # the last OUTLIER_WINDOW finite ones
    skipped: int = 0  # updates not applied because of an anomaly
    not_finite: int = 0  # updates in a row, up to now, whose numbers were not finite

    def after(self, loss: float, grad_norm: float, config: TrainConfig) -> tuple["Health", str | None]:
        """The health after the next update, and the anomaly for which to skip that update, or None."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            anomaly = f"train/loss is {loss}, train/grad_norm {grad_norm}"
            return replace(self, skipped=self.skipped + 1, not_finite=self.not_finite + 1), anomaly
        loss_z, norm_z = config.skip_loss_zscore, config.skip_grad_norm_zscore
        bounded_loss, high_loss = bounded("train/loss", loss, self.losses[-OUTLIER_WINDOW:], loss_z)
        bounded_norm, high_norm = bounded("train/grad_norm", grad_norm, self.grad_norms, norm_z)
        outliers = ", ".join(outlier for outlier in (high_loss, high_norm) if outlier) or None
        health = replace(
            self,
            losses=(*self.losses, bounded_loss)[-OUTLIER_WINDOW:],
            grad_norms=(*self.grad_norms, bounded_norm)[-OUTLIER_WINDOW:],
            skipped=self.skipped + bool(outliers),
            not_finite=0,
        )
        return health, outliers

    @property
    def diverged(self) -> str | None:
        """The evidence that the run diverges, so that skipping single updates does not help; None if it is healthy."""
        if self.not_finite < NOT_FINITE_IN_A_ROW:
            return None
        return f"loss or gradient were not finite in {self.not_finite} updates in a row"


def bounded(name: str, value: float, window: Sequence[float], limit: float | None) -> tuple[float, str | None]:
    """`value`, limited to `limit` standard deviations above the mean of the window, and a description if it is above.

    The z-score is that of llm.c (-sl, -sg), over the values before. In llm.c an outlier enters the window unchanged, so
    that one of 1e30 hides all others for 128 steps. If outliers never entered the window, a run could skip updates
    forever. A limited outlier widens the window a little: the run accepts a lasting rise in the end.
    """
    if limit is None or len(window) < OUTLIER_WINDOW:
        return value, None
    centre = fmean(window)
    deviation = math.sqrt(fmean([(x - centre) ** 2 for x in window]))
    if deviation == 0 or value <= centre + limit * deviation:
        return value, None
    z = (value - centre) / deviation
    return centre + limit * deviation, f"{name} {value:.4g} is {z:.1f} standard deviations above its last {len(window)}"


def diagnosis(step: int, evidence: str, config: TrainConfig) -> str:
    """The message of a run that stops because it diverges: the evidence, and possible changes."""
    muon = f" and train.muon_learning_rate (now {config.muon_learning_rate:g})" if config.optimizer == "muon" else ""
    return (
        f"training diverged at step {step}: {evidence}. The last commit stays. "
        f"Possible remedies: a lower train.learning_rate (now {config.learning_rate:g}){muon}, "
        f"a longer train.warmup_steps (now {config.warmup_steps}), train.grad_clip 1.0 (now {config.grad_clip}), "
        f"train.skip_grad_norm_zscore 6 (now {config.skip_grad_norm_zscore}), "
        f"or other data around step {step}"
    )


class Watchdog:
    """Ends the process after too long a time without progress.

    Calls of `progress` and changes of phase are progress. A thread polls for them. It adds up its own polling
    intervals instead of reading the clock: a machine that was suspended, or a process that was stopped, did not poll.
    The thread needs the interpreter: a rank that hangs while it holds the GIL is ended by its peers, which wait for it,
    or by its command (pipelines/nodes/ranks.py).
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

    The exit code is that of an interruption: the same command resumes the run.
    """
    print(reason, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr)
    os._exit(EXIT_INTERRUPTED)
