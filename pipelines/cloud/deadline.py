"""Spot while there is slack, on-demand when there is none: who is never late, and for how little.

The rule is Uniform Progress ("Can't Be Late", Wu et al., NSDI'24): on spot as long as it lasts; without it,
wait while the run is ahead of a straight line from its start to its deadline, and take on-demand when it is
behind; and venture nothing once a failure would make it late. Two things are ours:

- The line starts after a quarter of the slack, so that a market that is only away for a while is waited for.
- A purse. A spot machine that is taken away before it trains has cost something and brought nothing, and in
  a market that flickers the paper's rule pays for many such starts and for as many returns (up to 22% more
  than on-demand alone: benchmarks/deadline.py). Here they are paid from what spot has saved so far and 1% of
  the on-demand bill, so the run never costs more than 101% of that. Strictly never dearer is only who never
  tries spot: its first machine can always be taken away before it trains.

All times in seconds on one clock, money in dollars. Nothing here asks a clock or a cloud.
"""

from dataclasses import dataclass
from typing import Literal

Market = Literal["spot", "on-demand", "wait"]

PATIENCE = 0.25  # of the slack may pass without a machine before progress is asked for
LOOK_SECONDS = 3600.0  # on demand, before a run that can't see the market leaves to look
PURSE = 0.01  # of the on-demand bill may be lost to spot machines that never got to train


@dataclass(frozen=True)
class Race:
    """A run and its deadline."""

    started: float
    deadline: float
    work: float  # seconds of training from the first step to the last
    # At most, from the decision or from the loss of a machine until the next one trains: provisioning, setup,
    # start-up, and what has to be done again.
    changeover: float
    spot_per_hour: float  # of all nodes
    on_demand_per_hour: float
    tick: float = 60.0  # between two decisions, at most

    @property
    def on_demand_usd(self) -> float:
        """The bill of doing it all on demand."""
        return (self.changeover + self.work) * self.on_demand_per_hour / 3600

    @property
    def line_starts(self) -> float:
        return self.started + PATIENCE * (self.deadline - self.started - self.work)

    def slack(self, now: float, work_left: float) -> float:
        """Seconds that may still pass without training."""
        return self.deadline - now - work_left

    def behind(self, now: float, work_left: float) -> bool:
        """Whether less is done than the line asks for."""
        passed = (now - self.line_starts) / (self.deadline - self.line_starts)
        return self.work - work_left < self.work * passed

    def purse(self, work_left: float, spent: float, until_ready: float) -> float:
        """Dollars that may be lost, if all that is left were done on demand on a machine ready in so many seconds."""
        to_finish = (until_ready + work_left) * self.on_demand_per_hour / 3600
        return (1 + PURSE) * self.on_demand_usd - spent - to_finish

    @property
    def venture_usd(self) -> float:
        """What a spot machine costs that is taken away just before it trains."""
        return self.changeover * self.spot_per_hour / 3600

    @property
    def return_usd(self) -> float:
        """What it costs to leave on-demand for such a spot machine, and to come back."""
        return self.venture_usd + self.changeover * self.on_demand_per_hour / 3600


def market(
    race: Race,
    now: float,
    work_left: float,
    spent: float,
    on: Literal["spot", "on-demand"] | None,
    spot_available: bool,
    until_ready: float = 0.0,
) -> Market:
    """Where the run should be until the next tick.

    `spent` is its whole bill so far; `on` the machine it has, None if it has none (any more), and
    `until_ready` the seconds until that one trains, 0 if it does.
    """
    if on == "spot":
        return "on-demand" if must_switch(race, now, work_left, until_ready) else "spot"
    if on == "on-demand":
        return "spot" if spot_available and until_ready == 0 and may_leave(race, now, work_left, spent) else on
    slack, purse = race.slack(now, work_left), race.purse(work_left, spent, race.changeover)
    if slack < race.changeover + race.tick or purse < race.venture_usd:
        return "on-demand"
    if spot_available and slack >= 2 * race.changeover + race.tick:
        return "spot"
    # On demand for good is best begun late: only who can pay the way back goes while there is slack.
    return "on-demand" if race.behind(now, work_left) and purse >= race.return_usd else "wait"


def must_switch(race: Race, now: float, work_left: float, until_ready: float = 0.0) -> bool:
    """On spot: whether the run would be late if this machine were taken away later than now.

    A machine that trains uses up no slack, so this comes true only while one is getting ready, or where
    training is slower than thought.
    """
    return race.slack(now, work_left) < race.changeover + until_ready


def may_leave(race: Race, now: float, work_left: float, spent: float) -> bool:
    """On demand: whether the run can afford to try spot, lose that machine before it trains, and come back."""
    enough = race.slack(now, work_left) >= 2 * race.changeover + race.tick
    return enough and race.purse(work_left, spent, until_ready=0.0) >= race.return_usd


def leave_for(
    race: Race, now: float, work_left: float, spent: float, on: Literal["spot", "on-demand"], since: float
) -> Market | None:
    """What a run decides that sees only itself: leave this machine, which has been its own `since` then, or not.

    For a managed job with `any_of: [spot, on-demand]`, which gets spot if there is some and on-demand if not,
    and never waits. "spot": end such that the job looks for a machine again. "on-demand": end such that only
    on-demand comes next, since another spot machine might be lost before it trains.
    """
    if on == "spot":
        return "on-demand" if race.slack(now, work_left) < 2 * race.changeover + race.tick else None
    return "spot" if now - since >= LOOK_SECONDS and may_leave(race, now, work_left, spent) else None
