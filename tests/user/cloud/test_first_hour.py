"""The first hour: a machine without SkyPilot, without a network or a bucket, and one with a wheel instead of a clone.

Each is a real process. Its servers are its own.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from answers import Request, answering
from cloud_support import KEYS, closed_port
from in_process import clean_environment
from servers import free_ports

from pipelines.job.notice import Metadata
from pipelines.run.run_record import record
from pipelines.run.stage import STAGES, planned, run_name
from pipelines.user.cloud.catalog import CLOUDS, MachineRequest, shipped_machines, shipped_prices
from pipelines.user.cloud.checks import mlflow_answers
from pipelines.user.cloud.request import LaunchRecord, LaunchRequest, write_launch
from pipelines.user.cloud.tasks import read_task
from trainer.base.answers import answered_within
from trainer.base.store import LocalStore

ROOT = Path(__file__).resolve().parents[3]
TRACEBACK = "Traceback (most recent call last)"


def skytrain(
    *words: str, cwd: Path, more: Mapping[str, str] = {}, options: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    environment = clean_environment(**{"HOME": str(cwd)} | dict(more))
    command = [sys.executable, *options, "-m", "pipelines.cli", *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400)
    assert TRACEBACK not in done.stderr, done.stderr
    return done


# Without SkyPilot


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All installed packages but SkyPilot and this one."""
    folder = tmp_path_factory.mktemp("packages")
    for site in filter(lambda one: one.endswith("site-packages"), sys.path):
        for entry in Path(site).iterdir():
            if not entry.name.startswith(("sky", "__")) and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return folder


EVERY_COMMAND = """
import json, sys
from typer.testing import CliRunner
from pipelines import cli
answers = []
for words in json.load(sys.stdin):
    done = CliRunner().invoke(cli.app, words)
    error = done.exception
    expected = error is None or isinstance(error, (cli.UserError, SystemExit))
    answers.append([expected, str(error or ""), done.output])
print("ANSWERS" + json.dumps(answers))
"""


def test_without_skypilot_every_command_works_or_says_how_to_install_it(others: Path, tmp_path: Path) -> None:
    """In the clone, whose folder sky/ Python takes for a package."""
    store = LocalStore(tmp_path / "store")
    recipe, plans = planned("smoke", [], store)
    run = run_name(plans)
    record(store, run, recipe, plans, "export")
    write_launch(store, LaunchRecord(LaunchRequest(run, store.uri, infra="slurm/x"), ["train"], [1], [], 1.0, "there"))
    at, nowhere = ["--store", store.uri], ["--store", "s3://bucket/prefix"]
    commands = [
        ["launch", "smoke", "--dry-run", "--infra", "aws", *nowhere],
        ["plan", "smoke", "--json", *nowhere],
        ["plan", "run:smoke-01234567", *nowhere],
        ["plan", "gpt2-124m", "--cloud", "--infra", "slurm/x", *at],
        *(["logs", run, *at], ["down", run, *at], ["status", "--orphans", *at], ["resume", run, "--yes", *at]),
        *(["plan", "gpt2-124m", "--cloud", "--infra", "aws,gcp,lambda", *at], ["status", *at], ["doctor", *at]),
    ]
    more = KEYS | {"AWS_ENDPOINT_URL": closed_port(), "AWS_REGION": "us-east-1", "SKYTRAIN_STORE_SECONDS": "1"}
    more |= {"HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{others}"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", EVERY_COMMAND],
        input=json.dumps(commands),
        env=clean_environment(**more),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.rpartition("ANSWERS")[2])
    for words, (expected, error, output) in zip(commands, answers, strict=True):
        assert expected, (words, error, output)
        assert words[0] == "plan" or "make install" in error + output, (words, error, output)
    dry, unread, unknown, cluster, *_, plan, _, _ = answers
    assert "name: smoke-" in dry[2] and "skypilot: not installed" in dry[1]
    for text in (dry[1], unread[2], unknown[1]):  # and a run that only the store has is not planned without it
        assert "does not answer: no success within 1 s" in text
    assert "planned as if nothing were stored there" in unread[2] and '"exists": false' in unread[2]
    assert "make install" in cluster[1]  # its prices are in SkyPilot's config
    assert f"prices of {shipped_prices()['date']}, which ship with skytrain, for aws, gcp, lambda" in plan[2]


def test_the_shipped_prices_have_a_machine_for_every_task_on_each_cloud() -> None:
    for cloud in CLOUDS:
        for stage in STAGES:
            machines = [one for one in read_task(stage).machines if one.cloud == cloud]
            found = [found for one in machines for found in shipped_machines(one)]
            assert found or not machines or (cloud, stage) == ("gcp", "evaluate"), (cloud, stage)
            assert all(one.usd_per_hour and one.on_demand_per_hour and one.vcpus for one in found)
    at_another_place = MachineRequest("aws/eu-west-1", False, accelerators="H100:8")
    assert shipped_machines(at_another_place) == []
    assert shipped_machines(MachineRequest("lambda", False, cpus="4+", memory="999+")) == []


# Without a network


def drip(request: Request) -> None:
    """A byte every tenth of a second, so that no read ever takes long, and no end."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\n\r\n")
    try:
        while True:
            request.wfile.write(b"x")
            time.sleep(0.1)
    except OSError:
        request.close_connection = True


@contextmanager
def hole() -> Iterator[str]:
    """A server that takes every connection and answers none."""
    with socket.create_server(("127.0.0.1", 0), backlog=500) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_answer_that_drips_ends_at_its_deadline_and_leaves_no_thread_that_reads_it() -> None:
    with answering(drip) as address:
        metadata = Metadata(address)
        for _ in range(3):
            with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
                metadata.ask("/computeMetadata/v1/instance/preempted", {}, 0.5)
        deadline = time.monotonic() + 30
        while any(one.name == "answer" for one in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert answered_within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        answered_within(5, lambda: dict[str, int]()["absent"])


def test_a_tracking_server_of_any_size_and_speed_is_checked_by_its_status() -> None:
    with answering(drip) as address:
        assert mlflow_answers(address, {}).state == "ok"
    with hole() as address:
        assert "no answer" in mlflow_answers(address, {}).seen


@pytest.mark.slow
def test_without_a_network_or_a_bucket_a_plan_and_a_dry_run_say_so_and_are_complete(tmp_path: Path) -> None:
    """Without a network means here: everything beyond this machine is behind a proxy that never answers."""
    pytest.importorskip("sky", reason="needs skypilot (pip install '.[cloud]')")
    keys = {"AWS_ACCESS_KEY_ID": "an id", "AWS_SECRET_ACCESS_KEY": "a key", "SKYTRAIN_STORE_SECONDS": "1"}
    recipe = ("gpt2-124m", "--infra", "aws", "--store", "s3://bucket/prefix")
    with hole() as address:
        proxies = {name: address for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")}
        more = proxies | keys | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        more |= {"AWS_EC2_METADATA_DISABLED": "true", "SKYPILOT_API_SERVER_ENDPOINT": address}
        plan = skytrain("plan", *recipe, "--cloud", "--json", cwd=tmp_path, more=more)
        dry = skytrain("launch", *recipe, "--dry-run", cwd=tmp_path, more=more)
    assert plan.returncode == 0, plan.stderr
    assert "s3.amazonaws.com does not answer" in plan.stderr and "planned as if nothing were stored" in plan.stderr
    found: dict[str, Any] = json.loads(plan.stdout)
    assert found["store"] == "s3://bucket/prefix" and not any(one["exists"] for one in found["stages"].values())
    cloud = found["cloud"]
    assert cloud["candidates"][cloud["chosen"]]["machine"]["instance"] == "p5.48xlarge"
    price_note = f"prices of {shipped_prices()['date']}, which ship with skytrain, for aws: its price list"
    assert cloud["notes"][0].startswith(price_note)

    assert dry.returncode == 2
    header, *tasks = yaml.safe_load_all(dry.stdout)
    assert header["name"].startswith("gpt2-124m-7c762e5f") and len(tasks) == 3
    assert price_note in dry.stderr
    last = dry.stderr.partition("error: launch: the job would fail")[2]
    assert "benchmarks: evaluate.hellaswag" in last and "store: s3://bucket/prefix; https://s3." in last


# From a wheel


@pytest.mark.slow
def test_a_wheel_launches_and_names_neither_make_nor_the_clone(others: Path, tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    clone, here = tmp_path / "clone", tmp_path / "here"
    for name in filter(None, tracked.decode().split("\0")):
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "wheels"), str(clone)]
    subprocess.run(build, check=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True)
    here.mkdir()

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return skytrain(*words, cwd=here, more={"PYTHONPATH": f"{installed}:{others}"}, options=("-S",))

    dry = run("launch", "smoke", "--dry-run", "--infra", "aws")
    assert dry.returncode == 2
    _, *tasks = yaml.safe_load_all(dry.stdout)
    assert {task["workdir"] for task in tasks} == {str(here / ".cache" / "skytrain" / "tree-0.2.0")}
    texts = [dry.stderr, run("init", "--store", "s3://bucket/prefix", "--infra", "aws", "--budget", "25").stdout]
    for text in texts:
        assert "pip install 'skytrain[cloud]'" in text
        assert not [word for word in ("make install", "infra/", "docker/", "clone", ".[") if word in text], text

    made = "from pipelines.user.cloud.tasks import make_work_tree, work_tree; make_work_tree(); print(work_tree())"
    environment = clean_environment(HOME=str(here), PYTHONPATH=f"{installed}:{others}")
    tree = subprocess.run(
        [sys.executable, "-S", "-c", made], env=environment, capture_output=True, text=True, check=True
    )
    again = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "again"), tree.stdout.strip()]
    subprocess.run(again, check=True)  # as sky/environment.sh does on a node
    assert next((tmp_path / "again").glob("*.whl")).name == wheel.name
    assert (Path(tree.stdout.strip()) / "sky" / "environment.sh").is_file()


# With SkyPilot


@pytest.mark.slow
def test_down_with_a_wrong_name_leaves_no_server_that_it_started(tmp_path: Path) -> None:
    pytest.importorskip("sky", reason="needs skypilot (pip install '.[cloud]')")
    (port,) = free_ports(1)
    more = {"SKYPILOT_API_SERVER_LOCAL_PORT": str(port), "SKY_RUNTIME_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    done = skytrain("down", "nobody", "--store", f"file://{tmp_path}/store", cwd=tmp_path, more=more)
    assert done.returncode == 2 and "starting SkyPilot's API server" in done.stderr
    assert "SkyPilot has no job of nobody" in done.stderr
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass
