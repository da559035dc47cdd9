"""Status, stop and removal of a launched run from any machine, and the search for orphans.

The store has the run's progress and cost. SkyPilot reports the job of a launched run. If it does not answer, the status
has the facts of the store only.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Any

from pipelines.artifacts.store import open_store
from pipelines.cloud.request import launched_runs
from pipelines.cloud.skypilot import (
    Cluster,
    TaskStatus,
    cancel_jobs,
    clusters,
    managed_tasks,
    reach_api_server,
    take_down,
)
from pipelines.cloud.tasks import run_label
from pipelines.tracking.account import StoredHeartbeat, location
from pipelines.tracking.clusters import Interval, clusters_key, record_intervals
from pipelines.tracking.forecast import Forecast, forecast
from pipelines.tracking.ledger import HEARTBEAT_SECONDS, SILENT_SECONDS
from pipelines.tracking.records import Heartbeat, Progress
from pipelines.tracking.runs import Run, RunRecord, usable_runs
from pipelines.tracking.stop_request import StopRequest, read_stop_request, request_stop
from trainer.amounts import steps_to_come
from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.store import Store

# The longest set-up of a cluster before its attempt's first heartbeat: it pulls a container, or makes an environment.
SET_UP_SECONDS = 1800.0
DOWN_SECONDS = 300.0  # to cancel a job and take its machines down
REMOVAL_SECONDS = 600.0  # from the end of a job until its last cluster is gone, or two clocks differ
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
    places: list[str]  # of the rented machines, in the order of time, each once
    recoveries: int  # by SkyPilot, of the last launch
    usd: float
    unpriced_hours: float
    to_come: Forecast | None  # of training
    stop_request: StopRequest | None
    notice: str | None  # why the newest attempt was asked to stop
    killed: str | None  # the cause, if a signal or the watchdog ended a process of the newest attempt
    unsaved_seconds: float | None  # since the store takes no checkpoint of the newest attempt, up to its last heartbeat
    unsaved_because: str | None  # the last error
    tasks: list[TaskStatus]
    silent_seconds: float | None  # since the last heartbeat of a running attempt
    stepless_seconds: float | None  # of a training that runs, from its last row to its last heartbeat

    def to_json(self) -> dict[str, Any]:
        values = asdict(self) | {"tasks": [task.to_json() for task in self.tasks]}
        return {"wish" if name == "stop_request" else name: value for name, value in values.items()}


def status_of(run: Run, known_tasks: list[TaskStatus] | None, now: float) -> Status:
    """The status of a run at `now` (unix seconds), from its snapshot and SkyPilot's tasks; None: not known yet."""
    tasks = known_tasks or []
    machines = [attempt.machine for attempt in run.account.attempts]
    summary, total, train = run.summary, run.account.total, run.recipe.train
    present = run.record.prefixes.values()
    # The last attempt of each stage: an earlier one that was killed says for ever that it runs.
    last = {one.prefix: one for one in sorted(run.heartbeats, key=lambda one: one.beat.attempt)}
    stored = max(
        (one for prefix, one in last.items() if prefix in present),
        key=lambda one: (one.beat.stage == "train" and one.beat.state == "running", one.beat.started),
        default=None,
    )
    newest = stored.beat if stored else None
    progress = newest.progress if newest else Progress()
    waiting = summary.state in ("interrupted", "lost") and any(not task.over for task in tasks)
    waiting |= summary.state == "running" and bool(progress.waiting)
    state = "waiting" if waiting else summary.state
    if known_tasks is None and state in ("interrupted", "lost"):
        state = f"{state}, or waiting"
    return Status(
        run=run.name,
        state=state,
        stage=newest.stage if newest else None,
        step=summary.steps,
        max_steps=run.last_step,
        tokens_per_second=progress.metrics.get("perf/tokens_per_second"),
        train_loss=summary.train_loss,
        val_loss=summary.val_loss,
        attempts=summary.attempts,
        places=list(dict.fromkeys(f"{m.cloud}/{location(m)}" for m in machines if m.cloud and location(m))),
        recoveries=sum(task.recoveries for task in tasks),
        usd=total.usd,
        unpriced_hours=total.unpriced_hours,
        to_come=training_to_come(run, train, now),
        stop_request=read_stop_request(run.store, run.name),
        notice=progress.notice,
        killed=progress.killed,
        unsaved_seconds=newest.time - progress.unsaved_since if newest and progress.unsaved_since else None,
        unsaved_because=progress.unsaved_because,
        tasks=tasks,
        silent_seconds=silence(run, stored) if stored else None,
        stepless_seconds=stepless(newest) if newest and summary.steps < run.last_step else None,
    )


def silence(run: Run, newest: StoredHeartbeat) -> float | None:
    """Seconds since the last heartbeat of a running attempt, by the store's clock; None if it has ended."""
    if newest.beat.state != "running":
        return None
    return max(0.0, run.store.clock() - (newest.stored or 0.0))


def stepless(newest: Heartbeat) -> float | None:
    """Seconds without a new row of a running training, by the clock of its machine; None before its first row."""
    running = newest.stage == "train" and newest.state == "running"
    return newest.time - newest.progress.time if running and newest.progress.time else None


def training_to_come(run: Run, train: TrainConfig, now: float) -> Forecast | None:
    """The forecast of the rest of the training at `now` (unix seconds); None if nothing is left or known."""
    steps, prefix = max(run.summary.steps, train.first_step), run.record.prefixes.get("train")
    if steps >= run.last_step or prefix is None:
        return None
    attempts = [attempt for attempt in run.account.attempts if attempt.prefix == prefix]
    return forecast(attempts, steps_to_come(steps, train), now)


# SkyPilot's report


class JobsReport:
    """SkyPilot's report of all jobs: one request, made in a thread while the caller reads the store.

    SkyPilot's import takes 1.5 s, and an API server on an idle machine answers after two seconds.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._answer: Future[list[TaskStatus]] = Future()
        Thread(target=self._ask, args=[note], daemon=True, name="jobs").start()

    def _ask(self, note: Callable[[str], None]) -> None:
        try:
            reach_api_server(note)
            self._answer.set_result(managed_tasks())
        except BaseException as error:  # `tasks` reports it
            self._answer.set_exception(error)

    def arrived(self, seconds: float) -> bool:
        """Whether there is an answer, or an error, after so many seconds."""
        return self._answer in wait([self._answer], seconds).done

    def tasks(self) -> tuple[list[TaskStatus], str | None]:
        """The tasks of all jobs, and the reason if SkyPilot does not answer."""
        try:
            return self._answer.result(), None
        except Exception as error:  # of SkyPilot, its server, or the network: the facts of the store are still right
            return [], " ".join(str(error).split()) or type(error).__name__


def tasks_of(run: str, tasks: list[TaskStatus]) -> list[TaskStatus]:
    """The tasks of a run's last job, and of its other jobs that are not over, in order."""
    own = [task for task in tasks if task.run == run]
    last = max((task.job for task in own), default=0)
    shown = {task.job for task in own if not task.over} | {last}
    return sorted((task for task in own if task.job in shown), key=lambda task: (task.job, task.task))


def record_cluster_hours(store: Store, runs: Iterable[str], found: Iterable[Cluster]) -> None:
    """Record in the store when SkyPilot had the clusters of runs. `report` compares the ledger with it."""
    found, now = list(found), time.time()
    for run in runs:
        intervals = [
            Interval(
                cluster.name, cluster.nodes, started, ended, now if cluster.exists else None, cluster.price_per_hour
            )
            for cluster in found
            if cluster.run == run_label(run)
            for started, ended in cluster.intervals
        ]
        if intervals:
            record_intervals(store, run, intervals)


def refresh_cluster_hours(store: Store, tasks: list[TaskStatus]) -> None:
    """Record them for the launched runs whose hours may have changed. A failure is silent: the next call does it."""
    try:
        recorded = {entry.key: entry.modified for entry in store.entries("clusters/")}
        changed = {
            task.run
            for task in tasks
            if not task.over or task.ended + REMOVAL_SECONDS > recorded.get(clusters_key(task.run), 0.0)
        }
        if runs := changed & launched_runs(store):
            record_cluster_hours(store, runs, clusters())
    except Exception:  # of SkyPilot, its server, or the store
        return


# Stopping and removing


def stop(
    store: Store, record: RunRecord, reason: str, wait_seconds: float, note: Callable[[str], None]
) -> Heartbeat | None:
    """Request that a run stops, and wait until it has. The last heartbeat of the running attempt; None if none runs.

    Its state is 'running' if the attempt has not ended after `wait_seconds`.
    """
    request_stop(store, record.run, reason)
    beats, deadline = running_attempts(Run(store, record)), time.monotonic() + wait_seconds
    for beat in beats:
        note(f"{beat.stage}: attempt {beat.attempt} is asked to commit and exit")
    ends = [ended for beat in beats if (ended := wait_until_ended(store, record, beat, deadline))]
    return next((ended for ended in ends if ended.state == "running"), next(iter(ends), None))


def wait_until_ended(store: Store, record: RunRecord, beat: Heartbeat, deadline: float) -> Heartbeat | None:
    """The last heartbeat of an attempt once it has ended, or at `deadline` (of time.monotonic); None if it died."""
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
    """The last heartbeat of the attempt that runs, the latest stage's; None if none does."""
    return next(iter(running_attempts(run)), None)


def running_attempts(run: Run) -> list[Heartbeat]:
    """The last heartbeats of the attempts that run, the latest stage's first."""
    present = run.record.prefixes.values()
    running = [one for one in run.heartbeats if one.beat.state == "running" and one.prefix in present]
    return [
        one.beat
        for one in reversed(running)
        if one.alive or run.store.clock() - (one.stored or 0.0) < SILENT_SECONDS + HEARTBEAT_SECONDS
    ]


def wait_until_released(
    run: str, jobs: list[int], seconds: float, note: Callable[[str], None], note_server: Callable[[str], None]
) -> str | None:
    """Wait until the jobs of a run are over and their machines gone. What is left after `seconds`; None if nothing is.

    A job that SkyPilot does not know here is another API server's, and counts as left; so does one without an answer.
    """
    deadline, noted = time.monotonic() + seconds, False
    try:
        reach_api_server(note_server)
        if not any(task.job in jobs for task in managed_tasks(run)):
            return f"job {jobs[-1]}, which this API server does not know,"
        while left := what_is_left(run, jobs):
            if time.monotonic() > deadline:
                return left
            if not noted:
                note(f"waiting until {left} is gone")
                noted = True
            time.sleep(2)
    except Exception as error:  # of SkyPilot, its server, or the network: the run has stopped anyway
        note_server(f"SkyPilot does not answer: {' '.join(str(error).split())}")
        return f"job {jobs[-1]}"
    return None


def what_is_left(run: str, jobs: list[int]) -> str | None:
    if unfinished := [job for job in unfinished_jobs(run) if job in jobs]:
        return f"job {unfinished[-1]}"
    up = [cluster.name for cluster in clusters() if cluster.up and cluster.run == run_label(run)]
    return f"cluster {up[0]}" if up else None


def down(run: str, note: Callable[[str], None]) -> list[Cluster]:
    """Cancel a run's jobs, wait until they and their clusters are gone, and take down other clusters with its label.

    SkyPilot's API server has to be up. Returns SkyPilot's record of all clusters. UserError if it takes too long.
    """
    deadline = time.monotonic() + DOWN_SECONDS
    if jobs := unfinished_jobs(run):
        note(f"cancelling job {', '.join(map(str, jobs))}")
        cancel_jobs(jobs)
        # A cluster of a job that is not over stays: the job's controller would bring it back.
        while left := unfinished_jobs(run):
            if time.monotonic() > deadline:
                raise UserError(f"down: job {left[0]} is not over; see sky jobs logs --controller {left[0]}")
            time.sleep(2)
    patience = time.monotonic() + (JOB_CLUSTER_SECONDS if jobs else 0.0)
    deadline = time.monotonic() + JOB_CLUSTER_SECONDS + DOWN_SECONDS
    while True:
        found = clusters()
        up = [cluster for cluster in found if cluster.up and cluster.run == run_label(run)]
        if not up:
            return found
        if time.monotonic() > deadline:
            raise UserError(f"down: cluster {up[0].name} is not gone, and may cost money; try sky down {up[0].name}")
        for cluster in up if time.monotonic() > patience else []:
            note(f"taking down {cluster.name}")
            take_down(cluster.name)
        time.sleep(2)


def unfinished_jobs(run: str) -> list[int]:
    """The ids of a run's jobs that are not over."""
    return sorted({task.job for task in managed_tasks(run, unfinished=True) if not task.over})


def run_on_skypilots_record(name: str, reason: str) -> str:
    """The run with this name or beginning of a name, by SkyPilot's record of our jobs and clusters alone.

    UserError with `reason`, why the store does not say it, if there is none or several.
    """
    jobs = {task.run for task in managed_tasks(unfinished=True) if task.store}
    labels = {run_label(run) for run in jobs}  # a cluster of a known job is no run of its own
    names = jobs | {one.run for one in clusters() if one.up and one.run and one.run not in labels}
    found = [name] if name in names else sorted(run for run in names if run.startswith(name))
    if len(found) != 1:
        known = ", ".join(found or sorted(names)) or "none"
        raise UserError(f"{reason}; SkyPilot's own record has no single run {name} either; runs with machines: {known}")
    return found[0]


# Orphans


@dataclass(frozen=True)
class Orphan:
    """A job or cluster that still costs money and that no live run uses."""

    what: str
    why: str
    remedy: str


class RunsOfStores:
    """The runs of several stores, each read once, also of stores that can't be read."""

    def __init__(self, own: str, note: Callable[[str], None] = lambda message: None) -> None:
        self.own = own  # the URI of the user's store
        self._note = note  # gets a message for each run that cannot be read
        self.unreadable: dict[str, str] = {}  # by name, the message of each such run
        self._read: dict[str, dict[str, Run] | str] = {}
        self.of(own)

    def of(self, uri: str) -> dict[str, Run] | str:
        """The runs of a store by name, or why it can't be read."""
        if uri not in self._read:
            try:
                # Their attempts are read now: a store may fail at any request.
                found = usable_runs(open_store(uri), [], lambda run: run.attempts, self._skip)
                self._read[uri] = {run.name: run for run in found}
            except (UserError, OSError) as error:
                self._read[uri] = str(error)
        return self._read[uri]

    def _skip(self, message: str) -> None:
        self.unreadable[message.partition(": ")[0]] = message
        self._note(message)

    @property
    def known(self) -> dict[str, Run]:
        """All runs that could be read."""
        read = (runs for runs in self._read.values() if not isinstance(runs, str))
        return {name: run for runs in read for name, run in runs.items()}

    @property
    def failure(self) -> str | None:
        """Why the user's own store can't be read."""
        found = self._read[self.own]
        return found if isinstance(found, str) else None


def find_orphans(runs: RunsOfStores, now: float) -> Iterator[Orphan]:
    """Jobs on machines whose run is over, silent or unknown, and clusters with our label that no job uses.

    SkyPilot's record names them all; the stores only show which of them work.
    """
    tasks, found = managed_tasks(unfinished=True), clusters()
    up_since = {cluster.name: cluster.intervals[-1][0] for cluster in found if cluster.up}
    for task in tasks:
        # A task that waits for a machine has none, but one that is set up has it already.
        begun = [up_since[name] for name in task.clusters if name in up_since] or [task.submitted] * task.works
        if not task.over and begun and (why := why_idle(task, runs, max(begun), now)):
            # Never its cluster: the job's controller would bring it back.
            remedy = f"skytrain down {task.run} (or sky jobs cancel {task.job})"
            yield Orphan(f"job {task.job} ({task.run}, {task.stage})", why, remedy)
    labels = {run_label(name): run for name, run in runs.known.items()}
    unreadable = {run_label(name): message for name, message in runs.unreadable.items()}
    running = [beat for run in runs.known.values() for beat in running_attempts(run)]
    busy = {beat.machine.cluster for beat in running}.union(*(task.clusters for task in tasks if not task.over))
    for cluster in found:
        if not cluster.up or cluster.name in busy:
            continue
        if cluster.is_controller:
            if all(task.over for task in tasks):
                why = "SkyPilot's controller of managed jobs has no job left"
                yield Orphan(f"cluster {cluster.name}", why, f"sky down {cluster.name}")
            continue
        run = labels.get(cluster.run or "")
        unused = f"no job of SkyPilot and no run in {runs.own} uses it"
        if message := unreadable.get(cluster.run or ""):
            unused = f"nothing shows whether its run works ({message})"
        if why := idle_reason(run, cluster.intervals[-1][0], now) if run else unused:
            yield Orphan(f"cluster {cluster.name}", why, f"sky down {cluster.name}")


def why_idle(task: TaskStatus, runs: RunsOfStores, since: float, now: float) -> str | None:
    """Why the machine of a task, which it got at `since`, is idle or may be; None if it works, or is not ours."""
    if (run := runs.known.get(task.run)) is None and task.store:
        found = runs.of(task.store)
        if isinstance(found, str):
            return f"nothing shows whether its run works, because its store can't be read ({found})"
        run = found.get(task.run)
        if run is None and task.run not in runs.unreadable:
            return f"its run is not in its store {task.store}"
    if run is None and task.run in runs.unreadable:
        return f"nothing shows whether its run works ({runs.unreadable[task.run]})"
    return idle_reason(run, since, now) if run else None


def idle_reason(run: Run, since: float, now: float) -> str | None:
    """Why a machine is idle that the run got at `since` (unix seconds); None if it may be busy."""
    if running_attempt(run):
        return None
    if run.unreadable_attempts:
        return f"nothing shows whether its run works ({run.unreadable_attempts[0]})"
    try:
        if run.state == "done":
            return "the run is done"
    except (UserError, OSError) as error:
        return f"nothing shows whether its run works ({error})"
    present = run.record.prefixes.values()
    last = max((one.stored or 0.0 for one in run.heartbeats if one.prefix in present), default=0.0)
    silent = min(now - since, run.store.clock() - last)  # SkyPilot's clock and the store's may differ
    return f"no heartbeat of the run for {silent / 60:.0f} min" if silent > SET_UP_SECONDS else None
