"""The bill of a run that is killed ten times agrees with an independent stopwatch to within a heartbeat."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_runs import FOLDER_NAME, STEPS, Project, committed

from pipelines.run.runs import read_runs
from pipelines.store.account import Account
from pipelines.store.records import HEARTBEAT_SECONDS

KILLS = 10
PUT_SECONDS = 1.0  # that a heartbeat may take on its way, on a machine that is busy with everything else
LEAVE_SECONDS = 5.0  # from the end of the last attempt to the end of the command: the card, the interpreter
DOLLAR_A_SECOND = ("--price-per-hour", "3600")


def bill_of(project: Project) -> Account:
    (run,) = read_runs(project.store)
    return run.account


def beats_beyond(project: Project, count: int) -> Callable[[], bool]:
    """The first attempt is killed in the moment of its first commit, long before a second heartbeat is due."""
    return (lambda: len(project.heartbeats()) > count) if count else committed(project, 1)


@pytest.mark.slow
def test_hours_and_dollars_of_a_run_killed_ten_times_are_right_to_within_a_heartbeat(tmp_path: Path) -> None:
    project, chance = Project(tmp_path / FOLDER_NAME), random.Random(7)
    meter = tmp_path / "meter"
    project.environment["SKYTRAIN_METER"] = str(meter)
    meter.write_text(f"{time.time()}")  # by the clock that bills
    began = time.monotonic()  # by the stopwatch
    for kill in range(KILLS):
        with project.started("run", "tiny.yaml", *DOLLAR_A_SECOND) as process:
            project.wait_until(beats_beyond(project, kill), process)
            time.sleep(chance.uniform(0.0, 3.0) * (kill % 2))
            project.kill_all(process)
            seconds = time.monotonic() - began
        unbilled = seconds - bill_of(project).total.usd
        assert -0.1 < unbilled < HEARTBEAT_SECONDS + PUT_SECONDS, f"after kill {kill + 1}"
    project.run("run", "tiny.yaml", *DOLLAR_A_SECOND)
    seconds, bill = time.monotonic() - began, bill_of(project)
    assert -0.1 < seconds - bill.total.usd < LEAVE_SECONDS
    assert bill.total.usd == pytest.approx(3600 * bill.total.hours)
    for attempt in bill.attempts:
        assert sum(attempt.phases.values()) == pytest.approx(attempt.time - attempt.started, abs=1e-3)
    assert KILLS - 3 <= bill.deaths <= KILLS  # a kill may fall between two stages
    assert bill.unseen_seconds == bill.deaths * HEARTBEAT_SECONDS
    assert bill.unseen_usd == pytest.approx(bill.unseen_seconds)  # a dollar a second
    assert 0 < bill.by_phase["lost"].usd <= KILLS * HEARTBEAT_SECONDS
    assert sum(a.steps_kept for a in bill.attempts) == STEPS
    trained = [a for a in bill.attempts if a.stage == "train"]
    assert sum(a.steps_done - a.steps_redone for a in trained) <= STEPS
    assert bill.goodput is not None and 0 < bill.goodput < 0.5
    assert bill.interruptions.usd < bill.total.usd
