"""`launch --deadline`: on spot while another lost machine would not make the run late, and then on demand."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import FOLDER_NAME, Project

from pipelines.cloud.handover import (
    AFTER_TRAINING_SECONDS,
    CHANGEOVER_SECONDS,
    DEADLINE,
    LOOK_SECONDS,
    Handover,
    handover_here,
)
from pipelines.cloud.tasks import Wish, documents
from pipelines.recipe import load_recipe
from pipelines.stage import STAGES
from pipelines.tracking.ledger import Billing, Heartbeat
from trainer.config import UserError
from trainer.process import HandedOver, Interrupted, StopSignal

RECIPE = load_recipe("gpt2-124m")
SECONDS_PER_STEP = 0.5
SECONDS = SECONDS_PER_STEP * RECIPE.train.max_steps
SPOT, STEADY = Billing(1.0, machine={"spot": True}), Billing(3.0, machine={"spot": False})


class Signal(StopSignal):
    """pytest keeps its signals."""

    def __init__(self) -> None:
        pass


def asked(
    done: float,
    spare_seconds: float,
    stage: str = "train",
    billing: Billing = SPOT,
    since: float = 200,
    spent: float = 0.0,
    per_step: float = SECONDS_PER_STEP,
    **progress: Any,
) -> StopSignal:
    """What becomes of a run of which a part is done, 100 steps of it here, whose deadline leaves so much to spare."""
    stop, now = Signal(), time.time()
    steps = round(done * RECIPE.train.max_steps)
    left = per_step * (RECIPE.train.max_steps - steps)
    told = {"step": steps, "steps_done": 100, "perf/tokens_per_second": 1.0} | progress  # the last step was slow
    phases = {"compile": 60.0, "train": 80 * per_step, "evaluate": 20 * per_step}
    beat = Heartbeat("run", stage, 1, "running", now - since, now, 1.0, {}, phases, told, machine=billing.machine)
    deadline = now + left + AFTER_TRAINING_SECONDS + spare_seconds
    Handover(deadline, RECIPE, billing, stop, lambda beat: spent).watch(beat)
    return stop


def test_spot_is_left_while_a_lost_machine_and_the_next_one_would_still_be_in_time() -> None:
    assert not asked(0.5, 2 * CHANGEOVER_SECONDS + 60).asked
    left = asked(0.5, 2 * CHANGEOVER_SECONDS - 60)
    assert left.asked and left.ending is HandedOver and left.reason and "19 min of slack" in left.reason


def test_nobody_leaves_shortly_before_the_end_or_before_it_is_known_how_fast_it_goes() -> None:
    assert not asked(1 - 0.5 * CHANGEOVER_SECONDS / SECONDS, 0.0).asked  # to change over would take longer
    assert not asked(0.5, 0.0, steps_done=9).asked
    assert not asked(0.5, 0.0, stage="evaluate").asked


def test_on_demand_is_left_to_look_for_spot_after_an_hour_with_slack_and_from_what_was_saved() -> None:
    per_step = 10 * 3600 / RECIPE.train.max_steps  # ten hours, $30 on demand; five of them are left, for $15
    slack, saved = 4 * CHANGEOVER_SECONDS, 10.0
    look = 2 * CHANGEOVER_SECONDS * 3.0 / 3600

    def looks(done: float = 0.5, spare: float = slack, billing: Billing = STEADY, **more: Any) -> bool:
        stop = asked(done, spare, billing=billing, per_step=per_step, **({"since": LOOK_SECONDS + 1} | more))
        assert not stop.asked or (stop.ending is Interrupted and "look for spot" in str(stop.reason))
        return stop.asked

    hour = 3.0 * (LOOK_SECONDS + 1) / 3600  # this machine's own
    assert looks(spent=15 - hour - saved)
    assert not looks(spent=15 - hour - saved, since=LOOK_SECONDS - 60)
    assert not looks(spent=15 - hour - saved, spare=2 * CHANGEOVER_SECONDS - 60)
    assert not looks(0.95, spent=28.5 - hour - saved)  # half an hour is left: nothing to be saved
    assert looks(spent=15.5 - hour - look) and not looks(spent=16 - hour - look)  # 1% of the bill is ventured
    assert not looks(spent=0.0, billing=Billing(None, machine=STEADY.machine))


def test_only_a_machine_of_known_market_with_a_deadline_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(billing: Billing) -> Handover | None:
        return handover_here(billing, RECIPE, Signal(), lambda beat: 0.0)

    assert here(SPOT) is None
    monkeypatch.setenv(DEADLINE, str(time.time()))
    assert here(SPOT) and here(STEADY) and here(Billing()) is None
    monkeypatch.setenv(DEADLINE, "tomorrow")
    with pytest.raises(UserError, match="SKYTRAIN_DEADLINE=tomorrow: not a time in unix seconds"):
        here(SPOT)


def machines(**wish: Any) -> dict[str, dict[str, Any]]:
    job = documents(Wish("gpt2-124m-12345678", "s3://bucket/prefix", image="a/b@sha256:c", **wish), STAGES)
    return {task["name"]: task for task in job[1:]}


def test_a_launch_with_a_deadline_can_finish_training_on_demand_in_the_task_behind() -> None:
    plain, kept = machines(nodes=2), machines(nodes=2, deadline=1.8e9)
    train, evaluate = kept["train"]["resources"], kept["evaluate"]["resources"]
    spot = [machine for machine in train["any_of"] if machine["use_spot"]]
    steady = [machine for machine in train["any_of"] if not machine["use_spot"]]
    assert spot and {machine["infra"] for machine in spot} <= {machine["infra"] for machine in steady}
    assert sorted(map(str, evaluate["any_of"])) == sorted(map(str, steady))
    assert evaluate["max_hourly_cost"] == train["max_hourly_cost"]
    assert kept["evaluate"]["num_nodes"] == 2 and kept["train"]["envs"][DEADLINE] == "1800000000"
    assert DEADLINE not in kept["evaluate"]["envs"]
    with pytest.raises(UserError, match="--deadline: can't be kept with --spot"):
        machines(deadline=1.8e9, spot=True)
    with pytest.raises(UserError, match="--deadline: can't be kept with --stage train"):
        machines(deadline=1.8e9, until="train")
    with pytest.raises(UserError, match="--deadline: slurm/here,k8s has no spot machines to leave"):
        machines(deadline=1.8e9, infra="slurm/here,k8s")
    assert machines(deadline=1.8e9, infra="slurm/here,aws")["train"]["envs"][DEADLINE]
    assert all(machine["use_spot"] for machine in machines(spot=True)["train"]["resources"]["any_of"])
    assert DEADLINE not in plain["train"]["envs"] and plain["evaluate"]["num_nodes"] == 1


@pytest.mark.slow
def test_a_run_on_spot_without_slack_commits_its_last_step_and_hands_over(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    price = {"cloud": "aws", "spot": True, "usd_per_hour": 1.0, "on_demand_usd_per_hour": 3.0}
    project.environment |= {"SKYTRAIN_PRICES": json.dumps([price]), DEADLINE: f"{time.time() + 60:.0f}"}
    done = project.run("run", "tiny.yaml", "--stage", "train", "--set", "train.max_steps=1000000")
    assert "handed over (deadline: " in done.stderr and "the launch's next task goes on from here" in done.stderr
    newest = project.found("train/*/checkpoints/*/COMMIT.json")[-1]
    assert json.loads(newest.read_text())["step"] == project.rows_committed() > 0
    assert project.report()["state"] == "interrupted" and not project.alive()
