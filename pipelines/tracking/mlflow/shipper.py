"""The shipper: a process beside the run that follows the run's log and sends it to MLflow.

Its position is written after MLflow has the records, so a kill in between repeats them. A record keeps the time of
its writing, and MLflow stores one row per (key, value, timestamp, step): repeated points are not doubled.

`python -m pipelines.tracking.mlflow LOG` ships the rest of LOG by hand.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.tracking.mlflow.journal import (
    Close,
    DatasetInput,
    LogReader,
    Metrics,
    Model,
    Record,
    Sample,
    Session,
    StageEnded,
    StageRecord,
    StageStarted,
    Table,
    Tags,
    TextFile,
    append,
    open_log,
    position_file,
    read_position,
    sessions_in_journal,
    write_position,
)
from pipelines.tracking.mlflow.registry import NO_REGISTRY, register
from pipelines.tracking.mlflow.secrets import RedactedStream, redacted
from pipelines.tracking.mlflow.settings import NO_MLFLOW, QUICK_MLFLOW, flush_seconds
from trainer.errors import UserError
from trainer.store import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient

POLL_SECONDS = 0.25
SAMPLE_SECONDS = 10.0  # system metrics; MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL overrides it
LONGEST_PAUSE_SECONDS = 30.0
METRICS_AT_ONCE = 1_000  # MLflow's limit for one log_batch call
PARAM_CHARACTERS = 6_000  # MLflow's limit for the value of a param
DIGEST_CHARACTERS = 36  # MLflow's limit for the digest of a dataset
# The page of an experiment shows charts of runs with this tag; without it, the UI asks for the kind, or guesses.
KIND, MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
SERIES = ("train/", "val/", "perf/")  # of the train stage: one point a step over all attempts


class Refused(Exception):
    """MLflow rejects the record: no later try would change that."""


class Shipper:
    """Follows one run's log and repeats it to MLflow until MLflow has it.

    With `patience`, UserError once MLflow has taken nothing for so many seconds.
    """

    def __init__(self, log: Path, uri: str, patience: float = math.inf) -> None:
        self.log, self.uri, self.patience = log, uri, patience
        self.position = position_file(log, uri)
        self.closing = threading.Event()
        self.session = next(record for record, _ in LogReader(log).read() if isinstance(record, Session))
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._run_ids: dict[str | None, str] = {}
        self._known_steps: dict[str, set[int]] = {}  # steps of a series that MLflow had when shipping began

    def ship(self, until_end: bool) -> None:
        """Ship the log to its end and, unless `until_end`, all that follows."""
        reader = LogReader(self.log, read_position(self.position))
        while True:
            records = reader.read()
            for group, end in groups(records):
                self._deliver(group)
                write_position(self.position, end)
            if not records and until_end:
                return
            if not records:
                time.sleep(POLL_SECONDS)

    def _deliver(self, group: list[Record]) -> None:
        """Return once MLflow has the group, or has refused the rest of it."""
        pause, refusals, began = 1.0, 0, time.monotonic()
        while True:
            try:
                return self._send(group)
            except Refused as error:
                if len(group) > 1:
                    for record in group:
                        self._deliver([record])
                    return
                # Try once more, with fresh run ids: a proxy before MLflow may refuse everything for a while. Then
                # the search for the run fails too, which is not a refusal.
                refusals += 1
                if refusals == 2:
                    return log(f"dropped, because MLflow refuses it ({error}): {group[0].to_json().decode()}")
            except Exception as error:
                refusals = 0
                if time.monotonic() + pause > began + self.patience:
                    reason = redacted(" ".join(str(error).split()))[:200]
                    raise UserError(
                        f"{redacted(self.uri)} has taken nothing for {self.patience:g} s ({reason}); "
                        "start it, or name another"
                    ) from error
                log(f"will try again in {pause:.0f} s: {type(error).__name__}: {error}")
                if self.closing.wait(pause):  # the run has ended and waits for the shipper
                    time.sleep(1.0)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._client, self._run_ids = None, {}

    def _send(self, group: list[Record]) -> None:
        from mlflow.exceptions import MlflowException

        first = group[0]
        if not isinstance(first, StageRecord):
            return
        client, run_id = self._run(first.stage, _milliseconds(first.time))
        try:
            match first:
                case Metrics():
                    client.log_batch(run_id, metrics=self._new_points(client, run_id, group))
                case StageStarted():
                    _open_run(client, run_id, first)
                case DatasetInput():
                    client.log_inputs(run_id, datasets=[_dataset_input(first)])
                case Tags():
                    _set_tags(client, run_id, first.tags)
                case Table():
                    _log_table(client, run_id, first)
                case TextFile():
                    _log_text(client, run_id, first.name, first.text)
                case Model():
                    register(client, self._experiment_id, run_id, first)
                case StageEnded():
                    client.set_terminated(run_id, first.status, end_time=_milliseconds(first.time))
        except MlflowException as error:
            if error.error_code in REFUSALS or isinstance(first, Model) and error.error_code in NO_REGISTRY:
                raise Refused(error.message) from error
            raise

    def _new_points(self, client: MlflowClient, run_id: str, group: list[Record]) -> list[Any]:
        """The group's metrics, without points of the training series that MLflow had when shipping began: another
        machine logged them before the run came here."""
        records = [record for record in group if isinstance(record, Metrics)]
        metrics = [metric for record in records for metric in _metrics(record)]
        if records[0].stage != "train" or records[0].again:
            return metrics
        for key in {m.key for m in metrics if m.key.startswith(SERIES)} - self._known_steps.keys():
            self._known_steps[key] = {m.step for m in client.get_metric_history(run_id, key)}
        return [m for m in metrics if m.step not in self._known_steps.get(m.key, ())]

    def _run(self, stage: str | None, started: int) -> tuple[MlflowClient, str]:
        """The MLflow run of a stage: found by its tags, or created."""
        if self._client is None:
            from mlflow import MlflowClient

            client = MlflowClient(self.uri)
            self._experiment_id = _experiment_id(client, self.session.experiment, self.uri)
            self._run_ids = self._find(client)
            self._client = client
        if stage not in self._run_ids:
            self._run_ids[stage] = self._create(self._client, stage, started)
        return self._client, self._run_ids[stage]

    def _find(self, client: MlflowClient) -> dict[str | None, str]:
        """The MLflow run of every stage; the oldest one where two processes have created one each."""
        name = self.session.run
        quote = '"' if "'" in name else "'"
        found = client.search_runs([self._experiment_id], f"tags.`skytrain.run` = {quote}{name}{quote}")
        newest_first = sorted(found, key=lambda run: (run.info.start_time, run.info.run_id), reverse=True)
        return {run.data.tags.get("skytrain.stage"): run.info.run_id for run in newest_first}

    def _create(self, client: MlflowClient, stage: str | None, started: int) -> str:
        name = self.session.run
        tags = {"skytrain.run": name}
        if stage is not None:
            _, parent = self._run(None, started)
            tags |= {"skytrain.stage": stage, "mlflow.parentRunId": parent}
        created = client.create_run(
            self._experiment_id, started, tags, run_name=f"{name}/{stage}" if stage else name
        ).info.run_id
        oldest = self._find(client).get(stage, created)
        if oldest != created:  # another process started the same run at the same time, and was first
            client.delete_run(created)
        return oldest


def rebuild(store: Store, run: str, uri: str) -> int:
    """Send all that the run ever logged, from its journal, to the MLflow at `uri`; returns the number of sessions.

    Each session is shipped on its own. As in the first shipping, points that MLflow has at its start are left out.
    UserError if that MLflow takes nothing for SKYTRAIN_MLFLOW_FLUSH_SECONDS (30).
    """
    os.environ.update(QUICK_MLFLOW | os.environ | {"MLFLOW_TRACKING_URI": uri})
    patience = flush_seconds()
    sessions = sessions_in_journal(store, run)
    for lines in sessions:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "mlflow.jsonl")
            log.write_bytes(b"".join(lines))
            Shipper(log, uri, patience).ship(until_end=True)
    return len(sessions)


def groups(records: Iterable[tuple[Record, int]]) -> Iterator[tuple[list[Record], int]]:
    """Records that fit into one call, with the offset of their end: metrics of one stage, or one record."""
    group: list[Record] = []
    size = end = 0
    for record, record_end in records:
        length = len(record.values) if isinstance(record, Metrics) else 0
        if group and not (_alike(group[0], record) and size + length <= METRICS_AT_ONCE):
            yield group, end
            group, size = [], 0
        group.append(record)
        size, end = size + length, record_end
    if group:
        yield group, end


def _alike(one: Record, other: Record) -> bool:
    """Whether two records are metrics that one call can take."""
    if not (isinstance(one, Metrics) and isinstance(other, Metrics)):
        return False
    return (one.stage, one.again) == (other.stage, other.again)


def _experiment_id(client: MlflowClient, name: str, uri: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # A server has a location for artifacts. Without a server they would go to the current folder.
        database = Path(uri.removeprefix("sqlite:///")).absolute()
        beside = (database.parent / "mlartifacts").as_uri() if uri.startswith("sqlite:///") else None
        return client.create_experiment(name, beside, tags={KIND: MODEL_TRAINING})
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    if KIND not in experiment.tags:
        client.set_experiment_tag(experiment.experiment_id, KIND, MODEL_TRAINING)
    return experiment.experiment_id


def _open_run(client: MlflowClient, run_id: str, record: StageStarted) -> None:
    from mlflow.entities import Param

    client.update_run(run_id, status="RUNNING")
    logged = client.get_run(run_id).data.params
    params = {key: value[:PARAM_CHARACTERS] for key, value in record.params.items()}
    client.log_batch(run_id, params=[Param(k, v) for k, v in params.items() if k not in logged])
    changed = {f"param.{k}": v for k, v in params.items() if logged.get(k, v) != v}
    _set_tags(client, run_id, record.tags | changed)


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _metrics(record: Metrics) -> list[Any]:
    """MLflow's metrics of a record. Its SQL store keeps NaN as NaN and ±inf as ±1.8e308: points stay."""
    from mlflow.entities import Metric

    return [Metric(key, value, _milliseconds(record.time), record.step) for key, value in record.values.items()]


def _log_table(client: MlflowClient, run_id: str, record: Table) -> None:
    """A table as MLflow's own `log_table` writes it, without the pandas that it needs."""
    rows = [list(row) for row in zip(*record.columns.values(), strict=True)]
    if _log_text(client, run_id, record.name, json.dumps({"columns": list(record.columns), "data": rows})):
        _set_tags(client, run_id, {"mlflow.loggedArtifacts": json.dumps([{"path": record.name, "type": "table"}])})


def _log_text(client: MlflowClient, run_id: str, name: str, text: str) -> bool:
    """Store an artifact. Artifacts use another connection than metrics, which this machine may lack: it tries once."""
    try:
        client.log_text(run_id, text, name)
    except Exception as error:
        log(f"the file {name} is not in MLflow: {type(error).__name__}: {error}")
        return False
    return True


def _dataset_input(record: DatasetInput) -> Any:
    from mlflow import entities

    kind, separator, _ = record.source.partition("://")
    dataset = entities.Dataset(
        name=record.name,
        digest=record.digest[:DIGEST_CHARACTERS],
        source_type=kind if separator else "local",
        source=json.dumps({"uri": record.source}),
    )
    return entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", record.stage)])


class SystemMetrics:
    """Follows the log beside a shipper that may be stuck, and measures the machine while the train stage runs.

    The samples go into the log like all records, so they survive an outage of the server. Their step is the training
    step, so that a reader can compare GPU use with the loss.
    """

    def __init__(self, log: Path, closing: threading.Event) -> None:
        self.reader, self.closing = LogReader(log), closing
        self.training, self.step = False, 0

    def follow(self, fd: int) -> None:
        """Never returns; appends to the log through `fd`."""
        while True:
            try:
                self._follow(fd)
            except Exception as error:  # of a disk, a driver or a monitor: the shipper still has to hear the end
                log(f"system metrics: {type(error).__name__}: {error}; will try again in {LONGEST_PAUSE_SECONDS:.0f} s")
                time.sleep(LONGEST_PAUSE_SECONDS)

    def _follow(self, fd: int) -> None:
        monitors: list[Any] | None = None
        due = 0.0
        while True:
            for chunk in iter(self.reader.read, []):
                for record, _ in chunk:
                    self._observe(record)
            if not self.training:
                monitors = None
            elif monitors is None:
                monitors = _monitors()
                _sample(monitors)  # CPU use is counted since the call before: the first answer means nothing
                due = time.monotonic() + 1.0
            elif monitors and time.monotonic() >= due:
                due = time.monotonic() + _sample_seconds()
                sample = Sample(time.time(), "train", self.step, _sample(monitors))
                with contextlib.suppress(OSError):
                    append(fd, sample)
            time.sleep(POLL_SECONDS)

    def _observe(self, record: Record) -> None:
        if isinstance(record, Close):
            self.closing.set()
        else:
            self.closing.clear()
        match record:
            case Session() | Close() | StageEnded(stage="train"):
                self.training = False
            case StageStarted(stage="train"):
                self.training = True
            case Metrics(stage="train", step=step):
                self.step = max(self.step, step)


def _monitors() -> list[Any]:
    """MLflow's own monitors: CPU, memory, disk, network, and GPUs if there are any."""
    try:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    except ImportError as error:
        log(f"no system metrics: {error}")
        return []
    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        monitors.append(GPUMonitor())
    except Exception as error:  # no GPU, no driver, or no pynvml
        log(f"no GPU metrics: {error}")
    return monitors


def _sample(monitors: list[Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    for monitor in monitors:
        monitor.collect_metrics()
        values |= {f"system/{key}": value for key, value in monitor.aggregate_metrics().items()}
        monitor.clear_metrics()
    return values


def _sample_seconds() -> float:
    from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL

    return MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or SAMPLE_SECONDS


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def log(message: str) -> None:
    print(time.strftime("%Y-%m-%dT%H:%M:%S"), redacted(message), flush=True)


def _exit_with(parent: int) -> None:
    # Polls twice a second. Linux's parent-death signal also comes when only the thread ends that started us.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> int:
    """Ship the log in argv[1]; with a process id in argv[2], follow it until that parent is gone."""
    sys.stdout, sys.stderr = RedactedStream(sys.stdout), RedactedStream(sys.stderr)
    log_file = Path(sys.argv[1])
    parent = int(sys.argv[2]) if len(sys.argv) > 2 else None
    if parent is not None:
        os.nice(10)  # the cores are for the training; importing mlflow alone is 5 s of one
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    with open(log_file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of one run share the log: one of them ships it
        try:
            import mlflow  # noqa: F401
        except Exception as error:  # a broken installation counts as none
            log(f"mlflow cannot be imported: {type(error).__name__}: {error}")
            return NO_MLFLOW
        if os.environ["MLFLOW_TRACKING_URI"].startswith("sqlite:") and not find_spec("sqlalchemy"):
            log("mlflow-skinny has no SQLite: name a server in MLFLOW_TRACKING_URI, or install mlflow")
            return NO_MLFLOW
        shipper = Shipper(log_file, os.environ["MLFLOW_TRACKING_URI"])
        if parent is not None:
            system_metrics = SystemMetrics(log_file, shipper.closing)
            threading.Thread(target=system_metrics.follow, args=(open_log(log_file),), daemon=True).start()
        shipper.ship(until_end=parent is None)
    return 0
