"""SkyPilot's record of a run's clusters, and how it differs from the ledger."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from pipelines.tracking.account import Account, AttemptAccount, total_cost
from trainer.store import Store


@dataclass(frozen=True)
class Interval:
    """A time in which a cluster was up according to SkyPilot. Unix seconds by its API server's clock."""

    cluster: str
    nodes: int
    started: float
    ended: float | None  # None: it is up

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """TypeError for a field that this version does not know."""
        return cls(**values)


@dataclass(frozen=True)
class Difference:
    """SkyPilot and the ledger about one cluster, in machine hours."""

    cluster: str
    sky_hours: float
    ledger_hours: float
    usd: float | None  # of the hours outside all attempts, at the attempts' price; None: unknown


def read_intervals(store: Store, run: str) -> list[Interval]:
    """The intervals that were last recorded; none for a run that was never launched."""
    body = store.get(key_of(run))
    return [Interval.from_json(one) for one in json.loads(body)] if body else []


def record_intervals(store: Store, run: str, intervals: Iterable[Interval]) -> None:
    """Keep SkyPilot's intervals: SkyPilot forgets them, and a report reads the store alone."""
    store.put(key_of(run), json.dumps([one.to_json() for one in intervals], indent=1).encode())


def key_of(run: str) -> str:
    return f"clusters/{run}.json"


def reconcile(account: Account, intervals: Iterable[Interval], now: float) -> list[Difference]:
    """Compare the ledger with SkyPilot's record, cluster by cluster. `intervals`: of this run's clusters only.

    SkyPilot's hours also contain the time before the first attempt's bill (provisioning, unless the meter has it)
    and after the last one (shipping to MLflow, teardown).
    """
    sky: dict[str, list[float]] = {}
    for one in intervals:
        seconds = max(0.0, (now if one.ended is None else one.ended) - one.started)
        sky.setdefault(one.cluster, []).append(one.nodes * seconds / 3600)
    ledger: dict[str, list[AttemptAccount]] = {}
    for attempt in account.attempts:
        if cluster := attempt.machine.cluster:
            ledger.setdefault(cluster, []).append(attempt)
    differences = []
    for cluster in sorted(sky.keys() | ledger.keys()):
        billed = total_cost(attempt.bill for attempt in ledger.get(cluster, ()))
        sky_hours = math.fsum(sky.get(cluster, ()))
        priced = billed.hours > 0 and not billed.unpriced_hours
        usd = (sky_hours - billed.hours) * billed.usd / billed.hours if priced else None
        differences.append(Difference(cluster, sky_hours, billed.hours, usd))
    return differences
