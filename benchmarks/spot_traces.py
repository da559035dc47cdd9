"""Recorded spot markets: when a machine could be had, tick by tick.

The files are those of "Can't Be Late" (Wu et al., NSDI'24; github.com/skypilot-org/spot-traces): JSON with
`metadata.gap_seconds` and `data`, the number of machines available at each tick. For one node, 1 says that it
can be had (so the raw probes of the same zones say, too) and 0 that it can't, or is taken away.
"""

import argparse
import json
import random
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Trace:
    """One zone's market."""

    name: str
    gap_seconds: float
    available: tuple[bool, ...]

    @property
    def seconds(self) -> float:
        return self.gap_seconds * len(self.available)

    @property
    def share(self) -> float:
        """Of all time, how much a machine could be had."""
        return sum(self.available) / len(self.available)

    @cached_property
    def stretches(self) -> list[tuple[float, float]]:
        """From when to when a machine could be had, in seconds.

        A probe tells that it changed since the one before, not when: the moment is drawn in between. Or all
        stretches would be whole ticks long, and an interval that divides a tick would look better than it is.
        """
        draw = random.Random(self.name)  # the same in every process
        changes = [tick for tick in range(1, len(self.available)) if self.available[tick] != self.available[tick - 1]]
        ends = [0.0, *((tick - draw.random()) * self.gap_seconds for tick in changes), self.seconds]
        return list(pairwise(ends))[0 if self.available[0] else 1 :: 2]

    def spells(self, start: float = 0.0) -> list[tuple[float, float]]:
        """The stretches, in seconds after `start`."""
        return [(max(0.0, begin - start), end - start) for begin, end in self.stretches if end > start]

    def starts(self, count: int, room: float) -> list[float]:
        """Moments to begin at, of any phase of the trace, that leave `room` seconds of it."""
        draw = random.Random(self.name)
        return sorted(draw.uniform(0, self.seconds - room) for _ in range(count))


def load(folder: Path) -> list[Trace]:
    """All traces of a folder."""
    traces = []
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text())
        name = path.stem.removeprefix("availability_").removeprefix("preemption_").removeprefix("1-node_")
        data = tuple(bool(machines) for machines in told["data"])
        traces.append(Trace(name, float(told["metadata"]["gap_seconds"]), data))
    if not traces:
        raise SystemExit(f"{folder}: no traces (*.json) there; clone github.com/skypilot-org/spot-traces")
    return traces


def arguments(about: str) -> argparse.ArgumentParser:
    """The options that all simulations have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder of the recorded markets")
    return parser
