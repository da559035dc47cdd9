"""What a run tells the world: one JSON line an event, and a clock that gives every second a phase.

Rank 0 appends to `events.jsonl` in its work folder; whoever wants progress, tracking or heartbeats
tails that file, so nobody can hold up a step. The rows since the last commit are also kept in memory
and go into the store with the next checkpoint: a run's series is complete wherever it is resumed.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from trainer.config import ModelConfig

# Dense bf16 peak by a part of the device's name, the first that fits, FLOP/s. Source: NVIDIA's data sheets, which say
# twice as much, with sparsity.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}
MFU_FORMULA = "MFU = tokens/s x (6N + 12·L·C·T) / (GPUs x dense bf16 peak), N without position embeddings"


class PhaseClock:
    """Seconds by phase. Exactly one phase is running at any time. Any thread may read it, one drives it."""

    def __init__(self, phase: str = "setup", started: float | None = None) -> None:
        # What was, what is, and since when: replaced as a whole, so that a reader needs no lock.
        self._now: tuple[dict[str, float], str, float] = ({}, phase, time.time() if started is None else started)
        self.changed: Callable[[], None] = lambda: None  # called after each change of phase

    @property
    def current(self) -> str:
        return self._now[1]

    def enter(self, phase: str) -> str:
        """Go on in another phase; the one before."""
        before, now = self.current, time.time()
        if phase != before:
            self._now = (self.so_far(now), phase, now)
            self.changed()
        return before

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def so_far(self, now: float | None = None) -> dict[str, float]:
        """Seconds by phase up to now, the running one included."""
        seconds, phase, since = self._now
        return {**seconds, phase: seconds.get(phase, 0.0) + (time.time() if now is None else now) - since}

    def inside(
        self, phase: str, parts: dict[str, float], rest: str = "setup", now: float | None = None
    ) -> dict[str, float]:
        """Seconds by phase with one phase replaced by its parts, as another process measured them; what
        they leave of it goes to `rest`."""
        seconds = self.so_far(now)
        whole = seconds.pop(phase, 0.0)
        for name, share in (*parts.items(), (rest, whole - sum(parts.values()))):
            seconds[name] = seconds.get(name, 0.0) + share
        return seconds


class EventLog:
    """Appends events to a JSONL file and keeps the rows that no checkpoint holds yet.

    Steps up to `reached` were done before, and lost: doing them again is a phase of its own.
    """

    def __init__(self, path: Path | None, clock: PhaseClock, reached: int = 0) -> None:
        self.clock, self.reached = clock, reached
        clock.changed = self.phase
        self.uncommitted: list[dict[str, Any]] = []
        self._file: TextIO | None = path.open("a", buffering=1) if path else None

    def row(self, step: int, **values: float | int) -> None:
        """One point of the series: `step` updates are done, and these are its metrics."""
        row = {"step": step, "time": round(time.time(), 3), **values}
        self.uncommitted.append(row)
        self.event("row", **row, phases=self.clock.so_far(), phase=self.clock.current)

    def phase(self) -> None:
        """Tell where the seconds went up to now, and what is going on."""
        self.event("phase", phases=self.clock.so_far(), phase=self.clock.current)

    def training_phase(self, step: int) -> str:
        """The phase of the step that follows `step`."""
        return "redone" if step < self.reached else "train"

    def event(self, event: str, **values: Any) -> None:
        if self._file:
            with suppress(OSError):  # a full disk: who follows misses lines, and the next checkpoint has the rows
                self._file.write(json.dumps({"event": event, **values}) + "\n")


def merge_rows(segments: Iterable[Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a step, in order, from segments of rows given oldest attempt first.

    A step that was redone appears once, as the later attempt did it.
    """
    rows: dict[int, dict[str, Any]] = {}
    for segment in segments:
        for row in segment:
            rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU by its name, FLOP/s, or None if it isn't known."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


def mfu(tokens_per_second: float, model: ModelConfig, world_size: int, peak: float) -> float:
    """Model FLOPs utilization by MFU_FORMULA, 0 to 1 (Chowdhery et al. 2022)."""
    return tokens_per_second * model.flops_per_token / (world_size * peak)
