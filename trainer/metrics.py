"""What a run tells the world: one JSON line an event, and a clock that gives every second a phase.

Rank 0 appends to `events.jsonl` in its work folder; whoever wants progress, tracking or heartbeats
tails that file, so nobody can hold up a step. The rows since the last commit are also kept in memory
and go into the store with the next checkpoint: a run's series is complete wherever it is resumed.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from trainer.config import ModelConfig

# Dense bf16 peak by a part of the device's name, FLOP/s. Source: NVIDIA's data sheets.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
MFU_FORMULA = "MFU = tokens/s x (6N + 12·L·C·T) / (GPUs x dense bf16 peak), N without position embeddings"


class PhaseClock:
    """Seconds by phase. Exactly one phase is running at any time."""

    def __init__(self, phase: str = "setup", started: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = phase, started if started is not None else time.time()

    @property
    def current(self) -> str:
        return self._phase

    def enter(self, phase: str) -> str:
        """Go on in another phase; the one before."""
        now, before = time.time(), self._phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._phase, self._since = phase, now
        return before

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def so_far(self) -> dict[str, float]:
        """Seconds by phase up to now, the running one included."""
        self.enter(self._phase)
        return dict(self.seconds)

    def inside(self, phase: str, parts: dict[str, float], rest: str = "setup") -> dict[str, float]:
        """Seconds by phase with one phase replaced by its parts, as another process measured them; what
        they leave of it goes to `rest`."""
        seconds = self.so_far()
        whole = seconds.pop(phase, 0.0)
        for name, share in (*parts.items(), (rest, whole - sum(parts.values()))):
            seconds[name] = seconds.get(name, 0.0) + share
        return seconds


class EventLog:
    """Appends events to a JSONL file and keeps the rows that no checkpoint holds yet."""

    def __init__(self, path: Path | None, clock: PhaseClock) -> None:
        self.clock = clock
        self.uncommitted: list[dict[str, Any]] = []
        self._file: TextIO | None = path.open("a", buffering=1) if path else None

    def row(self, step: int, **values: float | int) -> None:
        """One point of the series: `step` updates are done, and these are its metrics."""
        row = {"step": step, "time": round(time.time(), 3), **values}
        self.uncommitted.append(row)
        self.event("row", **row, phases=self.clock.so_far())

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
