"""The progress of `python -m trainer` for a person: one moving line on a terminal, a line every N steps in a log."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

from trainer.events import Event, Row, Skipped, Slow, Started
from trainer.process import log_line

LINES = 100  # of a whole run in a log, unless the user chooses the steps between two lines
REDRAW_SECONDS = 0.1  # a moving line changes at most this often


@dataclass
class Progress:
    """Shows the events of rank 0. `terminal` is None for a log."""

    max_steps: int
    every: int  # steps between two lines of a log
    terminal: TextIO | None = None
    clock: Callable[[], float] = time.monotonic
    metrics: dict[str, float] = field(default_factory=dict)  # the last value of each
    began: tuple[int, float] = (0, 0.0)  # step and time of this start
    drawn: float = float("-inf")

    def __call__(self, event: Event) -> None:
        match event:
            case Started(step, world_size, device):
                self.began = step, self.clock()
                log_line(f"step {step:,} of {self.max_steps:,}: training begins on {world_size} x {device}")
            case Skipped(step, reason):
                log_line(f"update {step:,} skipped: {reason}")
            case Slow(_, reason):
                log_line(f"slower than possible: {reason}")
            case Row(step, _, metrics):
                self.metrics |= metrics
                self._row(step, metrics.get("val/loss"))

    def _row(self, step: int, val_loss: float | None) -> None:
        last = step == self.max_steps
        if self.terminal is None:
            if val_loss is not None:
                log_line(f"step {step:,}: val loss {val_loss:.4f}")
            elif step % self.every == 0 or last:
                log_line(self.line(step))
        elif val_loss is not None or last or self.clock() - self.drawn >= REDRAW_SECONDS:
            self.drawn = self.clock()
            with suppress(OSError):
                # The cursor waits at the line's start: other lines of the log overwrite this one.
                self.terminal.write(f"\r\x1b[K{self.line(step)[: columns(self.terminal) - 1]}\r")
                self.terminal.flush()

    def close(self) -> None:
        """Leave the moving line."""
        if self.terminal and self.metrics:
            with suppress(OSError):
                self.terminal.write("\n")
                self.terminal.flush()

    def line(self, step: int) -> str:
        first, since = self.began
        names = {"train/loss": "train loss {:.4f}", "val/loss": "val loss {:.4f}"}
        names["perf/tokens_per_second"] = "{:,.0f} tokens/s"
        parts = [text.format(self.metrics[name]) for name, text in names.items() if name in self.metrics]
        if step > first and step < self.max_steps:
            left = (self.clock() - since) / (step - first) * (self.max_steps - step)
            parts.append(f"{time_left(left)} left")
        return "  ".join([f"step {step:,} of {self.max_steps:,} ({step / self.max_steps:.0%})", *parts])


def time_left(seconds: float) -> str:
    """5 s, 3 min, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def columns(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
