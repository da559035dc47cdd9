"""A store has one id, whoever writes it first."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelines.store.layout import STORE_ID
from pipelines.store.store_id import new_store_id, read_store_id, settled_store_id
from trainer.base.record import DamagedRecord
from trainer.base.store import LocalStore
from trainer.config.errors import UserError


def test_a_store_has_one_id_whoever_is_first(store: LocalStore) -> None:
    assert read_store_id(store) is None and not store.entries("")  # reading writes nothing
    proposed = [new_store_id() for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        settled = set(threads.map(lambda one: settled_store_id(store, one), proposed))
    (known,) = settled
    assert known in proposed and settled_store_id(store) == read_store_id(store) == known


@pytest.mark.parametrize("body", [b"", b'{"id": "$(x)", "created": 1e9}', b'{"id": "12345678"}'])
def test_an_id_that_is_none_is_refused(store: LocalStore, body: bytes) -> None:
    store.put(STORE_ID, body)
    with pytest.raises(DamagedRecord, match=STORE_ID):
        settled_store_id(store)


def test_a_store_that_replaces_what_exists_gets_no_id(tmp_path: Path) -> None:
    class Replacing(LocalStore):  # as a server that ignores If-None-Match
        def create(self, key: str, body: bytes) -> bool:
            self.put(key, body)
            return True

    with pytest.raises(UserError, match="a second create replaced the first; this server ignores If-None-Match"):
        settled_store_id(Replacing(tmp_path))
    assert not LocalStore(tmp_path).entries("")
