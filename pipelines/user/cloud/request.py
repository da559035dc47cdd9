"""The request of a launch, its record in the store (`launches/<run>.json`), and what it takes from the user's shell."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Self

from pipelines.store.layout import LAUNCHES, launch_key, run_of
from pipelines.store.secrets import SECRET_TEXT, SECRETS, has_own_keys, is_secret_name
from pipelines.store.store_id import StoreIdText
from trainer.base.record import Count, DamagedRecord, Key, StoredRecord, UnixSeconds, decoded_at, record_in
from trainer.base.store import Store
from trainer.config.errors import UserError

WORK_TREE = "none"  # as an image: no container; SkyPilot syncs the work tree


@dataclass(frozen=True)
class LaunchRequest(StoredRecord):
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
    store_id: StoreIdText = ""  # known once the launch is planned

    @property
    def job_name(self) -> str:
        """The name of its managed job: runs of several stores may have one name, and SkyPilot has the jobs of all."""
        return f"{self.run}-{self.store_id}" if self.store_id else self.run

    @property
    def installs(self) -> bool:
        """Whether the nodes install the packages: without an image and without an environment of their own."""
        return self.image == WORK_TREE and "SKYTRAIN_VENV" not in self.variables


@dataclass(frozen=True)
class LaunchRecord(StoredRecord):
    """The last launch of a run."""

    request: LaunchRequest
    stages: list[str]  # that were missing, and submitted
    jobs: list[Count]  # SkyPilot's ids of managed jobs
    secrets: list[str]  # their names
    time: UnixSeconds
    server: str  # SkyPilot's API server that has the jobs

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, body: bytes, where: str = "a launch") -> Self:
        """DamagedRecord, or NewerRecord."""
        return record_in(cls, body, where)


def last_launch(store: Store, run: str) -> LaunchRecord | None:
    """None if the run was never launched."""

    def decode(body: bytes, where: str) -> LaunchRecord:
        launched = LaunchRecord.from_json(body, where)
        if (launched.request.run, launched.request.store) != (run, store.uri):
            raise DamagedRecord(where, f"it launches {launched.request.run} in {launched.request.store}")
        return launched

    return decoded_at(store, launch_key(run), decode, remedy="remove it, and launch the run with its options again")


def write_launch(store: Store, launched: LaunchRecord) -> None:
    store.put(launch_key(launched.request.run), launched.to_json())


def launched_runs(store: Store) -> set[str]:
    """The names of all runs that were launched."""
    return set(map(run_of, store.entries(LAUNCHES)))


def run_label(job_name: str) -> str:
    """The name of a run's job as a label of its machines, in GCP's alphabet, the strictest. Fingerprint and store id,
    at its end, stay whole."""
    return re.sub(r"[^a-z0-9_-]", "-", job_name)[-63:].strip("-_")


# Variables and secrets

# A dry run and the launch record show these.
VARIABLES = (
    "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
    "SKYTRAIN_S3_REGION", "SKYTRAIN_S3_ENDPOINT_URL",
    "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME",
)  # fmt: skip


def variables_from_shell(extra: Iterable[str] = ()) -> dict[str, str]:
    """VARIABLES that are set in this shell, and `extra` ones ("NAME=VALUE"). UserError for a secret among them."""
    own = [f"{name}={os.environ[name]}" for name in of_a_job(VARIABLES)]
    variables = {}
    for text in (*own, *extra):
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise UserError(f"--env {name}: not of the form NAME=VALUE")
        if is_secret_name(name):
            raise UserError(
                f"--env {name}: looks like a secret, and variables are shown; export it and use --secret {name}"
            )
        if SECRET_TEXT.search(value):
            raise UserError(
                f"{name}: the value holds a secret, and variables are shown; "
                "MLflow's belong in MLFLOW_TRACKING_USERNAME/PASSWORD"
            )
        variables[name] = value
    return variables


def of_a_job(names: Iterable[str]) -> list[str]:
    """The names that are set in this shell. If the store has credentials of its own, AWS's only rent machines."""
    return [name for name in names if os.environ.get(name) and not (has_own_keys() and name.startswith("AWS_"))]


def secrets_from_shell(extra: Iterable[str] = ()) -> dict[str, str]:
    """SECRETS that are set in this shell, and `extra` ones, by name. Only SkyPilot gets them; no file of ours does."""
    extra = list(extra)
    if absent := [name for name in extra if not os.environ.get(name)]:
        raise UserError(f"--secret {absent[0]}: not set in this shell; export it first, without writing it to a file")
    return {name: os.environ[name] for name in (*of_a_job(SECRETS), *extra)}
