"""`checkpoint_minutes: auto` keeps about as much as the best fixed interval would, whatever the market.

The replay is that of benchmarks/goodput.py; it asks the trainer's own clock of saves.
"""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_auto_is_within_two_percent_of_the_best_fixed_interval_on_every_recorded_market(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    goodput = importlib.import_module("goodput")
    monkeypatch.setattr(goodput, "STARTS", 10)
    (large,) = (size for size in goodput.SIZES if size.name == "1558M")  # with the dearest saves
    for trace in goodput.spot_traces.load(shared_data / "spot-traces"):
        kept = {rule: goodput.over_starts(trace, rule, large, hours=2.0) for rule in goodput.RULES}
        best = max(share for rule, share in kept.items() if rule != "auto")
        assert kept["auto"] >= 0.98 * best, trace.name


def test_a_machine_that_is_taken_away_keeps_what_was_committed_and_one_that_is_not_keeps_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    goodput = importlib.import_module("goodput")
    size = goodput.Size("any", stall=1.0, first_stall=1.0, background=5.0, load=10.0, compile=20.0)
    # Saves begin at 70, 131 and 192 s and are committed six seconds later: the last one too late.
    tally = goodput.replay([(0.0, 195.0)], 1.0, size)
    assert tally.billed == 195.0 and tally.started == 30.0
    assert tally.kept == 40.0 + 60.0  # from 30 to 70 s and from 71 to 131 s
    assert tally.stalled == pytest.approx(3.0)
    assert tally.redone == pytest.approx(195 - 30 - 3 - 100)
    assert goodput.replay([(0.0, 500.0)], 1.0, size, machine_seconds=195.0).kept == pytest.approx(195 - 30 - 3)
