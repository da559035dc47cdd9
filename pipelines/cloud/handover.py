"""A run with a deadline leaves spot while on demand can still finish it, and on demand while it can afford to look.

A managed job can't change its market, but it is a chain of tasks, and `skytrain run` makes whatever is missing. So
`launch --deadline` gives the task train spot machines (and on-demand ones, so that it never waits) and the task
evaluate on-demand ones, and tells the first the deadline (SKYTRAIN_DEADLINE, unix seconds). Once another lost spot
machine could make the run late, train commits and ends with exit code 0; evaluate finishes the training first.

Before that, where train got an on-demand machine because there was no spot, it leaves it after an hour with exit code
75: SkyPilot then looks for machines anew, the cheapest first. That costs a changeover, and may find nothing: so it is
paid from what spot has saved so far and PURSE of the bill on demand (benchmarks/deadline.py has what this brings).
"""

import os
import time
from collections.abc import Callable

from pipelines.cloud.plan import START_SECONDS, WAIT_SECONDS
from pipelines.recipe import Recipe
from pipelines.tracking.forecast import TRAINING_PHASES
from pipelines.tracking.ledger import HEARTBEAT_SECONDS, Billing, Heartbeat
from trainer.config import UserError, tokens_before
from trainer.process import HandedOver, StopSignal

DEADLINE = "SKYTRAIN_DEADLINE"
# Wait, start up, and do at most an interval between commits again.
CHANGEOVER_SECONDS = WAIT_SECONDS + START_SECONDS + 300.0
SURE_STEPS = 10  # the first one compiles
AFTER_TRAINING_SECONDS = 900.0  # for evaluate and export on a machine that is there already
LOOK_SECONDS = 3600.0  # on demand, before it leaves to look for spot
PURSE = 0.01  # of the bill of doing it all on demand may go for looks that find nothing


def has_to_leave(slack: float, changeover: float, tick: float) -> bool:
    """Whether a spot machine has to be left for on-demand, asked every `tick`: seconds may still pass without training
    (`slack`), and two changeovers no longer fit into them, that to another spot machine and then one on demand."""
    return slack < 2 * changeover + tick


def may_look(slack: float, changeover: float, tick: float, left: float, work: float, spent: float, rate: float) -> bool:
    """Whether an on-demand machine may be left to look for spot: a spot machine that is lost would still be in time,
    and one that is lost before it trains, with the way back, can be paid.

    `left` and `work`: seconds of training to come, and of all of it; `spent`: dollars so far; `rate`: dollars an hour
    on demand, which spot is taken to cost, too.
    """
    whole, to_finish, look = (seconds * rate / 3600 for seconds in (changeover + work, left, 2 * changeover))
    return not has_to_leave(slack, changeover, tick) and (1 + PURSE) * whole - spent - to_finish >= look


def handover_here(
    billing: Billing, recipe: Recipe, stop: StopSignal, spent_before: Callable[[Heartbeat], float]
) -> "Handover | None":
    """What watches the deadline here; None without one, or where it is not known whether the machine is a spot machine.

    `spent_before`: the dollars of the run's other attempts.
    """
    text = os.environ.get(DEADLINE)
    if not text:
        return None
    try:
        deadline = float(text)
    except ValueError:
        raise UserError(
            f"{DEADLINE}={text}: not a time in unix seconds; `skytrain launch --deadline` sets it"
        ) from None
    known = isinstance(billing.machine.get("spot"), bool)
    return Handover(deadline, recipe, billing, stop, spent_before) if known else None


class Handover:
    """Watches the training against the deadline: call `watch` with every heartbeat."""

    def __init__(
        self,
        deadline: float,
        recipe: Recipe,
        billing: Billing,
        stop: StopSignal,
        spent_before: Callable[[Heartbeat], float],
    ) -> None:
        self.deadline, self.recipe, self.billing, self.stop = deadline, recipe, billing, stop
        self._spent_before = spent_before
        self._before: float | None = None  # dollars; it stays the same while this attempt is at work

    def watch(self, beat: Heartbeat) -> None:
        """Ask to leave spot once there is too little slack for another lost machine, or on demand to look for spot."""
        train, done = self.recipe.train, beat.progress.get("steps_done", 0)
        step = beat.progress.get("step", 0)
        if beat.stage != "train" or done < SURE_STEPS or not step:  # how fast it is decides
            return
        # Over all steps, with what lies between them (validation, checkpoints): one step may be slow for once.
        seconds = sum(beat.phases.get(phase, 0.0) for phase in TRAINING_PHASES)
        before, whole = tokens_before(step, train), tokens_before(train.max_steps, train)
        per_token = seconds / (before - tokens_before(max(0, step - done), train))
        now, left = time.time(), (whole - before) * per_token
        slack = self.deadline - AFTER_TRAINING_SECONDS - now - left
        if not self.billing.machine["spot"]:
            an_hour = min(left, now - beat.started) > LOOK_SECONDS
            if an_hour and self._may_look(beat, now, slack, left, whole * per_token):
                self.stop.ask(f"deadline: {slack / 60:.0f} min of slack are left, enough to look for spot machines")
        elif left > CHANGEOVER_SECONDS and has_to_leave(slack, CHANGEOVER_SECONDS, HEARTBEAT_SECONDS):
            words = f"deadline: {slack / 60:.0f} min of slack are left, too few to lose another spot machine"
            self.stop.ask(words, HandedOver)

    def _may_look(self, beat: Heartbeat, now: float, slack: float, left: float, work: float) -> bool:
        if self.billing.price_per_hour is None:
            return False
        if self._before is None:
            self._before = self._spent_before(beat)
        rate = self.billing.price_per_hour * self.billing.nodes
        spent = self._before + rate * (now - beat.started) / 3600
        return may_look(slack, CHANGEOVER_SECONDS, HEARTBEAT_SECONDS, left, work, spent, rate)
