"""The SkyPilot tasks in sky/ and dry runs, checked by SkyPilot's own schema and optimizer with a small price catalog.

All run for real, in one child process for all questions (importing SkyPilot takes 4 s), and without its server or a
network. The tests only replace the list of enabled clouds, which would need accounts.
"""

import json
import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from answers import Request, answering
from cloud_support import KEYS, closed_port
from pipeline_runs import TINY, write_texts
from sky_catalog import ROWS, Row, sky_environment, write_catalog

from pipelines.run.stage import STAGES
from pipelines.user.cloud.request import LaunchRequest
from pipelines.user.cloud.tasks import STAGE, managed_job
from trainer.base.process import StopSignal

ROOT = Path(__file__).resolve().parents[3]
SKY = ROOT / "sky"
IMAGE = "registry.example.org/skytrain@sha256:" + "0" * 64
MORE = (Row("aws", "one-a100", "us-east-1", "us-east-1a", 4.0, 2.0, "A100-80GB:1", 8, 100),)
WHO = """<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>
<Arn>arn:aws:iam::123456789012:user/bucket</Arn><UserId>AIDA</UserId><Account>123456789012</Account>
</GetCallerIdentityResult><ResponseMetadata><RequestId>1</RequestId></ResponseMetadata></GetCallerIdentityResponse>"""


def only_an_identity(request: Request) -> None:
    """An S3 service other than Amazon's, as AWS_ENDPOINT_URL names it: it has no EC2."""
    known = b"GetCallerIdentity" in request.body
    request.respond(200 if known else 404, WHO if known else "<html>not found</html>")


ASKING = """
import contextlib, io, json, os, subprocess, sys
from dataclasses import asdict
from types import SimpleNamespace
from unittest import mock
from typer.testing import CliRunner
from pipelines import cli
from pipelines.user.cloud import catalog, planner, skypilot
from pipelines.user.cloud.request import LaunchRequest
from pipelines.user.cloud.tasks import managed_job
from pipelines.recipe.loader import load_recipe
from pipelines.user.show.cloud_plan import print_launch_report
from pipelines.run.stage import plans_of
from trainer.config.errors import UserError
from trainer.base.store import LocalStore
from sky import ClusterStatus, Resources, check, core as sky_core, execution, global_user_state, optimizer
from sky.backends import CloudVmRayResourceHandle
from sky.catalog import aws_catalog
from sky.client import sdk
from sky.jobs.server import core
from sky.utils import dag_utils, registry

enabled = []
check.get_cached_enabled_clouds_or_refresh = lambda *a, **k: [registry.CLOUD_REGISTRY.from_str(c) for c in enabled]
check.check_capability = lambda *a, **k: None
zones, aws_catalog._get_az_mappings = aws_catalog._get_az_mappings, lambda *a, **k: None
sdk.optimize, sdk.get = lambda dag: dag, lambda dag: optimizer.Optimizer.optimize(dag, quiet=True)

def answer(question):
    enabled[:] = question["enabled"]
    secrets = list(question["secrets"].items())
    dag = dag_utils.load_chain_dag_from_yaml_str(question["yaml"], list(question["envs"].items()), secrets)
    skypilot.ask_optimizer(dag)
    execution._resolve_managed_secrets(dag)  # what a launch does next
    return {"name": dag.name, "tasks": [task_record(task) for task in dag.tasks]}

def task_record(task):
    best = task.best_resources
    return {
        "name": task.name, "nodes": task.num_nodes, "cloud": str(best.cloud).lower(), "region": best.region,
        "instance": best.instance_type, "spot": best.use_spot, "usd": best.get_cost(3600),
        "recovery": best.job_recovery, "labels": best.labels, "image": best.image_id,
        "down": best.autostop_config and best.autostop_config.down, "hooks": best.hooks,
        "secrets": sorted(task.secrets), "yaml": json.dumps(task.to_yaml_config(use_user_specified_yaml=True)),
    }

def priced(options, stages, spent=0.0, enabled=()):
    total = SimpleNamespace(usd=spent)
    planner.find_run = lambda store, run: SimpleNamespace(account=SimpleNamespace(total=total))
    request = LaunchRequest(**options)
    job = managed_job(request, stages)
    recipe, store = load_recipe("gpt2-124m", ["evaluate.hellaswag=null"]), LocalStore("store")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        work = planner.workload(recipe, store, plans_of(recipe), list(stages), request.installs)
        job, _ = planner.priced_job(job, request, planner.limits_of(request, store), work, print_launch_report)
    tasks = {
        task.name: [[m.to_yaml() for m in task.machines], json.loads(task.envs["SKYTRAIN_PRICES"])]
        for task in job.tasks
    }
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    asked = {"yaml": job.to_yaml(), "envs": {}, "enabled": enabled, "secrets": keys}
    placed = answer(asked)["tasks"] if enabled else []
    return tasks | {"output": output.getvalue(), "placed": placed}

def offered(wanted):
    return [[asdict(offer) for offer in catalog.offers(catalog.MachineRequest(**one)).values()] for one in wanted]

def command(words, env, keys_of_another_service=False):
    if keys_of_another_service:
        aws_catalog._get_az_mappings, aws_catalog._user_df = zones, None
        catalog.offers.cache_clear()
    with mock.patch.dict(os.environ, env):
        done = CliRunner().invoke(cli.app, words)
    ended = str(done.exception) if isinstance(done.exception, UserError) else done.exit_code
    return {"stdout": done.stdout, "stderr": done.stderr, "ended": ended}

def with_controller(machine):
    # the jobs that we see where the controller has a machine of its own in this state
    found = (ClusterStatus.__members__.get(machine or "")), None
    lost = mock.Mock(side_effect=RuntimeError("Failed to fetch managed jobs with returncode: 1.\\nsrun: has expired"))
    with (
        mock.patch("sky.backends.backend_utils.refresh_cluster_status_handle", lambda *a, **k: found),
        mock.patch("sky.jobs.queue_v2", lost if machine == "lost" else core.queue_v2_api),
        mock.patch.object(sdk, "get", lambda answer: answer),
    ):
        return skypilot.managed_tasks()

def on_record(record_of):
    # clusters on the record of this process, read as an API server's, and as a controller's in this state
    for name, labels in (("train-1", {"project": "skytrain", "run": "tiny-0"}), ("theirs-1", None)):
        kind = Resources(infra="lambda/us-east-1", instance_type="gpu_1x_a10", labels=labels)
        handle = CloudVmRayResourceHandle(
            cluster_name=name, cluster_name_on_cloud=name, cluster_yaml=None, launched_nodes=1, launched_resources=kind
        )
        global_user_state.add_or_update_cluster(name, handle, {kind}, ready=True, is_managed=True)
    lost, status = record_of == "UP", ClusterStatus[record_of or "UP"]
    controllers, notes = [SimpleNamespace(name="sky-jobs-controller-1", status=status, handle=None)], []

    def run_on_head(backend, handle, command, **options):
        command = "echo unreachable >&2; exit 255" if lost else command
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    with (
        mock.patch.object(sdk, "status", lambda **options: controllers),
        mock.patch.object(sdk, "cost_report", sky_core.cost_report),
        mock.patch.object(sdk, "get", lambda answer: answer),
        mock.patch("sky.backends.CloudVmRayBackend.run_on_head", run_on_head),
    ):
        return [skypilot.clusters(), skypilot.clusters(notes.append), notes]

answers = {}
for name, question in json.load(sys.stdin).items():
    try:
        kind = {"options": priced, "wanted": offered, "words": command, "infra": skypilot.check_places,
                "machine": with_controller, "record_of": on_record}
        found = next((ask for field, ask in kind.items() if field in question), None)
        answers[name] = found(**question) if found else answer(question)
    except Exception as error:
        answers[name] = {"error": f"{type(error).__name__}: {error}"}
print("ANSWERS" + json.dumps(answers))
"""
CLOUDS = ("aws", "gcp", "lambda")
TASKS = ("tokenize", "train", "evaluate")  # of a launch of all stages
FILES = (*STAGES, "serve")
GIVEN = {"SKYTRAIN_RECIPE": "smoke", "SKYTRAIN_RUN": "smoke-0123", "SKYTRAIN_STORE": "s3://bucket/prefix"}
OTHERS = {"VLLM_API_KEY": "of sky/serve.yaml"}


def question(
    text: str, envs: dict[str, str] = GIVEN, enabled: tuple[str, ...] = CLOUDS, secrets: dict[str, str] = KEYS | OTHERS
) -> dict[str, Any]:
    return {"yaml": text, "envs": envs, "enabled": enabled, "secrets": secrets}


def requested(stages: tuple[str, ...] = ("train",), **options: Any) -> str:
    request = LaunchRequest("tiny.v1-12345678", "s3://bucket/prefix", store_id="9f8e7d6c", **{"image": IMAGE} | options)
    return managed_job(request, stages).to_yaml()


QUESTIONS = {
    **{name: question((SKY / f"{name}.yaml").read_text()) for name in FILES},
    "nothing cheap enough": question(
        (SKY / "train.yaml").read_text().replace("max_hourly_cost: 60", "max_hourly_cost: 19"), enabled=("lambda",)
    ),
    "all stages": question(requested(STAGES, budget=25.0), {}),
}


def to_price(stages: tuple[str, ...] = ("train",), **options: Any) -> dict[str, Any]:
    return {"options": {"run": "tiny-12345678", "store": "s3://bucket/prefix"} | options, "stages": stages}


QUESTIONS |= {
    "prices": to_price(STAGES) | {"enabled": CLOUDS},
    "prices on slurm": to_price(("tokenize", "train"), infra="slurm/local"),
    "a budget that spot keeps": to_price(budget=16.0),
    "a budget that nothing keeps": to_price(budget=1.0),
    "a budget that is spent": to_price(("evaluate", "export"), budget=20.0) | {"spent": 25.0},
    "a deadline without a price list": to_price(("train", "evaluate"), gpus="V100:8", deadline=4e9),
}
# A launch of all stages by cloud, nodes and market, with an image on two nodes or on spot alone. None: accepted.
NO_NETWORK = "UserError: no machine for train: runpod sells no H100:8{}, or not 2 that share a network"
NOT_SOLD = "UserError: no machine for train: {} sells no H100:8 on spot"


def refusal(cloud: str, nodes: int, spot: bool) -> str | None:
    if cloud == "lambda" and spot:
        return NOT_SOLD.format(cloud) + ", or not 2 that share a network" * (nodes == 2)
    return NO_NETWORK.format(" on spot" * spot) if cloud == "runpod" and nodes == 2 else None


PLACED = product(("aws", "gcp", "nebius", "lambda", "runpod"), (1, 2), (False, True))
MATRIX = {one: refusal(*one) for one in PLACED}
QUESTIONS |= {
    f"{cloud} {nodes} {spot}": to_price(
        (*STAGES, "tune.chat"), infra=cloud, nodes=nodes, spot=spot, image="none" if (nodes == 2) == spot else IMAGE
    )
    | {"enabled": [cloud]}
    for cloud, nodes, spot in MATRIX
}
QUESTIONS["H200:8 on aws"] = to_price(STAGES, infra="aws", gpus="H200:8") | {"enabled": ["aws"]}
H100: dict[str, Any] = {"accelerators": "H100:8"}
CPUS: dict[str, Any] = {"cpus": "16+"}
WANTED = {
    "aws h100:8 spot": {"infra": "aws", "use_spot": True, "accelerators": "h100:8"},
    **{f"{cloud} H100:8": {"infra": cloud, "use_spot": False} | H100 for cloud in ("aws", "gcp", "lambda")},
    "gcp H100:8 spot": {"infra": "gcp", "use_spot": True} | H100,
    "lambda H100:8 spot": {"infra": "lambda", "use_spot": True} | H100,
    "aws/us-west-2 H100:8": {"infra": "aws/us-west-2", "use_spot": False} | H100,
    "gcp H200:8": {"infra": "gcp", "use_spot": False, "accelerators": "H200:8"},
    "lambda cpus": {"infra": "lambda", "use_spot": False} | CPUS,
    "aws cpus and memory": {"infra": "aws", "use_spot": True, "memory": "32+"} | CPUS,
    "slurm H100:8": {"infra": "slurm/local", "use_spot": False} | H100,
    "slurm L4:1": {"infra": "slurm/local", "use_spot": False, "accelerators": "L4:1"},
    "slurm cpus": {"infra": "slurm/local", "use_spot": False} | CPUS,
    "kubernetes cpus": {"infra": "kubernetes", "use_spot": False} | CPUS,
}
PLACES = {
    "mars": "--infra mars: Cloud 'mars' is not a valid cloud among ",
    "slurm/WRONG": "Cluster WRONG not found in Slurm config",
    "aws/us-east-9": "Did you mean one of these: 'us-east-1, us-east-2, us-west-2'?",
    "gcp,lambda/mars": "--infra lambda/mars: Invalid region 'mars'",
}
VALID = "aws/us-east-1/us-east-1a,slurm/local,Slurm,gcp, lambda/us-east-1,k8s"
LAUNCH = ("launch", "--dry-run")
CONTROLLERS = (None, "STOPPED", "INIT", "UP", "lost")
UNSEEN = {None: None, "STOPPED": "it has stopped; `sky jobs queue --refresh` starts it", "UP": "unreachable"}
QUESTIONS |= {
    "offers": {"wanted": [*WANTED.values()]},
    "offers without a price list": {"wanted": [{"infra": "azure", "use_spot": False} | H100]},
    "offers of no cloud": {"wanted": [{"infra": "nocloud", "use_spot": False} | H100]},
    **{place: {"infra": place} for place in (*PLACES, VALID)},
    "a dry run": {
        "words": [*LAUNCH, "tiny.yaml", "--infra", "slurm/local", "--nodes", "2", "--gpus", "H100:8", "--budget", "5"],
        "env": KEYS | {"SKYPILOT_API_SERVER_ENDPOINT": closed_port()},
    },
    **{f"a controller that is {machine}": {"machine": machine} for machine in CONTROLLERS},
    **{f"the record of a controller that is {machine}": {"record_of": machine} for machine in UNSEEN},
    **{
        f"a plan on {infra}": {"words": ["plan", "gpt2-124m", "--cloud", "--infra", infra, "--json"], "env": {}}
        for infra in ("slurm/local", "kubernetes")
    },
    "a dry run with faults": {"words": [*LAUNCH, "gpt2-124m"], "env": {}},
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """SkyPilot's answer to every question."""
    pytest.importorskip("sky", reason="needs skypilot (pip install '.[cloud]')")
    home = tmp_path_factory.mktemp("sky-home")
    write_catalog(home, ROWS + MORE)
    local = {"pricing": {"cpu": 0.01, "accelerators": {"H100": 3.5}}, "provision_timeout": 60}
    jobs = {"controller": {"consolidation_mode": True}}
    config = {"slurm": {"cluster_configs": {"local": local}}, "jobs": jobs}
    (home / ".sky" / "config.yaml").write_text(yaml.safe_dump(config))
    (home / ".slurm").mkdir()
    (home / ".slurm" / "config").write_text("Host local\n  HostName 127.0.0.1\n")
    python = home / "python"  # of the program on a controller: SkyPilot does not quote its path
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    (home / ".sky" / "python_path").write_text(str(python))
    write_texts(home / "texts")
    recipe = TINY | {"tokens": TINY["tokens"] | {"source": f"{home}/texts/*.txt"}}
    (home / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SKY", "AWS_", "KUBE", "MLFLOW_"))}
    # A proxy that refuses: nothing can be downloaded, even on a machine with a network.
    ours = {
        "PYTHONPATH": str(ROOT),
        "HTTPS_PROXY": "http://127.0.0.1:1",
        "COLUMNS": "80",
        "SKYTRAIN_STORE_SECONDS": "1",
    }
    deadlines = {
        "a deadline that all keep": to_price(("train", "evaluate"), deadline=time.time() + 48 * 3600),
        "a deadline without slack for spot": to_price(("train", "evaluate"), deadline=time.time() + 1.1 * 3600),
        "a deadline that none keeps": to_price(("train", "evaluate"), deadline=time.time() + 360),
    }
    plan = ["plan", "gpt2-124m", "--cloud", "--deadline", "1h", "--json"]
    with answering(only_an_identity) as address:
        service = KEYS | {"AWS_ENDPOINT_URL": address, "AWS_DEFAULT_REGION": "us-east-1"}
        keys = {"a plan with keys of another service": {"words": plan, "env": service, "keys_of_another_service": True}}
        done = subprocess.run(
            [sys.executable, "-c", ASKING],
            input=json.dumps(QUESTIONS | deadlines | keys),
            env=inherited | sky_environment(home) | ours,
            cwd=home,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert not (home / ".sky" / "api_server").exists(), "no server was started"
    return json.loads(done.stdout.rpartition("ANSWERS")[2])


def only_task(answer: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in answer, answer["error"]
    (task,) = answer["tasks"]
    return task


# SkyPilot's reading of them


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_a_short_task_that_recovers_from_75_and_leaves_no_machine(
    answers: dict[str, Any], name: str
) -> None:
    task, job = only_task(answers[name]), name != "serve"
    assert task["name"] == name and task["labels"] == {"project": "skytrain"}
    assert task["recovery"] == ({"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [75]} if job else None)
    assert bool(task["down"]) == job
    assert task["image"] is None and json.loads(task["yaml"])["workdir"] == "."  # it runs as it stands, from a clone
    assert len((SKY / f"{name}.yaml").read_text().splitlines()) <= 60


def test_a_pod_that_kubernetes_takes_back_stops_its_training(answers: dict[str, Any]) -> None:
    for stage in STAGES:
        (*hooks,) = only_task(answers[stage])["hooks"] or []
        assert [hook["events"] for hook in hooks] == ([["preemption"]] if stage == "train" else [])
        assert all("pkill -TERM" in hook["run"] and hook["timeout"] > StopSignal.grace_seconds for hook in hooks)
    script = only_task(answers["train"])["hooks"][0]["run"]
    (pattern,) = re.findall("c='(.*?)'", script)
    assert not re.search(pattern, script)  # SkyPilot runs it by `bash -c`, and pkill would end that shell, too
    assert all(re.search(pattern, f"python {command} job") for command in ("/opt/bin/skytrain", "-m pipelines.cli"))


def test_without_a_machine_that_fits_below_the_price_cap_a_launch_fails_with_one_line(answers: dict[str, Any]) -> None:
    message = answers["nothing cheap enough"]["error"]
    assert message.startswith("UserError: launch: no machine fits: ") and "\n" not in message
    assert message.endswith("; try another --infra or --gpus, or without --spot")


def test_a_launch_is_one_job_whose_last_task_evaluates_and_exports(answers: dict[str, Any]) -> None:
    assert [task["name"] for task in answers["all stages"]["tasks"]] == list(TASKS)
    assert json.loads(answers["all stages"]["tasks"][-1]["yaml"])["envs"][STAGE] == "export"
    for task in answers["all stages"]["tasks"]:
        assert task["labels"] == {"project": "skytrain", "run": "tiny-v1-12345678-9f8e7d6c"}
        assert list(task["image"].values()) == [f"docker:{IMAGE}"]


def test_secrets_reach_skypilot_and_no_text_of_a_task(answers: dict[str, Any]) -> None:
    for name in ("train", "all stages"):
        for task in answers[name]["tasks"]:
            assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(task["secrets"])
            assert KEYS["AWS_SECRET_ACCESS_KEY"] not in task["yaml"]


@pytest.mark.parametrize("machine", CONTROLLERS)
def test_only_a_controller_that_is_stopped_or_never_was_has_no_jobs(answers: dict[str, Any], machine: str) -> None:
    """On a machine of its own, as a laptop's server has it. In state UP it has no address here, and the answer of a
    lost one is made up after one that was seen."""
    found = answers[f"a controller that is {machine}"]
    unknown = "UserError: SkyPilot can't tell of its managed jobs: "
    assert found == [] if machine in (None, "STOPPED") else found["error"].startswith(unknown)


@pytest.mark.parametrize("machine", UNSEEN)
def test_clusters_of_a_controller_elsewhere_are_listed_or_said_to_be_missing(
    answers: dict[str, Any], machine: str | None
) -> None:
    """The machine, and the way to it, are made up: SkyPilot's record and our program that reads it are real."""
    (own,), seen, notes = answers[f"the record of a controller that is {machine}"]
    assert own[:2] == ["train-1", "tiny-0"]
    assert seen == [own, *([] if machine else [[*own[:4], "sky-jobs-controller-1"]])] and len(notes) == bool(machine)
    assert all(UNSEEN[machine] in note for note in notes)


# What they cost


def rows(answer: dict[str, Any], stage: str = "train") -> list[dict[str, Any]]:
    assert "error" not in answer, answer["error"]
    return answer[stage][1]


def test_a_job_has_the_price_of_every_machine_that_it_may_run_on(answers: dict[str, Any]) -> None:
    known = {(r["cloud"], r["region"], r["spot"], r["usd_per_hour"]) for r in rows(answers["prices"])}
    assert known == {
        ("aws", "us-east-1", True, 20.0),
        ("aws", "us-west-2", True, 22.0),
        ("gcp", "us-central1", True, 26.0),
        ("lambda", "us-east-1", False, 31.92),
    }
    assert {r["accelerators"] for r in rows(answers["prices"])} == {"H100:8"}
    tokenize = {"c6i.4xlarge", "n2-standard-16", "cpu_16x_general"}
    assert {r["instance"] for r in rows(answers["prices"], "tokenize")} == tokenize
    placed = {task["name"]: task for task in answers["prices"]["placed"]}
    for stage in TASKS:  # SkyPilot's choice among the machines with type and region, at its price
        chosen = placed[stage]
        (price,) = (
            r["usd_per_hour"]
            for r in rows(answers["prices"], stage)
            if all(r[name] == chosen[name] for name in ("cloud", "region", "instance", "spot"))
        )
        assert price == chosen["usd"] == only_task(answers[stage])["usd"]


def test_only_machines_that_are_expected_to_meet_the_limits_are_rented(answers: dict[str, Any]) -> None:
    kept = answers["a deadline that all keep"]
    *spot, standby, _ = kept["train"][0]
    places = ["aws/us-east-1", "aws/us-west-2", "gcp/us-central1"]
    assert [(m["infra"], m["use_spot"]) for m in spot] == [(place, True) for place in places]
    assert "accelerators" not in standby
    assert {row["instance"] for row in rows(kept) if "accelerators" not in row} == {"m6i.xlarge", "n2-standard-16"}
    assert {m["use_spot"] for m in kept["evaluate"][0]} == {False}
    tight = answers["a deadline without slack for spot"]["train"][0]
    assert tight and not any(m["use_spot"] or "accelerators" not in m for m in tight)
    kept = answers["a budget that spot keeps"]
    assert kept.get("train") and {m["use_spot"] for m in kept["train"][0]} == {True}
    for nothing in ("a budget that nothing keeps", "a deadline that none keeps"):
        assert answers[nothing]["error"].startswith("UserError: launch: no machine is within")


def test_offers_are_the_catalogs_prices_by_region(answers: dict[str, Any]) -> None:
    found = {
        name: [(one["region"], one["instance"], one["usd_per_hour"], one["on_demand_per_hour"]) for one in some]
        for name, some in zip(WANTED, answers["offers"], strict=True)
    }
    p5, a3, sxm = "p5.48xlarge", "a3-highgpu-8g", "gpu_8x_h100_sxm5"
    assert found == {
        "aws h100:8 spot": [("us-east-1", p5, 20.0, 56.0), ("us-west-2", p5, 22.0, 60.0)],  # of its cheapest zone
        "aws H100:8": [("us-east-1", p5, 56.0, 56.0), ("us-west-2", p5, 60.0, 60.0)],
        "gcp H100:8": [("us-central1", a3, 72.0, 72.0)],  # GCP sells machine and GPUs apart
        "lambda H100:8": [("us-east-1", sxm, 31.92, 31.92)],
        "gcp H100:8 spot": [("us-central1", a3, 26.0, 72.0)],
        "lambda H100:8 spot": [],
        "aws/us-west-2 H100:8": [("us-west-2", p5, 60.0, 60.0)],
        "gcp H200:8": [],
        "lambda cpus": [("us-east-1", "cpu_16x_general", 0.64, 0.64)],
        "aws cpus and memory": [("us-east-1", "c6i.4xlarge", 0.25, 0.7)],
        "slurm H100:8": [("local", None, 28.0, 28.0)],
        "slurm L4:1": [("local", None, None, None)],  # SkyPilot says 0
        "slurm cpus": [("local", None, 0.16, 0.16)],
        "kubernetes cpus": [(None, None, None, None)],
    }
    by_zone = [one["usd_by_zone"] for one in answers["offers"][0]]
    assert by_zone == [{"use1-az4": 24.0, "use1-az6": 20.0}, {"usw2-az1": 22.0}]
    refused = answers["offers without a price list"]["error"], answers["offers of no cloud"]["error"]
    assert "azure: its price list cannot be fetched" in refused[0]
    assert "nocloud: Cloud 'nocloud' is not a valid cloud among" in refused[1]


def test_keys_without_ec2_in_reach_still_get_a_plan_and_nothing_else_is_printed(answers: dict[str, Any]) -> None:
    done = answers["a plan with keys of another service"]
    assert (done["ended"], done["stderr"]) == (0, "")
    candidates = json.loads(done["stdout"])["cloud"]["candidates"]
    assert {c["machine"]["cloud"] for c in candidates} == {"aws", "gcp", "lambda"}


def test_a_place_that_does_not_exist_is_refused_with_the_names_there_are(answers: dict[str, Any]) -> None:
    assert answers[VALID] is None
    for place, expected in PLACES.items():
        assert expected in answers[place]["error"]


def test_a_plan_on_a_private_cluster_has_hours_and_no_dollars_without_a_price(answers: dict[str, Any]) -> None:
    for infra, usd in (("slurm/local", 30.0), ("kubernetes", None)):
        done = answers[f"a plan on {infra}"]
        assert done["ended"] == 0, done
        (found,) = [
            c for c in json.loads(done["stdout"])["cloud"]["candidates"] if c["machine"]["accelerators"] == "H100:8"
        ]
        assert 0.9 < found["hours"] < 2 and found["usd"] == (usd and pytest.approx(usd, rel=0.5))


def test_six_clouds_tasks_are_refused_by_us_first_or_accepted_by_the_real_optimizer_with_mocked_accounts(
    answers: dict[str, Any],
) -> None:
    """Kubernetes is the sixth: SkyPilot's optimizer asks a cluster, which is not here."""
    for (cloud, nodes, spot), refused in MATRIX.items():
        answer = answers[f"{cloud} {nodes} {spot}"]
        assert answer.get("error") == refused, (cloud, nodes, spot)
        placed = {task["name"]: task for task in answer.get("placed", ())}
        assert refused or list(placed) == [*TASKS, "tune"], (cloud, nodes, spot)
        assert refused or (placed["train"]["nodes"], placed["train"]["spot"]) == (nodes, spot)


def test_evaluate_gets_its_own_machine_then_one_gpu_of_trains_then_trains_machine(answers: dict[str, Any]) -> None:
    gpus = {
        name: next(task["instance"] for task in answers[name]["placed"] if task["name"] == "evaluate")
        for name in ("H200:8 on aws", "nebius 1 False", "gcp 1 False")
    }
    assert gpus == {
        "H200:8 on aws": "g6.xlarge",
        "nebius 1 False": "gpu-h100-sxm_1gpu-16vcpu-200gb",
        "gcp 1 False": "a3-highgpu-8g",
    }


# A dry run


def test_a_dry_run_prints_the_job_its_price_and_no_secret(answers: dict[str, Any]) -> None:
    done = answers["a dry run"]
    assert done["ended"] == 0 and "SkyPilot's server: not up, so it is unknown" in done["stderr"], done
    header, *tasks = yaml.safe_load_all(done["stdout"])
    assert header["name"].startswith("tiny-") and [task["name"] for task in tasks] == list(TASKS)
    assert [task["num_nodes"] for task in tasks] == [1, 2, 1]
    (price,) = json.loads(tasks[1]["envs"]["SKYTRAIN_PRICES"])
    assert price["usd_per_hour"] == 28.0
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in done["stdout"] + done["stderr"]


def test_a_dry_run_names_every_fault_at_once_and_starts_no_server(answers: dict[str, Any]) -> None:
    done = answers["a dry run with faults"]
    (train,) = (task for task in yaml.safe_load_all(done["stdout"]) if task["name"] == "train")
    prices = {row["usd_per_hour"] for row in json.loads(train["envs"]["SKYTRAIN_PRICES"])}
    assert {20.0, 31.92} <= prices and done["ended"].startswith("launch: the job would fail")
    assert all(f"WRONG  {what}" in done["stderr"] for what in ("store", "benchmarks"))
    assert all(len(line) <= 80 for line in done["stderr"].splitlines() if "/pytest-of-" not in line)
