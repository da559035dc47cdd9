"""The ledger: the attempts on an artifact, with their time, price and heartbeats.

A stage of a run is a series of attempts. Each takes its number by creating `attempts/<n>/claim.json`, so exactly one
of several processes gets it. Then it rewrites `attempts/<n>/heartbeat.json` every few seconds. A killed attempt is
billed up to its last heartbeat: HEARTBEAT_SECONDS and a put may be missing. The ledger is the source of truth for
time and money; MLflow only mirrors it.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pipelines.store.layout import ATTEMPT_KEY, attempts_of, claim_key, heartbeat_key, momentary_key
from pipelines.store.meter import Meter
from pipelines.store.process_id import process_exists, this_process
from pipelines.store.records import HEARTBEAT_SECONDS, Billing, Heartbeat, sum_by_key
from pipelines.store.traffic import Traffic, traffic_here
from trainer.base.process import Background, log_crash, since_boot, steady_time
from trainer.base.record import DamagedRecord, decoded_at
from trainer.base.store import Entry, Store, side_by_side
from trainer.config.errors import StaleAttempt, UserError

log = logging.getLogger(__name__)
GC = "gc"  # in place of the run, in the attempts of `skytrain gc`: no run pays for them
# Three heartbeats and a slow upload: after a longer silence, an attempt counts as dead and is replaced.
SILENT_SECONDS = 20.0
# By the store's clock. An attempt may write no heartbeat while the store is away, and still go on.
LONG_AGO_SECONDS = 3600.0
CLOCK_SECONDS = 60.0  # of difference between clocks: more than a slow request, less than any age that decides
JUMP_SECONDS = 60.0  # of the wall clock, from which on the bill names it


class Attempt:
    """A claimed attempt that reports while it lives. Use as a context manager."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        heartbeat: Heartbeat,
        watch: Callable[[Heartbeat], None] = lambda beat: None,
        meter: Meter | None = None,
        crashed: Callable[[Background], None] = log_crash,
    ) -> None:
        self.store, self.prefix, self.latest = store, prefix, heartbeat
        self.watch = watch  # called with every heartbeat, in its thread, even if the store does not answer
        self.meter = meter or Meter(None)
        self.before = heartbeat.phases  # of the time before the claim
        self.clock: Callable[[float], dict[str, float]] = lambda now: {}  # seconds by phase since the claim
        self.traffic = traffic_here  # of all processes of its nodes; the attempt counts what comes after the claim
        self._traffic_before = traffic_here()
        self.number = heartbeat.attempt
        self.lost = False  # superseded, as far as the heartbeat thread knows
        self.reported = time.monotonic()  # when the store took the last heartbeat
        self._ending, self._soon = threading.Event(), threading.Event()
        self._logged: set[str] = set()
        self._lock = threading.Lock()
        self._reporting = threading.Lock()  # otherwise a slow put could overwrite the last heartbeat
        self._thread = Background("heartbeat", self._beat, crashed)

    def __enter__(self) -> "Attempt":
        self._report()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._ending.set()
        self._soon.set()
        self._thread.join(SILENT_SECONDS)
        if self.latest.state == "running":
            self.update(state="done" if error is None else "failed")
        try:
            self._report()
        except (OSError, UserError):
            # The previous heartbeat stands. The bill misses the time after it; the run misses nothing.
            if error is None:
                raise

    def update(self, **changes: Any) -> None:
        """Change fields of the next heartbeat."""
        with self._lock:
            self.latest = replace(self.latest, **changes)

    def report(self, metrics: Mapping[str, float] | None = None, **progress: Any) -> None:
        """Change fields of the next heartbeat's progress; metrics are merged."""
        with self._lock:
            self.latest = replace(self.latest, progress=self.latest.progress.updated(metrics, **progress))

    def report_soon(self) -> None:
        """Let the thread send the next heartbeat now."""
        self._soon.set()

    def begin_to_finish(self) -> None:
        """Announce that the manifest comes next: before a gc that takes a later attempt removes files, it sees this.
        StaleAttempt if a later attempt has been claimed already."""
        self.report(finishing=True)
        self._report()
        self.check()

    def superseded(self) -> bool:
        """Whether a later attempt has been claimed."""
        return latest_number(self.store, self.prefix) > self.number

    def check(self) -> None:
        """Raise StaleAttempt if a later attempt has been claimed."""
        if self.superseded():
            self.update(state="stale")
            raise StaleAttempt(f"attempt {self.number} of {self.prefix} was superseded")

    def _beat(self) -> None:
        while True:
            self._soon.wait(HEARTBEAT_SECONDS)
            self._soon.clear()
            if self._ending.is_set():
                return
            self._try(self._report)
            self._try(self._look_for_later_attempts)
            self._try(lambda: self.watch(self.latest))

    def _try(self, part: Callable[[], None]) -> None:
        """Do a part of a heartbeat; the next heartbeat repeats it after any error.

        A store that does not answer, or refuses for a while (renewal of credentials), stops no work. Other errors are
        bugs, or answers that no version of this program knows: they must not make a living attempt look dead.
        """
        try:
            part()
        except (OSError, UserError):
            pass
        except Exception as error:
            if repr(error) not in self._logged:
                self._logged.add(repr(error))
                log.warning("heartbeat of attempt %d: %r; trying again", self.number, error)

    def _look_for_later_attempts(self) -> None:
        self.lost = self.superseded()

    def _report(self) -> None:
        key = heartbeat_key(self.prefix, self.number)
        with self._reporting:
            now, traffic = steady_time(), self.traffic() - self._traffic_before
            if traffic != Traffic():
                self.report(bytes_sent=traffic.sent, bytes_received=traffic.received)
                self.report(write_requests=traffic.writes, read_requests=traffic.reads)
            if abs(jump := time.time() - now) > JUMP_SECONDS:
                self.report(clock_jump=round(jump))
            self.report(booted=since_boot())
            self.update(time=now, phases=self.phases(now))
            latest = self.latest
            self.store.put(key, latest.to_json())
            self.reported = time.monotonic()
            # A killed attempt forwards the meter no more, so the phase after each heartbeat is the worst case.
            self.meter.forward(now, "lost" if latest.state == "running" else "idle")

    def phases(self, now: float) -> dict[str, float]:
        """Seconds by phase from the start of its bill."""
        return sum_by_key([self.before, self.clock(now)])


def claim(
    store: Store,
    prefix: str,
    run: str,
    stage: str,
    number: int,
    billing: Billing,
    watch: Callable[[Heartbeat], None] = lambda beat: None,
    idle: float = 0.0,
    earlier: Iterable[Heartbeat] = (),
    crashed: Callable[[Background], None] = log_crash,
    began: float | None = None,
    meter: Meter | None = None,
) -> Attempt | None:
    """Take attempt `number` of an artifact; None if another process was faster.

    The bill begins at `meter` (by default the machine's), if there is one, else at `billing.since`, `began` or now.
    This process spent `idle` of the seconds before now waiting. Time that `earlier` attempts on this machine have
    billed is not billed again. `crashed` is called if the thread of the heartbeats ends unexpectedly.
    """
    now, meter = steady_time(), meter or Meter.here()
    here = this_process()
    billed = max((heartbeat_time_here(b) for b in earlier if b.process.machine == here.machine), default=0.0)
    before = meter.unbilled(now, idle, billed, began if billing.since is None else None)
    heartbeat = Heartbeat(
        run,
        stage,
        number,
        "running",
        started=now - math.fsum(before.values()) if before else billing.since or now,
        time=now,
        price_per_hour=billing.price_per_hour,
        process=here,
        phases=before,
        price_source=billing.price_source,
        nodes=billing.nodes,
        machine=billing.machine,
    )
    # The claim bills nothing: if a kill comes before the first heartbeat, the next attempt bills all of it.
    if not store.create(claim_key(prefix, number), replace(heartbeat, started=now, phases={}).to_json()):
        return None
    return Attempt(store, prefix, heartbeat, watch, meter, crashed)


def close_attempt(store: Store, prefix: str, beat: Heartbeat, state: str, cause: str) -> None:
    """Write the last heartbeat of an attempt whose processes a signal has ended on this machine, billed up to now."""
    silent = max(0.0, steady_time() - heartbeat_time_here(beat))
    now = beat.time + silent
    lost = min(silent, HEARTBEAT_SECONDS)  # it may have worked until just before its next heartbeat
    phases = sum_by_key([beat.phases, {"lost": lost, "idle": silent - lost}])
    progress = beat.progress.updated(killed=cause)
    last = replace(beat, state=state, time=now, phases=phases, progress=progress)
    store.put(heartbeat_key(prefix, beat.attempt), last.to_json())
    Meter.here().forward(steady_time(), "idle")


def heartbeat_time_here(beat: Heartbeat) -> float:
    """The time of a heartbeat of this machine by the clock of this process: the wall clock may have jumped since."""
    booted = beat.progress.booted
    return beat.time if booted is None else steady_time() - (since_boot() - booted)


def attempts(store: Store, prefix: str) -> list[Heartbeat]:
    """All attempts of an artifact as they last reported, in order. DamagedRecord, or NewerRecord."""
    # claim.json sorts before heartbeat.json, and is not read if there is a heartbeat
    newest = {number: entry.key for number, entry in attempt_entries(store, prefix)}
    return [beat for beat in side_by_side(lambda n: heartbeat_at(store, newest[n], n), sorted(newest)) if beat]


def newest_attempt(store: Store, prefix: str) -> Heartbeat | None:
    """The newest attempt of an artifact as it last reported. DamagedRecord, or NewerRecord."""
    report = newest_report(store, prefix)
    return report[0] if report else None


def newest_report(store: Store, prefix: str) -> tuple[Heartbeat, float] | None:
    """The last report of the newest attempt of an artifact, and its unix seconds by the store's clock. DamagedRecord,
    or NewerRecord."""
    number, entry = max(attempt_entries(store, prefix), key=lambda one: (one[0], one[1].key), default=(0, None))
    beat = heartbeat_at(store, entry.key, number) if entry else None
    return (beat, entry.modified) if entry and beat else None


def heartbeat_at(store: Store, key: str, number: int) -> Heartbeat | None:
    """The claim or the heartbeat of attempt `number` under a key that was listed; None if it was removed since.
    DamagedRecord, or NewerRecord."""

    def decode(body: bytes, where: str) -> Heartbeat:
        beat = Heartbeat.from_json(body, where)
        if beat.attempt != number:
            raise DamagedRecord(where, f"it is that of attempt {beat.attempt}")
        return beat

    return decoded_at(store, key, decode, remedy="remove it")


def latest_number(store: Store, prefix: str) -> int:
    """The number of the newest attempt, 0 if there is none."""
    return max((number for number, _ in attempt_entries(store, prefix)), default=0)


def attempt_entries(store: Store, prefix: str) -> list[tuple[int, Entry]]:
    """The claims and heartbeats of an artifact, each with its attempt's number, by key. Other names are not ours."""
    found = ((ATTEMPT_KEY.fullmatch(entry.key), entry) for entry in store.entries(attempts_of(prefix)))
    return [(int(match[1]), entry) for match, entry in found if match]


def is_alive(heartbeat: Heartbeat) -> bool | None:
    """Whether an attempt still works; None if only its next heartbeat can show that."""
    return process_exists(heartbeat.process) if heartbeat.state == "running" else False


def is_over(heartbeat: Heartbeat, stored: float, clock: Callable[[], float]) -> bool:
    """Whether an attempt is over: it has ended, its process is gone, or its heartbeat was `stored` long ago, by the
    store's clock."""
    alive = is_alive(heartbeat)
    return not alive if alive is not None else clock() - stored > LONG_AGO_SECONDS


def working_attempt(store: Store, prefix: str, clock: Callable[[], float] | None = None) -> Heartbeat | None:
    """The newest attempt of an artifact; None if it is over by `clock` (the store's), or there is none. DamagedRecord,
    or NewerRecord."""
    report = newest_report(store, prefix)
    return None if report is None or is_over(*report, clock or store.clock) else report[0]


def agreed_clock(store: Store) -> float:
    """The time that the store puts on an object that is written now, for what an age decides. UserError if the dates of
    its answers, or this machine, differ by more than CLOCK_SECONDS: no single answer decides."""
    store.put(key := momentary_key("clock"), b"")
    now = max((entry.modified for entry in store.entries(key)), default=0.0)
    store.delete(key)
    for whose, seconds in (("its answers", store.clock()), ("this machine", time.time())):
        if abs(seconds - now) > CLOCK_SECONDS:
            raise UserError(
                f"{store.uri}: the clock of {whose} differs by {seconds - now:+,.0f} s from the date that the store "
                "puts on a new object; set it right, because ages decide here"
            )
    return now
