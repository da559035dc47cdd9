"""SkyPilot's record of a run's clusters: its hours beyond those of the ledger belong to the bill."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipelines.tracking.account import Account, AttemptAccount, Cost, total_cost, usd_per_billion
from trainer.store import Store
from trainer.stored import Count, Stored, UnixSeconds, record_in

OUTSIDE = "outside"  # a phase of the bill, of no attempt


@dataclass(frozen=True)
class Interval(Stored):
    """A time in which a cluster was up according to SkyPilot. Unix seconds by its API server's clock."""

    cluster: str
    nodes: Count
    started: UnixSeconds
    ended: UnixSeconds | None  # None: it was up, or SkyPilot has no end of it
    seen: UnixSeconds | None = None  # when SkyPilot last had the cluster on record as up; None: not when it was asked
    price_per_hour: float | None = None  # dollars of one node, by SkyPilot's catalog

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """SkyPilot and the ledger about one cluster, in machine hours."""

    cluster: str
    sky_hours: float
    ledger_hours: float
    price_per_hour: float | None  # of one node; None: unknown

    @property
    def hours(self) -> float:
        """Hours outside all attempts; less than 0 if the ledger has more."""
        return self.sky_hours - self.ledger_hours

    @property
    def usd(self) -> float | None:
        """Dollars of these hours; None: unknown."""
        return None if self.price_per_hour is None else self.hours * self.price_per_hour


def read_intervals(store: Store, run: str) -> list[Interval]:
    """The intervals that were last recorded; none for a run that was never launched. DamagedRecord, NewerRecord."""
    body, where = store.get(clusters_key(run)), f"{store.uri}/{clusters_key(run)}"
    return record_in(list[Interval], body, where) if body is not None else []


def record_intervals(store: Store, run: str, intervals: Iterable[Interval]) -> None:
    """Keep SkyPilot's intervals: SkyPilot forgets them, and a report reads the store alone."""
    store.put(clusters_key(run), json.dumps([one.to_json() for one in intervals], indent=1).encode())


def clusters_key(run: str) -> str:
    return f"clusters/{run}.json"


def with_cluster_hours(account: Account, intervals: Iterable[Interval]) -> Account:
    """The account with the hours that the cloud charges and no attempt counted, as a part of its total."""
    outside = total_cost(
        Cost(one.hours, one.usd or 0.0, 0.0 if one.price_per_hour is not None else one.hours)
        for one in reconcile(account, intervals)
        if one.hours > 0
    )
    if not outside.hours:
        return account
    total = total_cost([account.total, outside])
    return replace(
        account,
        total=total,
        outside=outside,
        by_phase=account.by_phase | {OUTSIDE: outside},
        usd_per_billion_tokens=usd_per_billion(total, account.tokens),
    )


def reconcile(account: Account, intervals: Iterable[Interval]) -> list[Difference]:
    """Compare the ledger with SkyPilot's record, cluster by cluster. `intervals`: of this run's clusters only.

    SkyPilot's hours also contain the time before the first attempt's bill (provisioning, unless the meter has it),
    between a death and the release of the machine, and after the last attempt (shipping to MLflow, teardown); and
    nodes that never began an attempt. An interval without an end lasts until something was last seen of the cluster.
    """
    sky: dict[str, list[Interval]] = {}
    for one in intervals:
        sky.setdefault(one.cluster, []).append(one)
    ledger: dict[str, list[AttemptAccount]] = {}
    for attempt in account.attempts:
        if cluster := attempt.machine.cluster:
            ledger.setdefault(cluster, []).append(attempt)
    names = sorted(sky.keys() | ledger.keys())
    return [difference(name, sky.get(name, []), ledger.get(name, [])) for name in names]


def difference(cluster: str, intervals: list[Interval], attempts: list[AttemptAccount]) -> Difference:
    """SkyPilot and the ledger about one cluster. Its price is that of its attempts, else SkyPilot's."""
    heard = max((attempt.ended for attempt in attempts), default=0.0)
    ends = [max(one.started, one.seen or 0.0, heard) if one.ended is None else one.ended for one in intervals]
    hours = [one.nodes * max(0.0, end - one.started) / 3600 for one, end in zip(intervals, ends, strict=True)]
    billed = total_cost(attempt.bill for attempt in attempts)
    if billed.hours:
        traffic = math.fsum(attempt.traffic.usd for attempt in attempts)
        price = None if billed.unpriced_hours else (billed.usd - traffic) / billed.hours
    else:
        price = intervals[-1].price_per_hour if intervals else None
    return Difference(cluster, math.fsum(hours), billed.hours, price)
