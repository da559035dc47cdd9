"""`skytrain run` is on the bill before it does anything that takes long, and refuses in time."""

import subprocess
import sys
from pathlib import Path

import pytest
from core_bundle import make_bundle
from pipeline_runs import Project

from pipelines.recipe.loader import load_recipe
from pipelines.run.stage import STAGES, plans_of
from pipelines.user.verbs.run import refuse_what_ends_late, reporting
from trainer.base.store import LocalStore
from trainer.config.errors import Interrupted, UserError

HEAVY = (
    "torch",
    "numpy",
    "boto3",
    "mlflow",
    "sky",
    "datasets",
    "pipelines.user.cloud.planner",
    "pipelines.extras.bench.measurements",
)
AT_THE_FIRST_HEARTBEAT = f"""
import os, sys
from pipelines import cli
from pipelines.store.ledger import Attempt
def report(attempt):
    print(attempt.number, *(name for name in {HEAVY} if name in sys.modules), flush=True)
    os._exit(0)
Attempt._report = report
sys.argv[1:] = ["run", "tiny.yaml", "--unless-stopped"]
cli.main()
"""


def test_the_first_heartbeat_of_a_job_waits_for_no_heavy_import(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    done = subprocess.run(
        [sys.executable, "-P", "-c", AT_THE_FIRST_HEARTBEAT],
        cwd=project.folder,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["1"], done.stdout + done.stderr


def test_a_run_says_at_once_that_mlflow_does_not_answer(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    nowhere = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "SKYTRAIN_MLFLOW_FLUSH_SECONDS": "0"}
    project.environment |= nowhere | {"SKYTRAIN_TRACKING": "on"}
    seen = project.run("run", "tiny.yaml", "--stage", "tokenize").stderr
    assert seen.index("mlflow: http://127.0.0.1:9: no answer (ConnectionError); start it") < seen.index("tokenize  ")


def test_inputs_that_evaluate_cannot_read_are_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_HOME", str(tmp_path / "home"))
    store = LocalStore(tmp_path / "store")
    bundle, items = make_bundle(tmp_path / "core"), tmp_path / "hellaswag.jsonl"
    for path in (bundle / "eval_data" / "all" / "copa.jsonl", items):
        path.write_text("no item\n")
    for field, path in (("core", bundle), ("hellaswag", items)):
        recipe = load_recipe("smoke", [f"evaluate.{field}={path}"])
        with pytest.raises(UserError, match=r"(copa|hellaswag).jsonl: line 1"):
            refuse_what_ends_late(recipe, store, plans_of(recipe), [*STAGES], launched=False)
        refuse_what_ends_late(recipe, store, plans_of(recipe), [*STAGES], launched=True)
        refuse_what_ends_late(recipe, store, plans_of(recipe), ["evaluate", "export"], launched=False)


def test_an_error_of_the_report_of_a_run_changes_no_ending(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Interrupted):
        try:
            raise Interrupted("SIGTERM")
        finally:
            with reporting():
                raise KeyError("time")
    assert "its report failed: KeyError: 'time'" in capsys.readouterr().err
