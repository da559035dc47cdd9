"""Status, stop and removal of a launched run from any machine, and the search for orphans.

The store has the run's progress and cost. SkyPilot reports the job of a launched run. If it does not answer, the status
has the facts of the store only.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.cloud.request import LaunchRecord
from pipelines.cloud.skypilot import (
    TaskStatus,
    cancel_jobs,
    clusters,
    controllers,
    managed_tasks,
    reach_api_server,
    take_down,
)
from pipelines.cloud.tasks import run_label
from pipelines.tracking.clusters import Interval, record_intervals
from pipelines.tracking.forecast import Forecast, forecast
from pipelines.tracking.ledger import HEARTBEAT_SECONDS, SILENT_SECONDS, is_alive
from pipelines.tracking.records import Heartbeat, Progress
from pipelines.tracking.runs import Run, RunRecord, read_runs
from pipelines.tracking.stop_request import StopRequest, read_stop_request, request_stop
from trainer.config import TrainConfig, steps_to_come
from trainer.errors import UserError
from trainer.store import Store

# The longest set-up of a cluster before its attempt's first heartbeat: it pulls a container, or makes an environment.
SET_UP_SECONDS = 1800.0
DOWN_SECONDS = 300.0  # to cancel a job and take its machines down
JOB_CLUSTER_SECONDS = 60.0  # for a job that is over to take down its own clusters


@dataclass(frozen=True)
class Status:
    """The state of a run."""

    run: str
    state: str  # as in a report, or waiting: its job has no machine, or only a standby machine
    stage: str | None  # of the newest attempt
    step: int
    max_steps: int
    tokens_per_second: float | None
    train_loss: float | None
    val_loss: float | None
    attempts: int
    recoveries: int  # by SkyPilot, of the last launch
    usd: float
    unpriced_hours: float
    to_come: Forecast | None  # of training
    stop_request: StopRequest | None
    notice: str | None  # why the newest attempt was asked to stop
    tasks: list[TaskStatus]
    silent_seconds: float | None  # since the last heartbeat of a running attempt

    def to_json(self) -> dict[str, Any]:
        values = asdict(self) | {"tasks": [task.to_json() for task in self.tasks]}
        return {"wish" if name == "stop_request" else name: value for name, value in values.items()}


def status_of(run: Run, tasks: list[TaskStatus], now: float) -> Status:
    """The status of a run at `now` (unix seconds), from its snapshot and SkyPilot's tasks."""
    summary, total, train = run.summary, run.account.total, run.recipe.train
    beats = [beat for stage in run.attempts.values() for beat in stage]
    newest = max(beats, key=lambda beat: beat.started, default=None)
    progress = newest.progress if newest else Progress()
    waiting = summary.state in ("interrupted", "lost") and any(not task.over for task in tasks)
    waiting |= summary.state == "running" and bool(progress.waiting)
    return Status(
        run=run.name,
        state="waiting" if waiting else summary.state,
        stage=newest.stage if newest else None,
        step=summary.steps,
        max_steps=train.max_steps,
        tokens_per_second=progress.metrics.get("perf/tokens_per_second"),
        train_loss=summary.train_loss,
        val_loss=summary.val_loss,
        attempts=summary.attempts,
        recoveries=sum(task.recoveries for task in tasks),
        usd=total.usd,
        unpriced_hours=total.unpriced_hours,
        to_come=training_to_come(run, train, now),
        stop_request=read_stop_request(run.store, run.name),
        notice=progress.notice,
        tasks=tasks,
        silent_seconds=now - newest.time if newest and newest.state == "running" else None,
    )


def training_to_come(run: Run, train: TrainConfig, now: float) -> Forecast | None:
    """The forecast of the rest of the training at `now` (unix seconds); None if nothing is left or known."""
    steps, prefix = run.summary.steps, run.record.prefixes.get("train")
    if steps >= train.max_steps or prefix is None:
        return None
    attempts = [attempt for attempt in run.account.attempts if attempt.prefix == prefix]
    return forecast(attempts, steps_to_come(steps, train), now)


# SkyPilot's report


def tasks_of_last_job(run: str, launched: LaunchRecord) -> list[TaskStatus]:
    """In the order of the stages."""
    tasks = [task for task in managed_tasks(run) if not launched.jobs or task.job in launched.jobs]
    last = max((task.job for task in tasks), default=0)
    return sorted((task for task in tasks if task.job == last), key=lambda task: task.task)


def report_of_skypilot(
    store: Store, record: RunRecord, launched: LaunchRecord, note: Callable[[str], None]
) -> tuple[list[TaskStatus], str | None]:
    """The tasks of a run's last job, and the reason if SkyPilot does not answer. Also records its clusters' hours."""
    try:
        reach_api_server(note)
        tasks = tasks_of_last_job(record.run, launched)
        record_cluster_hours(store, record.run)
        return tasks, None
    except Exception as error:  # of SkyPilot, its server, or the network: the facts of the store are still right
        return [], " ".join(str(error).split()) or type(error).__name__


def record_cluster_hours(store: Store, run: str) -> None:
    """Record in the store when SkyPilot had the run's clusters. `report` compares the ledger with it."""
    intervals = [
        Interval(cluster.name, cluster.nodes, started, ended)
        for cluster in clusters()
        if cluster.run == run_label(run)
        for started, ended in cluster.intervals
    ]
    if intervals:
        record_intervals(store, run, intervals)


# Stopping and removing


def stop(
    store: Store, record: RunRecord, reason: str, wait_seconds: float, note: Callable[[str], None]
) -> Heartbeat | None:
    """Request that a run stops, and wait until it has. The last heartbeat of the running attempt; None if none runs.

    Its state is 'running' if the attempt has not ended after `wait_seconds`.
    """
    request_stop(store, record.run, reason)
    beat = running_attempt(Run(store, record))
    if beat is None:
        return None
    note(f"{beat.stage}: attempt {beat.attempt} is asked to commit and exit")
    deadline = time.monotonic() + wait_seconds
    changed_at, last = time.monotonic(), beat
    while time.monotonic() < deadline:
        beat = next(b for b in Run(store, record).attempts[beat.stage] if b.attempt == beat.attempt)
        if beat.state != "running":
            return beat
        if beat.time != last.time:
            changed_at, last = time.monotonic(), beat
        if time.monotonic() - changed_at > SILENT_SECONDS:
            return None  # it died in the meantime
        time.sleep(1)
    return beat


def running_attempt(run: Run) -> Heartbeat | None:
    """The last heartbeat of the attempt that runs; None if none does."""
    running = [b for stage in run.attempts.values() for b in stage if b.state == "running"]
    for beat in reversed(running):
        if is_alive(beat) or time.time() - beat.time < SILENT_SECONDS + HEARTBEAT_SECONDS:
            return beat
    return None


def down(run: str, note: Callable[[str], None]) -> None:
    """Cancel a run's jobs, wait until they and their clusters are gone, and take down other clusters with its label.

    SkyPilot's API server has to be up. UserError if it takes too long.
    """
    deadline = time.monotonic() + DOWN_SECONDS
    if ids := sorted({task.job for task in unfinished_tasks(run)}):
        note(f"cancelling job {', '.join(map(str, ids))}")
        cancel_jobs(ids)
    while unfinished := unfinished_tasks(run):
        if time.monotonic() > deadline:
            job = unfinished[0].job
            raise UserError(f"down: job {job} is not over; see sky jobs logs --controller {job}")
        time.sleep(2)
    patience = time.monotonic() + JOB_CLUSTER_SECONDS
    deadline = patience + DOWN_SECONDS
    while up := [cluster for cluster in clusters() if cluster.up and cluster.run == run_label(run)]:
        if time.monotonic() > deadline:
            raise UserError(f"down: cluster {up[0].name} is not gone, and may cost money; try sky down {up[0].name}")
        for cluster in up if time.monotonic() > patience else []:
            note(f"taking down {cluster.name}")
            take_down(cluster.name)
        time.sleep(2)


def unfinished_tasks(run: str) -> list[TaskStatus]:
    """The tasks of a run's jobs that are not over."""
    return [task for task in managed_tasks(run) if not task.over]


# Orphans


@dataclass(frozen=True)
class Orphan:
    """A job or cluster that still costs money and that no live run uses."""

    what: str
    why: str
    remedy: str


def find_orphans(store: Store, now: float) -> Iterator[Orphan]:
    """Jobs on machines whose run is over or silent, and clusters with our label that no job uses."""
    runs = {run.name: run for run in read_runs(store)}
    running = [beat for run in runs.values() if (beat := running_attempt(run))]
    tasks = managed_tasks()
    for task in tasks:
        # A task that waits for a machine has none.
        if task.over or task.status in ("PENDING", "STARTING", "RECOVERING") or task.run not in runs:
            continue
        if why := idle_reason(runs[task.run], task.submitted, now):
            yield Orphan(f"job {task.job} ({task.run}, {task.stage})", why, f"skytrain down {task.run}")
    busy = {task.cluster for task in tasks if not task.over} | {beat.machine.cluster for beat in running}
    if all(task.over for task in tasks):
        for name in controllers():
            yield Orphan(f"cluster {name}", "SkyPilot's controller of managed jobs has no job left", f"sky down {name}")
    labels = {run_label(name): run for name, run in runs.items()}
    for cluster in clusters():
        if not cluster.up or cluster.name in busy:
            continue
        known, since = labels.get(cluster.run or ""), cluster.intervals[-1][0]
        why = idle_reason(known, since, now) if known else f"no run in {store.uri} uses it"
        if why:
            yield Orphan(f"cluster {cluster.name}", why, f"sky down {cluster.name}")


def idle_reason(run: Run, since: float, now: float) -> str | None:
    """Why a machine is idle that the run got at `since` (unix seconds); None if it may be busy."""
    if running_attempt(run):
        return None
    if run.state == "done":
        return "the run is done"
    last = max((b.time for stage in run.attempts.values() for b in stage), default=0.0)
    if now - max(last, since) > SET_UP_SECONDS:
        return f"no heartbeat of the run for {(now - max(last, since)) / 60:.0f} min"
    return None
