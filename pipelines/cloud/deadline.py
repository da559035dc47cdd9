"""A run with a deadline trains on spot, waits for it on a machine that costs cents, and goes on demand in time.

A managed job can't change its market, but it is a chain of tasks, and `skytrain run` makes whatever is missing. So
`launch --deadline` gives the task train, in this order, spot machines and a small one without GPUs, and the task
evaluate on-demand machines as large as train's; and it tells train the deadline (SKYTRAIN_DEADLINE, unix seconds).
Uniform Progress (Wu et al., "Can't Be Late", NSDI'24) waits without a machine. Somebody has to decide meanwhile, so
here it waits on one:

- On spot: once another lost machine could make the run late, train commits and ends with exit code 0, and evaluate
  finishes the training first.
- In the waiting room, where SkyPilot lands when nobody has spot: after LOOK_SECONDS it leaves with exit code 75, and
  SkyPilot looks through all of train's machines anew. Once that could make the run late, or spot machines that went
  before they trained have used up the purse, it ends with 0 as well.

benchmarks/deadline.py has what this brings; `Race` holds the rules, for it and for the job.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

from pipelines.cloud.plan import START_SECONDS, WAIT_SECONDS
from pipelines.cloud.prices import table_from_environment
from pipelines.cloud.throughput import speed_on
from pipelines.recipe import Recipe
from pipelines.tracking.account import LONGEST_POLL_SECONDS, AttemptAccount
from pipelines.tracking.forecast import TRAINING_PHASES, training_seconds
from pipelines.tracking.ledger import HEARTBEAT_SECONDS
from pipelines.tracking.records import Billing, Heartbeat
from pipelines.tracking.runs import read_run
from trainer.commits import committed_state
from trainer.config import TrainConfig, tokens_before
from trainer.errors import HandedOver, UserError
from trainer.process import StopSignal

if TYPE_CHECKING:
    from pipelines.stage import Work

DEADLINE = "SKYTRAIN_DEADLINE"
# Wait, start up, and do at most an interval between commits again.
CHANGEOVER_SECONDS = WAIT_SECONDS + START_SECONDS + 300.0
LEAST_SLACK_SECONDS = 3 * CHANGEOVER_SECONDS  # to begin on spot at all, or to look for it
SURE_STEPS = 10  # the first one compiles
AFTER_TRAINING_SECONDS = 900.0  # for evaluate and export on a machine that is there already
LOOK_SECONDS = 600.0  # in the waiting room, before SkyPilot is to look for spot again
LOOKING = "looking for spot again"
PURSE = 0.01  # of the bill of doing it all on demand may be lost on spot machines, before another one is tried
SURE_ENOUGH_STEPS = 100  # to know how long all of them take: what is taken for too short here makes the run late
UNSURE = 1.25  # what training may take of what it was estimated to take, where nobody has measured


@dataclass(frozen=True)
class Race:
    """Training against a deadline: all of it, and on what. Seconds; dollars an hour, of all nodes."""

    deadline: float
    work: float  # training from the first step to the last
    # At most, from the decision or from the loss of a machine until the next one trains: provisioning, setup,
    # start-up, and what has to be done again.
    changeover: float
    tick: float  # between two decisions, at most
    on_demand_per_hour: float  # 0: unknown, and no money is counted

    def slack(self, now: float, left: float) -> float:
        """Seconds that may still pass without training, where `left` seconds of it are to come."""
        return self.deadline - now - left

    def has_to_leave_spot(self, now: float, left: float) -> bool:
        """Whether two changeovers no longer fit into the slack: to another spot machine, and then one on demand."""
        return self.slack(now, left) < 2 * self.changeover + self.tick

    def has_to_stop_waiting(self, now: float, left: float, spent: float) -> bool:
        """Whether there is no time to look for spot once more (a changeover, even if none is found), or no money: what
        is `spent` on training and what is left, on demand, come to more than PURSE above all of it on demand."""
        if self.slack(now, left) < 3 * self.changeover + self.tick:
            return True
        to_finish = (self.changeover + left) * self.on_demand_per_hour / 3600
        return self.on_demand_per_hour > 0 and spent + to_finish > (1 + PURSE) * self.on_demand_usd

    @property
    def on_demand_usd(self) -> float:
        """The bill of doing it all on demand."""
        return (self.changeover + self.work) * self.on_demand_per_hour / 3600


def waits_here() -> bool:
    """Whether this machine is the waiting room of a job with a deadline: one without GPUs."""
    return bool(os.environ.get(DEADLINE)) and os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE") == "0"


def handover_here(billing: Billing, recipe: Recipe, stop: StopSignal) -> "Handover | None":
    """What watches the deadline on a spot machine; None without a deadline, and elsewhere."""
    deadline = deadline_here()
    return Handover(deadline, recipe, stop) if deadline and billing.machine.spot else None


def deadline_here() -> float | None:
    """Unix seconds by which training has to be done, if the job has a deadline."""
    text = os.environ.get(DEADLINE)
    try:
        return float(text) - AFTER_TRAINING_SECONDS if text else None
    except ValueError:
        raise UserError(
            f"{DEADLINE}={text}: not a time in unix seconds; `skytrain launch --deadline` sets it"
        ) from None


class Handover:
    """On a spot machine: watches the training against the deadline. Call `watch` with every heartbeat."""

    def __init__(self, deadline: float, recipe: Recipe, stop: StopSignal) -> None:
        self.deadline, self.recipe, self.stop = deadline, recipe, stop

    def watch(self, beat: Heartbeat) -> None:
        """Ask to leave once there is too little slack for another lost machine."""
        train, done = self.recipe.train, beat.progress.steps_done or 0
        step = beat.progress.step or 0
        if beat.stage != "train" or done < SURE_STEPS or not step:  # how fast it is decides
            return
        # Over all steps, with what lies between them (validation, checkpoints): one step may be slow for once.
        seconds = sum(beat.phases.get(phase, 0.0) for phase in TRAINING_PHASES)
        before, whole = tokens_before(step, train), tokens_before(train.max_steps, train)
        per_token = seconds / (before - tokens_before(max(0, step - done), train))
        now, left = time.time(), (whole - before) * per_token
        race = Race(self.deadline, whole * per_token, CHANGEOVER_SECONDS, HEARTBEAT_SECONDS, 0.0)
        if left > CHANGEOVER_SECONDS and race.has_to_leave_spot(now, left):
            words = f"{minutes(race.slack(now, left))}, too few to lose another spot machine"
            self.stop.ask(words, HandedOver)


def before_ranks(work: "Work") -> None:
    """End this machine's task, if it should not train. Raises Interrupted or HandedOver."""
    if waits_here():
        wait_for_spot(work)
    leave_at_once(work)


def leave_at_once(work: "Work") -> None:
    """On a spot machine that replaces a lost one: leave before it trains if it would have to as soon as it does.

    SkyPilot replaces a lost machine by itself, so nobody has asked since. Raises HandedOver.
    """
    mine = work.attempt.latest
    if not deadline_here() or not mine.machine.spot:
        return
    attempts = [a for a in read_run(work.store, mine.run).account.attempts if a.stage == "train"]
    gpus = str(mine.machine.accelerators)
    if seconds_per_token(work.recipe.train, [gpus], mine.nodes, attempts) is None:
        return  # an estimate is no reason to leave
    race, left = race_from(work, attempts)
    now = time.time()
    if left > CHANGEOVER_SECONDS and race.has_to_leave_spot(now, left):
        work.stop.ask(f"{minutes(race.slack(now, left))}, too few to train on spot", HandedOver)
        work.check()


def wait_for_spot(work: "Work") -> NoReturn:
    """In the waiting room: leave to look for spot after LOOK_SECONDS, or for on-demand once that has to be, or if
    nobody can know when that is.

    Raises Interrupted or HandedOver, or what else this process was asked to end as.
    """
    work.report(waiting=True)
    bill = read_run(work.store, work.attempt.latest.run).account
    try:
        race, left = race_from(work, [a for a in bill.attempts if a.stage == "train"])
    except UserError as error:  # a failed task would end the whole launch
        raise HandedOver(str(error)) from error
    spent = bill.by_stage["train"].usd  # this attempt is on it
    work.screen.note(f"  {minutes(race.slack(time.time(), left))}: waiting for spot; SkyPilot looks again in 10 min")
    with work.clock.phase("idle"):
        looking_at = time.time() + LOOK_SECONDS
        while True:
            now = time.time()
            if race.has_to_stop_waiting(now, left, spent):
                work.stop.ask(f"{minutes(race.slack(now, left))}, no time or money to look for spot again", HandedOver)
            elif now > looking_at:
                work.stop.ask(f"{minutes(race.slack(now, left))}: {LOOKING}")
            work.check()
            time.sleep(1)


def race_from(work: "Work", attempts: list[AttemptAccount]) -> tuple[Race, float]:
    """The race, and the seconds of training to come. UserError where nobody can know how many."""
    recipe, train, nodes = work.recipe, work.recipe.train, work.attempt.latest.nodes
    rows = [row for row in table_from_environment() if row.get("accelerators")]
    state, whole = committed_state(work.store, work.plan.prefix), tokens_before(train.max_steps, train)
    done = state.step if state else 0
    to_come = whole - tokens_before(done, train)
    if measured := seconds_per_token(train, [row["accelerators"] for row in rows], nodes, attempts):
        left = to_come * measured
    elif rows:
        speeds = (
            speed_on(recipe.model, recipe.runtime, r["accelerators"], nodes, precision=train.precision) for r in rows
        )
        left = UNSURE * to_come / min(speed.tokens_per_second for speed in speeds)
    else:
        raise UserError(f"{DEADLINE}: SKYTRAIN_PRICES names no machine with GPUs that could be waited for")
    usd = nodes * min((r.get("on_demand_usd_per_hour") or 0.0 for r in rows), default=0.0)
    all_of_it = left * whole / max(1, to_come)
    changeover = max([CHANGEOVER_SECONDS, *looks(attempts)])
    return Race(deadline_here() or 0.0, all_of_it, changeover, HEARTBEAT_SECONDS, usd), left


def looks(attempts: list[AttemptAccount]) -> Iterator[float]:
    """Seconds that each look took which found nothing: from one waiting room until the next one was there."""
    for room, following in pairwise(sorted(attempts, key=lambda one: one.number)):
        if room.waited and following.waited and (room.notice or "").endswith(LOOKING):
            ready = following.started + sum(following.phases.get(phase, 0.0) for phase in ("provision", "setup"))
            yield min(ready - room.ended, LONGEST_POLL_SECONDS)


def seconds_per_token(train: TrainConfig, gpus: list[str], nodes: int, attempts: list[AttemptAccount]) -> float | None:
    """Of training on so many nodes with such GPUs, as it went so far; None while it went too short to tell."""
    steps, tokens, seconds = 0, 0, 0.0
    for one in attempts:
        first, last = one.resumed_from, one.step
        if one.nodes != nodes or one.machine.accelerators not in gpus or first is None or last is None:
            continue
        if last > first:  # the first step is in the phase "compile"
            steps += last - first - 1
            tokens += tokens_before(last, train) - tokens_before(first + 1, train)
            seconds += training_seconds(one)
    return seconds / tokens if steps >= SURE_ENOUGH_STEPS else None


def minutes(slack: float) -> str:
    return f"deadline: {slack / 60:.0f} min of slack are left"
