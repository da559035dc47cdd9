"""A run with a deadline leaves spot while it can still be finished on demand.

A managed job can't change its market, but it is a chain of tasks, and `skytrain run` makes whatever is missing. So
`launch --deadline` gives the task train spot machines (and on-demand ones, so that it never waits) and the task
evaluate on-demand ones, and tells the first the deadline (SKYTRAIN_DEADLINE, unix seconds). Once another lost spot
machine could make the run late, train commits and ends with exit code 0; evaluate finishes the training first.
It never goes back to spot.
"""

import os
import time

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


def has_to_leave(slack: float, changeover: float, tick: float) -> bool:
    """Whether a spot machine has to be left for on-demand, asked every `tick`: seconds may still pass without training
    (`slack`), and two changeovers no longer fit into them, that to another spot machine and then one on demand."""
    return slack < 2 * changeover + tick


def handover_here(billing: Billing, recipe: Recipe, stop: StopSignal) -> "Handover | None":
    """What watches the deadline here; None without one, or on a machine that is not taken away."""
    text = os.environ.get(DEADLINE)
    if not text:
        return None
    try:
        deadline = float(text)
    except ValueError:
        raise UserError(
            f"{DEADLINE}={text}: not a time in unix seconds; `skytrain launch --deadline` sets it"
        ) from None
    return Handover(deadline, recipe, stop) if billing.machine.get("spot") else None


class Handover:
    """Watches a spot machine's training against the deadline: call `watch` with every heartbeat."""

    def __init__(self, deadline: float, recipe: Recipe, stop: StopSignal) -> None:
        self.deadline, self.recipe, self.stop = deadline, recipe, stop

    def watch(self, beat: Heartbeat) -> None:
        """Ask to leave once there is too little slack for another lost machine."""
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
        if left > CHANGEOVER_SECONDS and has_to_leave(slack, CHANGEOVER_SECONDS, HEARTBEAT_SECONDS):
            words = f"deadline: {slack / 60:.0f} min of slack are left, too few to lose another spot machine"
            self.stop.ask(words, HandedOver)
