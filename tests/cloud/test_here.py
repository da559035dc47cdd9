"""The expected hours and disk of a run on this machine, and the consent to a long one."""

from pathlib import Path

import pytest
import yaml
from pipeline_runs import TINY, write_texts
from typer.testing import CliRunner

from pipelines.artifacts.manifest import Manifest, commit
from pipelines.cli import app
from pipelines.cloud.here import run_here
from pipelines.recipe import load_recipe
from pipelines.show.plan import about, here_text
from pipelines.stage import plans_of, run_name
from pipelines.tracking.records import Heartbeat, Progress
from pipelines.tracking.stop_request import read_stop_request, request_stop
from trainer.checkpoint.commits import Commit, TrainState
from trainer.errors import Stopped, UserError
from trainer.store import LocalStore

SMALL = load_recipe("gpt2-124m", ["runtime.device=cpu"])
PLANS = plans_of(SMALL)
TRAIN = PLANS["train"].prefix


def test_a_long_run_on_a_cpu_is_expected_to_take_long_and_says_why(tmp_path: Path) -> None:
    here = run_here(SMALL, PLANS, LocalStore(tmp_path), "export", tmp_path)
    assert here and here.is_long and list(here.hours) == ["tokenize", "train", "evaluate", "export"]
    assert here.hours["train"] > 24 * 30 and 20e9 < here.disk_bytes < 30e9  # the shards alone are 20 GB
    text = "\n".join(here_text(here))
    assert "CPU cores: tokenize " in text and "estimated: 20 GFLOP/s a core" in text
    tokens = run_here(SMALL, PLANS, LocalStore(tmp_path), "tokenize", tmp_path)
    assert tokens and not tokens.is_long and "tokens/s" not in "\n".join(here_text(tokens))
    smoke = load_recipe("smoke")
    assert run_here(smoke, plans_of(smoke), LocalStore(tmp_path), "export", tmp_path) is None


def test_only_the_work_that_is_left_counts_at_the_speed_of_the_runs_own_attempts(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for stage in ("tokenize", "evaluate", "export"):
        plan = PLANS[stage]
        commit(store, Manifest(stage, plan.label, plan.fingerprint, plan.identity, {}, (), {}, {}, "x", 1, 1.0))
    speed = Progress(metrics={"perf/tokens_per_second": 500.0})
    beat = Heartbeat(run_name(PLANS), "train", 1, "interrupted", 1e9, 1e9 + 60, 0.0, progress=speed)
    store.put(f"{TRAIN}/attempts/0001/heartbeat.json", beat.to_json())
    steps = SMALL.train.max_steps - 10
    last = Commit(steps, 1, 1, 0.0, TrainState(step=steps), "", ())
    store.put(f"{TRAIN}/checkpoints/step-{steps:08d}-a0001/COMMIT.json", last.encode())
    here = run_here(SMALL, PLANS, store, "export", tmp_path)
    assert here and list(here.hours) == ["train"] and here.speed.kind == "measured"
    assert here.hours["train"] == 10 * SMALL.train.batch_tokens / 500 / 3600 and not here.is_long
    assert [about(hours) for hours in (0.1, 1.5, 20, 72)] == ["6 min", "90 min", "20 h", "3 days"]


def test_a_run_of_more_than_a_day_needs_consent_and_a_managed_job_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    monkeypatch.chdir(tmp_path)
    long = ["train.max_steps=100000000000", f"tokens.source={tmp_path}/texts/*.txt"]
    store, name = LocalStore(tmp_path / "store"), run_name(plans_of(load_recipe("tiny.yaml", long)))
    request_stop(store, name, "a test")
    command = ["run", "tiny.yaml", "--store", "store", *(word for change in long for word in ("--set", change))]
    with pytest.raises(UserError, match=r"run: tiny.yaml is expected to take .* add --yes to run it here"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert read_stop_request(store, name), "a refused run withdraws no request to stop"
    with pytest.raises(Stopped):  # it got past the question, to the request to stop
        CliRunner().invoke(app, [*command, "--unless-stopped"], catch_exceptions=False)
