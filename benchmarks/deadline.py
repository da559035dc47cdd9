"""On time, and for how much? What `launch --deadline` does against other policies and the best that could be done.

    python benchmarks/deadline.py --traces DIR

Replays recorded spot markets on a grid of about 200 s (a finer trace counts as available where it is all
through): runs of 24 h of training, begun at many moments of each trace, spot at 30% of the on-demand price,
every second on a machine on the bill. A changeover is one tick (3.3 min) or four (13 min). All times in seconds on one
clock, money in dollars.

- launched: what `launch --deadline` does, by the rules of pipelines.cloud.deadline: spot if there is some when it is
  looked for; without it a waiting room, at ROOM of the on-demand price, from which it is looked for every ten minutes
  and a changeover (at the grid's steps); on demand to the end once the rules say so.

All others exist here alone; nothing in the product carries them out:

- greedy: spot or nothing until a failure would make it late, then on-demand to the end. It sees the market.
- uniform: Uniform Progress alone: spot whenever it is there; without it on-demand when behind the line, nothing
  when ahead (by two changeovers, to leave on-demand).
- waiting: Uniform Progress with a purse, see `waiting`. It needs somebody who sees the market and decides while there
  is no machine.
- bound: the cheapest schedule of one who knows the future (changeovers included, on the same grid): the
  shortest path through (tick, work left, machine), by dynamic programming.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import spot_traces
from numpy.typing import NDArray

from pipelines.cloud.deadline import LOOK_SECONDS, PURSE
from pipelines.cloud.deadline import Race as Rules

TICK = 200.0  # about
HOURS = 24.0
SPOT, ON_DEMAND = 0.3, 1.0  # dollars an hour: AWS lists p5.48xlarge spot at 30 to 50% of on-demand, p3 at 30%
SLACKS = (1.1, 1.25, 1.5)  # deadline / work
CHANGEOVER_TICKS = (1, 4)
STARTS = 40  # of each trace
ROOM = 0.005  # dollars an hour: a machine of two CPUs is $0.1 where 8 H100s are $24 to $55
PATIENCE = 0.25  # of the slack may pass without a machine before progress is asked for

Machine = Literal["spot", "on-demand"]
Market = Literal["spot", "on-demand", "wait", "room"]


@dataclass(frozen=True)
class Race(Rules):
    """A run and its deadline, and what spot costs. It begins at 0."""

    spot_per_hour: float


def behind(race: Race, now: float, work_left: float) -> bool:
    """Whether less is done than is asked for by a straight line from a part of the slack to the deadline."""
    line_starts = PATIENCE * (race.deadline - race.work)
    return race.work - work_left < race.work * (now - line_starts) / (race.deadline - line_starts)


def purse(race: Race, work_left: float, spent: float, until_ready: float) -> float:
    """Dollars that may be lost, if all that is left were done on demand on a machine ready in so many seconds."""
    return (1 + PURSE) * race.on_demand_usd - spent - (until_ready + work_left) * race.on_demand_per_hour / 3600


def venture_usd(race: Race) -> float:
    """What a spot machine costs that is taken away just before it trains."""
    return race.changeover * race.spot_per_hour / 3600


def return_usd(race: Race) -> float:
    """What it costs to leave on-demand for such a spot machine, and to come back."""
    return venture_usd(race) + race.changeover * race.on_demand_per_hour / 3600


def waiting(
    race: Race,
    now: float,
    work_left: float,
    spent: float,
    on: Machine | None,
    spot_available: bool,
    until_ready: float = 0.0,
) -> Market:
    """Uniform Progress (Wu et al., NSDI'24): on spot as long as it lasts; without it, wait while the run is ahead of a
    straight line from its start to its deadline, and take on-demand when it is behind; and venture nothing once a
    failure would make it late. Two things are ours:

    - The line starts after a quarter of the slack, so that a market that is only away for a while is waited for.
    - A purse. A spot machine that is taken away before it trains has cost something and brought nothing, and in
      a market that flickers the paper's rule pays for many such starts and for as many returns. Here they are paid
      from what spot has saved so far and 1% of the on-demand bill, so the run never costs more than 101% of that.
      Strictly never dearer is only who never tries spot.

    `spent` is its whole bill so far; `on` the machine it has, None if it has none (any more), and
    `until_ready` the seconds until that one trains, 0 if it does.
    """
    if on == "spot":
        return "on-demand" if must_switch(race, now, work_left, until_ready) else "spot"
    if on == "on-demand":
        return "spot" if spot_available and until_ready == 0 and may_leave(race, now, work_left, spent) else on
    slack, left_over = race.slack(now, work_left), purse(race, work_left, spent, race.changeover)
    if slack < race.changeover + race.tick or left_over < venture_usd(race):
        return "on-demand"
    if spot_available and slack >= 2 * race.changeover + race.tick:
        return "spot"
    # On demand for good is best begun late: only who can pay the way back goes while there is slack.
    return "on-demand" if behind(race, now, work_left) and left_over >= return_usd(race) else "wait"


def must_switch(race: Race, now: float, work_left: float, until_ready: float = 0.0) -> bool:
    """On spot: whether the run would be late if this machine were taken away later than now.

    A machine that trains uses up no slack, so this comes true only while one is getting ready, or where
    training is slower than thought.
    """
    return race.slack(now, work_left) < race.changeover + until_ready


def may_leave(race: Race, now: float, work_left: float, spent: float) -> bool:
    """On demand: whether the run can afford to try spot, lose that machine before it trains, and come back."""
    enough = race.slack(now, work_left) >= 2 * race.changeover + race.tick
    return enough and purse(race, work_left, spent, until_ready=0.0) >= return_usd(race)


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


class Launched:
    """As `launch --deadline` does. Has to be asked in the order of time: it remembers.

    SkyPilot replaces a lost spot machine, or leads to a room, without asking. A look that finds nothing takes a
    changeover, until the next room is there; only in a room is it asked whether to look again.
    """

    def __init__(self) -> None:
        self.in_room: float | None = None  # from when on it is in its room
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
        if on == "spot":
            self.in_room = None
            self.only_on_demand |= until_ready == 0 and race.has_to_leave_spot(now, work_left)
        elif on is None and self.in_room is not None and now >= self.in_room:
            self.only_on_demand |= race.has_to_stop_waiting(now, work_left, spent)
        if self.only_on_demand or on == "on-demand":
            return "on-demand"
        if on == "spot":
            return on
        if self.in_room is None or now >= self.in_room + LOOK_SECONDS:
            if available:
                return "spot"
            self.in_room = now + race.changeover
        return "room"


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
        if wanted in ("wait", "room"):
            on = None
            spent += tick / 3600 * (ROOM * race.on_demand_per_hour if wanted == "room" else 0.0)
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
        print(f"{'all':58}{row(every)}")
        for name in ("launched", "waiting"):
            pairs = list(zip(every["bound"], every[name], strict=True))
            above = np.mean([usd - best for best, usd in pairs])
            could = [usd for best, usd in pairs if best < 0.99]
            cheaper = f"{sum(usd < 1 for usd in could)} of {len(could)} where the bound is by 1%"
            print(f"{name}: {above:.3f} of the on-demand bill above the bound; cheaper than on-demand: {cheaper}")
            means = [np.mean(bills[name]) for bills in everywhere]
            print(f"{name}: cheaper by the mean in {sum(m < 1 for m in means)} of {len(means)} lines; {max(means):.3f}")
        print()


def bills_on(trace: spot_traces.Trace, slack: float, change: int) -> dict[str, list[float]]:
    """What each policy pays at each start, on-demand only = 1. All of them are on time, or this fails."""
    tick, available = grid(trace)
    work = round(HOURS * 3600 / tick) * tick
    ticks = int(slack * work / tick)
    race = Race(ticks * tick, work, change * tick, tick, ON_DEMAND, SPOT)
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
    "launched": Launched,
    "greedy": lambda: greedy,
    "uniform": lambda: uniform,
    "waiting": lambda: waiting,
}


if __name__ == "__main__":
    main()
