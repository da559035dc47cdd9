"""On time, and for how much? `--deadline` against greedy spot, on-demand only and the best that could be done.

    python benchmarks/deadline.py --traces DIR

Replays recorded spot markets on a grid of about 200 s (a finer trace counts as available where it is all
through): runs of 24 h of training, begun at many moments of each trace, spot at 30% of the on-demand price,
every second on a machine on the bill. A changeover is one tick (3.3 min) or four (13 min).

- greedy: spot or nothing until a failure would make it late, then on-demand to the end.
- uniform: Uniform Progress alone: spot whenever it is there; without it on-demand when behind the line, nothing
  when ahead (by two changeovers, to leave on-demand).
- ours: pipelines.cloud.deadline.market.
- no waiting: what a managed job with `any_of: [spot, on-demand]` can do, which never waits for spot and on
  demand can't see whether there is some: pipelines.cloud.deadline.leave_for.
- bound: the cheapest schedule of one who knows the future (changeovers included, on the same grid): the
  shortest path through (tick, work left, machine), by dynamic programming.
"""

from collections.abc import Callable
from itertools import product
from typing import Literal

import numpy as np
import spot_traces
from numpy.typing import NDArray

from pipelines.cloud.deadline import Market, Race, leave_for, market, must_switch

TICK = 200.0  # about
HOURS = 24.0
SPOT, ON_DEMAND = 0.3, 1.0  # dollars an hour: AWS lists p5.48xlarge spot at 30 to 50% of on-demand, p3 at 30%
SLACKS = (1.1, 1.25, 1.5)  # deadline / work
CHANGEOVER_TICKS = (1, 4)
STARTS = 40  # of each trace

Machine = Literal["spot", "on-demand"]
Policy = Callable[[Race, float, float, float, Machine | None, bool, float], Market]


def greedy(
    race: Race, now: float, work_left: float, spent: float, on: Machine | None, available: bool, until_ready: float
) -> Market:
    if on == "on-demand":
        return on
    if on == "spot":
        return "on-demand" if must_switch(race, now, work_left, until_ready) else on
    slack = race.slack(now, work_left)
    if available and slack >= 2 * race.changeover + race.tick:
        return "spot"
    return "wait" if slack >= race.changeover + race.tick else "on-demand"


def uniform(
    race: Race, now: float, work_left: float, spent: float, on: Machine | None, available: bool, until_ready: float
) -> Market:
    done, asked = race.work - work_left, race.work * now / race.deadline
    ventures = race.slack(now, work_left) >= 2 * race.changeover + race.tick
    if on == "on-demand" and not (available and until_ready == 0 and ventures):
        return on if done < race.work * (now + 2 * race.changeover) / race.deadline or not ventures else "wait"
    if available and (on == "spot" or ventures):
        return greedy(race, now, work_left, spent, None if on == "on-demand" else on, available, until_ready)
    return "on-demand" if done < asked or not ventures else "wait"


class NoWaiting:
    """Has to be asked in the order of time: it remembers since when it has its machine."""

    def __init__(self) -> None:
        self.since = 0.0
        self.only_on_demand = False

    def __call__(
        self,
        race: Race,
        now: float,
        work_left: float,
        spent: float,
        on: Machine | None,
        available: bool,
        until_ready: float,
    ) -> Market:
        if on is None:
            self.since = now
            return "spot" if available and not self.only_on_demand else "on-demand"
        if until_ready > 0:
            return on
        wanted = leave_for(race, now, work_left, spent, on, self.since)
        if wanted == "spot":
            return "wait"  # it leaves before it can know whether there is some: no machine for a tick
        self.only_on_demand |= wanted == "on-demand"
        return wanted or on


def replay(policy: Policy, race: Race, available: NDArray[np.bool_]) -> tuple[float, float]:
    """Dollars, and when it was done. After the end of `available` there is no spot."""
    on: Machine | None = None
    tick, now, work_left, spent, until_ready = race.tick, 0.0, race.work, 0.0, 0.0
    while work_left > 1e-6:
        number = round(now / tick)
        there = number < len(available) and bool(available[number])
        on = None if on == "spot" and not there else on
        wanted = policy(race, now, work_left, spent, on, there, until_ready if on else 0.0)
        assert wanted != "spot" or there, "there is no spot"
        if wanted == "wait":
            on = None
        else:
            if wanted != on:
                on, until_ready = wanted, race.changeover
            spent += tick / 3600 * (race.spot_per_hour if on == "spot" else race.on_demand_per_hour)
            if until_ready > 0:
                until_ready = max(0.0, until_ready - tick)
            else:
                work_left -= tick
        now += tick
    return spent, now


def bound(race: Race, available: NDArray[np.bool_]) -> float:
    """Dollars of the cheapest schedule of one who knows the future."""
    work, change, ticks = round(race.work / race.tick), round(race.changeover / race.tick), len(available)
    spot, on_demand = race.spot_per_hour * race.tick / 3600, race.on_demand_per_hour * race.tick / 3600
    lasts = np.zeros(ticks + 1, dtype=int)  # ticks of spot from here on
    for t in reversed(range(ticks)):
        lasts[t] = lasts[t + 1] + 1 if available[t] else 0
    late = np.full(work + 1, np.inf)  # dollars to finish by work left
    late[0] = 0.0
    without, on_spot, on_dem = ([late] * (ticks + change + 1) for _ in range(3))  # by the tick
    for t in reversed(range(ticks)):
        best = np.minimum(without[t + 1], change * on_demand + on_dem[t + change])
        if lasts[t] >= change:
            best = np.minimum(best, change * spot + on_spot[t + change])
        best[0] = 0.0
        without[t] = on_spot[t] = best
        on_dem[t] = np.append(0.0, np.minimum(best[1:], on_demand + on_dem[t + 1][:-1]))
        if available[t]:
            on_spot[t] = np.append(0.0, np.minimum(best[1:], spot + on_spot[t + 1][:-1]))
    return float(without[0][work])


def grid(trace: spot_traces.Trace) -> tuple[float, NDArray[np.bool_]]:
    """The trace in ticks of about TICK seconds."""
    available, gap = np.array(trace.available), trace.gap_seconds
    if gap >= TICK:
        parts = round(gap / TICK)
        return gap / parts, np.repeat(available, parts)
    together = round(TICK / gap)
    whole = len(available) // together * together
    return gap * together, available[:whole].reshape(-1, together).all(axis=1)


def main() -> None:
    options = spot_traces.arguments(__doc__.splitlines()[0]).parse_args()
    traces = spot_traces.load(options.traces)
    print(f"bills, on-demand only = 1; in brackets how many of {STARTS} were dearer than that, and the dearest\n")
    for change in CHANGEOVER_TICKS:
        everywhere: list[dict[str, list[float]]] = []
        print(
            f"changeover {change * TICK / 60:.1f} min; slack{'':31}{'bound':>9}" + "".join(f"{n:>19}" for n in POLICIES)
        )
        for slack, trace in product(SLACKS, traces):
            bills = bills_on(trace, slack, change)
            print(f"{f'{slack:.2f}   {trace.name} ({trace.share:.0%} there)':58}{row(bills)}", flush=True)
            everywhere.append(bills)
        every = {name: [usd for bills in everywhere for usd in bills[name]] for name in everywhere[0]}
        pairs = list(zip(every["bound"], every["ours"], strict=True))
        print(f"{f'all {len(pairs)}':58}{row(every)}")
        print(
            f"ours above the bound, of the on-demand bill: {np.mean([ours - best for best, ours in pairs]):.3f}; ",
            end="",
        )
        could = [ours for best, ours in pairs if best < 0.99]
        print(f"cheaper than on-demand: {sum(ours < 1 for ours in could)} of {len(could)} where the bound is by 1%\n")


def bills_on(trace: spot_traces.Trace, slack: float, change: int) -> dict[str, list[float]]:
    """What each policy pays at each start, on-demand only = 1. All of them are on time, or this fails."""
    tick, available = grid(trace)
    work = round(HOURS * 3600 / tick) * tick
    ticks = int(slack * work / tick)
    race = Race(0.0, ticks * tick, work, change * tick, SPOT, ON_DEMAND, tick)
    bills: dict[str, list[float]] = {name: [] for name in ("bound", *POLICIES)}
    for start in trace.starts(STARTS, room=race.deadline + tick):
        window = available[int(start / tick) :][:ticks]
        bills["bound"].append(bound(race, window) / race.on_demand_usd)
        for name, policy in POLICIES.items():
            usd, done = replay(policy(), race, window)
            assert done <= race.deadline + 1e-6, f"{name} is late on {trace.name} from {start:.0f} s"
            bills[name].append(usd / race.on_demand_usd)
    return bills


def row(bills: dict[str, list[float]]) -> str:
    dearer = {name: sum(usd > 1 + 1e-9 for usd in bills[name]) for name in POLICIES}
    cells = (f"{np.mean(bills[name]):7.3f} [{dearer[name]:3d} {max(bills[name]):5.3f}]" for name in POLICIES)
    return f"{np.mean(bills['bound']):9.3f}" + "".join(cells)


POLICIES: dict[str, Callable[[], Policy]] = {
    "greedy": lambda: greedy,
    "uniform": lambda: uniform,
    "ours": lambda: market,
    "no waiting": NoWaiting,
}


if __name__ == "__main__":
    main()
