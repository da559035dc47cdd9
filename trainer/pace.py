"""The pace of each rank: how long its own device computes in a step, without its waits for the other ranks.

Whole steps take equally long on all ranks, because each waits for the slowest. So a rank measures the part of its step
before the first exchange: on a CPU all micro-batches; on a GPU, by events of its stream, all but the last one, whose
backward pass overlaps with the exchange. A GPU with one micro-batch a step measures nothing. No GPU has run this.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from statistics import median
from typing import TypeVar

import torch

WINDOW = 50  # steps

T = TypeVar("T")


class Pace:
    """The seconds of this rank's own work in each step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def each(self, batches: Iterable[T]) -> Iterator[T]:
        """The micro-batches of a step. The engine asks for one as soon as it has the work of the one before."""
        self._marks.clear()
        self._events.clear()
        self._mark()
        for number, batch in enumerate(batches):
            if number:
                self._mark()
            yield batch
        if self._device.type != "cuda":
            self._mark()

    def _mark(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> float:
        """Of the last step, once its numbers have been read; 0 if it could not be measured."""
        if len(self._events) > 1:
            return self._events[0].elapsed_time(self._events[-1]) / 1e3
        return self._marks[-1] - self._marks[0] if len(self._marks) > 1 else 0.0


class Paces:
    """The paces of all ranks over the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        self._since = 0

    def add(self, seconds: tuple[float, ...]) -> tuple[float, ...] | None:
        """Add a step. Every WINDOW steps the median of each rank; None in between, and for a single rank."""
        self._steps.append(seconds)
        self._since += 1
        if len(seconds) < 2 or self._since < WINDOW or not all(seconds):
            return None
        self._since = 0
        return tuple(median(one) for one in zip(*self._steps, strict=True))
