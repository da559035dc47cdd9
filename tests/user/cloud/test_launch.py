"""`skytrain launch`: its record, its dry run, and the faults that it refuses. test_cluster.py submits jobs."""

import json
import math
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline_runs import TINY, write_texts
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.recipe.loader import load_recipe
from pipelines.run.run_record import record
from pipelines.run.stage import STAGES, planned, run_name
from pipelines.store.manifest import find
from pipelines.user.cloud import launch
from pipelines.user.cloud.launch import Launch, planned_launch
from pipelines.user.cloud.preflight import tuning
from pipelines.user.cloud.request import LaunchRequest
from pipelines.user.cloud.tasks import STAGE
from pipelines.user.verbs.launch import run_here
from trainer.base.store import LocalStore
from trainer.config.errors import UserError

pytestmark = pytest.mark.usefixtures("clean_shell")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and its text, as the working directory."""
    write_texts(tmp_path / "texts")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (tmp_path / ".slurm").mkdir()
    (tmp_path / ".slurm" / "config").write_text("Host here\n  HostName 127.0.0.1\nHost there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_recorded_run_is_identified_by_its_name_and_refuses_another_text(texts: Path) -> None:
    store = LocalStore(texts / "store")
    recipe, plans = planned("tiny.yaml", ["train.max_steps=20"], store)
    name = run_name(plans)
    record(store, name, recipe, plans, "export")
    assert planned(f"run:{name}", [], store) == (recipe, plans)
    with pytest.raises(UserError, match="--set would make it another run"):
        planned(f"run:{name}", ["train.max_steps=30"], store)
    with pytest.raises(UserError, match="no such run"):
        planned("run:another", [], store)
    (texts / "texts" / "0.txt").write_text("something else")
    with pytest.raises(UserError, match="is on record; tokens.source names another text here"):
        planned(f"run:{name}", [], store)


def test_a_dry_run_prints_the_job_alone_on_stdout(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyPilot's log writes to the stdout that it finds when it is imported: the check of --infra does that first."""
    found: list[Any] = []

    def log_as_skypilot(*_: Any) -> None:
        print("\x1b[33mW 11-26 sky.py: a coloured line\x1b[0m", file=found[0])

    monkeypatch.setattr(launch, "check_places", lambda infra: found.append(sys.stdout))
    monkeypatch.setattr(launch, "api_server_is_up", lambda: False)
    monkeypatch.setattr(launch, "dag_of", log_as_skypilot)
    done = CliRunner().invoke(app, ["launch", "tiny.yaml", "--dry-run", "--infra", "slurm/here"])
    assert "a coloured line" in done.stderr and "sky.py" not in done.stdout, done
    header, *tasks = yaml.safe_load_all(done.stdout)
    assert header["name"].startswith("tiny-") and [task["name"] for task in tasks] == ["train", "evaluate"]


def test_a_recipe_with_tune_is_launched_to_its_last_evaluation(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "check_places", lambda infra: None)
    monkeypatch.setattr(launch, "api_server_is_up", lambda: False)
    monkeypatch.setattr(launch, "dag_of", lambda job, secrets: None)
    command = ["launch", "smoke-chat", "--dry-run", "--infra", "slurm/here", "--gpus", "H100:8", "--nodes", "2"]

    def tasks(*options: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, [*command, *options])
        _, *found = yaml.safe_load_all(done.stdout)
        assert ("57 rows, " in done.stderr) == ("export" not in options), done.stderr
        return {task["name"]: task for task in found}

    found = tasks()
    assert list(found) == ["train", "evaluate", "tune"]
    assert found["tune"]["envs"][STAGE] == "evaluate.grpo" and found["tune"]["num_nodes"] == 1
    assert [one["accelerators"] for one in found["tune"]["resources"]["ordered"]] == ["H100:1", "H100:8"]
    assert list(tasks("--stage", "export")) == ["train", "evaluate"]
    assert tasks("--stage", "tune.sft")["tune"]["envs"][STAGE] == "tune.sft"

    (texts / "mine.py").write_text("def score(prompts, completions): return [1.0] * len(prompts)\n")
    reward = {"kind": "function", "function": str(texts / "mine.py:score")}
    step = {"name": "rl", "method": "grpo", "data": "sums.jsonl", "rewards": [reward], "max_answer": 8}
    (texts / "chat.yaml").write_text(yaml.safe_dump(TINY | {"tune": [step]}))
    wrong = {one.what: one.seen for one in tuning(load_recipe("chat.yaml"), ["tune"], True, "an/image")}
    assert wrong["data of tune.rl"] == "sums.jsonl is on this machine"
    assert wrong["tune.rl"] == f"no job runs a function of a recipe ({reward['function']})"
    assert wrong["image"] == "tune needs the package trl, which the image does not have"


def launch_of(recipe: str, store: LocalStore, *changes: str, **options: Any) -> Launch:
    loaded, plans = planned(recipe, changes, store)
    found = planned_launch(LaunchRequest(run_name(plans), store.uri, **options), loaded, plans, store, {})
    assert found
    return found


def test_text_that_only_this_machine_has_is_tokenized_here_before_the_launch(texts: Path) -> None:
    store, own = LocalStore(texts / "store"), f"tokens.source={texts}/texts/*.txt"
    rest = ["train", "evaluate", "export"]
    for recipe, changes, options in (
        ("smoke", (), {"infra": "slurm/here"}),  # every version of Python has another library
        ("tiny.yaml", (), {"infra": "slurm/here"}),  # a relative path
        ("tiny.yaml", (own,), {"infra": "aws"}),
    ):
        launch = launch_of(recipe, store, *changes, **options)
        assert (launch.here, launch.stages, launch.job.stages) == (("tokenize",), rest, ["train", "evaluate"])
        question = launch.question(math.inf)
        assert question.startswith("Run tokenize here, then launch ") and question.endswith(" for an unknown price?")
    cluster = launch_of("tiny.yaml", store, own, infra="slurm/here")
    assert (cluster.here, cluster.stages) == ((), list(STAGES))
    with pytest.raises(UserError, match="skytrain run RECIPE --stage tokenize"):
        launch_of("smoke", store, until="tokenize")

    launch = launch_of("tiny.yaml", store, infra="aws", budget=25.0)
    assert launch.question(4.2).endswith("(train, evaluate, export) for about $4.20 of a budget of $25.00?")
    before = signal.getsignal(signal.SIGINT)
    run_here(launch, "tokenize")
    assert find(store, launch.plans["tokenize"]) and signal.getsignal(signal.SIGINT) is before
    assert launch_of("tiny.yaml", store, infra="aws").here == ()
    step = {"name": "sft", "method": "sft", "data": "addition"}
    tuned = launch_of("tiny.yaml", store, f"tune=[{json.dumps(step)}]", infra="aws", until="evaluate.sft")
    assert tuned.question(4.2).endswith("evaluate.sft) for about $4.20 without tune?")
    only = replace(tuned, stages=["tune.sft", "evaluate.sft"])
    assert only.question(4.2).endswith("(tune.sft, evaluate.sft) for an unknown price?")
