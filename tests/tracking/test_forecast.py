"""The forecast of a run's remaining time and cost comes from its own attempts."""

import pytest

from pipelines.tracking.account import AttemptAccount, StoredHeartbeat, account, forecast
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


def rest_of(attempts: tuple[AttemptAccount, ...]) -> tuple[float, float | None]:
    rest = forecast(attempts, steps_left=300)
    assert rest
    return rest.hours, rest.usd


def test_an_undisturbed_run_is_expected_to_keep_its_speed() -> None:
    assert rest_of(attempts((0, 3.1), machine=OWN, nodes=2)) == pytest.approx((3.0, 12.0))  # two nodes
    assert rest_of(attempts((0, 3.1), machine=OWN, price=None)) == (pytest.approx(3.0), None)
    assert forecast(attempts((0, 0.1), machine=OWN), steps_left=300) is None


def test_lost_machines_make_a_run_later_and_dearer() -> None:
    spans = (0.0, 1.1), (2.1, 3.2), (4.2, 5.3)  # 100 steps each; two starts of six minutes, two hours of waits
    assert rest_of(attempts(*spans, machine=SPOT)) == pytest.approx((5.2, 2 * 3.2), rel=0.01)
