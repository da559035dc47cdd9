"""The SkyPilot tasks in sky/, checked by SkyPilot's own schema and optimizer with a small price catalog.

Both run for real, in one child process for all questions (importing SkyPilot takes 4 s), and without its server.
The tests only replace the list of enabled clouds, which would need accounts.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloud_support import KEYS
from sky_catalog import ROWS, Row, sky_environment, write_catalog

from pipelines.cloud.request import LaunchRequest
from pipelines.cloud.skypilot import take_down
from pipelines.cloud.tasks import ManagedJob, in_trial_order, managed_job
from pipelines.stage import STAGES

ROOT = Path(__file__).resolve().parents[2]
SKY = ROOT / "sky"
IMAGE = "registry.example.org/skytrain@sha256:" + "0" * 64
MORE = (
    Row("aws", "one-a100", "us-east-1", "us-east-1a", 4.0, 2.0, "A100-80GB:1", 8, 100),
    Row("aws", "m6id.4xlarge", "us-east-1", "us-east-1a", 0.95, 0.15),  # dearer than others on demand, cheaper on spot
)
ASKING = """
import contextlib, io, json, sys
from pipelines.cloud import pricing, skypilot
from pipelines.cloud.request import LaunchRequest
from pipelines.cloud.tasks import managed_job
from pipelines.recipe import load_recipe
from pipelines.show.cloud_plan import print_launch_report
from pipelines.stage import plans_of
from trainer.store import LocalStore
from sky import Resources, check, execution, optimizer
from sky.catalog import aws_catalog
from sky.client import sdk
from sky.utils import dag_utils, registry

enabled = []
check.get_cached_enabled_clouds_or_refresh = lambda *a, **k: [registry.CLOUD_REGISTRY.from_str(c) for c in enabled]
check.check_capability = lambda *a, **k: None
aws_catalog._get_az_mappings = lambda *a, **k: None
sdk.optimize, sdk.get = lambda dag: dag, lambda dag: optimizer.Optimizer.optimize(dag, quiet=True)

def answer(question):
    enabled[:] = question["enabled"]
    secrets = list(question["secrets"].items())
    dag = dag_utils.load_chain_dag_from_yaml_str(question["yaml"], list(question["envs"].items()), secrets)
    skypilot.ask_optimizer(dag, quiet=True)
    execution._resolve_managed_secrets(dag)  # what a launch does next
    if gone := question.get("gone"):  # as while it provisions
        blocked = [Resources(**machine) for machine in gone]
        optimizer.Optimizer.optimize(dag, blocked_resources=blocked, quiet=True)
    return {"name": dag.name, "tasks": [task_record(task) for task in dag.tasks]}

def task_record(task):
    best = task.best_resources
    return {
        "name": task.name, "nodes": task.num_nodes, "cloud": str(best.cloud).lower(), "region": best.region,
        "instance": best.instance_type, "spot": best.use_spot, "usd": best.get_cost(3600),
        "recovery": best.job_recovery, "labels": best.labels, "image": best.image_id,
        "down": best.autostop_config and best.autostop_config.down,
        "secrets": sorted(task.secrets), "yaml": json.dumps(task.to_yaml_config(use_user_specified_yaml=True)),
    }

def priced(options, stages, spent=0.0, enabled=()):
    pricing.usd_spent = lambda store, run: spent
    request = LaunchRequest(**options)
    job = managed_job(request, stages)
    recipe, store = load_recipe("gpt2-124m", ["evaluate.hellaswag=null"]), LocalStore("store")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        job = pricing.within_limits(job, request, recipe, plans_of(recipe), store, print_launch_report)
        job = pricing.with_prices(job, request, print_launch_report)
    tasks = {
        task.name: [[m.to_yaml() for m in task.machines], json.loads(task.envs["SKYTRAIN_PRICES"])]
        for task in job.tasks
    }
    ordered = [task.name for task in job.tasks if "ordered" in task.to_yaml()["resources"]]
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    asked = {"yaml": job.to_yaml(), "envs": {}, "enabled": enabled, "secrets": keys}
    placed = answer(asked)["tasks"] if enabled else []
    return tasks | {"output": output.getvalue(), "ordered": ordered, "placed": placed}

answers = {}
for name, question in json.load(sys.stdin).items():
    try:
        answers[name] = priced(**question) if "options" in question else answer(question)
    except Exception as error:
        answers[name] = {"error": f"{type(error).__name__}: {error}"}
print("ANSWERS" + json.dumps(answers))
"""
CLOUDS = ("aws", "gcp", "lambda")
GIVEN = {"SKYTRAIN_RECIPE": "smoke", "SKYTRAIN_STORE": "s3://bucket/prefix"}


def question(
    text: str, envs: dict[str, str] = GIVEN, enabled: tuple[str, ...] = CLOUDS, secrets: dict[str, str] = KEYS
) -> dict[str, Any]:
    return {"yaml": text, "envs": envs, "enabled": enabled, "secrets": secrets}


def requested(stages: tuple[str, ...] = ("train",), **options: Any) -> str:
    request = LaunchRequest("tiny.v1-12345678", "s3://bucket/prefix", **{"image": IMAGE} | options)
    return managed_job(request, stages).to_yaml()


def waiting(*gone: dict[str, Any]) -> dict[str, Any]:
    """The next machine for training with a deadline when some machines are unavailable."""
    request = LaunchRequest("tiny.v1-12345678", "s3://bucket/prefix", image=IMAGE, deadline=2e9)
    prices = {"aws": 20.0, "gcp": 26.0}
    train, _ = managed_job(request, ("train", "evaluate")).tasks
    task = in_trial_order(train, lambda machine: prices[machine.infra] if machine.use_spot else 0.1)
    return question(ManagedJob(request.run, (task,)).to_yaml(), {}) | {"gone": gone}


SERVED = {"SKYTRAIN_RUN": "tiny-12345678", "SKYTRAIN_STORE": "s3://bucket/prefix"}
QUESTIONS = {
    "serve": question((SKY / "serve.yaml").read_text(), SERVED, secrets=KEYS | {"VLLM_API_KEY": "a key"}),
    **{stage: question((SKY / f"{stage}.yaml").read_text()) for stage in STAGES},
    "no store": question((SKY / "train.yaml").read_text(), {"SKYTRAIN_RECIPE": "smoke"}),
    "no cloud but lambda": question((SKY / "train.yaml").read_text(), enabled=("lambda",)),
    "nothing cheap enough": question(
        (SKY / "train.yaml").read_text().replace("max_hourly_cost: 60", "max_hourly_cost: 19"), enabled=("lambda",)
    ),
    "on demand": question(requested(spot=False), {}),
    "spot on gcp": question(requested(spot=True, infra="gcp"), {}),
    "other gpus": question(requested(("train", "evaluate"), gpus="A100-80GB:8", infra="aws"), {}),
    "all stages": question(requested(STAGES, budget=25.0), {}),
    "spot is there": waiting(),
    "spot is gone": waiting({"accelerators": "H100:8", "use_spot": True}),
}


def to_price(stages: tuple[str, ...] = ("train",), **options: Any) -> dict[str, Any]:
    return {"options": {"run": "tiny-12345678", "store": "s3://bucket/prefix"} | options, "stages": stages}


QUESTIONS |= {
    "prices": to_price(STAGES) | {"enabled": CLOUDS},
    "prices on slurm": to_price(("tokenize", "train"), infra="slurm/local"),
    "a budget on an unpriced cluster": to_price(infra="kubernetes/mine", budget=5.0),
    "a budget that spot keeps": to_price(budget=16.0),
    "a budget that nothing keeps": to_price(budget=1.0),
    "a budget that is spent": to_price(("evaluate", "export"), budget=20.0) | {"spent": 25.0},
    "a deadline without a price list": to_price(("train", "evaluate"), gpus="V100:8", deadline=4e9),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """SkyPilot's answer to every question."""
    pytest.importorskip("sky", reason="needs skypilot (pip install '.[cloud]')")
    home = tmp_path_factory.mktemp("sky-home")
    write_catalog(home, ROWS + MORE)
    local = {"pricing": {"cpu": 0.01, "accelerators": {"H100": 3.5}}, "provision_timeout": 60}
    (home / ".sky" / "config.yaml").write_text(yaml.safe_dump({"slurm": {"cluster_configs": {"local": local}}}))
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SKY", "AWS_"))}
    deadlines = {
        "a deadline that all keep": to_price(("train", "evaluate"), deadline=time.time() + 48 * 3600),
        "a deadline without slack for spot": to_price(("train", "evaluate"), deadline=time.time() + 1.1 * 3600),
        "a deadline that none keeps": to_price(("train", "evaluate"), deadline=time.time() + 360),
    }
    done = subprocess.run(
        [sys.executable, "-c", ASKING],
        input=json.dumps(QUESTIONS | deadlines),
        env=inherited | sky_environment(home) | {"PYTHONPATH": str(ROOT)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("ANSWERS")[2])


def only_task(answer: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in answer, answer["error"]
    (task,) = answer["tasks"]
    return task


def place(answer: dict[str, Any]) -> tuple[Any, ...]:
    task = only_task(answer)
    return task["cloud"], task["region"], task["spot"], task["usd"]


# SkyPilot's reading of them


@pytest.mark.parametrize("stage", STAGES)
def test_every_file_is_a_task_that_recovers_from_75_and_leaves_no_machine(answers: dict[str, Any], stage: str) -> None:
    task = only_task(answers[stage])
    assert task["name"] == stage
    assert task["recovery"] == {"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [75]}
    assert task["down"] is True
    assert task["labels"] == {"project": "skytrain"}
    assert list(task["image"].values()) == ["docker:ghcr.io/your-name/skytrain:skypilot"]


def test_the_file_for_vllm_is_a_service_on_one_small_gpu_that_asks_for_a_key(answers: dict[str, Any]) -> None:
    task = only_task(answers["serve"])
    assert (task["name"], task["nodes"], task["cloud"]) == ("serve", 1, "lambda")  # the cheapest
    assert task["secrets"] == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY"]
    read = json.loads(task["yaml"])
    assert read["service"]["readiness_probe"]["path"] == "/health" and read["service"]["replicas"] == 1


def test_a_launch_of_all_stages_is_one_job_a_chain_of_four_tasks(answers: dict[str, Any]) -> None:
    assert answers["all stages"]["name"] == "tiny.v1-12345678"
    assert [task["name"] for task in answers["all stages"]["tasks"]] == list(STAGES)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("train", ("aws", "us-east-1", True, 20.0)),  # the cheapest zone's spot price
        ("no cloud but lambda", ("lambda", "us-east-1", False, 31.92)),
        ("on demand", ("lambda", "us-east-1", False, 31.92)),
        ("spot on gcp", ("gcp", "us-central1", True, 26.0)),
    ],
)
def test_the_cheapest_permitted_machine_wins(answers: dict[str, Any], asked: str, given: Any) -> None:
    assert place(answers[asked]) == given


def test_without_a_machine_that_fits_below_the_price_cap_a_launch_fails_with_one_line(answers: dict[str, Any]) -> None:
    message = answers["nothing cheap enough"]["error"]
    assert message.startswith("UserError: launch: no machine fits: ") and "\n" not in message
    assert message.endswith("; try another --infra or --gpus, or without --spot")


def test_other_gpus_are_requested_eight_to_train_and_one_to_evaluate(answers: dict[str, Any]) -> None:
    assert [task["instance"] for task in answers["other gpus"]["tasks"]] == ["p4de.24xlarge", "one-a100"]


def test_missing_required_values_are_named_at_once(answers: dict[str, Any]) -> None:
    assert "'SKYTRAIN_STORE' is None" in answers["no store"]["error"]


def test_a_launch_has_the_runs_name_in_labels_that_every_cloud_accepts(answers: dict[str, Any]) -> None:
    for task in answers["all stages"]["tasks"]:
        assert task["labels"] == {"project": "skytrain", "run": "tiny-v1-12345678"}
        assert list(task["image"].values()) == [f"docker:{IMAGE}"]


def test_secrets_reach_skypilot_and_no_text_of_a_task(answers: dict[str, Any]) -> None:
    for name in ("train", "all stages"):
        for task in answers[name]["tasks"]:
            assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(task["secrets"])
            assert KEYS["AWS_SECRET_ACCESS_KEY"] not in task["yaml"]


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
    assert {r["instance"] for r in rows(answers["prices"], "export")} == {
        "m6i.xlarge",
        "n2-standard-16",
        "cpu_16x_general",
    }
    placed = {task["name"]: task for task in answers["prices"]["placed"]}
    for stage in STAGES:  # SkyPilot's choice among the machines with type and region, at its price
        chosen = placed[stage]
        (price,) = (
            r["usd_per_hour"]
            for r in rows(answers["prices"], stage)
            if all(r[name] == chosen[name] for name in ("cloud", "region", "instance", "spot"))
        )
        assert price == chosen["usd"] == only_task(answers[stage])["usd"]
    assert only_task(answers["tokenize"])["instance"] == "m6id.4xlarge"


def test_an_own_cluster_has_the_price_of_skypilots_configuration(answers: dict[str, Any]) -> None:
    (train,) = rows(answers["prices on slurm"])
    assert (train["cloud"], train["region"], train["usd_per_hour"]) == ("slurm", "local", 28.0)
    (tokenize,) = rows(answers["prices on slurm"], "tokenize")
    assert tokenize["usd_per_hour"] == 0.16 and "accelerators" not in tokenize


def test_an_unknown_price_is_refused_with_a_budget(answers: dict[str, Any]) -> None:
    refused = answers["a budget on an unpriced cluster"]["error"]
    assert "--budget: can't be promised where a price is unknown" in refused


def test_only_machines_that_are_expected_to_meet_the_limits_are_rented(answers: dict[str, Any]) -> None:
    kept = answers["a deadline that all keep"]
    *spot, standby, _ = kept["train"][0]
    places = ["aws/us-east-1", "aws/us-west-2", "gcp/us-central1"]
    assert [(m["infra"], m["use_spot"]) for m in spot] == [(place, True) for place in places]
    assert kept["ordered"] == ["train", "evaluate"] and "accelerators" not in standby
    assert {row["instance"] for row in rows(kept) if "accelerators" not in row} == {"m6i.xlarge", "n2-standard-16"}
    assert {m["use_spot"] for m in kept["evaluate"][0]} == {False}
    tight = answers["a deadline without slack for spot"]["train"][0]
    assert tight and not any(m["use_spot"] or "accelerators" not in m for m in tight)
    kept = answers["a budget that spot keeps"]
    assert kept.get("train") and {m["use_spot"] for m in kept["train"][0]} == {True}
    for nothing in ("a budget that nothing keeps", "a deadline that none keeps"):
        assert answers[nothing]["error"].startswith("UserError: launch: no machine is within")


@pytest.mark.parametrize(
    ("market", "expected"),
    [
        ("spot is there", ("aws", "us-east-1", True, 20.0)),
        ("spot is gone", ("aws", "us-east-1", False, 0.2)),
    ],
)
def test_with_a_deadline_spot_comes_first_and_a_small_machine_waits_for_it(
    answers: dict[str, Any], market: str, expected: tuple[Any, ...]
) -> None:
    assert place(answers[market]) == expected
    assert only_task(answers[market])["recovery"]["recover_on_exit_codes"] == [75]


def test_limits_that_no_machine_meets_are_refused(answers: dict[str, Any]) -> None:
    for asked, reason in {
        "a budget that is spent": "--budget 20: the run has already cost $25.00; raise the budget to continue",
        "a deadline without a price list": "--deadline: needs a price list of train's machines, ",
    }.items():
        assert reason in answers[asked]["error"]


def test_a_cluster_that_its_job_removes_at_the_same_time_is_down_with_skypilots_answer_mocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sky.client import sdk
    from sky.exceptions import ClusterDoesNotExist

    def gone(request: object) -> None:
        raise ClusterDoesNotExist("Cluster 'export-2' does not exist.")

    monkeypatch.setattr(sdk, "down", lambda cluster: cluster)
    monkeypatch.setattr(sdk, "get", gone)
    take_down("export-2")
