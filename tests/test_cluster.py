"""A launched run from end to end: real SkyPilot, two Slurm nodes, S3, MLflow; preempted, and none the worse for it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from local_cloud import PRICE, LocalCloud, what_is_missing
from pipeline_runs import TINY, write_texts
from servers import MlflowServer, S3Account

from pipelines.artifacts.manifest import read_manifest
from pipelines.artifacts.store import S3Store
from pipelines.tracking.account import reconcile
from pipelines.tracking.report import (
    RunRecord,
    Summary,
    account_of,
    intervals_of,
    read_records,
    run_series,
    summarize,
)

pytestmark = [pytest.mark.slow, pytest.mark.cloud]

# Half a minute on an idle machine: long enough to be preempted in its midst. A commit every three seconds.
STEPS = 1200
# SkyPilot looks after a job every 20 s, and counts a cluster until it is taken down: nothing on it can beat for that.
TAIL_S = 120.0
LIMIT_S = 900.0  # of any one wait: an idle machine takes a minute for the longest


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    if missing := what_is_missing():
        pytest.skip(f"needs {missing}")
    cloud = LocalCloud(tmp_path_factory.mktemp("cloud")).start()
    try:
        yield cloud
    finally:
        cloud.stop()


@pytest.fixture
def mlflow_uri(tmp_path: Path) -> Iterator[str]:
    server = MlflowServer(tmp_path / "mlflow")
    server.start()
    yield server.uri
    server.stop()


class User:
    """Somebody at a shell, with a recipe and a bucket."""

    def __init__(self, folder: Path, cloud: LocalCloud, account: S3Account, **environment: str) -> None:
        self.recipe = folder / "e2e.yaml"
        write_texts(folder / "texts")
        source = {"source": str(folder / "texts" / "*.txt")}
        train = {"max_steps": STEPS, "val_every": 400}
        recipe: dict[str, Any] = TINY | {
            "name": "e2e",
            "tokens": TINY["tokens"] | source,
            "train": TINY["train"] | train,
            "runtime": TINY["runtime"] | {"checkpoint_minutes": 0.05},
        }
        self.recipe.write_text(yaml.safe_dump(recipe))
        self.bucket = f"e2e-{os.urandom(4).hex()}"
        self.account = account
        credentials = {"aws_access_key_id": account.access_key, "aws_secret_access_key": account.secret_key}
        boto3.client("s3", endpoint_url=account.endpoint, region_name="us-east-1", **credentials).create_bucket(
            Bucket=self.bucket
        )
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SKYTRAIN_", "MLFLOW_", "SKYPILOT_"))}
        self.environment = {
            **inherited,
            **account.environment,
            **cloud.environment,
            "SKYTRAIN_STORE": f"s3://{self.bucket}/runs",
            "SKYTRAIN_HOME": str(folder / "home"),
            "SKYTRAIN_NOTICE": "off",
            "OMP_NUM_THREADS": "1",
            **environment,
        }

    def skytrain(self, *words: str, expect: int = 0, **environment: str) -> str:
        """What the command prints, both ways."""
        done = subprocess.run(
            [sys.executable, "-m", "pipelines.cli", *words],
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def launch(self, *options: str, expect: int = 0) -> str:
        where = ("--infra", "slurm/local", "--image", "none", "--yes")
        venv = ("--env", f"SKYTRAIN_VENV={sys.prefix}")
        return self.skytrain("launch", str(self.recipe), *where, *venv, *options, expect=expect)

    @property
    def store(self) -> S3Store:
        return S3Store(self.bucket, "runs")

    def wait_until(self, condition: Callable[[Summary], object]) -> Summary:
        """Look into the store once a second: that costs a hundredth of what the verb costs."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            (record,) = read_records(self.store)
            summary = summarize(self.store, record)
            if condition(summary):
                return summary
            assert time.monotonic() < deadline, self.skytrain("status")
            time.sleep(1)


def test_a_launched_run_preempted_twice_ends_as_the_undisturbed_one(
    tmp_path: Path, cloud: LocalCloud, s3_server: S3Account, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = User(tmp_path, cloud, s3_server, MLFLOW_TRACKING_URI=mlflow_uri)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    assert "is launched as managed job" in user.launch("--nodes", "2")

    user.wait_until(lambda summary: summary.steps > 100)
    preempt(cloud, "train")
    cloud.sky("api", "stop")
    cloud.sky("api", "start")
    user.wait_until(lambda summary: trained(user) == 2 and summary.state == "running")
    preempt(cloud, "train")
    user.wait_until(lambda summary: summary.state == "done")
    (record,) = read_records(user.store)
    (status,) = json.loads(user.skytrain("status", "--json"))
    assert [(task["stage"], task["recoveries"]) for task in status["tasks"]][:2] == [("tokenize", 0), ("train", 2)]
    user.skytrain("down", record.run)
    assert cloud.slurm("squeue", "-h") == ""
    user.skytrain("orphans")

    undisturbed = S3Store(user.bucket, "undisturbed")
    alone = ("--set", "runtime.processes=2", "--store", undisturbed.uri)
    user.skytrain("run", str(user.recipe), *alone, SKYTRAIN_TRACKING="off", GLOO_SOCKET_IFNAME="lo")
    assert losses(user.store, record) == losses(undisturbed, record)
    for stage in ("train", "export"):
        assert weights(user.store, record, stage) == weights(undisturbed, record, stage)

    bill = account_of(user.store, record)
    training = [attempt for attempt in bill.attempts if attempt.stage == "train"]
    assert [(a.nodes, a.price_per_hour) for a in training] == [(2, 8 * PRICE)] * 3
    for difference in reconcile(bill, intervals_of(user.store, record.run), time.time()):
        beyond_s = 3600 * (difference.sky_hours - difference.ledger_hours)
        assert -10 < beyond_s < 3 * 2 * TAIL_S, difference  # of up to three clusters of two nodes by one name


def trained(user: User) -> int:
    """Attempts at training so far."""
    (record,) = read_records(user.store)
    return sum(attempt.stage == "train" for attempt in account_of(user.store, record).attempts)


def losses(store: S3Store, record: RunRecord) -> list[tuple[int, float]]:
    return [(row["step"], row["train/loss"]) for row in run_series(store, record) if "train/loss" in row]


def weights(store: S3Store, record: RunRecord, stage: str) -> str:
    manifest = read_manifest(store, record.prefixes[stage])
    assert manifest
    return manifest.file("model.safetensors").sha256


def preempt(cloud: LocalCloud, stage: str) -> None:
    """As a cloud does: the machines of a stage's cluster are gone."""
    jobs = [line.split() for line in cloud.slurm("squeue", "-h", "-o", "%i %j").splitlines()]
    (mine,) = [number for number, name in jobs if name.startswith(f"{stage}-")]
    cloud.slurm("scancel", mine)
