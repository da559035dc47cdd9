"""A run with a deadline trains on spot, polls for spot on a cheap standby machine, and finishes on demand in time.

A managed job can't change its market. But it is a chain of tasks, and `skytrain run` makes every missing stage. So
`launch --deadline` gives the task train, in this order, spot machines and a small machine without GPUs, the standby. It
gives the task evaluate on-demand machines as large as train's, and the task train the deadline (SKYTRAIN_DEADLINE, unix
seconds). Uniform Progress (Wu et al., "Can't Be Late", NSDI'24) waits without a machine. Here a process has to decide
during the wait, and it runs on the standby, which SkyPilot rents when no cloud has spot machines: after POLL_SECONDS
train exits with code 75, and SkyPilot tries all of train's machines again.

One rule holds on both, before and while train trains: once the slack is too short, train commits and exits with code 0.
Evaluate first finishes the training. docs/measurements.md has the savings.
"""

import os
import time
from collections.abc import Iterable

from pipelines.job.prices import prices_from_environment
from pipelines.recipe.recipe import Recipe
from pipelines.run.runs import read_run
from pipelines.run.stage import Work
from pipelines.run.watch import Watch
from pipelines.store.account import AttemptAccount, StoredHeartbeat, account, training_seconds
from pipelines.store.records import HEARTBEAT_SECONDS, Heartbeat
from trainer.base.process import StopSignal
from trainer.checkpoint.commits import committed_state
from trainer.config.amounts import tokens_before
from trainer.config.config import TrainConfig, seconds_from_environment
from trainer.config.errors import HandedOver, UserError

DEADLINE = "SKYTRAIN_DEADLINE"
WAIT_SECONDS = 180.0  # until there is a node, first and after a preemption; on a local Slurm 25 to 40 s were measured
START_SECONDS = 120.0  # billed: boot, image, interpreter
INSTALL_SECONDS = 180.0  # billed, without an image: 4 GB of packages from PyPI, unpacked
RETRAINED_SECONDS = 300.0  # at most the interval between two commits
AFTER_TRAINING_SECONDS = 900.0  # for evaluate and export on a machine that is up
POLL_SECONDS = 600.0  # on the standby, until SkyPilot tries to get spot again
FEWEST_STEPS = 100  # to forecast the whole training: an estimate that is too low makes the run late
ESTIMATE_MARGIN = 1.25  # on the standby: factor on the estimated time of training, where it is not measured


def changeover_seconds(installs: bool) -> float:
    """From the loss of a machine until the next one is where it was: wait, start up, install packages, train again."""
    return WAIT_SECONDS + START_SECONDS + (INSTALL_SECONDS if installs else 0.0) + RETRAINED_SECONDS


def installs_here() -> bool:
    """Whether the machines of this job install the packages: without an image and without an environment."""
    return not (os.environ.get("SKYTRAIN_IMAGE") or os.environ.get("SKYTRAIN_VENV"))


def least_slack_seconds(installs: bool) -> float:
    """The slack with which a job may start on spot: after a changeover it is still long enough."""
    return 4 * changeover_seconds(installs)


def must_go_on_demand(slack: float) -> bool:
    """Whether the seconds that may still pass without training are too few for three changeovers.

    Two, to machines of which the first is lost before it trains, or a poll and a machine that it finds; and one to a
    machine on demand.
    """
    return slack < 3 * changeover_seconds(installs_here()) + HEARTBEAT_SECONDS


def is_standby() -> bool:
    """Whether this machine is the standby of a job with a deadline: it has no GPUs."""
    return bool(os.environ.get(DEADLINE)) and os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE") == "0"


def deadline_here() -> float | None:
    """Unix seconds by which training has to be done, if the job has a deadline."""
    deadline = seconds_from_environment(DEADLINE, 0)
    return deadline - AFTER_TRAINING_SECONDS if deadline else None


class Deadline(Watch):
    """Compares the training with the deadline (unix seconds), on a spot machine or on the standby."""

    def __init__(self, deadline: float, recipe: Recipe, stop: StopSignal) -> None:
        self.deadline, self.recipe, self.stop = deadline, recipe, stop

    def before_build(self, work: Work) -> None:
        """Before the training, raise HandedOver if the slack is too short. On the standby, wait, and raise Interrupted
        so that SkyPilot tries spot again; after another request to stop, the error of that request."""
        if work.plan.stage != "train" or not work.recipe.train.max_steps:
            return
        standby = is_standby()
        if standby:
            work.report(waiting=True)
        try:
            work_left = seconds_left(work)
        except UserError as error:
            if standby:  # a failed task would end the whole launch
                raise HandedOver(str(error)) from error
            return
        poll_at = time.time() + POLL_SECONDS
        if standby:
            slack = slack_text(self._slack(work_left))
            work.screen.note(f"  {slack}: waiting for spot; SkyPilot polls again in 10 min")
        with work.clock.phase("idle" if standby else "setup"):
            while True:
                self._compare(work_left)
                if standby and time.time() > poll_at:
                    self.stop.ask(f"{slack_text(self._slack(work_left))}: polling for spot again")
                work.check()
                if not standby:
                    return
                time.sleep(1)

    def heartbeat(self, beat: Heartbeat) -> None:
        """Ask the run to stop once the slack is too short, by the speed of this attempt."""
        train, step = self.recipe.train, beat.progress.step
        if beat.stage == "train" and step:
            ours, gpus = account([StoredHeartbeat("train", beat)]).attempts, beat.machine.accelerators or ""
            if per_token := seconds_per_token(train, [gpus], beat.nodes, ours):
                to_come = tokens_before(train.max_steps, train) - tokens_before(step, train)
                self._compare(to_come * per_token)

    def _slack(self, work_left: float) -> float:
        """Seconds that may still pass without training, if `work_left` seconds of training are left."""
        return self.deadline - time.time() - work_left

    def _compare(self, work_left: float) -> None:
        slack, ends_here = self._slack(work_left), not is_standby() and work_left <= changeover_seconds(installs_here())
        if must_go_on_demand(slack) and not ends_here:
            self.stop.ask(f"{slack_text(slack)}: switching to on-demand", HandedOver)


def seconds_left(work: Work) -> float:
    """The seconds of training that are left. UserError if they can't be known."""
    from pipelines.extras.bench.throughput import speed_on  # reads the measured figures

    recipe, train, here = work.recipe, work.recipe.train, work.attempt.latest
    attempts = [one for one in read_run(work.store, here.run).account.attempts if one.stage == "train"]
    margin, gpus = 1.0, [here.machine.accelerators or ""]  # as launch expects it
    if is_standby():
        margin, gpus = ESTIMATE_MARGIN, [row.accelerators for row in prices_from_environment() if row.accelerators]
    state, whole = committed_state(work.store, work.plan.prefix), tokens_before(train.max_steps, train)
    done = state.step if state else train.first_step
    to_come = 0 if state and state.has_ended(train) else whole - tokens_before(done, train)
    if measured := seconds_per_token(train, gpus, here.nodes, attempts):
        return to_come * measured
    if not gpus:
        raise UserError(f"{DEADLINE}: SKYTRAIN_PRICES has no machine with GPUs to wait for")
    speeds = (speed_on(recipe, kind, here.nodes) for kind in gpus)
    return margin * to_come / min(speed.tokens_per_second for speed in speeds)


def seconds_per_token(
    train: TrainConfig, gpus: list[str], nodes: int, attempts: Iterable[AttemptAccount]
) -> float | None:
    """The measured speed on this number of nodes with such GPUs; None before FEWEST_STEPS."""
    same = [one for one in attempts if one.nodes == nodes and (one.machine.accelerators or "") in gpus]
    progress = ((one, one.progress.resumed_from, one.progress.step) for one in same)
    trained = [(first + 1, last, one) for one, first, last in progress if first is not None and last]
    steps = sum(last - first for first, last, _ in trained)  # the first step is in the phase "compile"
    if steps < FEWEST_STEPS:
        return None
    tokens = sum(tokens_before(last, train) - tokens_before(first, train) for first, last, _ in trained)
    return sum(training_seconds(one) for _, _, one in trained) / tokens


def slack_text(slack: float) -> str:
    """The slack (seconds) as a text for notes and reasons."""
    return f"deadline: {slack / 60:.0f} min of slack left"
