"""A request to stop a run: one small object in the store, which every attempt reads with every heartbeat.

Anyone with access to the store can write it, from any machine. The working attempt commits and ends with exit code 76,
which no launcher starts again; an attempt that begins later ends at once. The request stands until a command that
starts after it resumes the run.
"""

import getpass
import json
import platform
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

from pipelines.store.layout import CONTROL, run_of, stop_key
from trainer.base.record import StoredRecord, UnixSeconds, record_at
from trainer.base.store import Entry, Store
from trainer.config.errors import Stopped


@dataclass(frozen=True)
class StopRequest(StoredRecord):
    """Time, author and reason of a request to stop."""

    time: UnixSeconds
    by: str
    reason: str

    def __str__(self) -> str:
        return f"{self.by}: {self.reason}"


def read_stop_request(store: Store, run: str) -> StopRequest | None:
    """The request to stop a run; None if there is none. DamagedRecord, or NewerRecord."""
    return record_at(StopRequest, store, stop_key(run), polled=True)


def requested_stops(store: Store) -> set[str]:
    """The runs that somebody has requested to stop."""
    return set(map(run_of, stop_requests(store)))


def request_stop(store: Store, run: str, reason: str) -> StopRequest:
    """Request that a run stops. An earlier request keeps its author and reason, and counts from now on."""
    request = StopRequest(time.time(), f"{getpass.getuser()}@{platform.node()}", reason)
    if not store.create(stop_key(run), json.dumps(asdict(request)).encode()):
        request = replace(read_stop_request(store, run) or request, time=request.time)
        store.put(stop_key(run), json.dumps(asdict(request)).encode())
    return request


def stop_requests(store: Store) -> list[Entry]:
    """The requests to stop any run, which a command that will withdraw one lists before all else."""
    return [entry for entry in store.entries(CONTROL) if entry.key == stop_key(run_of(entry))]


def withdraw_stop(store: Store, run: str, known: Collection[Entry]) -> None:
    """Withdraw the request to stop a run, if it is one of `known`. Raises Stopped if somebody has made one since."""
    if any(entry in known for entry in store.entries(stop_key(run))):
        store.delete(stop_key(run))
    else:
        check_not_stopped(store, run)


def check_not_stopped(store: Store, run: str) -> None:
    """Raise Stopped if there is a request to stop a run."""
    if request := read_stop_request(store, run):
        raise Stopped(str(request))
