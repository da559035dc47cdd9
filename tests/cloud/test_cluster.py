"""A launched run from end to end: real SkyPilot, two Slurm nodes, S3, MLflow; preempted and killed without a loss."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
import yaml
from local_cloud import DEARER, PRICE, LocalCloud, what_is_missing
from pipeline_runs import TINY, runs_in_mlflow, write_texts
from servers import MlflowServer, S3Account

from pipelines.artifacts.manifest import read_manifest
from pipelines.artifacts.store import S3Store
from pipelines.cloud.deadline import DEADLINE
from pipelines.nodes.ranks import RANK_MODULE
from pipelines.stage import STAGES
from pipelines.tracking.account import Account
from pipelines.tracking.clusters import read_intervals
from pipelines.tracking.ledger import HEARTBEAT_SECONDS, attempts
from pipelines.tracking.runs import (
    Run,
    RunRecord,
    Summary,
    read_records,
)
from trainer.process import DRILL

pytestmark = pytest.mark.slow

STEPS = 120
# For two nodes; the run reserves 85 s for its stop. On an idle machine training begins after half a minute. On a very
# slow one the budget may be spent before that; then the run stops there, and the rest of the test is the same.
BUDGET_S = 200
HEAD_S = 10.0  # from SkyPilot's record that a cluster is up, or gone, until ours: 1 to 5 s on a busy machine
LIMIT_S = 900.0  # of each wait: the longest takes a minute on an idle machine


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
    """A user at a shell, with a recipe and a bucket."""

    def __init__(self, folder: Path, cloud: LocalCloud, account: S3Account) -> None:
        self.recipe, self.failpoints = folder / "e2e.yaml", folder / "failpoints"
        self.failpoints.mkdir()
        write_texts(folder / "texts")
        source = {"source": str(folder / "texts" / "*.txt")}
        recipe: dict[str, Any] = TINY | {
            "name": "e2e",
            "tokens": TINY["tokens"] | source | {"parts": 2},
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
            **cloud.environment,
            "SKYTRAIN_STORE": f"s3://{self.bucket}/runs",
            "SKYTRAIN_HOME": str(folder / "home"),
            "SKYTRAIN_NOTICE": "off",
            "OMP_NUM_THREADS": "1",
        }

    def skytrain(self, *words: str, expect: int = 0, **environment: str) -> str:
        """The command's stdout and stderr."""
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
        where = ("--infra", "slurm/local", "--gpus", "H100:8", "--image", "none", "--yes")
        variables = {"SKYTRAIN_VENV": sys.prefix, "SKYTRAIN_GRACE_SECONDS": "10", DRILL: str(self.failpoints)}
        given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        return self.skytrain("launch", str(self.recipe), *where, *given, *options, expect=expect)

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

    def has_died(self, cause: str) -> bool:
        """Whether an attempt at training has ended for this cause."""
        return any(
            cause in (beat.progress.killed or "") for beat in attempts(self.store, self.record.prefixes["train"])
        )

    def stand_still_until(self, condition: Callable[[], object]) -> None:
        """Training makes no step before that, or one a minute."""
        step = self.failpoints / "mid-step"

        def held() -> object:
            step.touch()  # again while a process waits there: it continues after a minute
            return condition()

        self.wait_until(held)
        step.unlink(missing_ok=True)
        reached(step).unlink(missing_ok=True)

    def preempted_in_mid_training(self, cloud: LocalCloud) -> float:
        """Preempt the machines in a step after the attempt's first commit; returns the time."""
        with self.held_in_mid_training():
            (training,) = jobs_of_training(cloud)
            cloud.slurm("scancel", training)
        return time.time()

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


def test_a_launched_run_stopped_by_its_budget_preempted_and_killed_ends_as_the_undisturbed_one(
    user: User, cloud: LocalCloud, mlflow_uri: str
) -> None:
    user.environment["MLFLOW_TRACKING_URI"] = mlflow_uri
    assert "error: launch: no machine fits" in user.launch("--gpus", "A100:8", expect=2)

    budget = 2 * BUDGET_S / 3600 * 8 * PRICE
    assert "is launched as managed job" in user.launch("--nodes", "2", "--budget", f"{budget:.3f}")
    assert "has job 1, launched by " in user.launch(expect=2)
    undisturbed = S3Store(user.bucket, "undisturbed")
    alone = ("--set", "runtime.processes=2", "--store", undisturbed.uri)
    with ThreadPoolExecutor(1) as threads:  # while the launched run waits for machines
        run_alone = partial(user.skytrain, SKYTRAIN_TRACKING="off", GLOO_SOCKET_IFNAME="lo")
        ended = threads.submit(run_alone, "run", str(user.recipe), *alone)
        over = ("stopped", "failed")
        user.stand_still_until(lambda: user.summary.state in over or any(a.notice for a in user.bill.attempts))
        ended.result()
    assert user.summary.state != "failed", user.skytrain("status")
    user.wait_until(lambda: user.summary.state == "stopped")
    assert user.bill.total.usd < budget
    user.wait_until(lambda: not cloud.slurm("squeue", "-h"))

    assert "is launched as managed job" in user.skytrain("resume", user.record.run, "--budget", "1000", "--yes")
    preempted = user.preempted_in_mid_training(cloud)
    cloud.sky("api", "stop")
    cloud.sky("api", "start")
    with user.held_in_mid_training():
        victims = processes_with(DRILL, RANK_MODULE)
        next(one for one in victims if "pipelines.nodes.torchrun" not in one.cmdline()).kill()
    user.wait_until(lambda: user.has_died(" was killed by SIGKILL after step "))
    with user.held_in_mid_training():
        commands = processes_with(DRILL, "run", f"run:{user.record.run}")
        next(one for one in commands if one.environ()["SKYPILOT_NODE_RANK"] == "0").kill()
    user.wait_until(lambda: user.has_died("the run's command was killed by SIGKILL"))
    user.wait_until(lambda: user.summary.state == "done")
    (status,) = json.loads(user.skytrain("status", "--json"))
    recoveries = {task["stage"]: task["recoveries"] for task in status["tasks"]}
    assert recoveries == {"train": 3, "evaluate": 0, "export": 0}
    user.skytrain("down", user.record.run)
    assert cloud.slurm("squeue", "-h") == ""
    user.skytrain("orphans")

    record = user.record
    assert losses(user.store, record) == losses(undisturbed, record)
    for stage in ("train", "export"):
        assert weights(user.store, record, stage) == weights(undisturbed, record, stage)

    _, stages = runs_in_mlflow(mlflow_uri, record.run)
    assert {one.info.status for one in stages.values()} == {"FINISHED"}
    assert_billed_as_skypilot_says(user, record, preempted)


@pytest.mark.skipif("SKYTRAIN_LONG_TESTS" not in os.environ, reason="needs five minutes: SKYTRAIN_LONG_TESTS=1")
def test_a_run_preempted_in_one_region_continues_in_another_one_from_its_commit(user: User, cloud: LocalCloud) -> None:
    user.skytrain("run", str(user.recipe), "--stage", "tokenize")
    assert "is launched as managed job" in user.launch("--infra", "slurm/local,slurm/other", "--stage", "train")
    with user.held_in_mid_training():
        others_take(cloud)
        cloud.slurm("scancel", *jobs_of_training(cloud))
    undisturbed = S3Store(user.bucket, "undisturbed")  # while SkyPilot waits for the first region's machines
    user.skytrain("run", str(user.recipe), "--stage", "train", "--store", undisturbed.uri)
    user.wait_until(lambda: user.summary.state == "done")
    cloud.slurm("scancel", "--name=others")

    first, second = (a for a in user.bill.attempts if a.stage == "train")
    assert (first.machine.region, first.price_per_hour, first.state) == ("local", 8 * PRICE, "interrupted")
    assert (second.machine.region, second.price_per_hour, second.state) == ("other", 8 * DEARER, "done")
    assert second.resumed_from
    assert losses(user.store, user.record) == losses(undisturbed, user.record)
    assert weights(user.store, user.record, "train") == weights(undisturbed, user.record, "train")
    assert "in 2 attempts on slurm/local, then slurm/other" in user.skytrain("status")
    report = user.skytrain("report", user.record.run)
    assert "28.80 (catalog slurm/local)" in report and "36.00 (catalog slurm/other)" in report
    user.skytrain("down", user.record.run)
    assert cloud.jobs == ""


def others_take(cloud: LocalCloud) -> None:
    """Other users' jobs take all GPUs of the first cluster, those in use as soon as they are free."""
    for node in cloud.local.nodes:
        taken = ("--gres=gpu:8", "--mem=1G", "--cpus-per-task=1", "--output=/dev/null", "--wrap", "sleep 3600")
        cloud.slurm("sbatch", "--job-name=others", "--nodelist", node, *taken)


def jobs_of_training(cloud: LocalCloud) -> list[str]:
    """The numbers of the first cluster's jobs that are machines of the stage train. SkyPilot gives a job's only task
    the job's name."""
    jobs = (line.split() for line in cloud.slurm("squeue", "-h", "-o", "%i %j").splitlines())
    return [number for number, name in jobs if name.startswith(("train-", "e2e-"))]


# `launch --deadline` refuses clusters that have no spot market; so machines that are taken are made to play spot.
SUBMIT = """
import sys
from dataclasses import replace
from pipelines.artifacts.store import open_store
from pipelines.cloud.deadline import DEADLINE
from pipelines.cloud.launch import planned_launch, submit
from pipelines.cloud.pricing import with_prices
from pipelines.cloud.request import LaunchRequest
from pipelines.cloud.shell import secrets_from_shell, variables_from_shell
from pipelines.cloud.skypilot import dag_of
from pipelines.cloud.tasks import STANDBY_CPUS, STANDBY_MEMORY, MachineRequest
from pipelines.stage import planned, run_name

uri, recipe, deadline = sys.argv[1:]
store = open_store(uri)
loaded, plans = planned(recipe, [], store)
variables = variables_from_shell([f"SKYTRAIN_VENV={sys.prefix}", "SKYTRAIN_NOTICE=off"])
request = LaunchRequest(run_name(plans), uri, until="train", infra="slurm/local", variables=variables)
launch = planned_launch(request, loaded, plans, store, secrets_from_shell())
job = with_prices(launch.job, request, print)
(train,) = job.tasks
standby = MachineRequest(request.infra, False, cpus=STANDBY_CPUS, memory=STANDBY_MEMORY)
train = replace(train, machines=(*train.machines, standby), envs={**train.envs, DEADLINE: deadline})
submit(launch, [dag_of(replace(job, tasks=(train,)), launch.secrets)])
"""


@pytest.mark.skipif("SKYTRAIN_LONG_TESTS" not in os.environ, reason="needs five minutes: SKYTRAIN_LONG_TESTS=1")
def test_without_gpus_a_job_with_a_deadline_waits_on_a_standby_and_polls_again(user: User, cloud: LocalCloud) -> None:
    user.skytrain("run", str(user.recipe), "--stage", "tokenize")
    others_take(cloud)
    deadline = f"{time.time() + 36_000:.0f}"
    arguments = [user.environment["SKYTRAIN_STORE"], str(user.recipe), deadline]
    subprocess.run([sys.executable, "-c", SUBMIT, *arguments], env=user.environment, check=True, timeout=LIMIT_S)
    user.wait_until(lambda: any(a.waited for a in user.bill.attempts))
    assert f"{user.record.run}  waiting in train" in user.skytrain("status")
    cloud.slurm("scancel", "--name=others")
    (standby,) = processes_with(DEADLINE, "run", f"run:{user.record.run}")
    standby.terminate()  # as it does itself after ten minutes: exit code 75
    user.wait_until(lambda: user.summary.state == "done")
    waited, trained = (a for a in user.bill.attempts if a.stage == "train")
    assert (waited.waited, waited.machine.accelerators, waited.state) == (True, None, "interrupted")
    assert (trained.waited, trained.machine.accelerators, trained.state) == (False, "H100:1", "done")
    user.skytrain("down", user.record.run)


def processes_with(variable: str, *words: str) -> list[psutil.Process]:
    """Processes with a variable in their environment and these arguments in their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if set(words) <= set(process.cmdline()) and variable in process.environ():
                found.append(process)
    return found


def assert_billed_as_skypilot_says(user: User, record: RunRecord, preempted: float) -> None:
    """An attempt is on the bill from the first seconds of SkyPilot's cluster until the last heartbeat from it.

    SkyPilot's own interval continues until it has checked the job and terminated the cluster. For SkyPilot, a job that
    `scancel` ended is over at once; its last heartbeat may come up to 5 s later, while Slurm still kills it.
    """
    bill, intervals = user.bill, read_intervals(user.store, record.run)
    training = [attempt for attempt in bill.attempts if attempt.stage == "train"]
    assert {(a.nodes, a.price_per_hour) for a in training} == {(2, 8 * PRICE)}
    assert {a.stage: a.nodes for a in bill.attempts} == {"tokenize": 2, "train": 2, "evaluate": 1, "export": 1}
    assert [a.state for a in training[-4:]] == [*["interrupted"] * 3, "done"]
    assert abs(training[-4].ended - preempted) < HEARTBEAT_SECONDS + HEAD_S

    # The restart of the API server may have interrupted a recovery, which SkyPilot then begins again.
    clusters = len(STAGES) + 4  # train needs five
    assert len(intervals) in (clusters, clusters + 1) and len(bill.attempts) <= clusters
    beyond_usd = 0.0
    for attempt in bill.attempts:
        mine = [i for i in intervals if i.cluster == attempt.machine.cluster and i.started <= attempt.started + 1]
        interval = max(mine, key=lambda i: i.started)
        assert interval.nodes == attempt.nodes and (interval.ended or 0.0) > attempt.ended - HEAD_S
        assert attempt.started - interval.started < HEAD_S
        seconds = attempt.ended - interval.started
        beyond_usd += attempt.nodes * seconds * (attempt.price_per_hour or 0.0) / 3600 - attempt.bill.usd
    assert abs(beyond_usd) < len(training) * 2 * HEAD_S * 8 * PRICE / 3600


def losses(store: S3Store, record: RunRecord) -> list[tuple[int, float]]:
    return [(row["step"], row["train/loss"]) for row in Run(store, record).series if "train/loss" in row]


def weights(store: S3Store, record: RunRecord, stage: str) -> str:
    manifest = read_manifest(store, record.prefixes[stage])
    assert manifest
    return manifest.file("model.safetensors").sha256
