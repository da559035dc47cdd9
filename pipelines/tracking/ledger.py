"""Who worked on an artifact, when, at what price: attempts, and what they add up to.

A stage of a run is a series of attempts. Each takes its number by creating `attempts/<n>/claim.json`, so
of any number of processes one gets it; then it rewrites `attempts/<n>/heartbeat.json` every few seconds.
An attempt that dies without a word is billed up to its last heartbeat. The ledger is the source of truth
for time and money; MLflow only mirrors it.
"""

import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config import UserError
from trainer.process import StaleAttempt
from trainer.store import Store

HEARTBEAT_SECONDS = 5.0
# Three heartbeats and a slow upload: who is silent for longer is taken for dead and replaced.
SILENT_SECONDS = 20.0
# Beyond any clock skew between nodes that object storage would still talk to (15 min).
LONG_AGO_SECONDS = 3600.0


@dataclass(frozen=True)
class Billing:
    """What an attempt costs, and how we know."""

    price_per_hour: float | None = 0.0  # dollars, of one node; None: unknown, which no sum counts as 0
    price_source: str = "own machine"
    nodes: int = 1  # every one is billed
    # cloud, region, zone, instance, spot, accelerators, on_demand_per_hour, cluster: as far as they are known
    machine: dict[str, Any] = field(default_factory=dict)
    since: float | None = None  # unix seconds from which the machine is on this attempt's bill; None: its claim


@dataclass(frozen=True)
class Heartbeat:
    """One attempt as it last reported. Times in unix seconds by its own clock, phases in seconds."""

    run: str
    stage: str
    attempt: int
    state: str  # running, done, interrupted, stopped, failed, stale
    started: float  # from here on the machine is on its bill
    time: float
    price_per_hour: float | None  # dollars, of one node; None: unknown
    process: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)  # step, loss, tokens/s, resumed_from, …
    price_source: str = "own machine"
    nodes: int = 1
    machine: dict[str, Any] = field(default_factory=dict)  # as in Billing

    @property
    def billed_hours(self) -> float:
        """Hours of the attempt. Each of its nodes is billed for all of them."""
        return max(0.0, self.time - self.started) / 3600

    @property
    def usd(self) -> float | None:
        """Dollars of all nodes; None if the price is unknown."""
        return None if self.price_per_hour is None else self.billed_hours * self.nodes * self.price_per_hour


class Attempt:
    """A claimed attempt that reports while it lives. Use as a context manager."""

    def __init__(
        self, store: Store, prefix: str, heartbeat: Heartbeat, watch: Callable[[Heartbeat], None] = lambda beat: None
    ) -> None:
        self.store, self.prefix, self.latest = store, prefix, heartbeat
        self.watch = watch  # called with every heartbeat, in its thread, also while the store is away
        self.number = heartbeat.attempt
        self.lost = False  # superseded, as far as the heartbeat thread knows
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._reporting = threading.Lock()  # or a slow put could arrive after, and undo, the last one
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")

    def __enter__(self) -> "Attempt":
        self._report()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._ending.set()
        self._thread.join(SILENT_SECONDS)
        if self.latest.state == "running":
            self.update(state="done" if error is None else "failed")
        try:
            self._report()
        except (OSError, UserError):
            # The heartbeat before this one stands; what follows it is lost to the bill, not to the run.
            if error is None:
                raise

    def update(self, **changes: Any) -> None:
        """Change what the next heartbeat says; `progress` and `phases` are merged."""
        with self._lock:
            for name in ("progress", "phases"):
                if name in changes:
                    changes[name] = {**getattr(self.latest, name), **changes[name]}
            self.latest = replace(self.latest, **changes)

    def superseded(self) -> bool:
        """Whether a later attempt has been claimed."""
        return latest_number(self.store, self.prefix) > self.number

    def check(self) -> None:
        """Raise StaleAttempt if a later attempt has been claimed."""
        if self.superseded():
            self.update(state="stale")
            raise StaleAttempt(f"attempt {self.number} of {self.prefix} was superseded")

    def _beat(self) -> None:
        while not self._ending.wait(HEARTBEAT_SECONDS):
            try:
                self._report()
                self.lost = self.superseded()
            except (OSError, UserError):
                # A store that is away, or for a while refuses (credentials that are being renewed), stops no
                # work: the next beat tries again.
                pass
            with suppress(OSError, UserError):
                self.watch(self.latest)

    def _report(self) -> None:
        key = f"{self.prefix}/attempts/{self.number:04d}/heartbeat.json"
        with self._reporting:
            self.update(time=time.time())
            self.store.put(key, json.dumps(asdict(self.latest), indent=1).encode())


def claim(
    store: Store,
    prefix: str,
    run: str,
    stage: str,
    number: int,
    billing: Billing,
    watch: Callable[[Heartbeat], None] = lambda beat: None,
) -> Attempt | None:
    """Take attempt `number` of an artifact; None if another process was faster."""
    now = time.time()
    heartbeat = Heartbeat(
        run,
        stage,
        number,
        "running",
        started=now if billing.since is None else billing.since,
        time=now,
        price_per_hour=billing.price_per_hour,
        process=this_process(),
        price_source=billing.price_source,
        nodes=billing.nodes,
        machine=billing.machine,
    )
    key = f"{prefix}/attempts/{number:04d}/claim.json"
    if not store.create(key, json.dumps(asdict(heartbeat), indent=1).encode()):
        return None
    return Attempt(store, prefix, heartbeat, watch)


def attempts(store: Store, prefix: str) -> list[Heartbeat]:
    """All attempts of an artifact as they last reported, in order."""
    bodies = {}
    for entry in store.entries(f"{prefix}/attempts/"):  # claim.json sorts before heartbeat.json
        body = store.get(entry.key)
        if body is not None:
            bodies[entry.key.split("/")[-2]] = Heartbeat(**json.loads(body))
    return [bodies[number] for number in sorted(bodies)]


def latest_number(store: Store, prefix: str) -> int:
    """The number of the newest attempt, 0 if there is none."""
    return max((int(e.key.split("/")[-2]) for e in store.entries(f"{prefix}/attempts/")), default=0)


def is_alive(heartbeat: Heartbeat) -> bool | None:
    """Whether an attempt still works, as far as one look tells; None if one has to watch its heartbeat."""
    return is_there(heartbeat) if heartbeat.state == "running" else False


def is_there(heartbeat: Heartbeat) -> bool | None:
    """Whether the process of an attempt still exists; None if that can't be told from here."""
    here, there = this_process(), heartbeat.process
    if here["machine"] == there["machine"]:
        parts = [there, *there.get("children", [])]
        return any(process_started(part["pid"]) == part["started"] for part in parts)
    if abs(time.time() - heartbeat.time) > LONG_AGO_SECONDS:
        return False
    return None


def this_process() -> dict[str, Any]:
    """What tells this process from every other: machine (boot and container), pid and its start time."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    # Containers of one host share its boot and may share its name; a pid means something in one of them only.
    parts = [boot.read_text().strip() if boot.exists() else "", os.readlink(pids) if pids.is_symlink() else ""]
    machine = "/".join([platform.node(), *filter(None, parts)])
    machine = os.environ.get("SKYTRAIN_DRILL_MACHINE", machine)  # for drills only: one machine plays several
    return {"machine": machine, "pid": os.getpid(), "started": process_started(os.getpid())}


def process_started(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot, None if there is no such process (any more)."""
    try:
        # The name in field 2 may hold spaces and brackets; the start time is the 20th field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A zombie is dead: in a container whose first process reaps nobody it stays for good.
        return None if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "unknown"
    return "unknown"


def seconds_between_failures(heartbeats: Iterable[Heartbeat], prior_seconds: float) -> float:
    """Mean time between deaths without a word, from earlier attempts and a prior that counts as one death.

    The posterior mean of a Poisson rate with a Gamma(1, prior) prior. Who could still commit before it
    left lost nothing, and doesn't count.
    """
    beats = list(heartbeats)
    seconds = sum(3600 * beat.billed_hours for beat in beats)
    return (prior_seconds + seconds) / (1 + sum(beat.state == "running" for beat in beats))


@dataclass(frozen=True)
class Account:
    """What a set of attempts adds up to."""

    attempts: int
    billed_hours: float  # of all nodes together, at whatever price
    usd: float  # of the hours whose price is known
    unpriced_hours: float  # the others, also of all nodes
    phases: dict[str, float]


def account(heartbeats: Iterable[Heartbeat]) -> Account:
    """Hours, dollars and seconds by phase of some attempts."""
    beats = list(heartbeats)
    phases: dict[str, float] = {}
    for beat in beats:
        for phase, seconds in beat.phases.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    return Account(
        attempts=len(beats),
        billed_hours=math.fsum(b.nodes * b.billed_hours for b in beats),
        usd=math.fsum(b.usd for b in beats if b.usd is not None),
        unpriced_hours=math.fsum(b.nodes * b.billed_hours for b in beats if b.usd is None),
        phases=phases,
    )
