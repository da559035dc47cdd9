"""The request of a launch, and the record of it in the store (`launches/<run>.json`)."""

import json
from dataclasses import asdict, dataclass, field
from typing import Self

from trainer.store import Store
from trainer.stored import Count, DamagedRecord, Key, Stored, UnixSeconds, decoded, typed

REMEDY = "remove it, and launch the run with its options again"
WORK_TREE = "none"  # as an image: no container; SkyPilot syncs the work tree


@dataclass(frozen=True)
class LaunchRequest(Stored):
    """The options of a launch. With the store they are enough to launch the run again."""

    run: Key
    store: str
    until: str = "export"
    infra: str | None = None  # "slurm/local", "aws/us-east-1", "aws,gcp"; None: as in the stages' files
    spot: bool | None = None  # None: as in the stages' files
    nodes: Count = 1  # of the stage train
    gpus: str | None = None  # "A100:8" instead of the files' GPUs
    image: str = WORK_TREE  # REGISTRY/NAME@sha256:…, or WORK_TREE
    budget: float | None = None  # dollars of the whole run
    deadline: UnixSeconds | None = None
    variables: dict[str, str] = field(default_factory=dict)  # none of them secret


@dataclass(frozen=True)
class EarlierLaunch(Stored):
    """A launch of the same run before the last one."""

    time: UnixSeconds
    stages: list[str]
    jobs: list[Count]


@dataclass(frozen=True)
class LaunchRecord(Stored):
    """The last launch of a run."""

    request: LaunchRequest
    stages: list[str]  # that were missing, and submitted
    jobs: list[Count]  # SkyPilot's ids of managed jobs
    secrets: list[str]  # their names
    time: UnixSeconds
    earlier: list[EarlierLaunch]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, body: bytes, where: str = "a launch") -> Self:
        """Version 0.1 called the request `wish`. DamagedRecord, or NewerRecord."""
        values = decoded(body, where)
        if isinstance(values, dict) and "wish" in values:
            values["request"] = values.pop("wish")
        return typed(cls, values, where)


def last_launch(store: Store, run: str) -> LaunchRecord | None:
    """None if the run was never launched."""
    body, where = store.get(key_of(run)), f"{store.uri}/{key_of(run)}"
    launched = LaunchRecord.from_json(body, where) if body is not None else None
    if launched and (launched.request.run, launched.request.store) != (run, store.uri):
        raise DamagedRecord(where, f"it launches {launched.request.run} in {launched.request.store}", REMEDY)
    return launched


def write_launch(store: Store, launched: LaunchRecord) -> None:
    store.put(key_of(launched.request.run), launched.to_json())


def key_of(run: str) -> str:
    return f"launches/{run}.json"


def launched_runs(store: Store) -> set[str]:
    """The names of all runs that were launched."""
    return {entry.key.removeprefix("launches/").removesuffix(".json") for entry in store.entries("launches/")}
