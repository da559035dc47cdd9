"""The records of an attempt: its machine, its price, its progress, and the heartbeat that carries them.

Each record has one writer (`to_json`) and one reader (`from_json`). The JSON leaves out fields that are None.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from trainer.base.record import Count, Number, StoredRecord, UnixSeconds, decoded, typed

HEARTBEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Machine(StoredRecord):
    """A machine and its price: one record from the catalog over a job's SKYTRAIN_PRICES to the bill. Unknown fields are
    None; an own machine has no others."""

    cloud: str | None = None  # SkyPilot's name of it; None: an own machine
    region: str | None = None
    zone: str | None = None
    instance: str | None = None
    spot: bool | None = None
    accelerators: str | None = None  # "H100:8", of one node
    on_demand_per_hour: float | None = None  # dollars of one node, on demand
    cluster: str | None = None  # SkyPilot's name of the cluster
    usd_per_gb_sent: float | None = None  # dollars of traffic from it to the store; None: unknown
    usd_per_gb_received: float | None = None  # dollars of traffic from the store to it
    usd_per_1000_writes: float | None = None  # dollars of requests to the store that write or list; None: unknown
    usd_per_1000_reads: float | None = None
    usd_per_hour: float | None = None  # dollars of one node, by the catalog
    vcpus: float | None = None
    # Of a catalog's row: dollars of one node on spot by zone. AWS's zones have ids ("use1-az1"), for a letter
    # ("us-east-1a") is another zone in another account.
    usd_by_zone: Mapping[str, Number] | None = field(default=None, hash=False)

    @property
    def location(self) -> str | None:
        """The zone of a rented machine if its name has the region's ("us-east-1a"), else the region: a partition of a
        Slurm cluster does not tell where it is."""
        region, zone = self.region or "", self.zone or ""
        return (zone if zone.startswith(region) else region) or None

    def to_json(self) -> dict[str, Any]:
        return without_none(asdict(self))

    def updated(self, **changes: Any) -> Self:
        """This machine with the changes that are not None."""
        return replace(self, **without_none(changes))


@dataclass(frozen=True)
class Progress(StoredRecord):
    """How far an attempt is. `metrics` holds the last value of each metric that a stage logged ("train/loss", …)."""

    step: int | None = None  # updates done
    time: float | None = None  # unix seconds of the last row
    resumed_from: int | None = None  # step
    highest_step: int | None = None  # of this and all earlier attempts
    steps_done: int | None = None  # by this attempt
    steps_redone: int | None = None  # of them, those that an earlier attempt had done
    unsaved_since: float | None = None  # unix seconds, of the first failure since the last commit
    unsaved_because: str | None = None  # the error of the last failure
    save_seconds: float | None = None  # of the last checkpoint
    world_size: int | None = None  # ranks
    device: str | None = None
    precision: str | None = None
    engine: str | None = None  # which engine on which device, and the reason
    micro_batch: str | None = None  # its size, and the reason
    tokens: int | None = None  # tokenize: in the store
    tokens_per_second: float | None = None  # tokenize
    finishing: bool | None = None  # about to create the manifest: gc leaves the files of the artifact alone
    bytes_sent: int | None = None  # to the store, by all processes of its nodes
    bytes_received: int | None = None  # from the store
    write_requests: int | None = None  # to the store, that write or list
    read_requests: int | None = None
    waiting: bool | None = None  # on a standby machine, for a machine that trains
    notice: str | None = None  # why the attempt was asked to stop
    restarting: bool | None = None  # after a crash this machine starts the next attempt
    booted: float | None = None  # seconds from the boot of the machine to the heartbeat
    clock_jump: float | None = None  # seconds by which the wall clock has jumped during the attempt
    killed: str | None = None  # the cause, if a signal or the watchdog ended a process of the attempt
    metrics: Mapping[str, Number] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """One flat object: a metric's name has a slash, no field's name has one."""
        values = without_none(asdict(self))
        return values | values.pop("metrics")

    @staticmethod
    def fields_of(values: Any) -> Any:
        """The fields in what `to_json` made."""
        if not isinstance(values, dict):
            return values
        plain = {name: value for name, value in values.items() if "/" not in name}
        return plain | {"metrics": {name: value for name, value in values.items() if "/" in name}}

    def updated(self, metrics: Mapping[str, float] | None = None, **changes: Any) -> Self:
        """This progress with the changes; metrics are merged, but for those that are not a number."""
        numbers = {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}
        return replace(self, **changes, metrics={**self.metrics, **numbers})


@dataclass(frozen=True)
class ProcessId(StoredRecord):
    """The identity of a process: machine (host, boot, container), pid and start time.

    An attempt lives while its process or one of its `children` (on the same machine) lives.
    """

    machine: str = ""
    pid: int | None = None
    started: str | None = None  # clock ticks since boot; None: there is no such process
    children: tuple["ProcessId", ...] = ()

    @property
    def host(self) -> str:
        return self.machine.partition("/")[0]

    def to_json(self) -> dict[str, Any]:
        if self == ProcessId():
            return {}
        values = {"machine": self.machine, "pid": self.pid, "started": self.started}
        children = [{"pid": child.pid, "started": child.started} for child in self.children]
        return values | ({"children": children} if children else {})


@dataclass(frozen=True)
class Billing:
    """The price of an attempt, and its source."""

    price_per_hour: float | None = 0.0  # dollars, of one node; None: unknown, which no sum counts as 0
    price_source: str = "own machine"
    nodes: int = 1  # every one is billed
    machine: Machine = Machine()
    since: float | None = None  # unix seconds, the start of this attempt's bill; None: the claim


@dataclass(frozen=True)
class Heartbeat(StoredRecord):
    """The last report of an attempt. Times in unix seconds by its own clock, phases in seconds."""

    run: str
    stage: str
    attempt: Count
    state: str  # running, done, interrupted, stopped, failed, stale
    started: UnixSeconds  # the start of its bill
    time: UnixSeconds
    price_per_hour: float | None  # dollars, of one node; None: unknown
    process: ProcessId = ProcessId()
    phases: dict[str, float] = field(default_factory=dict)
    progress: Progress = Progress()
    price_source: str = "own machine"
    nodes: Count = 1
    machine: Machine = Machine()

    @property
    def billed_hours(self) -> float:
        """Hours of the attempt. Each of its nodes is billed for all of them."""
        return max(0.0, self.time - self.started) / 3600

    def to_json(self) -> bytes:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        nested = {
            "process": self.process.to_json(),
            "progress": self.progress.to_json(),
            "machine": self.machine.to_json(),
        }
        return json.dumps(values | nested, indent=1).encode()

    @classmethod
    def from_json(cls, body: bytes, where: str = "a heartbeat") -> Self:
        """DamagedRecord, or NewerRecord."""
        values = decoded(body, where)
        if isinstance(values, dict) and "progress" in values:
            values["progress"] = Progress.fields_of(values["progress"])
        return typed(cls, values, where)


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def sum_by_key(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums by key."""
    sums: dict[str, float] = {}
    for one in several:
        for key, value in one.items():
            sums[key] = sums.get(key, 0.0) + value
    return sums
