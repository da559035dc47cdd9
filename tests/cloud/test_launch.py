"""`skytrain launch`: its record, its dry run, and the faults that it refuses. test_cluster.py submits jobs."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from cloud_support import KEYS, closed_port
from pipeline_runs import TINY, write_texts
from sky_catalog import sky_environment, write_catalog

from pipelines.artifacts.manifest import find
from pipelines.cloud.checks import Finding
from pipelines.cloud.launch import Launch, planned_launch, report_all
from pipelines.cloud.request import EarlierLaunch, LaunchRecord, LaunchRequest, last_launch, write_launch
from pipelines.show.cloud_plan import print_launch_report
from pipelines.stage import STAGES, planned, run_name
from pipelines.tracking.runs import record
from pipelines.verbs.launch import run_here
from trainer.errors import UserError
from trainer.store import LocalStore

ROOT = Path(__file__).resolve().parents[2]
SKYTRAIN = [sys.executable, "-c", "from pipelines.cli import main; main()"]

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


def test_a_launch_reports_all_faults_before_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("a", "x", "broken", "mend it"), Finding("b", "fine"), Finding("c", "y", "broken", "do that")]
    with pytest.raises(UserError, match="2 of the findings above"):
        report_all(findings, print_launch_report)
    output = capsys.readouterr().out
    assert "WRONG  a: x\n       -> mend it" in output and "   ok  b: fine" in output and "do that" in output


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
    with pytest.raises(UserError, match="is on record: tokens.source names another text on this"):
        planned(f"run:{name}", [], store)


def test_a_recorded_launch_can_be_repeated(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert last_launch(store, "tiny-12345678") is None
    request = LaunchRequest("tiny-12345678", store.uri, nodes=2, spot=True, budget=25.0, variables={"A": "b"})
    earlier = [EarlierLaunch(1e8, ["tokenize"], [6])]
    launched = LaunchRecord(request, ["train", "export"], [7], ["AWS_ACCESS_KEY_ID"], 1e9, earlier)
    write_launch(store, launched)
    assert last_launch(store, "tiny-12345678") == launched
    values = json.loads(launched.to_json())
    values["wish"] = values.pop("request")  # as version 0.1 wrote it
    assert LaunchRecord.from_json(json.dumps(values).encode()) == launched


def given(folder: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SKYTRAIN_", "AWS_"))}
    ours = {"PYTHONPATH": str(ROOT), "SKYTRAIN_TRACKING": "off", "SKYTRAIN_NOTICE": "off", "HOME": str(folder)}
    return subprocess.run(
        [*SKYTRAIN, *arguments], cwd=folder, env=kept | ours | more, capture_output=True, text=True, timeout=300
    )


def dry_run(folder: Path, *arguments: str, **more: str) -> "tuple[subprocess.CompletedProcess[str], list[Any]]":
    done = given(folder, "launch", *arguments, "--dry-run", **more)
    return done, list(yaml.safe_load_all(done.stdout))


def test_a_dry_run_prints_the_job_its_price_and_no_secret(texts: Path) -> None:
    pytest.importorskip("sky", reason="needs skypilot (pip install '.[cloud]')")
    config = {"slurm": {"pricing": {"accelerators": {"H100": 2.0}}}}
    (texts / ".sky").mkdir(exist_ok=True)
    (texts / ".sky" / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["tiny.yaml", "--image", "none", "--nodes", "2", "--gpus", "H100:8", "--budget", "5"]
    arguments += ["--set", f"tokens.source={texts}/texts/*.txt", "--infra", "slurm/here"]
    done, (header, *tasks) = dry_run(texts, *arguments, **KEYS, SKYPILOT_API_SERVER_ENDPOINT=closed_port())
    assert done.returncode == 0 and "SkyPilot's server: not up, so it is unknown" in done.stderr
    assert header["name"].startswith("tiny-") and [task["name"] for task in tasks] == list(STAGES)
    assert [task["num_nodes"] for task in tasks] == [1, 2, 1, 1]
    (price,) = json.loads(tasks[1]["envs"]["SKYTRAIN_PRICES"])
    assert price["usd_per_hour"] == 16.0
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in done.stdout + done.stderr


def test_a_dry_run_names_every_fault_at_once_and_starts_no_server(texts: Path) -> None:
    pytest.importorskip("sky", reason="needs skypilot (pip install '.[cloud]')")
    write_catalog(texts)
    mark = uuid.uuid4().hex
    environment = sky_environment(texts) | {"HTTPS_PROXY": "http://127.0.0.1:1", "SKYTRAIN_TEST_RUN": mark}
    environment |= {"SKYTRAIN_STORE_SECONDS": "1", "COLUMNS": "80"}
    done, jobs = dry_run(texts, "gpt2-124m", "--store", "s3://bucket/prefix", **environment)
    (train,) = (task for task in jobs if task["name"] == "train")
    prices = {row["usd_per_hour"] for row in json.loads(train["envs"]["SKYTRAIN_PRICES"])}
    assert done.returncode == 2 and {20.0, 31.92} <= prices
    assert all(f"WRONG  {what}" in done.stderr for what in ("credentials", "store", "hellaswag"))
    assert done.stderr.splitlines()[-1].startswith("error: launch: 3 of the findings above")
    assert max(map(len, done.stderr.splitlines()[:-1])) <= 80
    assert [one.pid for one in psutil.process_iter() if environment_of(one) == mark] == []


def environment_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("SKYTRAIN_TEST_RUN", "")
    except psutil.Error:
        return ""


ASKING = """
import json, sys
from pipelines.cloud.skypilot import check_places
from trainer.errors import UserError
for place in sys.argv[1:]:
    try:
        print(json.dumps(check_places(place)))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def test_a_place_that_does_not_exist_is_refused_with_the_names_there_are(texts: Path) -> None:
    pytest.importorskip("sky", reason="needs skypilot (pip install '.[cloud]')")
    write_catalog(texts)
    answers = {
        "mars": "--infra mars: Cloud 'mars' is not a valid cloud among ",
        "slurm/WRONG": "Cluster WRONG not found in Slurm config",
        "aws/us-east-9": "Did you mean one of these: 'us-east-1, us-east-2, us-west-2'?",
        "gcp,lambda/mars": "--infra lambda/mars: Invalid region 'mars'",
        "aws/us-east-1/us-east-1a,slurm/there,Slurm,gcp, lambda/us-east-1,k8s": None,
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SKY", "AWS_", "KUBE"))}
    done = subprocess.run(
        [sys.executable, "-c", ASKING, *answers],
        env=kept | sky_environment(texts) | {"PYTHONPATH": str(ROOT)},
        cwd=texts,
        capture_output=True,
        text=True,
    )
    for place, line, expected in zip(answers, done.stdout.splitlines(), answers.values(), strict=True):
        answer = json.loads(line)
        assert answer is None if expected is None else expected in answer, (place, answer, done.stderr)


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
        assert (launch.here, launch.stages, launch.job.stages) == (("tokenize",), rest, rest)
        assert launch.question.startswith("Run tokenize here, then launch ")
    cluster = launch_of("tiny.yaml", store, own, infra="slurm/here")
    assert (cluster.here, cluster.stages) == ((), list(STAGES))
    with pytest.raises(UserError, match="skytrain run RECIPE --stage tokenize"):
        launch_of("smoke", store, until="tokenize")

    launch = launch_of("tiny.yaml", store, infra="aws")
    before = signal.getsignal(signal.SIGINT)
    run_here(launch, "tokenize")
    assert find(store, launch.plans["tokenize"]) and signal.getsignal(signal.SIGINT) is before
    assert launch_of("tiny.yaml", store, infra="aws").here == ()
