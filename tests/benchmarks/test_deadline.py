"""The simulation of deadlines, benchmarks/deadline.py: nobody is late, and the bound is one.

What `launch --deadline` does itself is in tests/test_handover.py.
"""

import importlib
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def simulation() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("deadline")
    finally:
        sys.path.remove(str(BENCHMARKS))


SIMULATION: Any = simulation()
TICK = 60.0


def race(ticks: int, work: int, changeover: int, spot: float = 0.3) -> Any:
    return SIMULATION.Race(ticks * TICK, work * TICK, changeover * TICK, TICK, 1.0, spot)


@st.composite
def markets(draw: st.DrawFn, least: int = 1) -> tuple[Any, np.ndarray]:
    work, changeover = draw(st.integers(1, 80)), draw(st.integers(1, 6))
    ticks = work + least * changeover + 2 + draw(st.integers(0, 80))
    stretches = draw(st.lists(st.integers(1, 30), min_size=1, max_size=ticks))
    available = np.concatenate([np.full(n, number % 2 == 0) for number, n in enumerate(stretches)])
    if draw(st.booleans()):
        available = ~available
    return race(ticks, work, changeover, draw(st.sampled_from([0.1, 0.3, 0.9]))), available


@settings(deadline=None, max_examples=300)
@given(markets())
def test_whatever_the_market_does_nobody_is_late_and_nobody_pays_more_than_the_purse_allows(
    drawn: tuple[Any, np.ndarray],
) -> None:
    run, available = drawn
    usd, done = SIMULATION.replay(SIMULATION.waiting, run, available)
    assert done <= run.deadline + 1e-6
    assert usd <= (1 + SIMULATION.PURSE) * run.on_demand_usd + 1e-9


@settings(deadline=None, max_examples=300)
@given(markets(least=3))
def test_what_is_launched_is_on_time_and_loses_no_more_than_its_purse_and_one_machine(
    drawn: tuple[Any, np.ndarray],
) -> None:
    run, available = drawn
    usd, done = SIMULATION.replay(SIMULATION.Launched(), run, available)
    assert done <= run.deadline + 1e-6
    room = SIMULATION.ROOM * (SIMULATION.LOOK_SECONDS + TICK) / 3600  # of the last look
    lost = SIMULATION.PURSE * run.on_demand_usd + SIMULATION.venture_usd(run)
    assert usd <= run.on_demand_usd + lost + room + 1e-9


def test_on_every_recorded_market_a_short_changeover_makes_spot_pay_and_never_cost(shared_data: Path) -> None:
    for trace in SIMULATION.spot_traces.load(shared_data / "spot-traces"):
        SIMULATION.STARTS = 3
        bills = SIMULATION.bills_on(trace, slack=1.25, change=1)
        for best, ours in zip(bills["bound"], bills["waiting"], strict=True):
            assert best <= ours + 1e-9
            assert ours <= 1
            assert ours < 1 or best > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("change", SIMULATION.CHANGEOVER_TICKS)
def test_on_every_recorded_market_what_is_launched_costs_less_than_on_demand_on_the_whole(
    change: int, shared_data: Path
) -> None:
    for trace in SIMULATION.spot_traces.load(shared_data / "spot-traces"):
        SIMULATION.STARTS = 10
        bills = SIMULATION.bills_on(trace, slack=min(SIMULATION.SLACKS), change=change)  # asserts that it is on time
        assert np.mean(bills["launched"]) < 1
        assert max(bills["launched"]) <= 1 + SIMULATION.PURSE


def test_the_bound_is_the_cheapest_of_all_schedules() -> None:
    # Seven ticks, three choices a tick: all 2187 schedules, on some markets.
    run = race(ticks=7, work=3, changeover=1)
    for bits in (0b0000000, 0b0111010, 0b1111111, 0b1101100, 0b0010111):
        available = np.array([bool(bits >> tick & 1) for tick in range(7)])
        bills = [
            bill for plan in product(("spot", "on-demand", "wait"), repeat=7) if (bill := follow(plan, run, available))
        ]
        assert SIMULATION.bound(run, available) == pytest.approx(min(bills))


def follow(plan: tuple[str, ...], run: Any, available: np.ndarray) -> float | None:
    """What a schedule costs; None if it asks for spot where there is none, or is late."""

    def policy(_race: object, now: float, *_: object) -> str:
        number = round(now / TICK)
        return plan[number] if number < len(plan) else "on-demand"

    if any(wanted == "spot" and not there for wanted, there in zip(plan, available, strict=True)):
        return None
    usd, done = SIMULATION.replay(policy, run, available)
    return usd if done <= run.deadline + 1e-6 else None


def test_spot_is_left_when_there_is_no_slack_for_another_one() -> None:
    run = race(ticks=100, work=80, changeover=5)
    at = dict(work_left=80 * TICK, spent=0.0, on="spot", spot_available=True)
    assert SIMULATION.waiting(run, now=0.0, until_ready=5 * TICK, **at) == "spot"
    assert not SIMULATION.must_switch(run, now=15 * TICK, work_left=80 * TICK)
    assert SIMULATION.must_switch(run, now=16 * TICK, work_left=80 * TICK)
    assert SIMULATION.waiting(run, now=16 * TICK, **at) == "on-demand"


def test_on_demand_is_left_for_spot_only_with_slack_and_from_what_was_saved() -> None:
    run = race(ticks=3000, work=1000, changeover=5)
    left = 500 * TICK
    saved, nothing = run.on_demand_usd / 4, run.on_demand_usd / 2 + 0.5
    assert SIMULATION.may_leave(run, now=0.0, work_left=left, spent=saved)
    assert not SIMULATION.may_leave(run, now=0.0, work_left=left, spent=nothing)
    assert not SIMULATION.may_leave(run, now=2490 * TICK, work_left=left, spent=saved)


def test_without_spot_a_run_waits_while_it_is_ahead_and_takes_on_demand_when_behind() -> None:
    run = race(ticks=2000, work=1000, changeover=1)
    at = dict(work_left=1000 * TICK, spent=0.0, on=None, spot_available=False)
    assert SIMULATION.waiting(run, now=0.0, **at) == "wait"
    assert SIMULATION.waiting(run, now=240 * TICK, **at) == "wait"  # a quarter of 1000 ticks of slack
    assert SIMULATION.waiting(run, now=260 * TICK, **at) == "on-demand"
    assert SIMULATION.waiting(run, now=260 * TICK, **(at | {"spot_available": True})) == "spot"
    assert SIMULATION.waiting(run, now=260 * TICK, **(at | {"work_left": 900 * TICK})) == "wait"  # ahead of the line
