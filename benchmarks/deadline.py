"""Cost and punctuality of `launch --deadline`, with its standby machine and without, against the lowest possible cost.

    python -m benchmarks.deadline --traces DIR

Replays recorded spot markets on a grid of about 200 s. (A tick of a finer trace has spot if all its probes have.)
A run trains 24 h and starts at many points. Spot costs 30% of the on-demand price. Every second on a machine is billed.
A changeover takes one tick (3.3 min) or four (13 min). All times are seconds on one clock, costs are dollars.

- launched: `launch --deadline`, by the rules of pipelines.cloud.deadline. It takes spot if a poll finds some. Without
  spot it waits on a standby machine at STANDBY of the on-demand price, and polls every ten minutes; a poll that finds
  nothing takes a changeover (in steps of the grid). When the rules say so, it takes on-demand to the end. Of several
  zones with a machine it takes the one of the best score, as `launch` does: pipelines.cloud.estimates has it. The life
  of a zone's machines is that of this run's ledger.
- by price: the same, but it takes the zone with the lowest price.
- alone: launched without a standby. Once there is no spot, it takes on-demand to the end.
- bound: the cheapest schedule with full knowledge of the future, changeovers included, on the same grid: the shortest
  path through (tick, work left, machine), by dynamic programming.

Markets: one zone at a time; the zones that were recorded at one time, at the same instant; and all zones, each from a
random point of its record. The records have no prices: zones have one price, or prices that differ by up to SPREAD,
drawn anew for each run.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks import spot_traces
from benchmarks.spot_traces import Trace
from pipelines.cloud.deadline import POLL_SECONDS, RETRAINED_SECONDS, DeadlineRules, changeover_seconds
from pipelines.cloud.estimates import StageWork, usd_per_useful_hour
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES

TICK = 200.0  # about
HOURS = 24.0
SPOT, ON_DEMAND = 0.3, 1.0  # dollars an hour: AWS lists p5.48xlarge spot at 30 to 50% of on-demand, p3 at 30%
SLACKS = (1.1, 1.25, 1.5)  # deadline / work
CHANGEOVER_TICKS = (1, 4)
STARTS, STARTS_OF_ALL = 40, 280  # for each deadline and changeover: 1,680 runs over one zone each, and over all zones
SPREAD = 0.2  # of the price, up and down
SEGMENT_HOURS = 1 / 60  # between two commits
UP = RETRAINED_SECONDS / changeover_seconds(installs=True)  # the last part of a changeover: steps are done again
STANDBY = 0.005  # dollars an hour: a machine of two CPUs costs $0.1, 8 H100s cost $24 to $55

Machine = Literal["spot", "on-demand"]
Decision = Machine | Literal["wait", "standby"]


@dataclass(frozen=True)
class Race(DeadlineRules):
    """A run that begins at 0, its seconds of training, its deadline, and the prices."""

    work: float
    on_demand_per_hour: float
    spot_per_hour: tuple[float, ...]  # of each zone

    @property
    def on_demand_usd(self) -> float:
        """The cost of the whole training on demand."""
        return (self.changeover + self.work) * self.on_demand_per_hour / 3600


# (race, now, seconds of work left, current machine, spot is available, seconds until it is ready)
Policy = Callable[[Race, float, float, Machine | None, bool, float], Decision]


class Launched:
    """The rules of `launch --deadline`. It has state: call it in the order of time.

    SkyPilot replaces a lost spot machine, or starts a standby machine, without asking. A poll that finds nothing takes
    one changeover, until the next standby machine is up. Only a machine that is up decides, and it does so at once:
    one that is about to train is up before it is where the last one was, maybe between two ticks.
    """

    def __init__(self, standby: bool = True) -> None:
        self.standby = standby
        self.standby_since: float | None = None  # the standby machine is up from here on
        self.only_on_demand = False

    def __call__(
        self, race: Race, now: float, work_left: float, on: Machine | None, available: bool, until_ready: float
    ) -> Decision:
        if on == "spot":
            self.standby_since = None
            up = now + max(0.0, until_ready - UP * race.changeover)
            self.only_on_demand |= up < now + race.tick and race.must_go_on_demand(up, work_left)
            if up > now:
                return on  # until the next tick
        elif on is None and self.standby_since is not None and now >= self.standby_since:
            self.only_on_demand |= race.must_go_on_demand(now, work_left)
        self.only_on_demand |= on is None and not available and not self.standby
        if self.only_on_demand or on == "on-demand":
            return "on-demand"
        if on == "spot":
            return on
        if self.standby_since is None or now >= self.standby_since + POLL_SECONDS:
            if available:
                return "spot"
            self.standby_since = now + race.changeover
        return "standby"


# (race, hours on each zone's machines so far, machines lost there, the zones with spot): the zone to take
Choice = Callable[[Race, list[float], list[int], list[int]], int]


def by_score(race: Race, hours: list[float], losses: list[int], zones: list[int]) -> int:
    """The zone with the least expected dollars for a useful hour."""
    job = StageWork(HOURS, SEGMENT_HOURS, start=race.changeover / 3600)

    def score(zone: int) -> float:
        between = (PRIOR_SECONDS_BETWEEN_FAILURES / 3600 + hours[zone]) / (1 + losses[zone])
        return usd_per_useful_hour(job, race.spot_per_hour[zone], between)

    return min(zones, key=score)


def by_price(race: Race, hours: list[float], losses: list[int], zones: list[int]) -> int:
    return min(zones, key=lambda zone: race.spot_per_hour[zone])


def replay(policy: Policy, race: Race, available: NDArray[np.bool_], choose: Choice = by_score) -> tuple[float, float]:
    """Dollars, and the time of the end. `available`: zones x ticks; after its end there is no spot.

    A run keeps its spot machine until that is lost; then any zone may give the next one.
    """
    on: Machine | None = None
    zones, ticks = available.shape
    zone, hours, losses = 0, [0.0] * zones, [0] * zones
    tick, now, work_left, spent, until_ready = race.tick, 0.0, race.work, 0.0, 0.0
    while work_left > 1e-6:
        number = round(now / tick)
        open_zones = [z for z in range(zones) if number < ticks and available[z, number]]
        if on == "spot" and zone not in open_zones:
            on, losses[zone] = None, losses[zone] + 1
        has_spot = bool(open_zones)
        wanted = policy(race, now, work_left, on, has_spot, until_ready if on else 0.0)
        assert wanted != "spot" or has_spot, "there is no spot"
        if wanted == "wait" or wanted == "standby":
            on = None
            spent += tick / 3600 * (STANDBY * race.on_demand_per_hour if wanted == "standby" else 0.0)
        else:
            if wanted != on:
                on, until_ready = wanted, race.changeover
                zone = choose(race, hours, losses, open_zones) if on == "spot" else zone
            if on == "spot":
                hours[zone] += tick / 3600
            spent += tick / 3600 * (race.spot_per_hour[zone] if on == "spot" else race.on_demand_per_hour)
            if until_ready > 0:
                until_ready = max(0.0, until_ready - tick)
            else:
                work_left -= tick
        now += tick
    return spent, now


def bound(race: Race, available: NDArray[np.bool_]) -> float:
    """Dollars of the cheapest schedule with full knowledge of the future; `available`: zones x ticks."""
    zones, ticks = available.shape
    work, change = round(race.work / race.tick), round(race.changeover / race.tick)
    spot = [usd * race.tick / 3600 for usd in race.spot_per_hour]
    on_demand = race.on_demand_per_hour * race.tick / 3600
    spot_left = np.zeros((zones, ticks + 1), dtype=int)  # ticks of spot from here on
    for t in reversed(range(ticks)):
        spot_left[:, t] = np.where(available[:, t], spot_left[:, t + 1] + 1, 0)
    late = np.full(work + 1, np.inf)  # dollars to finish by work left
    late[0] = 0.0
    from_none, from_on_demand = [late] * (ticks + change + 1), [late] * (ticks + change + 1)  # by the tick
    from_spot = [[late] * (ticks + change + 1) for _ in range(zones)]
    for t in reversed(range(ticks)):
        best = np.minimum(from_none[t + 1], change * on_demand + from_on_demand[t + change])
        for z in range(zones):
            if spot_left[z, t] >= change:
                best = np.minimum(best, change * spot[z] + from_spot[z][t + change])
        best[0] = 0.0
        from_none[t] = best
        from_on_demand[t] = np.append(0.0, np.minimum(best[1:], on_demand + from_on_demand[t + 1][:-1]))
        for z in range(zones):
            stay = spot[z] + from_spot[z][t + 1][:-1]
            from_spot[z][t] = np.append(0.0, np.minimum(best[1:], stay)) if available[z, t] else best
    return float(from_none[0][work])


def grid(trace: Trace) -> NDArray[np.bool_]:
    """The trace in ticks of about TICK seconds."""
    available, gap = np.array(trace.available), trace.gap_seconds
    if gap >= TICK:
        return np.repeat(available, round(gap / TICK))
    together = round(TICK / gap)
    return np.all(available[: len(available) // together * together].reshape(-1, together), axis=1)


def drawn(
    zones: list[Trace], slack: float, change: int, spread: float, starts: int, together: bool = True
) -> list[tuple[Race, NDArray[np.bool_]]]:
    """Races and their markets. `together`: the zones at the same instant of their records."""
    grids, draw = [grid(zone) for zone in zones], random.Random(f"{zones[0].name} {len(zones)}")
    work = round(HOURS * 3600 / TICK)
    ticks, found = int(slack * work), []
    for _ in range(starts):
        first = draw.randrange(min(map(len, grids)) - ticks)
        offsets = [first if together else draw.randrange(len(one) - ticks) for one in grids]
        market = np.stack([one[at : at + ticks] for one, at in zip(grids, offsets, strict=True)])
        prices = tuple(SPOT * draw.uniform(1 - spread, 1 + spread) for _ in zones)
        found.append((Race(ticks * TICK, change * TICK, TICK, work * TICK, ON_DEMAND, prices), market))
    return found


WAYS: dict[str, tuple[Callable[[], Policy], Choice]] = {
    "launched": (Launched, by_score),
    "by price": (Launched, by_price),
    "alone": (lambda: Launched(standby=False), by_score),
}


class Tally:
    """The cost of each run, as a fraction of on-demand only, and the late ones."""

    def __init__(self) -> None:
        self.least: list[float] = []
        self.paid: dict[str, list[float]] = {name: [] for name in WAYS}
        self.late = dict.fromkeys(WAYS, 0)

    def add(self, races: list[tuple[Race, NDArray[np.bool_]]]) -> None:
        for race, market in races:
            self.least.append(bound(race, market) / race.on_demand_usd)
            for name, (policy, choose) in WAYS.items():
                usd, done = replay(policy(), race, market, choose)
                self.paid[name].append(usd / race.on_demand_usd)
                self.late[name] += done > race.deadline + 1e-6

    def __str__(self) -> str:
        best = float(np.mean(self.least))
        cells = []
        for name, usd in self.paid.items():
            above = sum(one > 1 + 1e-9 for one in usd)
            mean = float(np.mean(usd))
            cells.append(f"{mean:8.3f} ({mean / best:5.3f}) [{above:4d} {max(usd):5.3f}]{self.late[name]:3d}")
        return f"{len(self.least):6d}{best:8.3f}" + "".join(cells)


def main() -> None:
    options = spot_traces.arguments(__doc__.splitlines()[0]).parse_args()
    traces = spot_traces.load(options.traces)
    print(
        "mean cost, on-demand only = 1 (relative to the bound) [runs that cost more than 1, the highest cost] late runs"
    )
    print(f"{'':52}  runs   bound" + "".join(f"{name:>34}" for name in WAYS))
    by_time = [list(group) for _, group in groupby(traces, key=lambda trace: trace.name.partition("_")[0])]
    for change in CHANGEOVER_TICKS:
        print(f"changeover {change * TICK / 60:.1f} min")
        every = Tally()
        for trace in traces:
            for slack in SLACKS:
                every.add(drawn([trace], slack, change, 0.0, STARTS))
        print(f"{'each zone':52}{every}", flush=True)
        for zones in (*by_time, traces):
            for spread in (0.0, SPREAD):
                several = Tally()
                for slack in SLACKS:
                    starts = STARTS_OF_ALL if zones is traces else STARTS
                    several.add(drawn(zones, slack, change, spread, starts, zones is not traces))
                name = f"{len(zones)} zones from {zones[0].name}, prices ± {spread:.0%}"
                print(f"{name:52}{several}", flush=True)


if __name__ == "__main__":
    main()
