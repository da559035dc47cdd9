"""The identity of a store: a random id, created once at its root.

The name of a run is a recipe and a fingerprint, so two stores may both have a run of that name. Where runs of several
stores meet (SkyPilot's jobs, MLflow's runs), name and store id together are a run.
"""

import json
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field

from pipelines.store.layout import STORE_ID
from trainer.base.record import StoredRecord, UnixSeconds, record_at
from trainer.base.store import Store
from trainer.config.errors import UserError

OBEY = "this server ignores If-None-Match: *; commits need a server that obeys it (S3, R2, MinIO, Ceph 17, …)"
StoreIdText = Annotated[str, Field(pattern="^([0-9a-f]{8})?$")]  # it becomes part of the names of jobs


@dataclass(frozen=True)
class StoreId(StoredRecord):
    """The object at the root of a store."""

    id: StoreIdText
    created: UnixSeconds


def new_store_id() -> str:
    """A random id, short enough for the name of a job."""
    return uuid.uuid4().hex[:8]


def read_store_id(store: Store) -> str | None:
    """The id of a store; None before its first run. DamagedRecord, or NewerRecord."""
    found = record_at(StoreId, store, STORE_ID)
    return found.id if found else None


def settled_store_id(store: Store, proposed: str | None = None) -> str:
    """Write the id of a store that has none (`proposed`, or a new one). Returns the id that the store has. UserError
    for a new store that does not refuse a second create, on which every attempt and commit relies."""
    if known := read_store_id(store):
        return known
    ids = (proposed or new_store_id(), new_store_id())
    created = [store.create(STORE_ID, json.dumps(asdict(StoreId(one, time.time()))).encode()) for one in ids]
    if created[1]:
        store.delete(STORE_ID)
        raise UserError(f"{store.uri}: a second create replaced the first; {OBEY}")
    known = ids[0] if created[0] else read_store_id(store)
    assert known, f"{store.uri}/{STORE_ID} was removed"
    return known
