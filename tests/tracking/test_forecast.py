"""The forecast of a run's remaining time and cost comes from its own attempts."""

import math

import pytest

from pipelines.tracking.account import AttemptAccount, StoredHeartbeat, account
from pipelines.tracking.forecast import Forecast, forecast
from pipelines.tracking.records import Heartbeat, Machine, Progress

OWN = Machine()
SPOT = Machine(cloud="aws", spot=True)


def attempts(
    *spans: tuple[float, float],
    machine: Machine,
    price: float | None = 2.0,
    nodes: int = 1,
    state: str = "running",
) -> tuple[AttemptAccount, ...]:
    """Attempts from hour to hour, each starting up for six minutes and then making 100 steps an hour."""
    seen, base = [], 0
    for number, (begin, end) in enumerate(spans, start=1):
        trained = max(0.0, 3600 * (end - begin) - 360)
        steps = int(trained / 36)
        seen.append(
            Heartbeat(
                "run",
                "train",
                number,
                "running" if number < len(spans) else state,
                3600 * begin,
                3600 * end,
                price,
                phases={"setup": 3600 * (end - begin) - trained, "train": trained},
                progress=Progress(resumed_from=base, step=base + steps),
                machine=machine,
                nodes=nodes,
            )
        )
        base += steps
    return account("run", [StoredHeartbeat("train/run", beat) for beat in seen]).attempts


def test_an_undisturbed_run_is_expected_to_keep_its_speed() -> None:
    forecasted = forecast(attempts((0, 3.1), machine=OWN, nodes=2), steps_left=300, now=3.1 * 3600)
    assert forecasted is not None and forecasted.usd is not None
    assert forecasted.hours.low == pytest.approx(3.0) and forecasted.hours.middle == pytest.approx(3.0)
    assert forecasted.machine_hours.middle == pytest.approx(6.0)
    assert forecasted.usd.middle == pytest.approx(12.0)  # two nodes
    assert forecasted.interruptions.middle == 0


def test_lost_machines_make_a_run_later_dearer_and_less_certain() -> None:
    calm = told_of((0, 10.0))
    troubled = told_of((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    assert calm.usd and troubled.usd
    assert troubled.interruptions.middle > calm.interruptions.middle
    assert troubled.hours.middle > calm.hours.middle
    assert troubled.usd.middle > calm.usd.middle
    assert troubled.hours.high - troubled.hours.low > calm.hours.high - calm.hours.low
    steady = forecast(attempts((0, 10.0), machine=Machine(cloud="aws", spot=False)), 400, now=36_000.0)
    assert steady is not None and steady.hours.high < calm.hours.high


def told_of(*spans: tuple[float, float]) -> Forecast:
    forecasted = forecast(attempts(*spans, machine=SPOT), steps_left=400, now=3600 * spans[-1][1])
    assert forecasted is not None
    return forecasted


def test_a_run_without_a_machine_has_to_wait_for_one_first() -> None:
    spans = ((0.0, 2.0), (4.0, 6.0), (8.0, 10.0))
    there = forecast(attempts(*spans, machine=SPOT), steps_left=10, now=36_000.0)
    away = forecast(attempts(*spans, machine=SPOT, state="interrupted"), steps_left=10, now=36_000.0 + 7200)
    assert there is not None and away is not None
    assert there.hours.middle == pytest.approx(0.1)
    assert away.hours.middle == pytest.approx(
        0.1 + 0.1 + 2.0, abs=0.2
    )  # the start-up, and a wait as long as the others
    assert away.usd is not None and away.usd.middle == pytest.approx(2 * 0.2, rel=0.2)


def test_a_run_that_loses_its_machines_before_it_makes_progress_has_no_end() -> None:
    # A start-up of six minutes, on machines that last about two.
    spans = [(1 + number * 0.1, 1 + number * 0.1 + 0.034) for number in range(400)]
    hopeless = attempts((0, 1), *spans, machine=SPOT)
    forecasted = forecast(hopeless, steps_left=10_000, now=3600 * 42.0)
    assert forecasted is not None and forecasted.hours.high == math.inf
