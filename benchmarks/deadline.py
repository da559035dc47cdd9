"""Cost and punctuality of `launch --deadline`, with its standby machine and without, against the lowest possible cost.

    python -m benchmarks.deadline --traces DIR

Replays recorded spot markets on a grid of about 200 s. (A tick of a finer trace has spot if all its probes have.)
A run trains 24 h and starts at many points of each trace. Spot costs 30% of the on-demand price. Every second on a
machine is billed. A changeover takes one tick (3.3 min) or four (13 min). All times are seconds on one clock, costs are
dollars.

- launched: `launch --deadline`, by the rules of pipelines.cloud.deadline. It takes spot if a poll finds some. Without
  spot it waits on a standby machine at STANDBY of the on-demand price, and polls every ten minutes; a poll that finds
  nothing takes a changeover (in steps of the grid). When the rules say so, it takes on-demand to the end.
- alone: the same rules without a standby. Once there is no spot, it takes on-demand to the end.
- bound: the cheapest schedule with full knowledge of the future, changeovers included, on the same grid: the shortest
  path through (tick, work left, machine), by dynamic programming.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks import spot_traces
from pipelines.cloud.deadline import POLL_SECONDS, RETRAINED_SECONDS, DeadlineRules, changeover_seconds

TICK = 200.0  # about
HOURS = 24.0
SPOT, ON_DEMAND = 0.3, 1.0  # dollars an hour: AWS lists p5.48xlarge spot at 30 to 50% of on-demand, p3 at 30%
SLACKS = (1.1, 1.25, 1.5)  # deadline / work
CHANGEOVER_TICKS = (1, 4)
STARTS = 40  # of each trace
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
    one changeover, until the next standby machine is up. Only a machine that is up decides: one that is about to train
    is up before it is where the last one was.
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
            self.only_on_demand |= until_ready <= UP * race.changeover and race.must_go_on_demand(now, work_left)
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


def first_zone(race: Race, hours: list[float], losses: list[int], zones: list[int]) -> int:
    return zones[0]


def replay(
    policy: Policy, race: Race, available: NDArray[np.bool_], choose: Choice = first_zone
) -> tuple[float, float]:
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


def grid(trace: spot_traces.Trace) -> tuple[float, NDArray[np.bool_]]:
    """The trace in ticks of about TICK seconds."""
    available, gap = np.array(trace.available), trace.gap_seconds
    if gap >= TICK:
        parts = round(gap / TICK)
        return gap / parts, np.repeat(available, parts)
    together = round(TICK / gap)
    whole = len(available) // together * together
    return gap * together, np.all(available[:whole].reshape(-1, together), axis=1)


def main() -> None:
    options = spot_traces.arguments(__doc__.splitlines()[0]).parse_args()
    traces = spot_traces.load(options.traces)
    print(f"mean cost, on-demand only = 1; in brackets: runs of {STARTS} that cost more than 1, and the highest cost\n")
    for change in CHANGEOVER_TICKS:
        everywhere: list[dict[str, list[float]]] = []
        print(
            f"changeover {change * TICK / 60:.1f} min; slack{'':31}{'bound':>9}" + "".join(f"{n:>19}" for n in POLICIES)
        )
        for slack, trace in product(SLACKS, traces):
            costs = costs_on(trace, slack, change)
            print(f"{f'{slack:.2f}   {trace.name} ({trace.share:.0%} spot)':58}{row(costs)}", flush=True)
            everywhere.append(costs)
        every = {name: [usd for costs in everywhere for usd in costs[name]] for name in everywhere[0]}
        print(f"{'all':58}{row(every)}")
        pairs = list(zip(every["bound"], every["launched"], strict=True))
        excess = np.mean([usd - best for best, usd in pairs])
        could = [usd for best, usd in pairs if best < 0.99]
        cheaper = f"{sum(usd < 1 for usd in could)} of {len(could)} runs in which the bound saves 1%"
        print(f"launched: {excess:.3f} of the on-demand cost above the bound; cheaper than on-demand in {cheaper}")
        means = [np.mean(costs["launched"]) for costs in everywhere]
        print(
            f"launched: mean cost below 1 in {sum(m < 1 for m in means)} of {len(means)} lines, max {max(means):.3f}\n"
        )


def costs_on(trace: spot_traces.Trace, slack: float, change: int) -> dict[str, list[float]]:
    """The cost of each policy at each start, as a fraction of on-demand only. Fails if any run is late."""
    tick, available = grid(trace)
    work = round(HOURS * 3600 / tick) * tick
    ticks = int(slack * work / tick)
    race = Race(ticks * tick, change * tick, tick, work, ON_DEMAND, (SPOT,))
    costs: dict[str, list[float]] = {name: [] for name in ("bound", *POLICIES)}
    for start in trace.starts(STARTS, margin=race.deadline + tick):
        window = available[None, int(start / tick) :][:, :ticks]
        costs["bound"].append(bound(race, window) / race.on_demand_usd)
        for name, policy in POLICIES.items():
            usd, done = replay(policy(), race, window)
            assert done <= race.deadline + 1e-6, f"{name} is late on {trace.name} from {start:.0f} s"
            costs[name].append(usd / race.on_demand_usd)
    return costs


def row(costs: dict[str, list[float]]) -> str:
    above = {name: sum(usd > 1 + 1e-9 for usd in costs[name]) for name in POLICIES}
    cells = (f"{np.mean(costs[name]):7.3f} [{above[name]:3d} {max(costs[name]):5.3f}]" for name in POLICIES)
    return f"{np.mean(costs['bound']):9.3f}" + "".join(cells)


POLICIES: dict[str, Callable[[], Policy]] = {"launched": Launched, "alone": lambda: Launched(standby=False)}


if __name__ == "__main__":
    main()
