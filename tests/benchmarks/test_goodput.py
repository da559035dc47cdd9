"""`checkpoint_minutes: auto` keeps nearly as much as the best fixed interval, on every recorded market.

The replay is benchmarks/goodput.py. It uses the trainer's own clock of saves.
"""

from pathlib import Path

import pytest

from benchmarks import goodput, spot_traces


def test_auto_is_within_two_percent_of_the_best_fixed_interval_on_every_recorded_market(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "STARTS", 10)
    (large,) = (size for size in goodput.SIZES if size.name == "1558M")  # its saves cost most
    for trace in spot_traces.load(shared_data / "spot-traces"):
        kept = {rule: goodput.over_starts(trace, rule, large, hours=2.0) for rule in goodput.RULES}
        best = max(share for rule, share in kept.items() if rule != "auto")
        assert kept["auto"] >= 0.98 * best, trace.name


def test_a_preempted_machine_keeps_its_commits_and_any_other_machine_keeps_everything() -> None:
    size = goodput.Size("any", stall=1.0, first_stall=1.0, background=5.0, load=10.0, compile=20.0)
    # Saves begin at 70, 131 and 192 s, and commit six seconds later: the last one too late.
    tally = goodput.replay([(0.0, 195.0)], 1.0, size)
    assert tally.billed == 195.0 and tally.started == 30.0
    assert tally.useful == 40.0 + 60.0  # from 30 to 70 s and from 71 to 131 s
    assert tally.stalled == pytest.approx(3.0)
    assert tally.redone == pytest.approx(195 - 30 - 3 - 100)
    assert goodput.replay([(0.0, 500.0)], 1.0, size, machine_seconds=195.0).useful == pytest.approx(195 - 30 - 3)
