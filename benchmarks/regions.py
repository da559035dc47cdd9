"""The bill of a launch that may take spot from several zones, against the cheapest schedule over the same zones.

    python -m benchmarks.regions --traces DIR

Replays recorded spot markets as benchmarks/deadline.py does, with all zones of a set at once: when a machine is lost,
or a poll asks for spot, the launch takes the zone with the best score of those that have a machine. The score is that
of `launch`: pipelines.cloud.estimates.usd_per_useful_hour, with the zone's price and its machines' life as this run's
ledger knows it. No score is needed where at most one zone has a machine.

Sets: all seven zones, each from a random point of its own record (they were recorded at three times); and the zones of
each time, at the same instant. The records have no prices. So each set runs twice: all zones at SPOT, and zones at
prices that differ by up to SPREAD, drawn anew for each run.
"""

import random
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from benchmarks import spot_traces
from benchmarks.deadline import (
    CHANGEOVER_TICKS,
    HOURS,
    ON_DEMAND,
    SLACKS,
    SPOT,
    TICK,
    Choice,
    Launched,
    Race,
    bound,
    grid,
    replay,
)
from benchmarks.spot_traces import Trace
from pipelines.cloud.estimates import StageWork, usd_per_useful_hour
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES

STARTS, STARTS_OF_ALL = 40, 280  # for each deadline and changeover: 1,680 runs over all zones
SPREAD = 0.2  # of the price, up and down
SEGMENT_HOURS = 1 / 60  # between two commits


def by_score(race: Race, hours: list[float], losses: list[int], zones: list[int]) -> int:
    """The zone with the least expected dollars for a useful hour."""
    job = StageWork(HOURS, SEGMENT_HOURS, start=race.changeover / 3600)

    def score(zone: int) -> float:
        between = (PRIOR_SECONDS_BETWEEN_FAILURES / 3600 + hours[zone]) / (1 + losses[zone])
        return usd_per_useful_hour(job, race.spot_per_hour[zone], between)

    return min(zones, key=score)


def by_price(race: Race, hours: list[float], losses: list[int], zones: list[int]) -> int:
    return min(zones, key=lambda zone: race.spot_per_hour[zone])


CHOICES: dict[str, Choice] = {"score": by_score, "price": by_price}


def windows(traces: list[Trace], ticks: int, starts: int, together: bool) -> list[NDArray[np.bool_]]:
    """The markets of so many runs: zones x ticks each. `together`: at the same instant of the records."""
    grids = [grid(trace)[1] for trace in traces]
    draw, found = random.Random(f"{traces[0].name} {together}"), []
    for _ in range(starts):
        first = draw.randrange(min(map(len, grids)) - ticks)
        offsets = [first if together else draw.randrange(len(one) - ticks) for one in grids]
        found.append(np.stack([one[at : at + ticks] for one, at in zip(grids, offsets, strict=True)]))
    return found


def races(slack: float, change: int, zones: int, spread: float, runs: int) -> list[Race]:
    """The races of so many runs, on ticks of TICK seconds."""
    work, draw = round(HOURS * 3600 / TICK) * TICK, random.Random(f"{slack} {change} {spread}")
    ticks = int(slack * work / TICK)
    prices = [tuple(SPOT * draw.uniform(1 - spread, 1 + spread) for _ in range(zones)) for _ in range(runs)]
    return [Race(ticks * TICK, change * TICK, TICK, work, ON_DEMAND, one) for one in prices]


def compare(traces: list[Trace], starts: int, together: bool, spread: float) -> None:
    """Print a line for a set of zones."""
    least: list[float] = []
    paid: dict[str, list[float]] = {name: [] for name in CHOICES}
    late = dict.fromkeys(CHOICES, 0)
    for slack in SLACKS:
        for change in CHANGEOVER_TICKS:
            ticks = int(slack * round(HOURS * 3600 / TICK))
            markets = windows(traces, ticks, starts, together)
            for race, market in zip(races(slack, change, len(traces), spread, starts), markets, strict=True):
                least.append(bound(race, market) / race.on_demand_usd)
                for name, choose in CHOICES.items():
                    usd, done = replay(Launched(), race, market, choose)
                    late[name] += done > race.deadline + 1e-6
                    paid[name].append(usd / race.on_demand_usd)
    mean = float(np.mean(least))
    cells = "".join(f"{np.mean(usd):8.3f} ({np.mean(usd) / mean:5.3f}){late[name]:6d}" for name, usd in paid.items())
    print(f"{len(least):6d}  ± {spread:.0%}  {mean:7.3f}{cells}", flush=True)


def main() -> None:
    options = spot_traces.arguments(__doc__.splitlines()[0]).parse_args()
    traces = spot_traces.load(options.traces)
    print("mean cost, on-demand only = 1; in brackets: relative to the bound; then the number of late runs")
    print("  runs  prices   bound" + "".join(f"{name:>22}" for name in CHOICES))
    by_time = [list(group) for _, group in groupby(traces, key=lambda trace: trace.name.partition("_")[0])]
    for zones in (traces, *by_time):
        print(", ".join(f"{trace.name} ({trace.share:.0%} spot)" for trace in zones))
        for spread in (0.0, SPREAD):
            compare(zones, STARTS_OF_ALL if zones is traces else STARTS, zones is not traces, spread)


if __name__ == "__main__":
    main()
