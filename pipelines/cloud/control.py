"""A run that is launched, from afar: how it stands, its logs, its stop, its end, and what is left of others.

What a run did and cost is in the store; what SkyPilot makes of its job is asked besides, and only for runs that
were launched. SkyPilot unreachable is no reason not to tell the rest.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.cloud.checks import reach_api_server
from pipelines.cloud.launch import Launched
from pipelines.cloud.tasks import label_of
from pipelines.tracking.clusters import Interval, record_intervals
from pipelines.tracking.forecast import Forecast, forecast
from pipelines.tracking.ledger import HEARTBEAT_SECONDS, SILENT_SECONDS, is_alive
from pipelines.tracking.records import Heartbeat, Progress
from pipelines.tracking.runs import Run, RunRecord, read_runs
from pipelines.tracking.stop_request import StopRequest, read_stop_request, request_stop
from trainer.config import TrainConfig, steps_to_come
from trainer.errors import UserError
from trainer.store import Store

if TYPE_CHECKING:
    from sky.schemas.api.responses import ManagedJobRecord

JOB_FIELDS = (
    *("job_id", "task_id", "job_name", "task_name", "status", "recovery_count", "submitted_at", "end_at"),
    *("current_cluster_name", "failure_reason", "details"),
)
# A cluster has this long to be set up before its attempt first beats: a container is pulled, an environment made.
SET_UP_SECONDS = 1800.0
DOWN_SECONDS = 300.0  # to cancel a job and take its machines down
JOB_CLUSTER_SECONDS = 60.0  # for a job that is over to take down its own


@dataclass(frozen=True)
class Task:
    """What SkyPilot says of one stage of a launched run."""

    job: int
    stage: str
    status: str  # PENDING, STARTING, RUNNING, RECOVERING, SUCCEEDED, FAILED, CANCELLED, …
    recoveries: int
    cluster: str | None
    why: str | None  # it failed, or waits
    over: bool


@dataclass(frozen=True)
class Status:
    """How a run stands."""

    run: str
    state: str  # as in a report, or waiting (for a machine): a job that has none, or one that waits for spot
    stage: str | None  # that is, or was last, worked on
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
    wish: StopRequest | None
    notice: str | None  # what last asked an attempt to leave
    tasks: list[Task]
    silent_seconds: float | None  # since the last heartbeat, while one should come


def status_of(run: Run, tasks: list[Task], now: float) -> Status:
    summary, bill, recipe = run.summary, run.account, run.recipe
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
        max_steps=recipe.train.max_steps,
        tokens_per_second=progress.metrics.get("perf/tokens_per_second"),
        train_loss=summary.train_loss,
        val_loss=summary.val_loss,
        attempts=summary.attempts,
        recoveries=sum(task.recoveries for task in tasks),
        usd=bill.total.usd,
        unpriced_hours=bill.total.unpriced_hours,
        to_come=training_to_come(run, recipe.train, now),
        wish=read_stop_request(run.store, run.name),
        notice=progress.notice,
        tasks=tasks,
        silent_seconds=now - newest.time if newest and newest.state == "running" else None,
    )


def training_to_come(run: Run, train: TrainConfig, now: float) -> Forecast | None:
    steps, prefix = run.summary.steps, run.record.prefixes.get("train")
    if steps >= train.max_steps or prefix is None:
        return None
    attempts = [attempt for attempt in run.account.attempts if attempt.prefix == prefix]
    return forecast(attempts, steps_to_come(steps, train), now)


# What SkyPilot says


def tasks_of(run: str, launched: Launched) -> list[Task]:
    """The stages of a run's last job, in their order."""
    jobs = [job for job in managed_jobs(run) if not launched.jobs or job.job_id in launched.jobs]
    last = max((job.job_id or 0 for job in jobs), default=0)
    return [task_from(job) for job in sorted(jobs, key=lambda job: job.task_id or 0) if job.job_id == last]


def told_by_sky(store: Store, record: RunRecord, launched: Launched) -> tuple[list[Task], str | None]:
    """The stages of a run's last job, its clusters' hours noted in passing; and why SkyPilot can't say, if it can't."""
    try:
        reach_api_server()
        tasks = tasks_of(record.run, launched)
        keep_intervals(store, record.run)
        return tasks, None
    except Exception as error:  # of SkyPilot, its server, or the way there: what the store says is told all the same
        return [], " ".join(str(error).split()) or type(error).__name__


def managed_jobs(run: str | None = None) -> "list[ManagedJobRecord]":
    """Managed jobs, a record a task; of one run, or all."""
    from sky import exceptions, jobs
    from sky.client import sdk

    try:
        found, *_ = sdk.get(jobs.queue_v2(refresh=False, name_match=run, fields=JOB_FIELDS))
    except exceptions.ClusterNotUpError:
        return []  # there never was one
    return [job for job in found if run in (None, job.job_name)]


def task_from(job: "ManagedJobRecord") -> Task:
    assert job.job_id is not None and job.status is not None, job
    return Task(
        job=job.job_id,
        stage=job.task_name or "",
        status=job.status.value,
        recoveries=job.recovery_count or 0,
        cluster=job.current_cluster_name,
        why=job.failure_reason or job.details,
        over=job.status.is_terminal(),
    )


@dataclass(frozen=True)
class Cluster:
    """A cluster that skytrain had made, as SkyPilot keeps it on record also when it is gone."""

    name: str
    run: str | None  # its label
    nodes: int
    intervals: list[tuple[float, float | None]]  # unix seconds, from its provisioning to its removal

    @property
    def up(self) -> bool:
        """Whether it costs money, as far as SkyPilot knows."""
        return bool(self.intervals) and self.intervals[-1][1] is None


def clusters() -> list[Cluster]:
    """Every cluster with our label, of managed jobs and other ones, of the last 30 days."""
    from sky.client import sdk

    return [
        Cluster(one["name"], labels.get("run"), one["num_nodes"], [(a, b) for a, b in one["usage_intervals"] or ()])
        for one in sdk.get(sdk.cost_report())
        if (labels := one["resources"].labels or {}).get("project") == "skytrain"
    ]


def controllers() -> list[str]:
    """SkyPilot's machines for managed jobs, where its API server does not run them itself (consolidation mode).

    The machines of their jobs are in their own book: `clusters` does not see those.
    """
    from sky.client import sdk
    from sky.utils import common

    found = (one for one in sdk.get(sdk.cost_report()) if one["name"].startswith(common.JOB_CONTROLLER_PREFIX))
    return [one["name"] for one in found if any(ended is None for _, ended in one["usage_intervals"] or ())]


def keep_intervals(store: Store, run: str) -> list[Interval]:
    """Note in the store when SkyPilot had the run's clusters, for `report` to compare its bill with."""
    mine = [cluster for cluster in clusters() if cluster.run == label_of(run)]
    found = [
        Interval(cluster.name, cluster.nodes, started, ended)
        for cluster in mine
        for started, ended in cluster.intervals
    ]
    if found:
        record_intervals(store, run, found)
    return found


# Stopping and removing


def stop(
    store: Store, record: RunRecord, reason: str, wait_seconds: float, tell: Callable[[str], None]
) -> Heartbeat | None:
    """Wish that a run stops, and watch until it has; the attempt that was at work, None if none is.

    The attempt's state says how it ended: 'running' if it had not after `wait_seconds`.
    """
    request_stop(store, record.run, reason)
    beat = working(Run(store, record))
    if beat is None:
        return None
    tell(f"{beat.stage}: attempt {beat.attempt} is asked to commit and leave")
    deadline = time.monotonic() + wait_seconds
    heard_at, heard = time.monotonic(), beat
    while time.monotonic() < deadline:
        beat = next(b for b in Run(store, record).attempts[beat.stage] if b.attempt == beat.attempt)
        if beat.state != "running":
            return beat
        if beat.time != heard.time:
            heard_at, heard = time.monotonic(), beat
        if time.monotonic() - heard_at > SILENT_SECONDS:
            return None  # it died in the meantime
        time.sleep(1)
    return beat


def working(run: Run) -> Heartbeat | None:
    """The attempt that is at work, as far as its heartbeats tell."""
    running = [b for stage in run.attempts.values() for b in stage if b.state == "running"]
    for beat in reversed(running):
        if is_alive(beat) or time.time() - beat.time < SILENT_SECONDS + HEARTBEAT_SECONDS:
            return beat
    return None


def down(run: str, tell: Callable[[str], None]) -> None:
    """Cancel a run's jobs, wait until they and their clusters are gone, and take down what else bears its label."""
    reach_api_server()
    from sky import jobs
    from sky.client import sdk

    deadline = time.monotonic() + DOWN_SECONDS
    if ids := [task.job for task in unfinished(run)]:
        tell(f"cancelling job {', '.join(map(str, sorted(set(ids))))}")
        sdk.get(jobs.cancel(job_ids=sorted(set(ids))))
    while left := unfinished(run):
        if time.monotonic() > deadline:
            raise UserError(f"down: job {left[0].job} is not over; sky jobs logs --controller {left[0].job} tells why")
        time.sleep(2)
    patience = time.monotonic() + JOB_CLUSTER_SECONDS
    deadline = patience + DOWN_SECONDS
    while up := [cluster for cluster in clusters() if cluster.up and cluster.run == label_of(run)]:
        if time.monotonic() > deadline:
            raise UserError(
                f"down: cluster {up[0].name} is not gone, and may cost money; sky down {up[0].name} tells why"
            )
        for cluster in up if time.monotonic() > patience else []:
            tell(f"taking down {cluster.name}")
            sdk.get(sdk.down(cluster.name))
        time.sleep(2)


def unfinished(run: str) -> list[Task]:
    return [task for task in map(task_from, managed_jobs(run)) if not task.over]


# Orphans


@dataclass(frozen=True)
class Orphan:
    """Something that still costs money and belongs to no live run."""

    what: str
    why: str
    remedy: str


def orphans(store: Store, now: float) -> Iterator[Orphan]:
    """Jobs on machines whose run is over or silent, and clusters of ours that no job is on."""
    runs = {run.name: run for run in read_runs(store)}
    at_work = [beat for run in runs.values() if (beat := working(run))]
    tasks = [(job.job_name or "", job.submitted_at or 0.0, task_from(job)) for job in managed_jobs()]
    for name, submitted, task in tasks:
        # Who waits for a machine has none.
        if task.over or task.status in ("PENDING", "STARTING", "RECOVERING") or name not in runs:
            continue
        if why := needless(runs[name], submitted, now):
            yield Orphan(f"job {task.job} ({name}, {task.stage})", why, f"skytrain down {name}")
    busy = {task.cluster for _, _, task in tasks if not task.over} | {b.machine.cluster for b in at_work}
    if all(task.over for _, _, task in tasks):
        for name in controllers():
            yield Orphan(
                f"cluster {name}", "SkyPilot's controller of managed jobs has none to look after", f"sky down {name}"
            )
    labels = {label_of(name): run for name, run in runs.items()}
    for cluster in clusters():
        if not cluster.up or cluster.name in busy:
            continue
        known, since = labels.get(cluster.run or ""), cluster.intervals[-1][0]
        why = needless(known, since, now) if known else f"no run in {store.uri} works on it"
        if why:
            yield Orphan(f"cluster {cluster.name}", why, f"sky down {cluster.name}")


def needless(run: Run, since: float, now: float) -> str | None:
    """Why a machine that a run has had since then does nothing for it; None if it may."""
    if working(run):
        return None
    if run.state == "done":
        return "the run is done"
    last = max((b.time for stage in run.attempts.values() for b in stage), default=0.0)
    if now - max(last, since) > SET_UP_SECONDS:
        return f"no attempt of it has been heard for {(now - max(last, since)) / 60:.0f} min"
    return None
