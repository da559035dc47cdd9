"""`launch --deadline`: spot while one more lost machine would not make the run late, then on demand."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pipeline_runs import FOLDER_NAME, Project
from stage_work import NoSignals

from pipelines.job.deadline import (
    AFTER_TRAINING_SECONDS,
    DEADLINE,
    Deadline,
    changeover_seconds,
    seconds_left,
    seconds_per_token,
)
from pipelines.recipe.loader import load_recipe
from pipelines.run.run_record import record
from pipelines.run.stage import Work
from pipelines.store.account import StoredHeartbeat, account
from pipelines.store.manifest import ArtifactPlan
from pipelines.store.records import Billing, Heartbeat, Machine, Progress
from trainer.base.process import StopSignal
from trainer.config.errors import HandedOver

CHANGEOVER_SECONDS = changeover_seconds(installs=False)
RECIPE = load_recipe("gpt2-124m")
SECONDS_PER_STEP = 0.5
SPOT = Billing(1.0, machine=Machine(spot=True))


@pytest.fixture(autouse=True)
def _image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machines of the job start from an image."""
    monkeypatch.setenv("SKYTRAIN_IMAGE", "registry/skytrain@sha256:0123")


def asked(done: float, spare_seconds: float, stage: str = "train", steps_done: int = 100) -> StopSignal:
    """The end of a run with 100 steps done, whose deadline leaves the given slack."""
    stop, now = NoSignals(), time.time()
    steps = round(done * RECIPE.train.max_steps)
    left = SECONDS_PER_STEP * (RECIPE.train.max_steps - steps)
    last_step = {"perf/tokens_per_second": 1.0}  # it was slow
    so_far = Progress(steps, resumed_from=steps - steps_done - 1, steps_done=steps_done, metrics=last_step)
    phases = {"compile": 60.0, "train": 80 * SECONDS_PER_STEP, "evaluate": 20 * SECONDS_PER_STEP}
    beat = Heartbeat(
        "run", stage, 1, "running", now - 200, now, 1.0, phases=phases, progress=so_far, machine=SPOT.machine
    )
    Deadline(now + left + spare_seconds, RECIPE, stop).heartbeat(beat)
    return stop


def test_a_run_leaves_spot_while_one_more_lost_machine_would_still_meet_the_deadline() -> None:
    assert not asked(0.5, 3 * CHANGEOVER_SECONDS + 60).asked
    left = asked(0.5, 3 * CHANGEOVER_SECONDS - 60)
    assert left.asked and left.ending is HandedOver and left.reason and "29 min of slack" in left.reason


def test_the_speed_comes_from_the_same_machines_once_they_ran_long_enough() -> None:
    def measured(last: int, gpus: str = "H100:8", nodes: int = 1) -> float | None:
        """The speed of an attempt from step 100 to `last`, 2 s a step, the first step in the phase "compile"."""
        phases = {"compile": 30.0, "train": 2.0 * (last - 101)}
        progress = Progress(last, resumed_from=100, steps_done=last - 100)
        machine = Machine(accelerators=gpus, spot=True)
        beat = Heartbeat("run", "train", 1, "running", 0.0, 1e4, 1.0, phases=phases, progress=progress, nodes=nodes)
        seen = [StoredHeartbeat("train/a", replace(beat, machine=machine))]
        return seconds_per_token(RECIPE.train, ["H100:8"], 1, list(account(seen).attempts))

    assert measured(201) == pytest.approx(2.0 / RECIPE.train.batch_tokens)
    assert measured(200) is measured(102) is measured(201, gpus="H100:1") is measured(201, nodes=2) is None


@pytest.mark.parametrize("left", [2 * CHANGEOVER_SECONDS, 4 * CHANGEOVER_SECONDS])
def test_a_spot_machine_that_comes_too_late_hands_over_before_it_trains(
    left: float, work: Callable[[str], Work]
) -> None:
    late = replace(work("train"), recipe=RECIPE, stop=NoSignals())
    plans = {"tokenize": ArtifactPlan("tokenize", "tiny", {"stage": "tokenize"}), "train": late.plan}
    record(late.store, late.attempt.latest.run, RECIPE, plans, "train")
    late.attempt.update(machine=Machine(cloud="aws", spot=True, accelerators="H100:8"))
    whole = seconds_left(late)
    watch = Deadline(time.time() + whole + left, RECIPE, late.stop)
    if left > 3 * CHANGEOVER_SECONDS:
        return watch.before_build(late)
    with pytest.raises(HandedOver, match="switching to on-demand"):
        watch.before_build(late)


PRICES = [
    {"cloud": "aws", "spot": True, "usd_per_hour": 1.0, "on_demand_usd_per_hour": 3.0, "accelerators": "H100:8"},
    {"cloud": "aws", "spot": False, "usd_per_hour": 0.1, "on_demand_usd_per_hour": 0.1, "accelerators": None},
]
STANDBY = {"SKYTRAIN_PRICES": json.dumps(PRICES), "SKYPILOT_NUM_GPUS_PER_NODE": "0"}


@pytest.mark.slow
def test_a_standby_exits_to_poll_or_hands_over_and_is_on_the_bill(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    project.environment |= STANDBY | {DEADLINE: f"{time.time() + AFTER_TRAINING_SECONDS + 60:.0f}"}
    done = project.run("run", "tiny.yaml", "--stage", "train")
    assert "handed over (deadline: 1 min of slack left: switching to on-demand" in done.stderr
    (one,) = project.found("train/*/attempts/*/heartbeat.json")
    beat = json.loads(one.read_text())
    assert beat["progress"]["waiting"] and beat["state"] == "interrupted" and beat["price_per_hour"] == 0.1
    assert project.report()["state"] == "interrupted" and not project.found("train/*/checkpoints/*")
    project.environment[DEADLINE] = f"{time.time() + 36_000:.0f}"
    project.environment["SKYTRAIN_PRICES"] = json.dumps(PRICES[1:])
    done = project.run("run", "tiny.yaml", "--stage", "train")  # a failed task would end the launch
    assert "handed over (SKYTRAIN_DEADLINE: SKYTRAIN_PRICES has no machine with GPUs" in done.stderr
    project.environment |= STANDBY
    with project.started("run", "tiny.yaml", "--stage", "train") as waiting:
        project.wait_until(lambda: project.heartbeats()[-1]["phases"].get("idle", 0) > 1, waiting)
        waiting.terminate()
        assert waiting.wait() == 75
    del project.environment[DEADLINE], project.environment["SKYPILOT_NUM_GPUS_PER_NODE"]
    project.run("run", "tiny.yaml", "--stage", "train")
    report = project.report()
    assert report["state"] == "done" and 0 < report["goodput"] <= 1
    bill = project.run("report", report["run"]).stdout
    assert "train 3" not in bill and "train 4" in bill
    assert "of waits for spot, in no row above" in bill and "without waits for spot" in bill


@pytest.mark.slow
def test_a_run_on_spot_without_slack_commits_its_last_step_and_hands_over(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    on_cpus = [{**PRICES[0], "accelerators": None}]  # of unknown speed, so the run has to measure it
    project.environment |= {"SKYTRAIN_PRICES": json.dumps(on_cpus), DEADLINE: f"{time.time() + 60:.0f}"}
    done = project.run("run", "tiny.yaml", "--stage", "train", "--set", "train.max_steps=1000000")
    assert "handed over (deadline: " in done.stderr and "the next task of this launch continues" in done.stderr
    newest = project.found("train/*/checkpoints/*/COMMIT.json")[-1]
    assert json.loads(newest.read_text())["step"] == project.rows_committed() > 0
    assert project.report()["state"] == "interrupted" and not project.alive()
