"""The events of a run: their JSON form, their log and their reader."""

from pathlib import Path

import pytest

from trainer.events import (
    KINDS,
    Checkpointed,
    CheckpointFailed,
    Damaged,
    Event,
    EventLog,
    PhaseChanged,
    Row,
    Sampled,
    Skipped,
    Slow,
    Started,
    event_from_json,
    event_to_json,
    read_events,
)
from trainer.metrics import PhaseClock


def test_the_log_has_each_change_of_phase_and_redone_steps_have_their_own(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", PhaseClock(), reached=2)
    for step in range(4):
        log.clock.enter(log.training_phase(step))  # of the step that makes step + 1
        log.row(step + 1)
    events = [e for e in read_events(tmp_path / "events.jsonl") if isinstance(e, Row | PhaseChanged)]
    assert [(type(e), e.phase) for e in events] == [
        *((PhaseChanged, "redone"), (Row, "redone"), (Row, "redone")),
        *((PhaseChanged, "train"), (Row, "train"), (Row, "train")),
    ]
    assert set(events[-1].phases) == {"setup", "redone", "train"}


PHASES = {"setup": 1.5, "train": 2.0}
LINES: dict[str, Event] = {
    '{"event": "row", "step": 3, "time": 1.25, "train/loss": 4.5, "data/digest": 7, '
    '"phases": {"setup": 1.5, "train": 2.0}, "phase": "train"}': Row(
        3, 1.25, {"train/loss": 4.5, "data/digest": 7}, PHASES, "train"
    ),
    '{"event": "phase", "phases": {"setup": 1.5, "train": 2.0}, "phase": "train"}': PhaseChanged(PHASES, "train"),
    '{"event": "start", "step": 0, "world_size": 2, "device": "cpu", "engine": "eager, on cpu", "precision": "fp32", '
    '"parameters": 9, "micro_batch_size": 4, "micro_batch_why": "as configured"}': Started(
        0, 2, "cpu", "eager, on cpu", "fp32", 9, 4, "as configured"
    ),
    '{"event": "damaged", "checkpoint": "run/checkpoints/a", "reason": "b"}': Damaged("run/checkpoints/a", "b"),
    '{"event": "checkpoint", "step": 3, "seconds": 0.5, "bytes": 10}': Checkpointed(3, 0.5, 10),
    '{"event": "checkpoint_failed", "step": 3, "reason": "b", "ended": false}': CheckpointFailed(3, "b"),
    '{"event": "skipped", "step": 3, "reason": "b"}': Skipped(3, "b"),
    '{"event": "slow", "step": 3, "reason": "b"}': Slow(3, "b"),
    '{"event": "sampled", "step": 3, "texts": ["a", "b"]}': Sampled(3, ["a", "b"]),
}


@pytest.mark.parametrize("line", LINES)
def test_an_event_is_a_line_of_json_and_back(line: str) -> None:
    assert event_to_json(LINES[line]) == line
    assert event_from_json(line) == LINES[line]
    assert {type(event) for event in LINES.values()} == set(KINDS.values())
