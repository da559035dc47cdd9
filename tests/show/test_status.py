"""The state of runs reads as a person speaks."""

import json
import math

import pytest
from run_records import RUN, done_run

from pipelines.show.status import print_stopped, to_go
from pipelines.tracking.forecast import Forecast, Range
from pipelines.tracking.records import Heartbeat, Progress
from pipelines.verbs.status import status
from trainer.errors import UserError
from trainer.store import LocalStore

HOUR = Range(1.0, 1.0, 1.0)


def rest(hours: tuple[float, float, float], usd: tuple[float, float, float] | None = None) -> Forecast:
    return Forecast(Range(*hours), HOUR, Range(*usd) if usd else None, HOUR)


@pytest.mark.parametrize(
    ("forecast", "text"),
    [
        (
            rest((3 / 60, 4 / 60, 6 / 60), (0.25, 0.31, 0.44)),
            "4 minutes and $0.31 to go (80%: 3 to 6 minutes, $0.25 to $0.44)",
        ),
        (rest((30 / 3600, 42 / 3600, 44.4 / 3600)), "42 seconds to go (80%: 30 to 44 seconds)"),
        (
            rest((1.9, 2.51, 26.0), (150.0, 1234.5, 9999.0)),
            "2.5 hours and $1,234 to go (80%: 1.9 to 26 hours, $150 to $9,999)",
        ),
        (
            rest((48.0, 72.0, math.inf), (1.0, 1.5, math.inf)),
            "3 days and $1.50 to go (80%: at least 2 days, at least $1.00)",
        ),
        (
            rest((math.inf, math.inf, math.inf)),
            "no end in sight: at this rate of interruptions the training makes no progress",
        ),
    ],
)
def test_a_forecast_is_in_a_persons_units(forecast: Forecast, text: str) -> None:
    assert to_go(forecast) == text


def test_a_stopped_run_says_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    running = Heartbeat("r-1", "train", 3, "running", 0.0, 0.0, 0.0)
    stopped = Heartbeat("r-1", "train", 3, "stopped", 0.0, 0.0, 0.0, progress=Progress(step=17))
    print_stopped("r-1", running, stopped, launched=True)
    print_stopped("r-1", running, stopped, launched=False)
    assert capsys.readouterr().out.splitlines() == [
        "r-1: train: attempt 3 is stopped at step 17; once its job is over, skytrain resume r-1 continues",
        "r-1: train: attempt 3 is stopped at step 17; skytrain run run:r-1 continues",
    ]


@pytest.mark.parametrize("key", ["runs/other-12345678.json", "train/other-12345678/MANIFEST.json"])
@pytest.mark.parametrize("body", [b"{", b'{"format": 2}'])
def test_status_of_all_runs_leaves_an_unreadable_one_out_loudly_and_shows_the_others(
    store: LocalStore, capsys: pytest.CaptureFixture[str], key: str, body: bytes
) -> None:
    done_run(store)
    values = json.loads(store.get(f"runs/{RUN}.json") or b"")
    other = values | {"run": "other-12345678", "prefixes": values["prefixes"] | {"train": "train/other-12345678"}}
    store.put("runs/other-12345678.json", json.dumps(other).encode())
    store.put(key, body)
    status(None, store=store.uri, as_json=True)
    out, err = capsys.readouterr()
    shown = [one["run"] for one in json.loads(out)]
    if key.startswith("train/") and b"format" not in body:
        assert {one["run"]: one["state"] for one in json.loads(out)}["other-12345678"] == "damaged"
    else:
        assert shown == [RUN] and err.startswith("other-12345678: left out: ") and f"{store.uri}/{key}" in err
        with pytest.raises(UserError, match=key):
            status(["other"], store=store.uri)
