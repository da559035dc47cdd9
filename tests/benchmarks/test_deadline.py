"""The simulation of deadlines, benchmarks/deadline.py: no run is late, and no schedule is cheaper than the bound.

tests/cloud/test_deadline_rules.py tests the rules of `launch --deadline` themselves.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import deadline as simulation
from benchmarks import spot_traces
from benchmarks.deadline import Decision, Launched, Machine, Race, replay

TICK = 60.0


def race(ticks: int, work: int, changeover: int, spot: float = 0.3) -> Race:
    return Race(ticks * TICK, changeover * TICK, TICK, work * TICK, 1.0, (spot, 0.3))


@st.composite
def markets(draw: st.DrawFn, least: int = 1) -> tuple[Race, np.ndarray]:
    work, changeover = draw(st.integers(1, 80)), draw(st.integers(1, 6))
    ticks = work + least * changeover + 2 + draw(st.integers(0, 80))
    stretches = draw(st.lists(st.integers(1, 30), min_size=1, max_size=ticks))
    available = np.concatenate([np.full(n, number % 2 == 0) for number, n in enumerate(stretches)])
    if draw(st.booleans()):
        available = ~available
    available = np.pad(available, (0, max(0, ticks - len(available))))[:ticks]
    zones = np.stack([available, np.roll(available, draw(st.integers(0, 20)))])  # a second zone, at another price
    return race(ticks, work, changeover, draw(st.sampled_from([0.1, 0.3, 0.9]))), zones[: draw(st.integers(1, 2))]


@pytest.mark.parametrize("standby", [True, False])
@settings(deadline=None, max_examples=300)
@given(markets(least=3))
def test_a_launched_run_is_on_time(standby: bool, drawn: tuple[Race, np.ndarray]) -> None:
    run, available = drawn
    usd, done = replay(Launched(standby), run, available)
    if len(available) == 2:
        # Nobody can promise to be on time where one machine after another is lost before it trains.
        assert simulation.bound(run, available) <= simulation.bound(run, available[:1]) + 1e-9
        return
    assert done <= run.deadline + 1e-6
    assert simulation.bound(run, available) <= usd + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("change", simulation.CHANGEOVER_TICKS)
def test_on_every_recorded_market_a_launched_run_costs_less_than_on_demand_on_average(
    change: int, shared_data: Path
) -> None:
    traces = spot_traces.load(shared_data / "spot-traces")
    for zones in (*([one] for one in traces), traces):
        tally, slack = simulation.Tally(), min(simulation.SLACKS)
        tally.add(simulation.drawn(zones, slack, change, 0.0, 10, together=False))
        assert tally.late["launched"] == 0
        assert np.mean(tally.paid["launched"]) < 1
        assert np.mean(tally.paid["launched"]) < np.mean(tally.paid["alone"]) + 0.02  # the standby pays
        assert max(tally.paid["launched"]) <= 1.02
        for paid in tally.paid.values():
            assert all(best <= usd + 1e-9 for best, usd in zip(tally.least, paid, strict=True))


DECISIONS: tuple[Decision, ...] = ("spot", "on-demand", "wait")


def test_the_bound_is_the_cheapest_of_all_schedules() -> None:
    # Seven ticks, three choices a tick: all 2187 schedules, on some markets.
    run = race(ticks=7, work=3, changeover=1)
    for bits in (0b0000000, 0b0111010, 0b1111111, 0b1101100, 0b0010111):
        available = np.array([[bool(bits >> tick & 1) for tick in range(7)]])
        plans = product(DECISIONS, repeat=7)
        costs = [usd for plan in plans if (usd := cost_of(plan, run, available))]
        assert simulation.bound(run, available) == pytest.approx(min(costs))


def cost_of(plan: tuple[Decision, ...], run: Race, available: np.ndarray) -> float | None:
    """Dollars of a schedule; None if it takes spot where there is none, or is late."""

    def policy(
        race: Race, now: float, work_left: float, on: Machine | None, has_spot: bool, until_ready: float
    ) -> Decision:
        number = round(now / TICK)
        return plan[number] if number < len(plan) else "on-demand"

    if any(wanted == "spot" and not has_spot for wanted, has_spot in zip(plan, available[0], strict=True)):
        return None
    usd, done = replay(policy, run, available)
    return usd if done <= run.deadline + 1e-6 else None
