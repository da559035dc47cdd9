"""A request to stop a run stops it, also one that this version cannot read."""

import pytest

from pipelines.tracking.records import Heartbeat
from pipelines.tracking.stop_request import key_of, read_stop_request, request_stop, watch_stop_request
from trainer.errors import UserError
from trainer.store import LocalStore

BEAT = Heartbeat("a-1", "train", 1, "running", 0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b'{"format": 2}', b'{"time": 1.5, "by": 7, "reason": "x"}']
)
def test_an_unreadable_request_stops_the_run_and_names_its_object(store: LocalStore, body: bytes) -> None:
    watch = watch_stop_request(store, "a-1")
    assert watch(BEAT) is None
    store.put(key_of("a-1"), body)
    assert f"{store.uri}/{key_of('a-1')}" in (watch(BEAT) or "")
    with pytest.raises(UserError, match="damaged|newer skytrain"):
        read_stop_request(store, "a-1")


def test_a_request_names_its_author_and_reason(store: LocalStore) -> None:
    made = request_stop(store, "a-1", "enough")
    assert made.reason == "enough" and watch_stop_request(store, "a-1")(BEAT) == str(made)
