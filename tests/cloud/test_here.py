"""The expected hours and disk of a run on this machine, and the consent to a long one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from pipeline_runs import SHIPPED_CLI, TINY, write_texts

from pipelines.artifacts.manifest import Manifest, commit
from pipelines.cloud.here import run_here
from pipelines.recipe import load_recipe
from pipelines.show.plan import about, here_text
from pipelines.stage import plans_of, run_name
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing, Machine
from pipelines.tracking.stop_request import read_stop_request, request_stop
from trainer.commits import Commit, TrainState
from trainer.store import LocalStore

ON_CPU = ["runtime.device=cpu"]
SMALL = load_recipe("gpt2-124m", ON_CPU)
PLANS = plans_of(SMALL)
TRAIN = PLANS["train"].prefix


def test_a_long_run_on_a_cpu_is_expected_to_take_long_and_says_why(tmp_path: Path) -> None:
    here = run_here(SMALL, PLANS, LocalStore(tmp_path), "export", tmp_path)
    assert here and here.is_long and list(here.hours) == ["tokenize", "train", "evaluate", "export"]
    assert here.tokens["tokenize"] == 10_000_000_000 and here.hours["train"] > 24 * 30
    assert 20e9 < here.disk_bytes < 30e9  # the shards alone are 20 GB
    text = "\n".join(here_text(here))
    assert "CPU cores: tokenize 10.0B tokens" in text and "estimated: 60% of a matrix product timed here" in text
    tokens = run_here(SMALL, PLANS, LocalStore(tmp_path), "tokenize", tmp_path)
    assert tokens and not tokens.is_long and "tokens/s" not in "\n".join(here_text(tokens))


def test_a_short_run_is_not_estimated(tmp_path: Path) -> None:
    smoke = load_recipe("smoke")
    assert run_here(smoke, plans_of(smoke), LocalStore(tmp_path), "export", tmp_path) is None


def test_only_the_work_that_is_left_counts_at_the_speed_of_the_runs_own_attempts(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for stage in ("tokenize", "evaluate", "export"):
        plan = PLANS[stage]
        commit(store, Manifest(stage, plan.label, plan.fingerprint, plan.identity, {}, (), {}, {}, "x", 1, 1.0))
    claim(store, TRAIN, run_name(PLANS), "train", 1, Billing(0.0, machine=Machine()))
    rows = [{"step": i, "perf/tokens_per_second": 500.0} for i in range(1, 8)]
    store.put(f"{TRAIN}/metrics/step-00000007-a0001.jsonl", "\n".join(map(json.dumps, rows)).encode())
    steps = SMALL.train.max_steps - 10
    last = Commit(steps, 1, 1, 0.0, TrainState(step=steps), "", ())
    store.put(f"{TRAIN}/checkpoints/step-{steps:08d}-a0001/COMMIT.json", last.encode())
    here = run_here(SMALL, PLANS, store, "export", tmp_path)
    assert here and list(here.hours) == ["train"] and here.speed.kind == "measured"
    assert here.hours["train"] == 10 * SMALL.train.batch_tokens / 500 / 3600 and not here.is_long


def test_a_duration_is_said_in_the_unit_that_fits() -> None:
    assert [about(hours) for hours in (0.1, 1.5, 20, 72)] == ["6 min", "90 min", "20 h", "3 days"]


def test_a_run_of_more_than_a_day_needs_consent_and_a_managed_job_has_it(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    long = ["train.max_steps=100000000000", f"tokens.source={tmp_path}/texts/*.txt"]
    store, name = LocalStore(tmp_path / "store"), run_name(plans_of(load_recipe(str(tmp_path / "tiny.yaml"), long)))
    request_stop(store, name, "a test")

    def run(*options: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", SHIPPED_CLI, "run", "tiny.yaml", "--store", "store", *options]
        command += [word for change in long for word in ("--set", change)]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SKYTRAIN_")}
        return subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=100)

    refused = run()
    assert refused.returncode == 2 and read_stop_request(store, name), "a refused run withdraws no request to stop"
    *_, error = refused.stderr.splitlines()
    assert error.startswith("error: run: tiny.yaml is expected to take ") and "add --yes to run it here" in error
    assert "plan tiny.yaml --cloud" in error and "launch tiny.yaml" in error
    assert "expected on " in refused.stderr and "disk: " in refused.stderr
    assert run("--unless-stopped").returncode == 76  # it got past the question, to the request to stop
