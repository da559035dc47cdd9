"""The time of a rented machine from its last heartbeat until SkyPilot has removed it, which is billed too.

Only SkyPilot's API server knows it. `status` and `down` record its answers in the store (control/<run>/releases.json),
where every bill and the budget of a running job read them.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from pipelines.store.account import StoredHeartbeat
from pipelines.store.layout import releases_key
from pipelines.store.records import Heartbeat, sum_by_key
from trainer.base.record import StoredRecord, UnixSeconds, record_at
from trainer.base.store import Store

RELEASE = "release"  # a phase
CLOCKS_SECONDS = 60.0  # by which the clocks of a machine and of SkyPilot's server may differ


@dataclass(frozen=True)
class Release(StoredRecord):
    """A cluster from its launch until its removal, by the clock of SkyPilot's server."""

    cluster: str
    since: UnixSeconds
    until: UnixSeconds


def read_releases(store: Store, run: str) -> list[Release]:
    """The releases on record of a run's clusters. DamagedRecord, or NewerRecord."""
    return record_at(list[Release], store, releases_key(run)) or []


def write_releases(store: Store, run: str, releases: Iterable[Release]) -> None:
    store.put(releases_key(run), json.dumps([asdict(one) for one in releases], indent=1).encode())


def until_release(
    heartbeats: Iterable[StoredHeartbeat], releases: list[Release]
) -> tuple[list[StoredHeartbeat], list[Heartbeat]]:
    """The heartbeats, with the time until the release of a machine as the end of its last attempt; and the last
    heartbeats of machines whose release is not on record."""
    billed, unknown = list(heartbeats), list[Heartbeat]()
    rented = sorted((one for one in billed if one.beat.machine.cluster), key=lambda one: one.beat.started)
    for number, one in enumerate(rented):
        beat, cluster = one.beat, one.beat.machine.cluster
        # A recovery gives a new machine the name of the old one, and its first attempt has provisioned it.
        later = next((other.beat for other in rented[number + 1 :] if other.beat.machine.cluster == cluster), None)
        # A stop is final: the later machine is of another launch, by a server that gave its job the same number.
        taken_away = beat.state == "running" or (beat.progress.notice and beat.state != "stopped")
        if later and ("provision" not in later.phases or taken_away):
            continue
        of_cluster = (known for known in releases if known.cluster == cluster)
        ends = [known.until for known in of_cluster if known.since - CLOCKS_SECONDS < beat.started < known.until]
        if not ends:
            unknown += [beat] * (beat.state != "running")
        elif (more := ends[0] - beat.time) > 0:
            phases = sum_by_key([beat.phases, {RELEASE: more}])
            billed[billed.index(one)] = replace(one, beat=replace(beat, time=ends[0], phases=phases))
    return billed, unknown
