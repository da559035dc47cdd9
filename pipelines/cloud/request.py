"""The request of a launch, and the record of it in the store (`launches/<run>.json`)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from trainer.store import Store

WORK_TREE = "none"  # as an image: no container; SkyPilot syncs the work tree


@dataclass(frozen=True)
class LaunchRequest:
    """The options of a launch. With the store they are enough to launch the run again."""

    run: str
    store: str
    until: str = "export"
    infra: str | None = None  # "slurm/local", "aws/us-east-1", "aws,gcp"; None: as in the stages' files
    spot: bool | None = None  # None: as in the stages' files
    nodes: int = 1  # of the stage train
    gpus: str | None = None  # "A100:8" instead of the files' GPUs
    image: str = WORK_TREE  # REGISTRY/NAME@sha256:…, or WORK_TREE
    budget: float | None = None  # dollars of the whole run
    deadline: float | None = None  # unix seconds
    variables: dict[str, str] = field(default_factory=dict)  # none of them secret


@dataclass(frozen=True)
class EarlierLaunch:
    """A launch of the same run before the last one."""

    time: float  # unix seconds
    stages: list[str]
    jobs: list[int]


@dataclass(frozen=True)
class LaunchRecord:
    """The last launch of a run."""

    request: LaunchRequest
    stages: list[str]  # that were missing, and submitted
    jobs: list[int]  # SkyPilot's ids of managed jobs
    secrets: list[str]  # their names
    time: float  # unix seconds
    earlier: list[EarlierLaunch]

    def to_json(self) -> bytes:
        values = asdict(self)
        return json.dumps({"wish": values.pop("request"), **values}, indent=1).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        values: Mapping[str, Any] = json.loads(body)
        rest = {name: value for name, value in values.items() if name not in ("wish", "earlier")}
        earlier = [EarlierLaunch(**launch) for launch in values["earlier"]]
        return cls(request=LaunchRequest(**values["wish"]), earlier=earlier, **rest)


def last_launch(store: Store, run: str) -> LaunchRecord | None:
    """None if the run was never launched."""
    body = store.get(key_of(run))
    return LaunchRecord.from_json(body) if body is not None else None


def write_launch(store: Store, launched: LaunchRecord) -> None:
    store.put(key_of(launched.request.run), launched.to_json())


def key_of(run: str) -> str:
    return f"launches/{run}.json"


def launched_runs(store: Store) -> set[str]:
    """The names of all runs that were launched."""
    return {entry.key.removeprefix("launches/").removesuffix(".json") for entry in store.entries("launches/")}
