"""Whether a run is well, and what is done when it is not.

Three illnesses, three cures. *One bad batch* (a loss or gradient that is not finite, or far outside its own
recent window): the update is skipped; weights and moments stay as they are. *Divergence* (the loss stays
above its own best level, or is not finite time after time): the run goes back to a commit from before the
rise and never reads the data in between again; if that doesn't cure it, it stops with a diagnosis. *A step
that never ends* (a hung collective, a dead peer, a frozen disk): the process exits, so that it is started anew.

What is judged is what all ranks agreed on, and what is remembered is a frozen value inside the commit: every
rank decides alike, and a resumed run decides as the undisturbed one.
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
from statistics import median
from typing import Any, TypeVar

from trainer.config import RuntimeConfig, TrainConfig
from trainer.metrics import PhaseClock

OUTLIER_WINDOW = 128  # values that a z-score compares with, as in llm.c; before there are so many, none is an outlier
# A limit of 0.5 nats on a mean of 32 is an area of 16 nat-steps: 4 steps at +4, or 32 at +0.5. A batch's own
# noise (about 0.03 at 0.5M tokens, so 0.005 on the mean) is far below.
RECENT, LEVEL = 32, 128
# Where rollbacks are on, every 128th step is committed, and only those are returned to: which other commits
# there are depends on the clock, and a run that was killed must turn back to where the undisturbed one does.
LANDMARK_STEPS = 128
NOT_FINITE_IN_A_ROW = 8  # single bad batches don't come in rows: by then the weights are ruined

STUCK = "no progress"  # with these words a rank says why it exits
EXIT_STUCK = 75  # as when interrupted: the same command goes on
STUCK_MINUTES, STUCK_STEPS = 10.0, 20
# Compiling, loading 19 GB, the last upload: nothing of that tells how far it is.
PATIENCE = 6.0

T = TypeVar("T")


@dataclass(frozen=True)
class Health:
    """What a run remembers to judge itself by. It travels in every commit."""

    losses: tuple[float, ...] = ()  # the last LEVEL + RECENT finite ones
    grad_norms: tuple[float, ...] = ()  # the last OUTLIER_WINDOW finite ones
    skipped: int = 0  # updates not applied because of an illness
    not_finite: int = 0  # of them in a row, up to now
    best_level: float | None = None  # the lowest mean of LEVEL losses in a row
    calm_step: int | None = None  # the last step that is known to lie before any rise; None with rollbacks off

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Health":
        """From what `asdict` and JSON made of it."""
        lists: dict[str, Any] = {name: tuple(values[name]) for name in ("losses", "grad_norms")}
        return cls(**{**values, **lists})

    def after(
        self, step: int, loss: float, grad_norm: float, config: TrainConfig, overflow_allowed: bool = False
    ) -> tuple["Health", str | None]:
        """The health after update number `step` (from 1) with what the ranks agreed on; why to skip it, or None.

        With `overflow_allowed` a gradient that is not finite is left to fp16's loss scaler, if the loss is.
        """
        finite = math.isfinite(loss) and (math.isfinite(grad_norm) or overflow_allowed)
        if not finite:
            why = f"train/loss is {loss}, train/grad_norm {grad_norm}"
            return replace(self, skipped=self.skipped + 1, not_finite=self.not_finite + 1), why
        loss_z, norm_z = config.skip_loss_zscore, config.skip_grad_norm_zscore
        kept_loss, why_loss = bounded("train/loss", loss, self.losses[-OUTLIER_WINDOW:], loss_z)
        kept_norm, why_norm = bounded("train/grad_norm", grad_norm, self.grad_norms, norm_z)
        reason = ", ".join(why for why in (why_loss, why_norm) if why) or None
        known = replace(
            self,
            losses=(*self.losses, kept_loss)[-LEVEL - RECENT :],
            grad_norms=(*self.grad_norms, kept_norm)[-OUTLIER_WINDOW:] if math.isfinite(grad_norm) else self.grad_norms,
            skipped=self.skipped + bool(reason),
            not_finite=0,
        )
        return known.levelled(step, config.rollback_above_nats), reason

    def levelled(self, step: int, limit_nats: float | None) -> "Health":
        """With `best_level` and `calm_step` brought up to date."""
        if limit_nats is None:
            return self
        calm_step = self.calm_step or 0
        if len(self.losses) < LEVEL + RECENT:
            return replace(self, calm_step=calm_step)
        best = mean(self.losses[:LEVEL])
        best = best if self.best_level is None else min(best, self.best_level)
        # Had the loss risen by the time these RECENT began, their mean would be above half the limit.
        calm = mean(self.losses[-RECENT:]) <= best + limit_nats / 2
        return replace(self, best_level=best, calm_step=max(calm_step, step - RECENT) if calm else calm_step)

    def diverged(self, config: TrainConfig) -> str | None:
        """What shows that single skipped updates don't cure this run; None if it is well."""
        if self.not_finite >= NOT_FINITE_IN_A_ROW:
            return f"loss or gradient were not finite in {self.not_finite} updates in a row"
        if config.rollback_above_nats is None or self.best_level is None:
            return None
        recent = mean(self.losses[-RECENT:])
        if recent <= self.best_level + config.rollback_above_nats:
            return None
        return f"train/loss was {recent:.3f} over the last {RECENT} updates, {self.best_level:.3f} at its best before"


def is_landmark(step: int) -> bool:
    return step % LANDMARK_STEPS == 0


def bounded(name: str, value: float, window: Sequence[float], limit: float | None) -> tuple[float, str | None]:
    """`value`, or `limit` standard deviations above the window's mean if it lies beyond; and the words for that.

    The z-score is llm.c's (-sl, -sg), over the values before. There an outlier enters the window as it is, and
    one of 1e30 blinds it for 128 steps. Left out, outliers could be skipped forever. Cut to the limit they
    widen the window a little each: a lasting rise is accepted in the end.
    """
    if limit is None or len(window) < OUTLIER_WINDOW:
        return value, None
    centre = mean(window)
    deviation = math.sqrt(mean([(x - centre) ** 2 for x in window]))
    if deviation == 0 or value <= centre + limit * deviation:
        return value, None
    z = (value - centre) / deviation
    return centre + limit * deviation, f"{name} {value:.4g} is {z:.1f} standard deviations above its last {len(window)}"


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def data_step(step: int, rollbacks: Sequence[tuple[int, int]]) -> int:
    """The place in the data order that update `step` (from 0) reads.

    Each of `rollbacks` (step returned to, steps of data left out there) moves all steps from there on.
    """
    return step + sum(left_out for returned_to, left_out in rollbacks if step >= returned_to)


def diagnosis(step: int, seen: str, rollbacks: Sequence[tuple[int, int]], config: TrainConfig) -> str:
    """What was seen, what was tried, what could be changed: for whoever finds the run stopped."""
    if config.rollback_above_nats is None:
        tried = "Nothing was tried: train.rollback_above_nats is off"
    elif not rollbacks:
        tried = "Nothing was tried: there was no commit to return to, or train.max_rollbacks is 0"
    else:
        returns = ", ".join(f"from step {to + left_out} to {to}" for to, left_out in rollbacks)
        tried = f"Tried: {len(rollbacks)} rollback(s) ({returns}), each leaving out the data in between"
    return (
        f"training diverged at step {step}: {seen}. {tried}; the last commit stays. "
        f"What may help: a lower train.learning_rate (now {config.learning_rate:g}), a longer train.warmup_steps "
        f"(now {config.warmup_steps}), train.grad_clip 1.0 (now {config.grad_clip}), "
        f"train.skip_grad_norm_zscore 6 (now {config.skip_grad_norm_zscore}), "
        f"or a look at the data around step {step}"
    )


class Watchdog:
    """Ends the process when nothing has moved for too long.

    A thread looks at the run once in a while and counts its own looks, not the time between them: while the
    machine was suspended or the process stopped, it wasn't looking either. `beat` tells it that something
    moved; so does a change of phase. It needs the interpreter: a rank that hangs while it holds the lock is
    ended by its peers, which wait for it.
    """

    def __init__(
        self,
        runtime: RuntimeConfig,
        clock: PhaseClock,
        rank: int = 0,
        on_stuck: Callable[[str], None] | None = None,
        look_seconds: float = 1.0,
    ) -> None:
        self.minutes, self.clock, self.rank = runtime.watchdog_minutes, clock, rank
        self.on_stuck, self.look_seconds = on_stuck or leave, look_seconds
        self.steps: deque[float] = deque(maxlen=101)  # seconds
        self.beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.minutes is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def beat(self) -> None:
        self.beats += 1

    def stepped(self, seconds: float) -> None:
        """A step is done, and took so long."""
        self.steps.append(seconds)
        self.beat()

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each is progress."""
        for item in items:
            self.beat()
            yield item

    def limit_seconds(self) -> float:
        """How long nothing may move: in a step 10 min or 20 median steps, elsewhere six times that."""
        if self.minutes is None:
            return math.inf
        usual = median(list(self.steps)) if self.steps else 0.0
        limit = max(60 * STUCK_MINUTES, STUCK_STEPS * usual) if self.minutes == "auto" else 60 * float(self.minutes)
        return limit if self.clock.current in ("train", "redone") else PATIENCE * limit

    def _watch(self) -> None:
        seen, still, looked = (self.beats, self.clock.current), 0.0, time.monotonic()
        while not self._ended.wait(self.look_seconds):
            passed, looked = time.monotonic() - looked, time.monotonic()
            still += min(passed, 2 * self.look_seconds)
            if seen != (self.beats, self.clock.current):
                seen, still = (self.beats, self.clock.current), 0.0
            elif still > self.limit_seconds():
                self.on_stuck(f"rank {self.rank}: {STUCK} in phase '{seen[1]}' for {still:.0f} s; leaving")
                return


def leave(reason: str) -> None:
    """Exit at once, with every thread's traceback: what hangs can't be asked to clean up."""
    print(reason, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr)
    os._exit(EXIT_STUCK)
