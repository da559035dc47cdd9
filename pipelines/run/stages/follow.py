"""Follow the ranks: their events become progress and heartbeats; their end becomes a result or an error.

Rank 0 appends its events to a file, which this process reads, so nothing here can delay a step.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.run.nodes.address import NodeAddress
from pipelines.run.nodes.ranks import LOG_FILE, Ranks, RankTask, result_of_ranks, start_ranks
from pipelines.run.nodes.results import (
    COUNTED,
    GONE,
    KILLED,
    PEER,
    RERAISED,
    STUCK,
    UNAVAILABLE,
    NodeResult,
    cause_of,
)
from pipelines.run.nodes.workers import Workers
from pipelines.run.screen import Bar
from pipelines.run.stage import Work
from pipelines.store.crashes import after_crash
from pipelines.store.process_id import process_started
from pipelines.store.records import ProcessId
from trainer.base.events import (
    EVENTS_FILE,
    Checkpointed,
    CheckpointFailed,
    Event,
    Measuring,
    PhaseChanged,
    Row,
    Started,
    Warned,
    events_after,
)
from trainer.base.process import steady_time
from trainer.config.config import seconds_from_environment
from trainer.config.errors import FULL, Crashed, Interrupted, RepeatedCrash, UserError
from trainer.loop.watchdog import START_MINUTES

FACTS_FILE = "facts.json"  # that rank 0 of evaluate and tune writes
POLL_SECONDS = 0.1
UNSAVED_SECONDS = 1800.0  # from the first failed checkpoint until the run leaves
FULL_BYTES = 1 << 16  # more than an error message, less than any other file: with less free space, the disk is full
# Slurm ends the processes of a job one by one; the ranks may get their signal before this process.
SIGNALS_SECONDS = 1.0


def follow(work: Work, ranks: Ranks, workers: Workers | None = None) -> int | None:
    """Follow the ranks until they end. Returns their last step; raises the error that ended them early."""
    follower, stopping = Follower(work), False
    steps = work.recipe.train.max_steps if work.plan.stage == "train" else None  # of tuning, the ranks count them
    exit_code: int | None = None
    with work.screen.bar(work.plan.stage, steps) as bar:
        for events in follow_events(work.folder / EVENTS_FILE, ranks.launcher):
            for event in events:
                follower.handle(event, bar)
            # Ranks of several nodes get the stop after their start.
            unstarted = workers is None and not follower.started
            stopping = stopping or pass_on_stop(work, ranks, nothing_to_lose=unstarted)
            if workers and workers.have_failed:
                exit_code = ranks.wait_or_kill()
    if exit_code is None:
        exit_code = ranks.launcher.wait()
        if exit_code < 0:
            ranks.wait_for_orphans()
    raise_error_of_ranks(work, exit_code, follower.step, workers)
    return follower.step


def task_of(work: Work, processes: int) -> dict[str, Any]:
    """The fields of a `RankTask` in this attempt."""
    return {
        "stage": work.attempt.latest.stage,
        "recipe": work.recipe,
        "store": work.store.uri,
        "tokens": work.inputs["tokenize"].prefix,
        "started": steady_time(),
        "processes": processes,
    }


def facts_of_ranks(work: Work, task: RankTask) -> dict[str, Any]:
    """Start ranks on this node alone, and follow them. Returns the facts that rank 0 leaves; raises the error that
    ended them early."""
    work.clock.enter("ranks")
    ranks = start_ranks(task, work.folder, work.home, work.stop.grace_seconds, NodeAddress())
    with attempt_of(work, ranks):
        follow(work, ranks)
    facts = work.folder / FACTS_FILE
    if not facts.exists():
        raise work.stop.interruption()
    made: dict[str, Any] = json.loads(facts.read_text())
    return made


@contextmanager
def attempt_of(work: Work, ranks: Ranks) -> Iterator[None]:
    """Record that the attempt lives as long as its ranks hold the GPUs, even if this process dies. Ends the ranks
    after an error of this process."""
    own, pid = work.attempt.latest.process, ranks.launcher.pid
    child = ProcessId(own.machine, pid, process_started(pid))
    work.attempt.update(process=replace(own, children=(child,)))
    work.attempt.report_soon()
    try:
        yield
    except BaseException:
        ranks.stop()
        ranks.launcher.wait()
        raise


def pass_on_stop(work: Work, ranks: Ranks, nothing_to_lose: bool) -> bool:
    """Ask the ranks to stop if this process must. Return whether it must.

    Ranks with `nothing_to_lose` are killed: while they import torch or load a state, a signal takes seconds to act.
    """
    if not (work.stop.asked or work.attempt.lost):
        return False
    if work.stop.reason:
        work.report(notice=work.stop.reason)  # now: this machine may be gone soon
    if nothing_to_lose:
        ranks.kill()
    else:
        work.screen.note("  stopping: the ranks commit the last step and exit")
        ranks.stop()
    return True


class Follower:
    """The state of the ranks as the pipeline's process knows it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.step: int | None = None
        self.metrics: dict[str, float] = {}  # the last value of each
        self.started = False  # whether the ranks were ready to train: only then can they lose a step
        self.unsaved_since: float | None = None  # by time.monotonic, of the first failed checkpoint since a commit
        self.unsaved_seconds = seconds_from_environment("SKYTRAIN_UNSAVED_SECONDS", UNSAVED_SECONDS)

    def handle(self, event: Event, bar: Bar) -> None:
        """Report an event to screen and heartbeat."""
        work, warn = self.work, self.work.screen.warn
        match event:
            case Row():
                self._row(event, bar)
            case PhaseChanged(phases, phase):
                work.rank_phases = phases, phase
            case Measuring(note):
                bar.update(0, note)
            case Started():
                self.started = True
                self.step = event.step  # a run that resumes after its last step sends no row
                report_start(work, event)
            case CheckpointFailed(step, reason, ended):
                self._checkpoint_failed(reason, ended)
                then = "the training has ended, and its last state is saved again" if ended else "training continues"
                warn(f"checkpoint of step {step:,} failed ({reason}); {then}")
            case Checkpointed(step, seconds):
                if work.stop.asked:
                    work.screen.note(f"  step {step:,} is committed")
                self.unsaved_since = None
                work.report(unsaved_since=None, unsaved_because=None, save_seconds=seconds)
            case Warned(message):
                warn(message)

    def _checkpoint_failed(self, reason: str, ended: bool) -> None:
        """Ask the run to stop once the store has taken no checkpoint for too long: nobody could resume from the work
        of this machine. A training that has `ended` waits for the store instead: its weights are only here."""
        if self.unsaved_since is None:
            self.unsaved_since = time.monotonic()
            self.work.report(unsaved_since=steady_time())
        self.work.report(unsaved_because=reason)
        seconds = time.monotonic() - self.unsaved_since
        if not ended and seconds >= self.unsaved_seconds and not self.work.stop.asked:
            self.work.stop.ask(f"the store has taken no checkpoint for {seconds:,.0f} s")
            self.work.screen.warn(f"{self.work.stop.reason}; the run tries to save once more, then exits")

    def _row(self, row: Row, bar: Bar) -> None:
        self.step = row.step
        self.metrics |= row.metrics
        bar.update(row.step, describe(row.step, self.metrics))
        self.work.rank_phases = row.phases, row.phase
        counts: dict[str, int] = {}
        if any(name.endswith("/loss") and name != "val/loss" for name in row.metrics):
            progress = self.work.attempt.latest.progress
            highest = progress.highest_step or 0  # of this and all earlier attempts
            counts["steps_done"] = (progress.steps_done or 0) + 1
            counts["steps_redone"] = (progress.steps_redone or 0) + (row.step <= highest)
            counts["highest_step"] = max(highest, row.step)
        self.work.report(row.metrics, step=row.step, time=steady_time(), **counts)


def follow_events(path: Path, process: subprocess.Popen[bytes]) -> Iterator[list[Event]]:
    """The new events of a file that is being written, at least every POLL_SECONDS until the process ends."""
    ended, offset = False, 0
    events: list[Event] = []
    while events or not ended:
        ended = process.poll() is not None
        events, offset = events_after(path, offset)
        yield events
        if not ended:
            time.sleep(POLL_SECONDS)


def raise_error_of_ranks(work: Work, exit_code: int, step: int | None, workers: Workers | None) -> None:
    """Raise the error that ended the ranks early; nothing if they completed, or left after a request.

    `step` is their last one. `workers`: of several nodes.
    """
    if exit_code and not work.stop.asked:
        time.sleep(SIGNALS_SECONDS)
    work.attempt.check()
    if exit_code and shutil.disk_usage(work.folder).free < FULL_BYTES:  # the ranks cannot leave their errors there
        raise UserError(f"{work.folder}: {FULL}")
    results = [result_of_ranks(0, work.folder, exit_code)]
    if workers and exit_code:
        results += workers.wait_for_results()
    if (cause := cause_of(results)) is None:
        return

    def crashed(message: str, ending: type[Interrupted] = Interrupted) -> Exception:
        work.report(killed=message)
        return after_crash(work.store, work.plan.prefix, work.attempt.number, message, ending)

    if (kind := cause.kind) in COUNTED and work.stop.ending is Interrupted:
        raise crashed(cause.message)
    if kind in RERAISED:
        raise after_outage(work, cause) if kind == UNAVAILABLE else cause.error
    if workers and workers.lost and work.stop.ending is Interrupted:
        raise Interrupted(f"node {workers.lost[0]} is lost")
    if work.stop.asked:
        raise work.stop.interruption()
    if kind == STUCK and workers and workers.absent:  # no interruption: rented nodes would otherwise retry for ever
        raise UserError(
            f"node {workers.absent[0]} of {workers.address.count} did not start its ranks within "
            f"{START_MINUTES:.0f} min; run this command on all nodes, and let them reach {workers.address.first}"
        )
    if kind == STUCK:
        raise crashed(cause.message)
    if kind in (GONE, KILLED, PEER):
        after = "" if step is None else f" after step {step:,}"
        raise crashed(f"{cause.message}{after}", Interrupted if kind == GONE else Crashed)
    messages = "\n".join(result.message for result in results if result.kind)
    raise RuntimeError(
        f"the processes of {work.plan.stage} failed; their output is in {work.folder / LOG_FILE}:\n{messages}"
    )


def after_outage(work: Work, result: NodeResult) -> Exception:
    """The exception that ends an attempt whose store took no checkpoint. `status` has its message. A stop of the
    whole run stays one. A run that leaves again and again without a commit ends, as after crashes."""
    unsaved = work.attempt.latest.progress.unsaved_since
    if unsaved:
        work.report(unsaved_because=result.message)
    if work.stop.ending is not Interrupted:
        return work.stop.ending(f"{work.stop.reason}; {result.message}")
    with suppress(OSError, UserError):  # the store does not answer: uncounted
        prefix, number = work.plan.prefix, work.attempt.number
        ending = after_crash(work.store, prefix, number, result.message)
        if unsaved and isinstance(ending, RepeatedCrash):
            return ending
    return result.error


def describe(step: int, metrics: Mapping[str, float]) -> str:
    """A row as a short text."""
    facts = [f"step {step:,}"]
    if "train/loss" in metrics:
        facts += [f"loss {metrics['train/loss']:.3f}", f"{metrics['perf/tokens_per_second']:,.0f} tok/s"]
    tuned = {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("tune/")}
    facts += [f"{name} {tuned[name]:.3f}" for name in ("loss", "reward", "exact") if name in tuned]
    if "val/loss" in metrics:
        facts.append(f"val {metrics['val/loss']:.3f}")
    if "eval/hellaswag_acc_norm" in metrics:
        facts.append(f"HellaSwag {metrics['eval/hellaswag_acc_norm']:.4f}")
    return "  ".join(facts)


def report_start(work: Work, event: Started) -> None:
    """Report the hardware and the first step of the ranks."""
    hardware: dict[str, Any] = {"device": event.device, "precision": event.precision, "world_size": event.world_size}
    hardware |= {"engine": event.engine, "micro_batch": event.micro_batch_why}
    work.report(resumed_from=event.step, step=event.step, **hardware)
    work.attempt.report_soon()  # without it, steps that an attempt commits before its next heartbeat belong to nobody
    resumed = f", resumed from step {event.step:,}" if event.step else ""
    work.screen.note(
        f"  {event.parameters:,} parameters, {event.world_size} x {event.device}, "
        f"{event.precision}, {event.micro_batch_why}; {event.engine}{resumed}"
    )
