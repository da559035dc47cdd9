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

from trainer.record import StoredRecord, UnixSeconds, record_at
from trainer.store import Store

KEY = "store.json"
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
    found = record_at(StoreId, store, KEY)
    return found.id if found else None


def settled_store_id(store: Store, proposed: str | None = None) -> str:
    """Write the id of a store that has none (`proposed`, or a new one). Returns the id that the store has."""
    if (known := read_store_id(store)) is None:
        made = StoreId(proposed or new_store_id(), time.time())
        known = made.id if store.create(KEY, json.dumps(asdict(made)).encode()) else read_store_id(store)
    assert known, f"{store.uri}/{KEY} was removed"
    return known
