"""The events of a run: their JSON form, their log and their reader."""

import time
from pathlib import Path

import pytest
from trainer_command import read_events

from trainer.base.events import (
    EventLog,
    PhaseChanged,
    Row,
)
from trainer.base.metrics import PhaseClock


def test_the_log_has_each_change_of_phase_and_redone_steps_have_their_own(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", PhaseClock(), reached=2)
    for step in range(4):
        log.clock.enter("redone" if step < log.reached else "train")
        log.row(step + 1, {})
    events = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, Row | PhaseChanged)]
    assert [(type(e), e.phase) for e in events] == [
        *((PhaseChanged, "redone"), (Row, "redone"), (Row, "redone")),
        *((PhaseChanged, "train"), (Row, "train"), (Row, "train")),
    ]
    assert set(events[-1].phases) == {"setup", "redone", "train"}


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_steps_moves_no_row(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    log, real = EventLog(None, PhaseClock()), time.time
    log.row(1, {"train/loss": 4.5})
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    log.row(2, {"train/loss": 4.25})
    assert 0 <= log.uncommitted[1]["time"] - log.uncommitted[0]["time"] < 60
