"""`--budget`: the run stops on a commit before it has cost more.

The job itself watches the budget with the ledger and a clock. So it needs neither the launching machine nor a store
that always answers. Each heartbeat computes the time of the stop: the cost so far (all attempts of all stages from the
store, and this one by the clock) plus the cost of stopping reaches the budget. A timer then asks the run to stop. The
command ends with exit code 76, which no launcher restarts by itself.
"""

import math
import threading

from pipelines.run.runs import Run, find_run
from pipelines.run.watch import Watch
from pipelines.store.account import traffic_of
from pipelines.store.layout import run_key
from pipelines.store.meter import Meter
from pipelines.store.records import HEARTBEAT_SECONDS, Billing, Heartbeat, Progress
from pipelines.store.releases import RELEASE
from trainer.base.process import StopSignal, steady_time
from trainer.base.store import Store
from trainer.config.errors import Stopped, UserError

LEAVE_SECONDS = 10.0  # from the last commit to the last heartbeat: the ranks end, files are uploaded
RELEASE_SECONDS = 180.0  # before any was seen: a cluster is billed until SkyPilot has removed it; 87 s were measured


def seconds_until_ask(budget: float, spent: float, usd_per_hour: float, stopping_seconds: float) -> float:
    """Seconds until the run has to be asked to stop, if it then takes `stopping_seconds`. Below 0: too late."""
    if usd_per_hour == 0:
        return math.inf if spent <= budget else -math.inf
    return 3600 * (budget - spent) / usd_per_hour - stopping_seconds


def stopping_seconds(progress: Progress, batch_tokens: int, grace_seconds: float, release_seconds: float) -> float:
    """The longest duration of a stop until the machine is released, by the steps and saves so far.

    The grace limits the ranks' save. It does not limit the upload of the final weights: they are a third of a commit,
    and one process uploads the parts of all ranks.
    """
    busy = grace_seconds
    speed, save = progress.metrics.get("perf/tokens_per_second"), progress.save_seconds
    if save is not None and speed:
        step = batch_tokens / speed
        saving = min(grace_seconds, 2 * (step + save))  # twice, because saves vary
        busy = max(saving, (progress.world_size or 1) * save / 3)
    return busy + LEAVE_SECONDS + HEARTBEAT_SECONDS + release_seconds


def longest_release(run: Run | None, cloud: str | None) -> float:
    """Seconds that a release in a cloud may take: twice the longest one of this run's machines that is on record,
    because they vary (67 and 87 s on one cluster)."""
    attempts = run.account.attempts if run else ()
    seen = [a.phases[RELEASE] for a in attempts if a.machine.cloud == cloud and RELEASE in a.phases]
    return 2 * max(seen) if seen else RELEASE_SECONDS


def spent_by_others(run: Run | None, current: Heartbeat | None, price_per_hour: float) -> float:
    """Dollars of the run's attempts, without `current`, and of the releases of their machines. Hours of unknown price
    cost `price_per_hour`."""
    if run is None:
        return 0.0
    own = (current.stage, current.attempt) if current else None
    others = [a for a in run.account.attempts if (a.stage, a.attempt) != own]
    spent = sum(a.bill.usd + a.bill.unpriced_hours * price_per_hour for a in others)
    for beat in run.unreleased:
        if (beat.stage, beat.attempt) != own:
            price = price_per_hour if beat.price_per_hour is None else beat.price_per_hour
            spent += longest_release(run, beat.machine.cloud) / 3600 * beat.nodes * price
    return spent


class Budget(Watch):
    """Stops the run before it costs more than its budget."""

    def __init__(
        self,
        usd: float,
        billing: Billing,
        store: Store,
        run: str,
        batch_tokens: int,
        stop: StopSignal,
    ) -> None:
        if billing.price_per_hour is None or billing.price_source == Billing().price_source:
            raise UserError(
                f"--budget: the price of this machine is unknown ({billing.price_source}); add --price-per-hour"
            )
        self.usd, self.store, self.run, self.batch_tokens, self.stop = usd, store, run, batch_tokens, stop
        self.price_per_hour, self.machine = billing.price_per_hour, billing.machine
        self.usd_per_hour = billing.price_per_hour * billing.nodes
        self._others = 0.0  # dollars of all attempts but the running one
        self._release_seconds = 0.0
        self._traffic = 0.0  # dollars of traffic of the running one
        self._attempt: tuple[str, int] | None = None
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Raise Stopped if too little is left to begin an attempt; UserError if the budget never was enough for one."""
        self._read(None)
        meter = Meter.here().read()
        started = meter[0] if meter else steady_time()
        until_ask = self._arm(started, Progress())
        if until_ask > 0:
            return
        if self.store.get(run_key(self.run)) is not None:
            raise Stopped(f"{self._message(self.spent(started))}; the rest is too little to start and stop again")
        least = self.usd - until_ask * self.usd_per_hour / 3600
        raise UserError(f"--budget {self.usd:g}: too little to start: saving and stopping may cost ${least:.4g} here")

    def heartbeat(self, beat: Heartbeat) -> None:
        """Ask the run to stop once it is time, and set a timer for that: the store may delay the next heartbeat."""
        if self._attempt != (beat.stage, beat.attempt):
            self._read(beat)
            self._attempt = (beat.stage, beat.attempt)
        self._traffic = traffic_of(beat).usd
        if self._arm(beat.started, beat.progress) <= 0:
            self._ask(beat.started)

    def _read(self, current: Heartbeat | None) -> None:
        """Read what the other attempts cost, and how long a release takes."""
        run = find_run(self.store, self.run)
        self._others = spent_by_others(run, current, self.price_per_hour)
        self._release_seconds = longest_release(run, self.machine.cloud) if self.machine.cluster else 0.0

    def spent(self, started: float) -> float:
        return self._others + self._traffic + self.usd_per_hour * max(0.0, steady_time() - started) / 3600

    def _arm(self, started: float, progress: Progress) -> float:
        """Set the timer again; the seconds until it asks the run to stop."""
        grace = self.stop.grace_seconds
        stopping = stopping_seconds(progress, self.batch_tokens, grace, self._release_seconds)
        until_ask = seconds_until_ask(self.usd, self.spent(started), self.usd_per_hour, stopping)
        if self._timer:
            self._timer.cancel()
        if 0 < until_ask < threading.TIMEOUT_MAX:
            self._timer = threading.Timer(until_ask, self._ask, [started])
            self._timer.daemon = True
            self._timer.start()
        return until_ask

    def _ask(self, started: float) -> None:
        self.stop.ask(self._message(self.spent(started)), Stopped)

    def _message(self, spent: float) -> str:
        return f"budget: ${spent:.4g} of ${self.usd:.4g} are spent; raise --budget to continue"
