"""The time of a rented machine from its last heartbeat until SkyPilot has removed it, which is billed too.

Only SkyPilot's API server knows it. `status` and `down` record its answers in the store (control/<run>/releases.json),
where every bill and the budget of a running job read them.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from pipelines.tracking.account import StoredHeartbeat
from pipelines.tracking.ledger import sum_by_key
from pipelines.tracking.records import Heartbeat
from trainer.record import Stored, UnixSeconds, record_in
from trainer.store import Store

RELEASE = "release"  # a phase
CLOCKS_SECONDS = 60.0  # by which the clocks of a machine and of SkyPilot's server may differ


@dataclass(frozen=True)
class Release(Stored):
    """A cluster from its launch until its removal, by the clock of SkyPilot's server."""

    cluster: str
    since: UnixSeconds
    until: UnixSeconds


def read_releases(store: Store, run: str) -> list[Release]:
    """The releases on record of a run's clusters. DamagedRecord, or NewerRecord."""
    body = store.get(key_of(run))
    return [] if body is None else record_in(list[Release], body, f"{store.uri}/{key_of(run)}")


def write_releases(store: Store, run: str, releases: Iterable[Release]) -> None:
    store.put(key_of(run), json.dumps([asdict(one) for one in releases], indent=1).encode())


def key_of(run: str) -> str:
    return f"control/{run}/releases.json"


def until_release(
    heartbeats: Iterable[StoredHeartbeat], releases: list[Release]
) -> tuple[list[StoredHeartbeat], list[Heartbeat]]:
    """The heartbeats, with the time until the release of a machine as the end of its last attempt; and the last
    heartbeats of machines whose release is not on record."""
    billed, unknown = list(heartbeats), list[Heartbeat]()
    for machines in machines_of(billed):
        for machine in machines:
            first, last = machine[0].beat, machine[-1]
            beat = last.beat
            if machine is not machines[-1] and (beat.state == "running" or beat.progress.notice):
                continue  # the cloud took it away
            known = (
                one.until
                for one in releases
                if one.cluster == beat.machine.cluster and one.since - CLOCKS_SECONDS < first.started < one.until
            )
            if (until := next(known, None)) is None:
                unknown += [beat] * (beat.state != "running")
            elif until > beat.time:
                phases = sum_by_key([beat.phases, {RELEASE: until - beat.time}])
                billed[billed.index(last)] = replace(last, beat=replace(beat, time=until, phases=phases))
    return billed, unknown


def machines_of(heartbeats: Iterable[StoredHeartbeat]) -> Iterator[list[list[StoredHeartbeat]]]:
    """For each name of a cluster, the attempts on one machine after another. A recovery gives a new machine the name of
    the old one; the first attempt on a machine has provisioned it."""
    by_cluster: dict[str, list[list[StoredHeartbeat]]] = {}
    for one in sorted(heartbeats, key=lambda one: one.beat.started):
        if cluster := one.beat.machine.cluster:
            machines = by_cluster.setdefault(cluster, [])
            if not machines or "provision" in one.beat.phases:
                machines.append([])
            machines[-1].append(one)
    yield from by_cluster.values()
