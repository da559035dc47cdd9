"""A request to stop a run stops it, also one that this version cannot read."""

import pytest
from stage_work import NoSignals

from pipelines.run.watch import StopRequests
from pipelines.store.layout import stop_key
from pipelines.store.records import Heartbeat
from pipelines.store.stop_request import (
    read_stop_request,
    request_stop,
    stop_requests,
    withdraw_stop,
)
from trainer.base.store import LocalStore
from trainer.config.errors import Stopped, UserError


def asked(store: LocalStore) -> str | None:
    """Why the run is asked to stop at its next heartbeat."""
    stop = NoSignals()
    StopRequests(store, "a-1", stop).heartbeat(Heartbeat("a-1", "train", 1, "running", 0.0, 1.0, 1.0))
    return stop.reason


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b'{"format": 2}', b'{"time": 1.5, "by": 7, "reason": "x"}']
)
def test_an_unreadable_request_stops_the_run_and_names_its_object(store: LocalStore, body: bytes) -> None:
    assert asked(store) is None
    store.put(stop_key("a-1"), body)
    assert f"{store.uri}/{stop_key('a-1')}" in (asked(store) or "")
    with pytest.raises(UserError, match="damaged|newer skytrain"):
        read_stop_request(store, "a-1")


def test_a_request_stands_until_a_later_command_withdraws_it_and_one_that_came_after_its_start_counts(
    store: LocalStore,
) -> None:
    request_stop(store, "a-1", "too dear")
    request = request_stop(store, "a-1", "another")
    assert asked(store) == f"{request.by}: too dear" == str(request)
    known = stop_requests(store)
    request_stop(store, "a-1", "now")
    for listed in (known, []):
        with pytest.raises(Stopped, match="too dear"):
            withdraw_stop(store, "a-1", listed)
    store.put(stop_key("a-1"), b"{")
    withdraw_stop(store, "a-1", stop_requests(store))
    assert (read_stop_request(store, "a-1"), asked(store)) == (None, None)
