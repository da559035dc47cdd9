"""A promise: the run has stopped on a commit before its bill is higher than `--budget`.

Kept inside the job, from the ledger and a clock, so that it holds with the laptop closed and with the store
away. With every heartbeat the moment is worked out at which to ask for the stop: the bill so far (all attempts
of all stages, as the store has them, and this one by the clock) plus what stopping costs makes the budget. A
timer asks then; the command ends with exit code 76, which no launcher starts again by itself.
"""

import math
import threading
import time

from pipelines.tracking.account import AttemptAccount
from pipelines.tracking.ledger import HEARTBEAT_SECONDS, Meter
from pipelines.tracking.records import Billing, Heartbeat, Progress
from pipelines.tracking.runs import find_run
from trainer.errors import Stopped, UserError
from trainer.process import StopSignal
from trainer.store import Store

LEAVE_SECONDS = 10.0  # from the last commit to the last heartbeat: torchrun and its ranks end, files go up
TEARDOWN_SECONDS = 60.0  # assumed: a rented cluster is billed until SkyPilot has taken it down


def seconds_until_ask(budget: float, spent: float, usd_per_hour: float, stopping_seconds: float) -> float:
    """How long a machine may still work if, once asked to, it takes that long to stop. Below 0: too late."""
    if usd_per_hour == 0:
        return math.inf if spent <= budget else -math.inf
    return 3600 * (budget - spent) / usd_per_hour - stopping_seconds


def stopping_seconds(progress: Progress, batch_tokens: int, grace_seconds: float, rented: bool) -> float:
    """What a stop takes at most, by the steps and saves that were measured.

    Ranks that are saving are cut off after the grace; nobody cuts off a process that has begun to upload the final
    weights. They are a third of a commit, and one process uploads what all ranks did.
    """
    busy = grace_seconds
    speed, save = progress.metrics.get("perf/tokens_per_second"), progress.save_seconds
    if save is not None and speed:
        step = batch_tokens / speed
        saving = min(grace_seconds, 2 * (step + save))  # twice, as no two are alike
        busy = max(saving, (progress.world_size or 1) * save / 3)
    return busy + LEAVE_SECONDS + HEARTBEAT_SECONDS + (TEARDOWN_SECONDS if rented else 0.0)


def teardown_usd(attempt: AttemptAccount) -> float:
    """What taking down an attempt's rented machines may have cost after its last heartbeat."""
    if attempt.machine.cluster is None:
        return 0.0
    return TEARDOWN_SECONDS / 3600 * attempt.nodes * (attempt.price_per_hour or 0.0)


def spent_by_others(store: Store, run: str, mine: Heartbeat | None, price_per_hour: float) -> float:
    """The run's bill in the store without attempt `mine`, dollars. Hours of unknown price count as `price_per_hour`."""
    found = find_run(store, run)
    if found is None:
        return 0.0
    me = (mine.stage, mine.attempt) if mine else None
    others = [a for a in found.account.attempts if (a.stage, a.number) != me]
    spent = sum(a.bill.usd + a.bill.unpriced_hours * price_per_hour for a in others)
    # Nobody beats while a cluster is taken down. One that was taken away, or went on to the next attempt, was not.
    return spent + sum(teardown_usd(a) for a in others if a.state not in ("lost", "running"))


class Budget:
    """Watches a run's bill: `begin` before its first attempt here, then `watch` with every heartbeat."""

    def __init__(
        self, usd: float, billing: Billing, store: Store, run: str, batch_tokens: int, stop: StopSignal
    ) -> None:
        if billing.price_per_hour is None or billing.price_source == Billing().price_source:
            raise UserError(
                f"--budget: what this machine costs nobody has told ({billing.price_source}); "
                "give it as --price-per-hour"
            )
        self.usd, self.store, self.run, self.batch_tokens, self.stop = usd, store, run, batch_tokens, stop
        self.price_per_hour, self.rented = billing.price_per_hour, billing.machine.cluster is not None
        self.usd_per_hour = billing.price_per_hour * billing.nodes
        self._before = 0.0  # dollars of all attempts but the one that is beating
        self._attempt: tuple[str, int] | None = None
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """Raise Stopped if too little is left to begin an attempt; UserError if it always was too little."""
        self._before = spent_by_others(self.store, self.run, None, self.price_per_hour)
        told = Meter.here().read()
        started = told[0] if told else time.time()
        left = self._arm(started, Progress())
        if left > 0:
            return
        if self.begun():
            raise Stopped(f"{self._words(self.spent(started))}, and what is left would not do to stop in order")
        least = self.usd - left * self.usd_per_hour / 3600
        raise UserError(f"--budget {self.usd:g}: too little to begin: to stop in order may take ${least:.4g} here")

    def watch(self, beat: Heartbeat) -> str | None:
        """A reason to stop, once it is time. Before that a timer is set, for the store may delay a heartbeat."""
        if self._attempt != (beat.stage, beat.attempt):
            self._before = spent_by_others(self.store, self.run, beat, self.price_per_hour)
            self._attempt = (beat.stage, beat.attempt)
        return self._words(self.spent(beat.started)) if self._arm(beat.started, beat.progress) <= 0 else None

    def spent(self, started: float) -> float:
        return self._before + self.usd_per_hour * max(0.0, time.time() - started) / 3600

    def begun(self) -> bool:
        return self.store.get(f"runs/{self.run}.json") is not None

    def _arm(self, started: float, progress: Progress) -> float:
        """Set the timer anew; seconds until it asks."""
        stopping = stopping_seconds(progress, self.batch_tokens, self.stop.grace_seconds, self.rented)
        left = seconds_until_ask(self.usd, self.spent(started), self.usd_per_hour, stopping)
        if self._timer:
            self._timer.cancel()
        if 0 < left < threading.TIMEOUT_MAX:
            self._timer = threading.Timer(max(0.0, left), self._ask, [started])
            self._timer.daemon = True
            self._timer.start()
        return left

    def _ask(self, started: float) -> None:
        self.stop.ask(self._words(self.spent(started)), Stopped)

    def _words(self, spent: float) -> str:
        return f"budget: ${spent:.4g} of ${self.usd:.4g} are spent; a higher --budget goes on"
