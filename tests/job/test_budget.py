"""`--budget`: the run stops on a commit before its bill exceeds the budget, whichever costs are on the bill."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_runs import FOLDER_NAME, STEPS, Project
from stage_work import NoSignals
from waiting import LONG_SECONDS

from pipelines.job.budget import (
    RELEASE_SECONDS,
    Budget,
    seconds_until_ask,
    stopping_seconds,
)
from pipelines.recipe.loader import load_recipe
from pipelines.run.run_record import record
from pipelines.run.stage import plans_of, run_name
from pipelines.store.ledger import claim
from pipelines.store.records import Billing, Machine, Progress
from pipelines.store.releases import Release, write_releases
from trainer.base.process import FAILPOINTS
from trainer.base.store import LocalStore
from trainer.config.errors import Stopped, UserError

# --- the rule

dollars, rates, durations = st.floats(0.01, 1e5), st.floats(0.01, 1e3), st.floats(0, 600)


@given(dollars, dollars, rates, durations)
def test_a_run_that_stops_when_asked_has_spent_the_budget_and_no_more(
    budget: float, spent: float, rate: float, stopping: float
) -> None:
    left = seconds_until_ask(budget, spent, rate, stopping)
    if left >= 0:
        assert spent + rate * (left + stopping) / 3600 == pytest.approx(budget, rel=1e-9)
    else:
        assert spent + rate * stopping / 3600 > budget * (1 - 1e-9)  # not even an immediate stop would meet it


# --- the bill


class Bench:
    """A run in its own store, and attempts with given starts and ends."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder)
        recipe = load_recipe("smoke")
        self.plans = plans_of(recipe)
        self.run = run_name(self.plans)
        self.stop = NoSignals()
        record(self.store, self.run, recipe, self.plans, "export")

    def attempt(self, stage: str, number: int, seconds: float, price: float | None, nodes: int = 1) -> Any:
        """An attempt that ended a minute ago after so many seconds."""
        claimed = claim(self.store, self.plans[stage].prefix, self.run, stage, number, Billing(price, "test", nodes))
        assert claimed is not None
        end = time.time() - 60
        claimed.update(started=end - seconds, state="interrupted", time=end)
        key = f"{self.plans[stage].prefix}/attempts/{number:04d}/heartbeat.json"
        self.store.put(key, claimed.latest.to_json())
        return claimed

    def budget(self, usd: float, price: float | None = 3600.0, nodes: int = 1, **machine: Any) -> Budget:
        return Budget(usd, Billing(price, "test", nodes, Machine(**machine)), self.store, self.run, 2048, self.stop)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_timer_stops_the_run_on_time_even_without_further_heartbeats(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.attempt("tokenize", 1, 100, 3600.0)
    stopping = stopping_seconds(Progress(), 2048, bench.stop.grace_seconds, 0.0)
    mine = claim(bench.store, bench.plans["train"].prefix, bench.run, "train", 1, Billing(3600.0, "test"))
    assert mine is not None
    monkeypatch.setattr("pipelines.job.budget.steady_time", lambda: mine.latest.started)
    budget = bench.budget(100 + stopping + 0.1)  # a tenth of a second after the claim it is time
    budget.heartbeat(mine.latest)
    assert not bench.stop.asked
    assert bench.stop.heard.wait(LONG_SECONDS)
    assert bench.stop.ending is Stopped
    assert bench.stop.reason == f"budget: $100 of ${budget.usd:g} are spent; raise --budget to continue"
    monkeypatch.setattr("pipelines.job.budget.steady_time", lambda: mine.latest.started + 0.2)
    bench.stop.reason = None
    budget.heartbeat(mine.latest)
    assert (bench.stop.reason or "").endswith("are spent; raise --budget to continue")


def test_a_spent_budget_begins_nothing(bench: Bench) -> None:
    bench.attempt("train", 1, 100, 3600.0)
    with pytest.raises(Stopped, match=r"budget: \$100 of \$110 are spent; raise --budget to continue"):
        bench.budget(110).start()
    bench.budget(110, price=0.0).start()  # a machine that costs nothing may
    bench.budget(200).start()
    with pytest.raises(Stopped):
        bench.budget(200, cluster="sky-1", nodes=2).start()  # its end is paid too
    assert not bench.stop.asked


def test_a_budget_reserves_the_release_of_machines_as_long_as_it_was_seen_to_take(bench: Bench) -> None:
    rented: dict[str, Any] = {"cluster": "train-3", "cloud": "aws"}
    beat = bench.attempt("train", 1, 100, 3600.0).latest
    key = f"{bench.plans['train'].prefix}/attempts/0001/heartbeat.json"
    bench.store.put(key, replace(beat, machine=Machine(**rented), phases={"provision": 1.0}).to_json())

    def left(spent: float) -> None:
        stopping = stopping_seconds(Progress(), 2048, bench.stop.grace_seconds, 0.0)
        bench.budget(spent + stopping + 5, **rented).start()
        with pytest.raises(Stopped):
            bench.budget(spent + stopping - 5, **rented).start()

    left(100 + 2 * RELEASE_SECONDS)  # that of the first machine, and that of this one
    write_releases(bench.store, bench.run, [Release("train-3", beat.started - 30, beat.time + 40)])
    left(100 + 40 + 2 * 40)


def test_a_budget_needs_a_known_price(bench: Bench) -> None:
    with pytest.raises(UserError, match=r"--budget: the price of this machine is unknown \(unknown: why"):
        Budget(100, Billing(None, "unknown: why"), bench.store, bench.run, 2048, bench.stop)


# --- the command


@pytest.mark.slow
def test_a_run_stops_on_a_commit_within_its_budget_and_a_higher_budget_resumes_it_to_the_same_losses(
    tmp_path: Path, undisturbed: Callable[[int], Project]
) -> None:
    """At a dollar a second. The 8th step waits until the budget stops the run, on a machine of any speed."""
    project = Project(tmp_path / FOLDER_NAME)
    moments = tmp_path / "moments"
    moments.mkdir()
    command = ("run", "tiny.yaml", "--stage", "train", "--price-per-hour", "3600", "--budget")
    project.environment |= {FAILPOINTS: str(moments), "SKYTRAIN_GRACE_SECONDS": "15"}
    with project.started(*command, "60") as process:
        project.wait_until(lambda: project.rows_logged() >= 7, process)
        (moments / "mid-step").touch()
        project.wait_until(lambda: any("notice" in beat["progress"] for beat in project.heartbeats()), process)
        (moments / "mid-step.here").unlink()
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 76, err
    assert "stopped (budget: $" in err and "of $60 are spent; raise --budget to continue)" in err
    del project.environment[FAILPOINTS]
    steps = project.rows_committed()
    commits = project.found("train/*/checkpoints/*/COMMIT.json")
    assert 7 <= max(json.loads(commit.read_text())["step"] for commit in commits) == steps < STEPS
    report = project.report()
    assert report["state"] == "stopped" and 15 < report["usd"] <= 60
    assert not project.alive()

    project.run(*command, "10000")
    assert project.series() == undisturbed(1).series()
    assert project.rows_committed() == STEPS  # no step was done twice
