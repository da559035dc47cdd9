"""The costs of a run add up: every second has a phase, every node a price or none, and nothing counts twice."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.store.account import (
    Account,
    Cost,
    StoredHeartbeat,
    account,
    cost_metrics,
    forecast,
    market_of,
    settled_phases,
)
from pipelines.store.records import HEARTBEAT_SECONDS, Heartbeat, Machine, ProcessId, Progress

HOUR = 3600.0
PREFIX = "train/tiny-1a2b3c4d"


def beat(**changes: Any) -> Heartbeat:
    """An attempt of an hour at a dollar."""
    return replace(Heartbeat("tiny-1a2b3c4d", "train", 1, "done", 0.0, HOUR, 1.0, ProcessId("node-7/boot")), **changes)


def of(*beats: Heartbeat, **options: Any) -> Account:
    return account([StoredHeartbeat(f"{b.stage}/tiny-1a2b3c4d", b) for b in beats], **options)


# --- hours and dollars


def test_hours_and_dollars_are_the_time_between_start_and_last_heartbeat_at_each_ones_price() -> None:
    first = beat(started=1000.0, time=1000.0 + 5400, price_per_hour=31.92, phases={"train": 5000.0, "setup": 400.0})
    second = beat(attempt=2, started=9000.0, time=9000.0 + 1800, price_per_hour=12.0, phases={"train": 1800.0})
    clock_set_back = beat(attempt=3, started=9000.0, time=8000.0, price_per_hour=12.0, phases={"train": 7.0})
    bill = of(first, second, clock_set_back)
    assert (bill.total.hours, bill.total.usd, len(bill.attempts)) == (2.0, pytest.approx(47.88 + 6.0), 3)
    assert {phase: 3600 * part.hours for phase, part in bill.by_phase.items()} == {"train": 6800.0, "setup": 400.0}
    assert of().total == Cost() and of().goodput is None


def test_every_node_is_billed_and_hours_of_unknown_price_are_kept_apart_in_every_sum() -> None:
    four_nodes = beat(price_per_hour=2.0, nodes=4, phases={"train": HOUR})
    unknown = beat(attempt=2, price_per_hour=None, nodes=2, phases={"train": HOUR})
    bill = of(four_nodes, unknown, tokens_before=lambda step: 1000 * step)
    assert bill.total == bill.by_stage["train"] == bill.by_phase["train"] == Cost(6.0, 8.0, 2.0)
    assert cost_metrics(bill)["time/unpriced_hours"] == 2.0
    unpriced = of(beat(price_per_hour=None))
    assert not any("usd" in name for one in (unpriced, of(beat(price_per_hour=0.0))) for name in cost_metrics(one))
    assert bill.usd_per_billion_tokens is None and "cost/usd_per_billion_tokens" not in cost_metrics(bill)
    assert "time/goodput" in cost_metrics(bill) and "time/goodput" not in cost_metrics(of(beat(stage="tokenize")))


def test_dollars_are_divided_by_stage_by_phase_and_by_market() -> None:
    spot = Machine(cloud="aws", spot=True, on_demand_per_hour=3.0)
    bill = of(
        beat(stage="tokenize", phases={"tokenize": HOUR}),
        beat(machine=spot, phases={"train": 0.75 * HOUR, "setup": 0.25 * HOUR}),
        beat(attempt=2, machine=replace(spot, spot=False), price_per_hour=3.0, phases={"train": HOUR}),
    )
    assert {stage: part.usd for stage, part in bill.by_stage.items()} == {"tokenize": 1.0, "train": 4.0}
    assert {phase: part.usd for phase, part in bill.by_phase.items()} == {"tokenize": 1.0, "train": 3.75, "setup": 0.25}
    markets = {market: part.usd for market, part in bill.by_market.items()}
    assert markets == {"own machine": 1.0, "aws spot": 1.0, "aws on demand": 3.0}
    assert bill.savings_usd == 2.0  # an hour of spot at 1 instead of 3
    assert bill.goodput == pytest.approx(1.75 / 3)
    assert market_of(Machine(cloud="gcp")) == "gcp"
    machines = [Machine("aws", "us-east-1", "us-east-1a"), Machine("slurm", "north", "gpu"), Machine("aws"), Machine()]
    assert [machine.location for machine in machines] == ["us-east-1a", "north", None, None]


# --- steps, and the cost of interruptions


def steps(resumed_from: int, step: int, **more: Any) -> Progress:
    return Progress(resumed_from=resumed_from, step=step, **more)


def test_steps_that_a_later_attempt_rolled_back_are_not_kept() -> None:
    bill = of(
        beat(attempt=1, state="running", progress=steps(0, 57)),
        beat(attempt=2, state="interrupted", progress=steps(50, 80, steps_done=30, steps_redone=7)),
        beat(attempt=3, state="failed"),  # never began to train
        beat(attempt=4, state="running", progress=steps(80, 88)),  # died 2 steps after its last heartbeat
        beat(attempt=5, progress=steps(90, 100)),
        tokens_before=lambda step: 10_000_000 * step,
    )
    assert [(a.steps_done, a.steps_kept, a.steps_redone) for a in bill.attempts] == [
        (57, 50, 0),
        (30, 30, 7),
        (0, 0, 0),
        (10, 10, 0),
        (10, 10, 0),
    ]
    assert bill.tokens == 100 * 10_000_000
    assert bill.usd_per_billion_tokens == pytest.approx(5.0)


@pytest.mark.parametrize(("state", "lost"), [("running", 0.3), ("interrupted", 0.3), ("done", 0.1), ("failed", 0.1)])
def test_an_interruption_costs_the_restart_and_the_redone_steps(state: str, lost: float) -> None:
    phases = {"setup": 0.2 * HOUR, "redone": 0.1 * HOUR, "train": 0.7 * HOUR}
    bill = of(beat(state=state, phases={"setup": 0.5 * HOUR, "train": 0.5 * HOUR}), beat(attempt=2, phases=phases))
    assert bill.interruptions.usd == pytest.approx(lost)
    assert bill.deaths == (state == "running")
    assert bill.unseen_seconds == (HEARTBEAT_SECONDS if state == "running" else 0.0)
    assert bill.attempts[0].state == ("lost" if state == "running" else state)


def test_waiting_for_spot_counts_for_an_interruption_only_after_one() -> None:
    wait = {"state": "interrupted", "progress": Progress(waiting=True), "phases": {"idle": HOUR}}
    spot = {"state": "interrupted", "phases": {"setup": 600.0, "train": HOUR - 600}}
    waits = beat(**wait), beat(attempt=2, **wait)
    assert of(*waits, beat(attempt=3, **spot)).interruptions.hours == 0
    assert of(*waits, beat(attempt=3, **spot)).waits == of(*waits).total
    again = of(*waits, *(beat(attempt=n, **made) for n, made in ((3, spot), (4, wait), (5, spot))))
    assert again.interruptions.hours == pytest.approx(1 + 600 / HOUR)
    assert again.goodput == pytest.approx(1 - 600 / HOUR)


@pytest.mark.parametrize(("alive", "deaths"), [(True, 0), (None, 0), (False, 1)])
def test_an_attempt_that_may_be_alive_is_not_lost(alive: bool | None, deaths: int) -> None:
    assert account([StoredHeartbeat(PREFIX, beat(state="running"), None, alive)]).deaths == deaths


# --- what is to come


def trained(number: int, began: float, ended: float, **more: Any) -> Heartbeat:
    """An attempt from hour to hour: it starts up for six minutes, and then makes 100 steps an hour."""
    seconds, state = HOUR * (ended - began) - 360, "running"
    progress, phases = steps(100 * (number - 1), 100 * number), {"setup": 360.0, "train": seconds}
    spot = {"price_per_hour": 2.0, "machine": Machine(cloud="aws", spot=True)}
    times = {"started": HOUR * began, "time": HOUR * ended, "phases": phases, "progress": progress}
    return beat(attempt=number, state=state, **spot | times | more)


def test_the_rest_is_expected_at_the_runs_own_speed_and_lost_machines_make_it_later_and_dearer() -> None:
    def rest_of(*beats: Heartbeat) -> tuple[float, float | None]:
        rest = forecast(of(*beats).attempts, steps_left=300)
        assert rest
        return rest.hours, rest.usd

    steady = trained(1, 0, 1.1, machine=Machine(), nodes=2)
    assert rest_of(steady) == pytest.approx((3.0, 12.0))  # two nodes
    assert rest_of(replace(steady, price_per_hour=None)) == (pytest.approx(3.0), None)
    assert forecast(of(trained(1, 0, 0.1, progress=steps(0, 0))).attempts, steps_left=300) is None
    several = trained(1, 0, 1.1), trained(2, 2.1, 3.2), trained(3, 4.2, 5.3)  # and two hours of waits
    assert rest_of(*several) == pytest.approx((5.2, 2 * 3.2), rel=0.01)


# --- for any attempts


SECONDS = st.floats(0, 1e6)
PHASES = ["setup", "train", "redone", "checkpoint", "evaluate", "idle", "lost"]
BEATS = st.builds(
    lambda attempt, state, started, lasted, price, nodes, phases: beat(
        attempt=attempt,
        state=state,
        started=started,
        time=started + lasted,
        price_per_hour=price,
        nodes=nodes,
        phases=phases,
    ),
    st.integers(1, 5),
    st.sampled_from(["running", "done", "interrupted", "failed", "stale", "stopped"]),
    SECONDS,
    st.floats(-1e6, 1e6),
    st.one_of(st.none(), st.floats(0, 100)),
    st.integers(1, 8),
    st.dictionaries(st.sampled_from(PHASES), st.floats(-10, 1e6)),
)


@given(BEATS)
def test_the_phases_of_an_attempt_sum_to_its_wall_time(one: Heartbeat) -> None:
    wall = max(0.0, one.time - one.started)
    phases = settled_phases(one)
    assert math.fsum(phases.values()) == pytest.approx(wall, rel=1e-6, abs=1e-9)
    assert all(seconds >= 0 for seconds in phases.values())


@given(st.lists(BEATS, max_size=8), st.randoms(use_true_random=False))
def test_every_way_to_divide_the_bill_has_the_same_sum_in_any_order(beats: list[Heartbeat], random: Any) -> None:
    in_order = list({beat.attempt: beat for beat in beats}.values())
    bill = of(*in_order)
    assert bill == of(*random.sample(in_order, len(in_order)))
    for parts in (bill.by_stage, bill.by_phase, bill.by_market):
        for field in ("hours", "usd", "unpriced_hours"):
            assert math.fsum(getattr(part, field) for part in parts.values()) == pytest.approx(
                getattr(bill.total, field), rel=1e-5, abs=1e-9
            )
    assert bill.total.unpriced_hours <= bill.total.hours
    assert bill.interruptions.hours <= bill.total.hours * (1 + 1e-6)
    assert bill.goodput is None or 0 <= bill.goodput <= 1 + 1e-6
