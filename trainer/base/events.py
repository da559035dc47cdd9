"""The events of a training process: one JSON line each, written by rank 0 and read by the process that follows it.

Rank 0 appends to `events.jsonl` in its work folder. Progress, tracking and heartbeats read that file, so that none of
them can delay a step. EventLog also keeps the rows since the last commit; the next checkpoint stores them. So the
series of metrics is complete wherever the run resumes. No torch in this module.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, get_args

from trainer.base.metrics import PhaseClock
from trainer.base.process import steady_time


@dataclass(frozen=True)
class Row:
    """One point of the series: metrics after `step` updates, and the seconds by phase until then."""

    step: int
    time: float  # unix seconds
    metrics: dict[str, float]  # by name, such as "train/loss"
    phases: dict[str, float]  # seconds by phase
    phase: str  # the current one
    samples: list[str] | None = None  # texts that the weights generate


@dataclass(frozen=True)
class PhaseChanged:
    """The clock entered another phase."""

    phases: dict[str, float]  # seconds by phase
    phase: str  # the new one


@dataclass(frozen=True)
class Started:
    """The ranks are ready for their first step, after `step` updates of earlier attempts."""

    step: int
    world_size: int
    device: str
    engine: str  # which engine on which device, and the reason
    precision: str
    parameters: int
    micro_batch_size: int
    micro_batch_why: str


@dataclass(frozen=True)
class Checkpointed:
    """The checkpoint of `step` is committed, `seconds` after its copy began."""

    step: int
    seconds: float


@dataclass(frozen=True)
class CheckpointFailed:
    """The checkpoint of `step` was not committed; training continues, or the last save is repeated if it has ended."""

    step: int
    reason: str
    ended: bool = False


@dataclass(frozen=True)
class Warned:
    """Something that people should know: a damaged checkpoint, an update that is not applied, a slow kernel."""

    message: str


@dataclass(frozen=True)
class Measuring:
    """How far an evaluation of the final weights is, for people."""

    note: str


EVENTS_FILE = "events.jsonl"  # in the work folder of an attempt
BYTES_AT_ONCE = 1 << 19  # some 1,000 rows

Event = Row | PhaseChanged | Started | Checkpointed | CheckpointFailed | Warned | Measuring

KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


def event_to_json(event: Event) -> str:
    """The event as one line, without its newline."""
    return json.dumps({"event": type(event).__name__, **vars(event)}, allow_nan=False)


def event_from_json(line: str) -> Event:
    """The event in a line that `event_to_json` made. ValueError for any other line."""
    try:
        values: dict[str, Any] = json.loads(line)
        return KINDS[values.pop("event")](**values)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an event of training: {line[:200]!r} ({error!r})") from error


def events_after(path: Path, offset: int) -> tuple[list[Event], int]:
    """The next events of a file that is being written, from a byte offset on, and the offset behind them; none without
    the file. Leaves out lines that a full disk has cut."""
    events: list[Event] = []
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        for line in file.readlines(BYTES_AT_ONCE):
            if line.endswith(b"\n"):
                offset += len(line)
                with suppress(ValueError):
                    events.append(event_from_json(line.decode()))
    return events, offset


class EventLog:
    """Appends events to a JSONL file, and keeps the rows that no checkpoint holds yet.

    Earlier attempts already did the steps up to `reached` and lost them: repeating them is a phase of its own. `watch`
    gets every event, too.
    """

    def __init__(
        self,
        path: Path | None,
        clock: PhaseClock,
        reached: int = 0,
        watch: Callable[[Event], None] | None = None,
    ) -> None:
        self.clock, self.reached, self.watch = clock, reached, watch
        clock.changed = self._phase_changed
        self.uncommitted: list[dict[str, Any]] = []
        self._file: TextIO | None = path.open("a", buffering=1) if path else None

    def row(self, step: int, metrics: Mapping[str, float], samples: list[str] | None = None) -> None:
        """Log the metrics after `step` updates, without those that JSON cannot represent, and generated texts."""
        now = round(steady_time(), 3)  # the clock of the bill, on which reports place it
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        texts = {"samples": samples} if samples else {}
        self.uncommitted.append({"step": step, "time": now, **metrics, **texts})
        self.write(Row(step, now, metrics, self.clock.so_far(), self.clock.current, **texts))

    def write(self, event: Event) -> None:
        if self.watch:
            self.watch(event)
        if self._file:
            with suppress(OSError):  # a full disk: the follower misses lines, and the next checkpoint has the rows
                self._file.write(event_to_json(event) + "\n")

    def _phase_changed(self) -> None:
        self.write(PhaseChanged(self.clock.so_far(), self.clock.current))
