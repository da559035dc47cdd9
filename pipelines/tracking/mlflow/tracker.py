"""What a run tells MLflow, told in a way that cannot hurt the run.

The run appends lines to a log on its own disk and never imports MLflow. A second process, the shipper,
follows that log and does the talking, so a server that is slow, silent, refusing or gone costs the run
nothing until `close`, which waits a bounded time. What was not shipped stays in the log, and the next run
with the same work folder ships it first.

Shipping may repeat itself but never doubles a point: a line keeps the time at which it was written, and
MLflow stores one row per (key, value, timestamp, step). So the position of the shipper is written after the
fact, and a kill between the two is harmless. There is one position per tracking URI: a new server gets the
whole history of the run.

The log is also copied to the store, piece by piece: the run's journal, from which `rebuild` tells a new server
all that a lost one knew. A machine that is lost takes with it what it told since the last piece (30 s at most,
while the store answers); the steps among that are told again by whoever redoes them.

`python -m pipelines.tracking.mlflow.tracker LOG` ships by hand what is left in LOG to MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import seconds_from_environment
from trainer.errors import UserError
from trainer.store import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient

POLL_SECONDS = 0.25
SAMPLE_SECONDS = 10.0  # system metrics; MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL overrides it
LONGEST_PAUSE_SECONDS = 30.0
RECORDS_AT_ONCE = 5_000  # read into memory together: ~200 bytes each, so 1 MB
METRICS_AT_ONCE = 1_000  # MLflow's limit for one log_batch call
PARAM_CHARACTERS = 6_000  # MLflow's limit for the value of a param
DIGEST_CHARACTERS = 36  # MLflow's limit for the digest of a dataset
SERIES = ("train/", "val/", "perf/")  # of the train stage: one point a step, by whichever attempt
NO_MLFLOW = 3  # exit code of a shipper that cannot import mlflow: starting it again would not help

# The retrying is done here, where it is logged, and not below in MLflow, where a dead server holds a call
# for 4 minutes. 1,000 metrics took a server on one busy core 0.1 to 0.9 s. The user's own settings win.
QUICK_MLFLOW = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# Not `-m`: that puts the current folder first, where a user may well have a `pipelines` or an `mlflow.py`.
SHIPPER = "import sys; sys.path.append({!r}); from pipelines.tracking.mlflow.tracker import main; sys.exit(main())"


class Tracker:
    """The run's side: appends to the log, keeps a shipper running, and never raises for MLflow's sake.

    `work_dir` holds the log and belongs to `run`. The tracking URI is `uri`, else MLFLOW_TRACKING_URI, else
    `default_uri`. A stage of None means the run itself. SKYTRAIN_TRACKING=off writes and starts nothing;
    SKYTRAIN_MLFLOW_FLUSH_SECONDS (30) bounds how long `close` waits. UserError if one of the two can't be meant.
    """

    def __init__(
        self,
        work_dir: Path,
        run: str,
        experiment: str = "skytrain",
        uri: str | None = None,
        *,
        default_uri: str,
    ) -> None:
        self.run, self.experiment = run, experiment
        self.uri = tracking_uri(uri, default_uri)
        self.log = work_dir / "mlflow.jsonl"
        self.shipper_log = work_dir / "mlflow.log"
        self.flush_seconds = flush_seconds()
        self.off = tracking_is_off()
        self._fd: int | None = None
        self._shipper: subprocess.Popen[bytes] | None = None
        self._fault = ""  # why records did not reach the log

    def start(self) -> None:
        """Open the log and start the shipper; what an earlier run left is shipped first."""
        if self.off:
            return
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            if not self.log.exists():  # positions in a log that was deleted say nothing about this one
                for stale in self.log.parent.glob("mlflow.*.position"):
                    stale.unlink(missing_ok=True)
            self._fd = _open_log(self.log)
        except OSError as error:
            self._fault = str(error)
            return
        # The empty line before it closes a line that a crash has cut in two.
        self._append("session", torn=True, run=self.run, experiment=self.experiment)
        self._keep_shipping()

    def stage_started(self, stage: str | None, params: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        """Open the stage's MLflow run, or rejoin it; a param that has changed since becomes a tag."""
        self._append("stage_started", stage=stage, params=_strings(params), tags=_strings(tags))
        self._keep_shipping()

    def metrics(
        self, stage: str | None, step: int, time: float, values: Mapping[str, float], again: bool = False
    ) -> None:
        """Log `values` at `step`; `time` is in unix seconds. NaN and infinities are kept.

        `again`: even if MLflow knows a point of a training series at that step.
        """
        floats = {key: float(value) for key, value in values.items()}
        self._append("metrics", stage=stage, step=int(step), time=time, values=floats, again=again)

    def dataset(self, stage: str, name: str, digest: str, source: str) -> None:
        """Log the stage's input: `source` is a URI, `digest` may be longer than the 36 that MLflow keeps."""
        self._append("dataset", stage=stage, name=name, digest=digest, source=source)

    def tags(self, stage: str | None, tags: Mapping[str, Any]) -> None:
        """Set tags on the stage's MLflow run; the last value of a tag wins."""
        self._append("tags", stage=stage, tags=_strings(tags))

    def table(self, stage: str | None, name: str, columns: Mapping[str, list[Any]]) -> None:
        """Keep a table with the stage's MLflow run, as the artifact `name` (….json)."""
        self._append("table", stage=stage, name=name, columns=columns)

    def stage_ended(self, stage: str | None, status: str) -> None:
        """Close the stage's MLflow run; `status` is FINISHED, FAILED or KILLED."""
        assert status in ("FINISHED", "FAILED", "KILLED"), status
        self._append("stage_ended", stage=stage, status=status)
        self._keep_shipping()

    def highest_steps(self, stage: str | None) -> dict[str, int]:
        """The last step at which each metric of a stage was logged: a step that is redone is not new."""
        highest: dict[str, int] = {}
        if self._fd is not None:
            records = Records(self.log)
            for record in (record for chunk in iter(records.read, []) for record, _ in chunk):
                if record["kind"] == "metrics" and record["stage"] == stage:
                    for key in record["values"]:
                        highest[key] = max(record["step"], highest.get(key, -1))
        return highest

    def unshipped(self) -> int:
        """How many records an earlier invocation of this run has left behind."""
        return self._kept(self.log.stat().st_size) if self.log.exists() and not self.off else 0

    def keep_journal(self, store: Store) -> None:
        """Put what was told and is not in the store yet there: with it a lost server can be rebuilt."""
        if not self.off and self.log.exists():
            keep_journal(store, self.run, self.log)

    def close(self) -> str | None:
        """Wait at most `flush_seconds` for the log to be shipped; one line for the user if it was not."""
        kept = 0
        if self._fd is not None:
            self._append("close")
            end = os.fstat(self._fd).st_size
            self._wait_for(end)
            os.close(self._fd)
            self._fd = None
            kept = self._kept(end)
        if self._fault:
            return f"MLflow: records are lost, because {self.log} could not be kept: {self._fault}"
        if kept:
            return (
                f"MLflow: {kept} records are kept in {self.log} and will be shipped by the next run "
                f"(the reason is in {self.shipper_log})"
            )
        return None

    def _append(self, kind: str, torn: bool = False, **fields: Any) -> None:
        if self._fd is None:
            assert self.off or self._fault, "start() comes first, and nothing comes after close()"
            return
        try:
            _append(self._fd, {"kind": kind, "time": time.time()} | fields, torn or bool(self._fault))
        except OSError as error:  # a full disk stops the tracking, not the training
            self._fault = str(error)

    def _keep_shipping(self) -> None:
        """Start a shipper unless one lives, or the last one said that it never will."""
        if self._fd is None or (self._shipper and self._shipper.poll() in (None, NO_MLFLOW)):
            return
        code = SHIPPER.format(str(Path(__file__).resolve().parents[3]))
        # Without a shipper the records stay in the log, and `close` says so.
        with contextlib.suppress(OSError), open(self.shipper_log, "ab") as output:
            self._shipper = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(self.log), str(os.getpid())],
                env=QUICK_MLFLOW | os.environ | {"MLFLOW_TRACKING_URI": self.uri, "PYTHONUTF8": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the run, which then still has things to say
            )

    def _wait_for(self, end: int) -> None:
        position = position_file(self.log, self.uri)
        deadline = time.monotonic() + self.flush_seconds
        if read_position(position) < end:
            self._keep_shipping()
        while self._shipper and self._shipper.poll() is None:
            if read_position(position) >= end or time.monotonic() > deadline:
                self._shipper.kill()
                self._shipper.wait()
            time.sleep(0.05)

    def _kept(self, end: int) -> int:
        """How many of the run's records up to `end` MLflow does not have."""
        records = Records(self.log, read_position(position_file(self.log, self.uri)))
        try:
            left = [r for chunk in iter(records.read, []) for r, offset in chunk if offset <= end]
        except OSError as error:  # the work folder was deleted meanwhile
            self._fault = str(error)
            return 0
        return sum(record["kind"] not in ("session", "close") for record in left)


class Records:
    """The complete lines of a log that others append to, each read once, with the offset where it ends."""

    def __init__(self, log: Path, offset: int = 0) -> None:
        self.log, self.offset = log, offset

    def read(self) -> list[tuple[dict[str, Any], int]]:
        """Up to 5,000 records that were not read before; none means that this is the end for now."""
        records: list[tuple[dict[str, Any], int]] = []
        with open(self.log, "rb") as lines:
            lines.seek(self.offset)
            while len(records) < RECORDS_AT_ONCE:
                line = lines.readline()
                if not line.endswith(b"\n"):
                    break  # still being written, or the end
                self.offset += len(line)
                with contextlib.suppress(ValueError):  # a line that a crash or a full disk cut in two
                    records.append((json.loads(line), self.offset))
        return records


class Refused(Exception):
    """MLflow understood the record and will not have it: no later try would change that."""


class Shipper:
    """The other side: follows one run's log and repeats it to MLflow, as often as it takes.

    With `patience`, UserError once MLflow has taken nothing for so many seconds.
    """

    def __init__(self, log: Path, uri: str, patience: float = math.inf) -> None:
        self.log, self.uri, self.patience = log, uri, patience
        self.position = position_file(log, uri)
        self.closing = threading.Event()
        self.session = next(r for r, _ in Records(log).read() if r["kind"] == "session")
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._run_ids: dict[str | None, str] = {}
        self._told: dict[str, set[int]] = {}  # the steps of a series that were in MLflow when shipping began

    def ship(self, until_end: bool) -> None:
        """Ship what is in the log and, unless `until_end`, what will be."""
        records = Records(self.log, read_position(self.position))
        while True:
            read = records.read()
            for group, end in groups(read):
                self._deliver(group)
                write_position(self.position, end)
            if not read and until_end:
                return
            if not read:
                time.sleep(POLL_SECONDS)

    def _deliver(self, group: list[dict[str, Any]]) -> None:
        """Return once MLflow has the group, or has refused what is missing."""
        pause, refusals, began = 1.0, 0, time.monotonic()
        while True:
            try:
                return self._send(group)
            except Refused as error:
                if len(group) > 1:
                    for record in group:
                        self._deliver([record])
                    return
                # Asked once more, with fresh run ids: a proxy before MLflow may refuse everything for a
                # while, and then the search for the run fails too, which is not a refusal.
                refusals += 1
                if refusals == 2:
                    return say(f"dropped, because MLflow refuses it ({error}): {json.dumps(group[0])}")
            except Exception as error:
                refusals = 0
                if time.monotonic() + pause > began + self.patience:
                    reason = " ".join(str(error).split())[:200]
                    raise UserError(
                        f"{self.uri} has taken nothing for {self.patience:g} s ({reason}); start it, or name another"
                    ) from error
                say(f"will try again in {pause:.0f} s: {type(error).__name__}: {error}")
                if self.closing.wait(pause):  # the run is at its end and waits for us
                    time.sleep(1.0)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._client, self._run_ids = None, {}

    def _send(self, group: list[dict[str, Any]]) -> None:
        from mlflow.exceptions import MlflowException

        first = group[0]
        if first["kind"] in ("session", "close"):
            return
        client, run_id = self._run(first["stage"], _milliseconds(first))
        try:
            if first["kind"] == "metrics":
                client.log_batch(run_id, metrics=self._untold(client, run_id, group))
            elif first["kind"] == "stage_started":
                _open_run(client, run_id, first)
            elif first["kind"] == "dataset":
                client.log_inputs(run_id, datasets=[_dataset_input(first)])
            elif first["kind"] == "tags":
                _set_tags(client, run_id, first["tags"])
            elif first["kind"] == "table":
                _log_table(client, run_id, first)
            elif first["kind"] == "stage_ended":
                client.set_terminated(run_id, first["status"], end_time=_milliseconds(first))
        except MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                raise Refused(error.message) from error
            raise

    def _untold(self, client: MlflowClient, run_id: str, group: list[dict[str, Any]]) -> list[Any]:
        """The group's metrics without points of the training series that MLflow had when shipping began:
        another machine told them before the run came here."""
        metrics = [metric for record in group for metric in _metrics(record)]
        if group[0]["stage"] != "train" or group[0].get("again"):
            return metrics
        for key in {m.key for m in metrics if m.key.startswith(SERIES)} - self._told.keys():
            self._told[key] = {m.step for m in client.get_metric_history(run_id, key)}
        return [m for m in metrics if m.step not in self._told.get(m.key, ())]

    def _run(self, stage: str | None, started: int) -> tuple[MlflowClient, str]:
        """The MLflow run of a stage: found by its tags, or created."""
        if self._client is None:
            from mlflow import MlflowClient

            client = MlflowClient(self.uri)
            self._experiment_id = _experiment_id(client, self.session["experiment"], self.uri)
            self._run_ids = self._find(client)
            self._client = client
        if stage not in self._run_ids:
            self._run_ids[stage] = self._create(self._client, stage, started)
        return self._client, self._run_ids[stage]

    def _find(self, client: MlflowClient) -> dict[str | None, str]:
        """Every stage's MLflow run; the oldest where two processes have made one each."""
        name = self.session["run"]
        quote = '"' if "'" in name else "'"
        found = client.search_runs([self._experiment_id], f"tags.`skytrain.run` = {quote}{name}{quote}")
        newest_first = sorted(found, key=lambda run: (run.info.start_time, run.info.run_id), reverse=True)
        return {run.data.tags.get("skytrain.stage"): run.info.run_id for run in newest_first}

    def _create(self, client: MlflowClient, stage: str | None, started: int) -> str:
        name = self.session["run"]
        tags = {"skytrain.run": name}
        if stage is not None:
            _, parent = self._run(None, started)
            tags |= {"skytrain.stage": stage, "mlflow.parentRunId": parent}
        created = client.create_run(
            self._experiment_id, started, tags, run_name=f"{name}/{stage}" if stage else name
        ).info.run_id
        oldest = self._find(client).get(stage, created)
        if oldest != created:  # the same run, started twice at once: the other process was first
            client.delete_run(created)
        return oldest


def groups(records: Iterable[tuple[dict[str, Any], int]]) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """What can be sent in one call, with the offset where it ends: metrics of one stage, or one record."""
    group: list[dict[str, Any]] = []
    size = end = 0
    for record, record_end in records:
        length = len(record.get("values", ()))
        alike = group and all(record.get(field) == group[0].get(field) for field in ("kind", "stage", "again"))
        if group and not (alike and record["kind"] == "metrics" and size + length <= METRICS_AT_ONCE):
            yield group, end
            group, size = [], 0
        group.append(record)
        size, end = size + length, record_end
    if group:
        yield group, end


def _experiment_id(client: MlflowClient, name: str, uri: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # A server knows where its artifacts go. Without one they would go where the command happened to be given.
        database = Path(uri.removeprefix("sqlite:///")).absolute()
        beside = (database.parent / "mlartifacts").as_uri() if uri.startswith("sqlite:///") else None
        return client.create_experiment(name, beside)
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def _open_run(client: MlflowClient, run_id: str, record: dict[str, Any]) -> None:
    from mlflow.entities import Param

    client.update_run(run_id, status="RUNNING")
    logged = client.get_run(run_id).data.params
    params = {key: value[:PARAM_CHARACTERS] for key, value in record["params"].items()}
    client.log_batch(run_id, params=[Param(k, v) for k, v in params.items() if k not in logged])
    changed = {f"param.{k}": v for k, v in params.items() if logged.get(k, v) != v}
    _set_tags(client, run_id, record["tags"] | changed)


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _metrics(record: dict[str, Any]) -> list[Any]:
    """MLflow's metrics of a record. Its SQL store keeps NaN as NaN and ±inf as ±1.8e308: points stay."""
    from mlflow.entities import Metric

    return [Metric(k, v, _milliseconds(record), record["step"]) for k, v in record["values"].items()]


def _log_table(client: MlflowClient, run_id: str, record: dict[str, Any]) -> None:
    """A table as MLflow's own `log_table` writes it, without the pandas that it needs.

    Artifacts take another way than metrics, and one that may be closed to this machine: tried once.
    """
    columns = record["columns"]
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    try:
        client.log_text(run_id, json.dumps({"columns": list(columns), "data": rows}), record["name"])
    except Exception as error:
        return say(f"the table {record['name']} is not in MLflow: {type(error).__name__}: {error}")
    _set_tags(client, run_id, {"mlflow.loggedArtifacts": json.dumps([{"path": record["name"], "type": "table"}])})


def _dataset_input(record: dict[str, Any]) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    kind, separator, _ = record["source"].partition("://")
    dataset = Dataset(
        name=record["name"],
        digest=record["digest"][:DIGEST_CHARACTERS],
        source_type=kind if separator else "local",
        source=json.dumps({"uri": record["source"]}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", record["stage"])])


class Watch:
    """Follows the log beside a shipper that may be stuck: measures the machine while the train stage runs.

    The samples go into the log like everything else, so they outlive an outage. Their step is the training
    step, so that GPU use can be read against the loss.
    """

    def __init__(self, log: Path, closing: threading.Event) -> None:
        self.records, self.closing = Records(log), closing
        self.training, self.step = False, 0

    def follow(self, fd: int) -> None:
        """Never returns; appends to the log through `fd`."""
        monitors: list[Any] | None = None
        due = 0.0
        while True:
            for chunk in iter(self.records.read, []):
                for record, _ in chunk:
                    self._note(record)
            if not self.training:
                monitors = None
            elif monitors is None:
                monitors = _monitors()
                _sample(monitors)  # CPU use is counted since the call before: the first answer means nothing
                due = time.monotonic() + 1.0
            elif monitors and time.monotonic() >= due:
                due = time.monotonic() + _sample_seconds()
                fields = {"stage": "train", "step": self.step, "values": _sample(monitors)}
                with contextlib.suppress(OSError):
                    _append(fd, {"kind": "metrics", "time": time.time()} | fields)
            time.sleep(POLL_SECONDS)

    def _note(self, record: dict[str, Any]) -> None:
        kind, in_train = record["kind"], record.get("stage") == "train"
        if kind == "close":
            self.closing.set()
        else:
            self.closing.clear()
        if kind in ("session", "close") or (in_train and kind == "stage_ended"):
            self.training = False
        elif in_train and kind == "stage_started":
            self.training = True
        elif in_train and kind == "metrics":
            self.step = max(self.step, record["step"])


def _monitors() -> list[Any]:
    """MLflow's own measuring parts: CPU, memory, disk, network, and GPUs where there are any."""
    try:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    except ImportError as error:
        say(f"no system metrics: {error}")
        return []
    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        monitors.append(GPUMonitor())
    except Exception as error:  # no GPU, no driver, or no pynvml
        say(f"no GPU metrics: {error}")
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


def flush_seconds() -> float:
    """How long somebody waits for an MLflow that does not answer."""
    return seconds_from_environment("SKYTRAIN_MLFLOW_FLUSH_SECONDS", 30.0)


def tracking_is_off() -> bool:
    """Whether SKYTRAIN_TRACKING says so. UserError for what is neither on nor off."""
    said = os.environ.get("SKYTRAIN_TRACKING") or "on"
    if said.lower() not in ("on", "off"):
        raise UserError(f"SKYTRAIN_TRACKING: {said!r} is neither on nor off")
    return said.lower() == "off"


def tracking_uri(asked: str | None, default: str) -> str:
    return asked or os.environ.get("MLFLOW_TRACKING_URI") or default


def keep_journal(store: Store, run: str, log: Path) -> None:
    """Copy what is new in a run's log to `tracking/<run>/<log>/<from>-<to>.jsonl.gz` of the store.

    Cut off in between, it copies the same lines again, which does no harm: shipping repeats itself anyway.
    """
    position = log.with_suffix(".journal.position")
    start = read_position(position)
    with open(log, "rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
        name = hashlib.sha256(first).hexdigest()[:12]  # it has a time: no two logs share it
        lines.seek(start)
        body = lines.read()
    body = body[: body.rfind(b"\n") + 1]  # the rest is still being written
    if body:
        end = start + len(body)
        store.put(f"tracking/{run}/{name}/{start:012d}-{end:012d}.jsonl.gz", gzip.compress(body))
        write_position(position, end)


def journal(store: Store, run: str) -> list[list[bytes]]:
    """All that a run told MLflow on whatever machine, as lines, one list a session, oldest first."""
    sessions: list[tuple[float, list[bytes]]] = []
    for entry in store.entries(f"tracking/{run}/"):  # the pieces of one log follow each other
        for line in gzip.decompress(store.get(entry.key) or b"").splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record["kind"] == "session":
                    sessions.append((record["time"], []))
                sessions[-1][1].append(line)
    return [lines for _, lines in sorted(sessions, key=lambda session: session[0])]


def rebuild(store: Store, run: str, uri: str) -> int:
    """Tell the MLflow at `uri` all that the run ever told one; how many sessions. In place of the run's shipper.

    Each session is shipped on its own: as then, it leaves out what MLflow knew when it began. UserError if that MLflow
    takes nothing for SKYTRAIN_MLFLOW_FLUSH_SECONDS (30).
    """
    os.environ.update(QUICK_MLFLOW | os.environ)
    patience = flush_seconds()
    sessions = journal(store, run)
    for lines in sessions:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "mlflow.jsonl")
            log.write_bytes(b"".join(lines))
            Shipper(log, uri, patience).ship(until_end=True)
    return len(sessions)


def position_file(log: Path, uri: str) -> Path:
    """Where the shipper of `log` to `uri` notes how far it came."""
    return log.with_suffix(f".{hashlib.sha256(uri.encode()).hexdigest()[:8]}.position")


def read_position(path: Path) -> int:
    """Bytes of the log that MLflow has; 0 if unknown, since shipping twice does no harm."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def write_position(path: Path, offset: int) -> None:
    fresh = path.with_suffix(".position-new")
    fresh.write_text(str(offset))
    fresh.replace(path)


def _open_log(log: Path) -> int:
    return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def _append(fd: int, record: Mapping[str, Any], torn: bool = False) -> None:
    """One write of a whole line: with O_APPEND, lines of two processes do not mix."""
    line = (b"\n" if torn else b"") + json.dumps(record).encode() + b"\n"
    if os.write(fd, line) < len(line):
        raise OSError("the disk is full")


def _strings(values: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}


def _milliseconds(record: Mapping[str, Any]) -> int:
    return round(record["time"] * 1000)


def say(line: str) -> None:
    print(time.strftime("%Y-%m-%dT%H:%M:%S"), line, flush=True)


def _leave_with(parent: int) -> None:
    # Asked twice a second instead of Linux's parent-death signal: that one also comes when only the thread
    # that started us ends.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> int:
    """Ship the log in argv[1]; with a process id in argv[2], follow it until that parent is gone."""
    log = Path(sys.argv[1])
    parent = int(sys.argv[2]) if len(sys.argv) > 2 else None
    if parent is not None:
        os.nice(10)  # the cores are for the training; importing mlflow alone is 5 s of one
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    with open(log.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes of one run share the log: one of them ships it
        try:
            import mlflow  # noqa: F401
        except Exception as error:  # a broken installation is as good as none
            say(f"mlflow cannot be imported: {type(error).__name__}: {error}")
            return NO_MLFLOW
        if os.environ["MLFLOW_TRACKING_URI"].startswith("sqlite:") and not find_spec("sqlalchemy"):
            say("mlflow-skinny has no SQLite: name a server in MLFLOW_TRACKING_URI, or install mlflow")
            return NO_MLFLOW
        shipper = Shipper(log, os.environ["MLFLOW_TRACKING_URI"])
        if parent is not None:
            watch = Watch(log, shipper.closing)
            threading.Thread(target=watch.follow, args=(_open_log(log),), daemon=True).start()
        shipper.ship(until_end=parent is None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
