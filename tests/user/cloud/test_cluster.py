"""A launched run from end to end: real SkyPilot, two Slurm nodes, S3; preempted and killed without a loss."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
import yaml
from local_cloud import PRICE, LocalCloud, what_is_missing
from pipeline_runs import TINY, write_texts
from servers import S3Account

from pipelines.run.run_record import RunRecord, read_records
from pipelines.run.runs import Run, Summary
from pipelines.store.account import Account
from pipelines.store.ledger import attempts
from pipelines.store.manifest import read_manifest
from pipelines.store.records import HEARTBEAT_SECONDS, Heartbeat
from pipelines.store.s3_store import S3Store
from trainer.base.process import FAILPOINTS

pytestmark = pytest.mark.slow

STEPS = 120
LIMIT_S = 900.0  # of each wait: the longest takes a minute on an idle machine


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    if missing := what_is_missing():
        pytest.skip(f"needs {missing}")
    cloud = LocalCloud(tmp_path_factory.mktemp("cloud")).start()
    try:
        yield cloud
    finally:
        cloud.stop()


class User:
    """A user at a shell, with a recipe and a bucket."""

    def __init__(self, folder: Path, cloud: LocalCloud, account: S3Account) -> None:
        self.recipe, self.failpoints, self.python = folder / "e2e.yaml", folder / "failpoints", cloud.client.python
        self.failpoints.mkdir()
        write_texts(folder / "texts")
        source = {"source": str(folder / "texts" / "*.txt")}
        recipe: dict[str, Any] = TINY | {
            "name": "e2e",
            "tokens": TINY["tokens"] | source,
            "train": TINY["train"] | {"max_steps": STEPS, "val_every": 50},
            "runtime": TINY["runtime"] | {"checkpoint_minutes": 0.005},
        }
        self.recipe.write_text(yaml.safe_dump(recipe))
        self.bucket = f"e2e-{os.urandom(4).hex()}"
        credentials = {"aws_access_key_id": account.access_key, "aws_secret_access_key": account.secret_key}
        boto3.client("s3", endpoint_url=account.endpoint, region_name="us-east-1", **credentials).create_bucket(
            Bucket=self.bucket
        )
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SKYTRAIN_", "MLFLOW_", "SKYPILOT_"))}
        self.environment = {
            **inherited,
            **account.environment,
            **cloud.client.environment,
            "SKYTRAIN_STORE": f"s3://{self.bucket}/runs",
            "SKYTRAIN_HOME": str(folder / "home"),
            "SKYTRAIN_NOTICE": "off",
            "SKYTRAIN_TRACKING": "off",
            "OMP_NUM_THREADS": "1",
        }

    def skytrain(self, *words: str, expect: int = 0, environment: Mapping[str, str] = {}) -> str:
        """The command's stdout and stderr."""
        done = subprocess.run(
            [self.python, "-P", "-m", "pipelines.cli", *words],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def launch(self, *options: str, expect: int = 0, environment: Mapping[str, str] = {}) -> str:
        where = ("--infra", "slurm/local", "--gpus", "H100:8", "--image", "none", "--yes")
        variables = {"SKYTRAIN_VENV": str(self.python.parents[1]), "SKYTRAIN_GRACE_SECONDS": "10"}
        variables[FAILPOINTS] = str(self.failpoints)
        given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        return self.skytrain(
            "launch", str(self.recipe), *where, *given, *options, expect=expect, environment=environment
        )

    @cached_property
    def store(self) -> S3Store:
        return S3Store(self.bucket, "runs")

    @property
    def record(self) -> RunRecord:
        (record,) = read_records(self.store)
        return record

    @property
    def summary(self) -> Summary:
        return Run(self.store, self.record).summary

    def wait_until(self, condition: Callable[[], object], poll_s: float = 2.0) -> None:
        """Poll the store, which takes a hundredth of the time of the verb."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, self.skytrain("status")
            time.sleep(poll_s)

    @property
    def bill(self) -> Account:
        return Run(self.store, self.record).account

    @property
    def trainings(self) -> list[Heartbeat]:
        """The last heartbeat of each attempt at training."""
        return list(attempts(self.store, self.record.prefixes["train"]))

    @contextmanager
    def held_in_mid_training(self) -> Iterator[None]:
        """Hold a rank in a step after the attempt's first commit."""
        armed = [self.failpoints / name for name in ("committed", "mid-step")]
        for failpoint in armed:
            failpoint.touch()
            self.wait_until(reached(failpoint).exists, 0.05)
        yield
        for failpoint in armed:
            reached(failpoint).unlink()


@pytest.fixture
def user(tmp_path: Path, cloud: LocalCloud, s3_server: S3Account, monkeypatch: pytest.MonkeyPatch) -> User:
    """A user whose store this process reads with the same account."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return User(tmp_path, cloud, s3_server)


def reached(failpoint: Path) -> Path:
    """The file of an armed failpoint once a process has reached it."""
    return failpoint.with_name(f"{failpoint.name}.here")


def test_a_launched_run_stopped_preempted_and_killed_ends_as_the_undisturbed_one(user: User, cloud: LocalCloud) -> None:
    there = cloud.other.environment
    with ThreadPoolExecutor(2) as threads:  # the first verb of each client starts its API server
        orphans = partial(user.skytrain, "status", "--orphans")
        started = [threads.submit(orphans), threads.submit(orphans, environment=there)]
        user.skytrain("run", str(user.recipe), "--stage", "tokenize")
        assert all("none" in one.result().splitlines() for one in started)
    launched = user.launch("--stage", "train", "--nodes", "2", "--budget", "1000")
    assert "as managed job 1" in launched
    run = user.record.run
    undisturbed = S3Store(user.bucket, "undisturbed")
    alone = ("--stage", "train", "--set", "runtime.processes=2", "--store", undisturbed.uri)

    def refusals() -> None:
        """Of a second launch, and of all that would touch the job from another server or store."""
        assert "has job 1, still running" in user.launch("--stage", "train", expect=2)
        elsewhere = user.skytrain("down", run, "--store", undisturbed.uri.replace("undisturbed", "other"), expect=2)
        assert f"job 1 belongs to the store {user.store.uri}, not to " in elsewhere
        other = user.launch("--stage", "train", expect=2, environment=there)
        assert f"{run} has job 1 on SkyPilot's API server " in other

    with ThreadPoolExecutor(2) as threads:  # while the launched run waits for machines
        run_alone = partial(user.skytrain, environment={"GLOO_SOCKET_IFNAME": "lo"})
        ended, refused = threads.submit(run_alone, "run", str(user.recipe), *alone), threads.submit(refusals)
        with user.held_in_mid_training():
            refused.result()
            user.skytrain("stop", run, "--wait", "0", expect=1)
            user.wait_until(lambda: any(attempt.progress.notice for attempt in user.bill.attempts))
        ended.result()
    user.wait_until(lambda: user.summary.state == "stopped")
    user.wait_until(lambda: not cloud.slurm("squeue", "-h"))

    # On the other server, where it is job 1, as the one that has ended is here.
    assert "as managed job 1" in user.skytrain("resume", run, "--yes", environment=there)
    threads = ThreadPoolExecutor(2)
    followed = threads.submit(user.skytrain, "logs", run, "--follow", environment=there)

    def asked_here() -> None:
        for verb, code in {"logs": 2, "resume": 2, "down": 2, "status": 0}.items():
            assert f"{run} has job 1 on SkyPilot's API server " in user.skytrain(verb, run, expect=code)

    asked = threads.submit(asked_here)
    with user.held_in_mid_training():
        asked.result()
        cloud.slurm("scancel", *jobs_of_training(cloud))  # preempted
    preempted = time.time()
    with user.held_in_mid_training():
        assert not followed.done()  # SkyPilot's own command ends with the first machine
        commands = processes_with(FAILPOINTS, "job")  # on each node a supervisor and its run
        first = [one for one in commands if one.environ()["SKYPILOT_NODE_RANK"] == "0"]
        next(one for one in first if one.parent() in first).kill()
    user.wait_until(lambda: user.summary.state == "done")
    assert any("the run's command was killed by SIGKILL" in (beat.progress.killed or "") for beat in user.trainings)
    assert "(attempt 3)" in followed.result()  # SkyPilot waits for the end of so short an attempt as the last one
    (status,) = json.loads(user.skytrain("status", "--json", environment=there))
    assert [task["recoveries"] for task in status["tasks"]] == [2]
    user.skytrain("down", run, environment=there)
    assert cloud.slurm("squeue", "-h") == ""
    assert user.skytrain("status", "--orphans", environment=there).splitlines()[-1] == "none"

    record, bill = user.record, user.bill
    assert losses(user.store, record) == losses(undisturbed, record)
    assert weights(user.store, record, "train") == weights(undisturbed, record, "train")
    training = [attempt for attempt in bill.attempts if attempt.stage == "train"]
    assert {(a.nodes, a.price_per_hour) for a in training} == {(2, 8 * PRICE)}
    assert [a.state for a in training] == ["stopped", "interrupted", "interrupted", "done"]
    rented = 3600 * sum(attempt.bill.hours for attempt in bill.attempts if attempt.machine.cluster)
    # SkyPilot records a release when it has seen it: seconds after Slurm's, on a busy machine
    allocated, machines = cloud.allocated_seconds(), sum(attempt.nodes for attempt in training)
    assert 0.97 * allocated < rented < 1.03 * allocated + 10.0 * machines
    assert preempted - HEARTBEAT_SECONDS < training[1].time < training[2].started  # its bill ends with its machine
    assert all(a.phases.get("provision") or a.phases.get("start") for a in training)  # the meter ran before them


def jobs_of_training(cloud: LocalCloud) -> list[str]:
    """The numbers of the first cluster's jobs that are machines of the stage train. SkyPilot gives a job's only task
    the job's name."""
    jobs = (line.split() for line in cloud.slurm("squeue", "-h", "-o", "%i %j").splitlines())
    return [number for number, name in jobs if name.startswith(("train-", "e2e-"))]


def processes_with(variable: str, *words: str) -> list[psutil.Process]:
    """Processes with a variable in their environment and these arguments in their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if set(words) <= set(process.cmdline()) and variable in process.environ():
                found.append(process)
    return found


def losses(store: S3Store, record: RunRecord) -> list[tuple[int, float]]:
    return [(row["step"], row["train/loss"]) for row in Run(store, record).series if "train/loss" in row]


def weights(store: S3Store, record: RunRecord, stage: str) -> str:
    manifest = read_manifest(store, record.prefixes[stage])
    assert manifest
    return manifest.file("model.safetensors").sha256
