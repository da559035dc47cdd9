"""Numbers about a run: seconds by phase, the series of rows, and model FLOPs utilization. No torch in this module."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.base.process import steady_time
from trainer.config.model_config import ModelConfig

# Dense bf16 peak in FLOP/s, by a part of the device's name; the first match counts. Source: NVIDIA's data sheets, which
# give twice as much, with sparsity.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}
MFU_FORMULA = (
    "MFU = tokens/s x (6N + 12·L·C·T) / (GPUs x dense bf16 peak), N without looked-up embeddings, vocabulary padded"
)


class PhaseClock:
    """Seconds by phase. Exactly one phase is active at any time. One thread drives it; any thread may read it."""

    def __init__(self, phase: str = "setup", started: float | None = None) -> None:
        # Seconds by phase, the active phase and its start: replaced as a whole, so that a reader needs no lock.
        self._now: tuple[dict[str, float], str, float] = ({}, phase, steady_time() if started is None else started)
        self.changed: Callable[[], None] = lambda: None  # called after each change of phase

    @property
    def current(self) -> str:
        return self._now[1]

    def enter(self, phase: str) -> str:
        """Enter another phase. Returns the previous one."""
        before, now = self.current, steady_time()
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
        """Seconds by phase up to now, including the active one."""
        seconds, phase, since = self._now
        return {**seconds, phase: seconds.get(phase, 0.0) + (steady_time() if now is None else now) - since}

    def inside(
        self, phase: str, parts: dict[str, float], rest: str = "setup", now: float | None = None
    ) -> dict[str, float]:
        """Seconds by phase, with one phase replaced by the `parts` that another process measured.

        The seconds that the parts do not cover go to `rest`.
        """
        seconds = self.so_far(now)
        whole = seconds.pop(phase, 0.0)
        for name, share in (*parts.items(), (rest, whole - sum(parts.values()))):
            seconds[name] = seconds.get(name, 0.0) + share
        return seconds


def merge_rows(segments: Iterable[Iterable[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a step, ordered by step. The segments of rows come oldest attempt first.

    A step that several attempts did appears once, with the values of the latest one.
    """
    rows: dict[int, dict[str, Any]] = {}
    for segment in segments:
        for row in segment:
            rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a GPU in FLOP/s, by its name; None if it is unknown."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


def mfu(tokens_per_second: float, model: ModelConfig, world_size: int, peak: float) -> float:
    """Model FLOPs utilization by MFU_FORMULA, 0 to 1 (Chowdhery et al. 2022)."""
    return tokens_per_second * model.flops_per_token / (world_size * peak)
