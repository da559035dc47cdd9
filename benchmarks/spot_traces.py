"""Recorded spot markets: the availability of a machine, tick by tick.

The files come from "Can't Be Late" (Wu et al., NSDI'24; github.com/skypilot-org/spot-traces): JSON with
`metadata.gap_seconds` and `data`, the number of machines available at each tick. For one node, 1 means available (the
raw probes of the same zones agree), 0 means unavailable or preempted.
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
        """Fraction of the time with a machine available."""
        return sum(self.available) / len(self.available)

    @cached_property
    def stretches(self) -> list[tuple[float, float]]:
        """(start, end) of each available period, in seconds.

        Two probes bracket a change; its time is drawn between them. Otherwise all periods would be whole ticks, and a
        checkpoint interval that divides a tick would look better than it is.
        """
        draw = random.Random(self.name)  # the same in every process
        changes = [tick for tick in range(1, len(self.available)) if self.available[tick] != self.available[tick - 1]]
        ends = [0.0, *((tick - draw.random()) * self.gap_seconds for tick in changes), self.seconds]
        return list(pairwise(ends))[0 if self.available[0] else 1 :: 2]

    def spells(self, start: float = 0.0) -> list[tuple[float, float]]:
        """The available periods, in seconds after `start`."""
        return [(max(0.0, begin - start), end - start) for begin, end in self.stretches if end > start]

    def starts(self, count: int, margin: float) -> list[float]:
        """Random start times that leave at least `margin` seconds of the trace."""
        draw = random.Random(self.name)
        return sorted(draw.uniform(0, self.seconds - margin) for _ in range(count))


def load(folder: Path) -> list[Trace]:
    """All traces of a folder."""
    traces = []
    for path in sorted(folder.glob("*.json")):
        trace = json.loads(path.read_text())
        name = path.stem.removeprefix("availability_").removeprefix("preemption_").removeprefix("1-node_")
        data = tuple(bool(machines) for machines in trace["data"])
        traces.append(Trace(name, float(trace["metadata"]["gap_seconds"]), data))
    if not traces:
        raise SystemExit(f"{folder}: no traces (*.json); clone github.com/skypilot-org/spot-traces")
    return traces


def arguments(about: str) -> argparse.ArgumentParser:
    """The options of all simulations."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder of the recorded markets")
    return parser
