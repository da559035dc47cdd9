"""A run with a deadline trains on spot, polls for spot on a cheap standby machine, and finishes on demand in time.

A managed job can't change its market. But it is a chain of tasks, and `skytrain run` makes every missing stage. So
`launch --deadline` gives the task train, in this order, spot machines and a small machine without GPUs, the standby. It
gives the task evaluate on-demand machines as large as train's, and the task train the deadline (SKYTRAIN_DEADLINE, unix
seconds). Uniform Progress (Wu et al., "Can't Be Late", NSDI'24) waits without a machine. Here a process has to decide
during the wait, and it runs on the standby:

- On spot: once another lost machine could make the run late, train commits and exits with code 0. Evaluate first
  finishes the training.
- On the standby, which SkyPilot rents when no cloud has spot machines: after POLL_SECONDS train exits with code 75, and
  SkyPilot tries all of train's machines again. Train exits with code 0 once another poll could make the run late.

benchmarks/deadline.py measures the savings, with the standby and without it. `DeadlineRules` has the rules, for the
benchmark and the job.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

from pipelines.cloud.prices import prices_from_environment
from pipelines.cloud.start_up import INSTALL_SECONDS, START_SECONDS, WAIT_SECONDS
from pipelines.recipe import Recipe
from pipelines.tracking.account import LONGEST_POLL_SECONDS, AttemptAccount
from pipelines.tracking.forecast import TRAINING_PHASES, training_seconds
from pipelines.tracking.ledger import HEARTBEAT_SECONDS
from pipelines.tracking.records import Billing, Heartbeat
from pipelines.tracking.runs import read_run
from trainer.amounts import tokens_before
from trainer.commits import committed_state
from trainer.config import TrainConfig
from trainer.errors import HandedOver, UserError
from trainer.process import StopSignal

if TYPE_CHECKING:
    from pipelines.stage import Work

DEADLINE = "SKYTRAIN_DEADLINE"
RETRAINED_SECONDS = 300.0  # at most the interval between two commits
FEWEST_STEPS_HERE = 10  # to measure the speed of this machine: the first step compiles
AFTER_TRAINING_SECONDS = 900.0  # for evaluate and export on a machine that is up
POLL_SECONDS = 600.0  # on the standby, until SkyPilot tries to get spot again
POLLING = "polling for spot again"  # the end of the notice of a standby attempt
FEWEST_STEPS = 100  # to forecast the whole training: an estimate that is too low makes the run late
ESTIMATE_MARGIN = 1.25  # factor on the estimated time of training, where it is not measured


def changeover_seconds(installs: bool) -> float:
    """From the loss of a machine until the next one is where it was: wait, start up, install packages, train again."""
    return WAIT_SECONDS + START_SECONDS + (INSTALL_SECONDS if installs else 0.0) + RETRAINED_SECONDS


def installs_here() -> bool:
    """Whether the machines of this job install the packages: without an image and without an environment."""
    return not (os.environ.get("SKYTRAIN_IMAGE") or os.environ.get("SKYTRAIN_VENV"))


def least_slack_seconds(installs: bool) -> float:
    """The slack with which a job may start on spot, or poll for it."""
    return 3 * changeover_seconds(installs)


@dataclass(frozen=True)
class DeadlineRules:
    """When to leave spot, and when to stop polling for it. All in seconds."""

    deadline: float
    # At most, from the decision or from the loss of a machine until the next one trains: provisioning, setup, start-up,
    # and the steps since the last commit.
    changeover: float
    tick: float  # between two decisions, at most

    def slack(self, now: float, work_left: float) -> float:
        """Seconds that may still pass without training, if `work_left` seconds of training are left."""
        return self.deadline - now - work_left

    def must_leave_spot(self, now: float, work_left: float) -> bool:
        """Whether the slack is too short for two changeovers: to another spot machine, and to one on demand."""
        return self.slack(now, work_left) < 2 * self.changeover + self.tick

    def must_stop_polling(self, now: float, work_left: float) -> bool:
        """Whether the time for another poll is gone. A poll takes a changeover, even if it finds no machine."""
        return self.slack(now, work_left) < 3 * self.changeover + self.tick


def is_standby() -> bool:
    """Whether this machine is the standby of a job with a deadline: it has no GPUs."""
    return bool(os.environ.get(DEADLINE)) and os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE") == "0"


def deadline_here() -> float | None:
    """Unix seconds by which training has to be done, if the job has a deadline."""
    text = os.environ.get(DEADLINE)
    try:
        return float(text) - AFTER_TRAINING_SECONDS if text else None
    except ValueError:
        raise UserError(
            f"{DEADLINE}={text}: not a time in unix seconds; `skytrain launch --deadline` sets it"
        ) from None


# On a spot machine


def deadline_watch(billing: Billing, recipe: Recipe, stop: StopSignal) -> "DeadlineWatch | None":
    """None without a deadline, and on a machine that is not spot."""
    deadline = deadline_here()
    return DeadlineWatch(deadline, recipe, stop) if deadline and billing.machine.spot else None


class DeadlineWatch:
    """Compares the training with the deadline. Call `watch` with every heartbeat."""

    def __init__(self, deadline: float, recipe: Recipe, stop: StopSignal) -> None:
        self.deadline, self.recipe, self.stop = deadline, recipe, stop

    def watch(self, beat: Heartbeat) -> None:
        """Ask the run to stop once the slack is too short for another lost machine."""
        train, done = self.recipe.train, beat.progress.steps_done or 0
        step = beat.progress.step or 0
        if beat.stage != "train" or done < FEWEST_STEPS_HERE or not step:
            return
        # The mean over all steps, with validation and checkpoints between them: a single step may be slow.
        seconds = sum(beat.phases.get(phase, 0.0) for phase in TRAINING_PHASES)
        before, whole = tokens_before(step, train), tokens_before(train.max_steps, train)
        per_token = seconds / (before - tokens_before(max(0, step - done), train))
        now, work_left = time.time(), (whole - before) * per_token
        rules = DeadlineRules(self.deadline, changeover_seconds(installs_here()), HEARTBEAT_SECONDS)
        if work_left > rules.changeover and rules.must_leave_spot(now, work_left):
            reason = f"{slack_text(rules.slack(now, work_left))}, too few to lose another spot machine"
            self.stop.ask(reason, HandedOver)


# On the standby


def poll_for_spot(work: "Work") -> NoReturn:
    """On the standby: exit after POLL_SECONDS, so that SkyPilot tries spot again. Exit for on-demand machines if the
    rules demand it, or can't be applied.

    Raises Interrupted or HandedOver; after another request to stop, the error of that request.
    """
    work.report(waiting=True)
    try:
        rules, work_left = rules_for(work)
    except UserError as error:  # a failed task would end the whole launch
        raise HandedOver(str(error)) from error
    work.screen.note(
        f"  {slack_text(rules.slack(time.time(), work_left))}: waiting for spot; SkyPilot polls again in 10 min"
    )
    with work.clock.phase("idle"):
        poll_at = time.time() + POLL_SECONDS
        while True:
            now = time.time()
            if rules.must_stop_polling(now, work_left):
                reason = f"{slack_text(rules.slack(now, work_left))}, no time to poll for spot again"
                work.stop.ask(reason, HandedOver)
            elif now > poll_at:
                work.stop.ask(f"{slack_text(rules.slack(now, work_left))}: {POLLING}")
            work.check()
            time.sleep(1)


def rules_for(work: "Work") -> tuple[DeadlineRules, float]:
    """The rules, and the seconds of training that are left. UserError if these can't be known."""
    from pipelines.cloud.throughput import speed_on  # reads the measured figures

    recipe, train, nodes = work.recipe, work.recipe.train, work.attempt.latest.nodes
    account = read_run(work.store, work.attempt.latest.run).account
    attempts = [attempt for attempt in account.attempts if attempt.stage == "train"]
    gpus = [row.accelerators for row in prices_from_environment() if row.accelerators]
    state, whole = committed_state(work.store, work.plan.prefix), tokens_before(train.max_steps, train)
    done = state.step if state else train.first_step
    to_come = 0 if state and state.has_ended(train) else whole - tokens_before(done, train)
    if measured := seconds_per_token(train, gpus, nodes, attempts):
        work_left = to_come * measured
    elif gpus:
        speeds = (speed_on(recipe.model, recipe.runtime, kind, nodes, precision=train.precision) for kind in gpus)
        work_left = ESTIMATE_MARGIN * to_come / min(speed.tokens_per_second for speed in speeds)
    else:
        raise UserError(f"{DEADLINE}: SKYTRAIN_PRICES has no machine with GPUs to wait for")
    changeover = max([changeover_seconds(installs_here()), *poll_seconds(attempts)])
    return DeadlineRules(deadline_here() or 0.0, changeover, HEARTBEAT_SECONDS), work_left


def poll_seconds(attempts: list[AttemptAccount]) -> Iterator[float]:
    """The duration of each poll that found no spot: from the end of one standby attempt until the next one is up."""
    for standby, following in pairwise(sorted(attempts, key=lambda one: one.number)):
        if standby.waited and following.waited and (standby.notice or "").endswith(POLLING):
            ready = following.started + sum(following.phases.get(phase, 0.0) for phase in ("provision", "setup"))
            yield min(ready - standby.ended, LONGEST_POLL_SECONDS)


def seconds_per_token(train: TrainConfig, gpus: list[str], nodes: int, attempts: list[AttemptAccount]) -> float | None:
    """The measured speed on so many nodes with such GPUs; None before FEWEST_STEPS."""
    steps, tokens, seconds = 0, 0, 0.0
    for one in attempts:
        first, last = one.resumed_from, one.step
        if one.nodes != nodes or one.machine.accelerators not in gpus or first is None or last is None:
            continue
        if last > first:  # the first step is in the phase "compile"
            steps += last - first - 1
            tokens += tokens_before(last, train) - tokens_before(first + 1, train)
            seconds += training_seconds(one)
    return seconds / tokens if steps >= FEWEST_STEPS else None


def slack_text(slack: float) -> str:
    """The slack (seconds) as a text for notes and reasons."""
    return f"deadline: {slack / 60:.0f} min of slack are left"
