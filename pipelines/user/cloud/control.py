"""Status, stop and removal of a launched run from any machine, and the search for orphans.

The store has the run's progress and cost. SkyPilot reports the job of a launched run. If it does not answer, the status
has the facts of the store only.
"""

import io
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipelines.run.run_record import RunRecord
from pipelines.run.runs import Run, Summary, store_summary, usable_runs
from pipelines.store.account import Forecast
from pipelines.store.ledger import SILENT_SECONDS
from pipelines.store.records import HEARTBEAT_SECONDS, Heartbeat, Progress
from pipelines.store.releases import Release, read_releases, write_releases
from pipelines.store.stop_request import StopRequest, request_stop
from pipelines.user.cloud.request import LaunchRecord, last_launch, launched_runs, run_label
from pipelines.user.cloud.skypilot import (
    SKY_THERE,
    Cluster,
    TaskStatus,
    cancel_jobs,
    clusters,
    is_this_server,
    managed_tasks,
    reach_api_server,
    server_name,
    stores_of,
    tail_logs,
    take_down,
)
from trainer.base.store import Store
from trainer.config.errors import EXIT_DONE, UserError

# The longest set-up of a cluster before its attempt's first heartbeat: it pulls a container, or makes an environment.
SET_UP_SECONDS = 1800.0
POLL_SECONDS = 2.0
DOWN_SECONDS = 600.0  # to cancel a job and take its machines down
JOB_CLUSTER_SECONDS = 60.0  # for a cancelled job to take down its own clusters


@dataclass(frozen=True)
class Status:
    """The state of a run."""

    run: str
    state: str  # as in a report, or waiting: its job has no machine, or only a standby machine
    step: int
    max_steps: int
    summary: Summary  # as in a report
    tasks: list[TaskStatus]
    recoveries: int  # by SkyPilot, of the last launch
    budget: float | None  # dollars, of the last launch
    # Of a run that is not done:
    newest: Heartbeat | None = None  # of the newest attempt
    places: Sequence[str] = ()  # of the rented machines, in the order of time, each once
    to_come: Forecast | None = None  # of training
    stop_request: StopRequest | None = None
    # Since the store takes no checkpoint of the newest attempt, up to its last heartbeat:
    unsaved_seconds: float | None = None
    silent_seconds: float | None = None  # since the last heartbeat of a running attempt
    stepless_seconds: float | None = None  # of a training that runs, from its last row to its last heartbeat


def status_of(run: Run, launched: LaunchRecord | None, all_tasks: list[TaskStatus], stoppable: bool = True) -> Status:
    """The status of a run, from its snapshot, its last launch and SkyPilot's tasks. Not `stoppable`: the store has no
    request to stop it."""
    tasks = tasks_of(launched, all_tasks) if launched else []
    recoveries, budget = sum(task.recoveries for task in tasks), launched.request.budget if launched else None
    if (summary := run.listed).state == "done":
        return Status(run.name, "done", summary.steps, summary.steps, summary, tasks, recoveries, budget)
    newest = run.newest
    progress = newest.progress if newest else Progress()
    running = newest is not None and newest.state == "running"
    training = running and newest is not None and newest.stage == "train" and summary.steps < run.last_step
    waiting = summary.state in ("interrupted", "lost") and any(not task.over for task in tasks)
    # The job that was stopped runs until its machine is released; a newer one waits for its machine.
    waiting |= summary.state in ("stopped", "failed") and any(not (task.over or task.works) for task in tasks)
    waiting |= summary.state == "running" and bool(progress.waiting)
    return Status(
        run=run.name,
        state="waiting" if waiting else summary.state,
        step=summary.steps,
        max_steps=run.last_step,
        summary=summary,
        newest=newest,
        places=run.places,
        recoveries=recoveries,
        to_come=run.to_come,
        stop_request=run.stop_request if stoppable else None,
        unsaved_seconds=newest.time - progress.unsaved_since if newest and progress.unsaved_since else None,
        tasks=tasks,
        silent_seconds=run.silent_seconds if running else None,
        stepless_seconds=newest.time - progress.time if newest and training and progress.time else None,
        budget=budget,
    )


def reported_tasks(note: Callable[[str], None]) -> tuple[list[TaskStatus], str | None]:
    """The tasks of all jobs, and the reason if SkyPilot does not answer. `note` reports the start of its server."""
    try:
        reach_api_server(note)
        return managed_tasks(), None
    except Exception as error:  # of SkyPilot, its server, or the network: the facts of the store are still right
        return [], " ".join(str(error).split()) or type(error).__name__


def tasks_of(launched: LaunchRecord, tasks: list[TaskStatus]) -> list[TaskStatus]:
    """The tasks of a run's last job, and of its other jobs that are not over, in order. Without those of a job that is
    over if a later launch went to another API server."""
    own = [task for task in tasks if task.name == launched.request.job_name]
    # SkyPilot gives a job's only task the name of the job.
    own = [replace(task, stage=launched.stages[0]) if task.stage == task.name else task for task in own]
    last = max((task.job for task in own), default=0)
    shown = {task.job for task in own if not task.over} | ({last} if own and is_this_server(launched.server) else set())
    return sorted((task for task in own if task.job in shown), key=lambda task: (task.job, task.task))


def no_job(run: str) -> str:
    """A message where SkyPilot shows no job that is expected."""
    return f"SkyPilot shows no job of {run}; if its controller has stopped, `sky jobs queue --refresh` starts it"


def on_another_server(launched: LaunchRecord) -> str | None:
    """A message if the last launch went to another API server, and this shell's can't see its job."""
    if is_this_server(launched.server):
        return None
    job = f"job {launched.jobs[-1]}" if launched.jobs else "a job"
    return (
        f"{launched.request.run} has {job} on SkyPilot's API server {launched.server}; "
        f"ask there, not on {server_name()}"
    )


def record_releases(runs: list[Run], launches: Mapping[str, LaunchRecord], note: Callable[[str], None]) -> list[Run]:
    """Record when SkyPilot has released the machines of launched runs, if that is not on record and the store may be
    written. Returns the runs, new snapshots of those with other bills."""
    # A stored summary has all releases.
    missing = [run for run in runs if run.name in launches and not run.stored_summary and run.unreleased]
    found, again = clusters(note) if missing else [], dict[str, Run]()
    for run in missing:
        label = run_label(launches[run.name].request.job_name)
        ours = {Release(one.name, one.since, one.until) for one in found if one.run == label and one.until}
        with suppress(UserError, OSError):
            if ours and not ours <= {*run.releases}:
                known = {*read_releases(run.store, run.name)}  # another server may have recorded its own meanwhile
                write_releases(run.store, run.name, sorted(known | ours, key=lambda one: one.since))
                again[run.name] = Run(run.store, run.record)
                store_summary(again[run.name])
    return [again.get(run.name, run) for run in runs]


def jobs_without_store(run: str, store: str) -> list[str]:
    """The names of unfinished jobs of a run by SkyPilot's own record, for a store (its URI) that can't be read.

    UserError if there are only jobs of that run in other stores.
    """
    pattern = rf"{re.escape(run)}(-[0-9a-f]{{8}})?"
    names = {task.job: task.name for task in managed_tasks(unfinished=True) if re.fullmatch(pattern, task.name)}
    stores = stores_of(names) if names else {}
    if names and store not in stores.values():
        job, elsewhere = next(iter(stores.items()), (min(names), "unknown"))
        raise UserError(f"{run}: job {job} belongs to the store {elsewhere}, not to {store}; name it with --store")
    return [name for job, name in names.items() if stores.get(job) == store]


# Logs


def newest_job(tasks: list[TaskStatus]) -> list[TaskStatus]:
    """The tasks of the job with the highest number."""
    last = max(task.job for task in tasks)
    return [task for task in tasks if task.job == last]


def waiting_task(tasks: list[TaskStatus]) -> TaskStatus | None:
    """The present task of the newest job, if it has no machine. SkyPilot's log would wait until it has one."""
    present = next((task for task in newest_job(tasks) if not task.over), None)
    return present if present and not present.works else None


def print_log(name: str, follow: bool, output: io.TextIOBase) -> int:
    """Write the log of the newest job of this name to `output`. Returns the job's exit code, and 0 before it is over.

    SkyPilot 0.14.1 ends a followed log at the first exit code that is not 0, although it recovers from 75: this goes on
    with the logs of the next machines until the job is over. It lacks those of a job that is over within two minutes of
    that exit, for so long SkyPilot waits.
    """
    while True:
        before = newest_job(managed_tasks(name))
        goes_on = tail_logs(before[0].job, follow, output)
        tasks = newest_job(managed_tasks(name))
        while goes_on and started_count(tasks) <= started_count(before) and not all(task.over for task in tasks):
            time.sleep(POLL_SECONDS)
            tasks = newest_job(managed_tasks(name))
        if not goes_on or started_count(tasks) <= started_count(before):
            over = all(task.over for task in tasks)
            return next((task.exit_code for task in tasks if over and task.exit_code), EXIT_DONE)


def started_count(tasks: list[TaskStatus]) -> int:
    """How many machines, or sets of them, a job's tasks have had, with one that a task waits for."""
    had = [task for task in tasks if task.status not in ("PENDING", "CANCELLED")]
    return sum(1 + task.recoveries + (task.status == "RECOVERING") for task in had)


# Stopping and removing


def stop(
    store: Store,
    record: RunRecord,
    reason: str,
    wait_seconds: float,
    note: Callable[[str], None],
    silent_seconds: float = SILENT_SECONDS,
) -> Heartbeat | None:
    """Request that a run stops, and wait until its attempt has ended.

    The attempt's last heartbeat: 'running' if it has not ended after `wait_seconds`. None if no attempt runs, or if it
    crashed meanwhile, which `silent_seconds` without a heartbeat show.
    """
    request_stop(store, record.run, reason)
    beat = running_attempt(Run(store, record))
    if beat:
        note(f"{beat.stage}: attempt {beat.attempt} is asked to commit and exit")
    deadline = time.monotonic() + wait_seconds
    changed_at, last = time.monotonic(), beat
    while beat and beat.state == "running" and time.monotonic() < deadline:
        beat = next(b for b in Run(store, record).attempts[beat.stage] if b.attempt == beat.attempt)
        if last and beat.time != last.time:
            changed_at, last = time.monotonic(), beat
        if beat.state == "running" and time.monotonic() - changed_at > silent_seconds:
            return None
        time.sleep(1 if beat.state == "running" else 0)
    return beat


def running_attempt(run: Run) -> Heartbeat | None:
    """The last heartbeat of the attempt that runs, the latest stage's; None if none does."""
    present = run.record.prefixes.values()
    for one in reversed(run.heartbeats):
        recent = one.alive or run.store.clock() - (one.stored or 0.0) < SILENT_SECONDS + HEARTBEAT_SECONDS
        if one.beat.state == "running" and one.prefix in present and recent:
            return one.beat
    return None


def machines_of(name: str) -> tuple[list[int], list[Cluster]]:
    """The jobs of this name that are not over, and their clusters that are up. Those without a label are of jobs that
    are over, and a controller on a machine of its own, which alone has them on record, takes them down."""
    tasks = managed_tasks(name)
    found = [one for one in clusters() if one.run == run_label(name) and one.until is None]
    found += [Cluster(task.up, None, task.submitted) for task in tasks if task.over and task.up]
    return sorted({task.job for task in tasks if not task.over}), found


def down(name: str, note: Callable[[str], None]) -> bool:
    """Cancel the jobs of this name, wait until they and their clusters are gone, and take down others with its label.

    SkyPilot's API server has to be up. False if it had no job and no cluster. UserError if it takes too long.
    """
    began, (jobs, found) = time.monotonic(), machines_of(name)
    any_left = bool(jobs or found)
    if jobs:
        note(f"cancelling job {', '.join(map(str, jobs))}")
        cancel_jobs(jobs)
    own_time = JOB_CLUSTER_SECONDS if jobs else 0.0
    while jobs or found:
        seconds = time.monotonic() - began
        if seconds > DOWN_SECONDS:
            left = f"job {jobs[0]}" if jobs else f"cluster {found[0].name}"
            raise UserError(f"down: {left} still exists and may cost money; see `sky jobs queue` and `sky status`")
        # A cluster of a job that is not over stays: the job's controller would bring it back.
        for cluster in found if not jobs and seconds >= own_time else []:
            if cluster.run:
                note(f"taking down {cluster.name}")
                take_down(cluster.name)
        time.sleep(POLL_SECONDS)
        jobs, found = machines_of(name)
    return any_left


# Orphans


@dataclass(frozen=True)
class Orphan:
    """A job or cluster that still costs money and that no live run uses."""

    what: str
    why: str
    remedy: str


def find_orphans(store: Store, now: float, note: Callable[[str], None]) -> Iterator[Orphan]:
    """Jobs on machines whose run is over or silent, and clusters with our label that no job uses.

    SkyPilot's record names them all; the store only shows which of its runs work. `note` gets a message for each run
    that can't be read; machines of such a run are not searched.
    """
    runs: dict[str, Run] = {}  # by the name of the last job

    def read(run: Run) -> None:
        if run.name in names and run.attempts is not None and (launched := last_launch(store, run.name)):
            runs[launched.request.job_name] = run

    names = launched_runs(store)
    usable_runs(store, [], read, note)
    tasks = [task for task in managed_tasks(unfinished=True) if not task.over]
    found = [cluster for cluster in clusters(note) if cluster.until is None]
    up_since = {cluster.name: cluster.since for cluster in found}
    for task in tasks:
        # A task that waits for a machine has none, but one that is set up has it already.
        had = [up_since[name] for name in task.clusters if name in up_since] or [task.submitted] * task.works
        run = runs.get(task.name)
        if had and run and (why := idle_reason(run, max(had), now)):
            # Never its cluster: the job's controller would bring it back.
            remedy = f"skytrain down {run.name} (or sky jobs cancel {task.job})"
            yield Orphan(f"job {task.job} ({run.name}, {task.stage})", why, remedy)
    by_label = {run_label(name): run for name, run in runs.items()}
    running = [beat.machine.cluster for run in runs.values() if (beat := running_attempt(run))]
    busy = set(running).union(*(task.clusters for task in tasks))
    for cluster in found:
        if cluster.name in busy:
            continue
        if run := by_label.get(cluster.run or ""):
            why = idle_reason(run, cluster.since, now)
        else:
            why = f"no job of SkyPilot and no readable run in {store.uri} uses it"
        if why:
            sky = f"ssh {cluster.controller} {SKY_THERE} down -y" if cluster.controller else "sky down"
            yield Orphan(f"cluster {cluster.name}", why, f"{sky} {cluster.name}")


def idle_reason(run: Run, since: float, now: float) -> str | None:
    """Why a machine is idle that the run got at `since` (unix seconds); None if it may be busy."""
    if running_attempt(run) or run.unreadable_attempts:
        return None
    if run.state == "done":
        return "the run is done"
    present = run.record.prefixes.values()
    last = max((one.stored or 0.0 for one in run.heartbeats if one.prefix in present), default=0.0)
    silent = min(now - since, run.store.clock() - last)  # SkyPilot's clock and the store's may differ
    return f"no heartbeat of the run for {silent / 60:.0f} min" if silent > SET_UP_SECONDS else None
