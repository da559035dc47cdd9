"""The run's side of MLflow tracking, which cannot disturb the run.

The run appends records to a log on its own disk and never imports MLflow. A second process, the shipper, follows
that log and sends it to the server. So a slow, silent, refusing or lost server costs the run nothing until `close`,
which waits a bounded time. Records that were not shipped stay in the log; the next run with the same work folder
ships them first.

Shipping may repeat a record but never doubles a point: a record keeps the time of its writing, and MLflow stores one
row per (key, value, timestamp, step).

The run also copies the log to the store, piece by piece: the run's journal, from which `rebuild` restores a lost
server. A lost machine loses the records since its last upload (at most 30 s while the store answers); the attempt
that redoes those steps logs them again.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.tracking.mlflow.journal import (
    Close,
    DatasetInput,
    LogReader,
    Metrics,
    Model,
    Record,
    Session,
    StageEnded,
    StageStarted,
    Table,
    Tags,
    TextFile,
    append,
    ends_with_close,
    keep_journal,
    open_log,
    position_file,
    read_position,
)
from pipelines.tracking.mlflow.settings import (
    NO_MLFLOW,
    QUICK_MLFLOW,
    experiment_name,
    flush_seconds,
    own_tags,
    tracking_is_off,
    tracking_uri,
)
from trainer.store import Store

# Not `-m`: that puts the current folder first, where a user may well have a `pipelines` or an `mlflow.py`.
SHIPPER = "import sys; sys.path.append({!r}); from pipelines.tracking.mlflow.shipper import main; sys.exit(main())"


class Tracker:
    """Appends to the log, keeps a shipper running, and never raises for an error of MLflow.

    `work_dir` holds the log and belongs to `run`. The tracking URI is `uri`, else MLFLOW_TRACKING_URI, else
    `default_uri`; the experiment and the user's own tags come from MLFLOW_EXPERIMENT_NAME and SKYTRAIN_TAGS. A stage of
    None means the run itself. SKYTRAIN_TRACKING=off writes and starts nothing;
    SKYTRAIN_MLFLOW_FLUSH_SECONDS (30) bounds how long `close` waits. UserError if one of the two is invalid.
    """

    def __init__(
        self,
        work_dir: Path,
        run: str,
        experiment: str | None = None,
        uri: str | None = None,
        *,
        default_uri: str,
    ) -> None:
        self.run, self.experiment, self.own_tags = run, experiment or experiment_name(), own_tags()
        self.uri = tracking_uri(uri, default_uri)
        self.log = work_dir / "mlflow.jsonl"
        self.shipper_log = work_dir / "mlflow.log"
        self.flush_seconds = flush_seconds()
        self.off = tracking_is_off()
        self._fd: int | None = None
        self._shipper: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._write_error = ""  # why records did not reach the log

    def start(self) -> None:
        """Open the log and start the shipper, which ships the records of an earlier run first."""
        if self.off:
            return
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            if not self.log.exists():  # positions in a deleted log mean nothing in this one
                for stale in self.log.parent.glob("mlflow.*.position"):
                    stale.unlink(missing_ok=True)
            self._fd = open_log(self.log)
        except OSError as error:
            self._write_error = str(error)
            return
        # The empty line before it closes a line that a crash has cut in two.
        self._append(Session(time.time(), self.run, self.experiment), torn=True)
        self._keep_shipping()

    def stage_started(self, stage: str | None, params: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        """Open the stage's MLflow run, or rejoin it; a param that has changed since becomes a tag."""
        self._append(StageStarted(time.time(), stage, _strings(params), _strings(tags) | self.own_tags))
        self._keep_shipping()

    def metrics(
        self, stage: str | None, step: int, time: float, values: Mapping[str, float], again: bool = False
    ) -> None:
        """Log `values` at `step`; `time` is in unix seconds. NaN and infinities are kept.

        `again`: even if MLflow has a point of a training series at that step.
        """
        floats = {key: float(value) for key, value in values.items()}
        self._append(Metrics(time, stage, int(step), floats, again))

    def dataset(self, stage: str, name: str, digest: str, source: str) -> None:
        """Log the stage's input: `source` is a URI, `digest` may be longer than the 36 that MLflow keeps."""
        self._append(DatasetInput(time.time(), stage, name, digest, source))

    def tags(self, stage: str | None, tags: Mapping[str, Any]) -> None:
        """Set tags on the stage's MLflow run; the last value of a tag wins."""
        self._append(Tags(time.time(), stage, _strings(tags)))

    def table(self, stage: str | None, name: str, columns: Mapping[str, list[Any]]) -> None:
        """Keep a table with the stage's MLflow run, as the artifact `name` (….json)."""
        self._append(Table(time.time(), stage, name, columns))

    def text_file(self, stage: str | None, name: str, text: str) -> None:
        """Keep a text with the stage's MLflow run, as the artifact `name`."""
        self._append(TextFile(time.time(), stage, name, text))

    def model(self, model: Model) -> None:
        """Keep the export of the run as a logged model, after the metrics that it shares with the run's parent."""
        self._append(replace(model, tags=model.tags | self.own_tags))

    def stage_ended(self, stage: str | None, status: str) -> None:
        """Close the stage's MLflow run; `status` is FINISHED, FAILED or KILLED."""
        assert status in ("FINISHED", "FAILED", "KILLED"), status
        self._append(StageEnded(time.time(), stage, status))
        self._keep_shipping()

    def highest_steps(self, stage: str | None) -> dict[str, int]:
        """The last logged step of each metric of a stage: a redone step is not new."""
        highest: dict[str, int] = {}
        if self._fd is not None:
            reader = LogReader(self.log)
            for record in (record for chunk in iter(reader.read, []) for record, _ in chunk):
                if isinstance(record, Metrics) and record.stage == stage:
                    for key in record.values:
                        highest[key] = max(record.step, highest.get(key, -1))
        return highest

    def owes_records(self) -> bool:
        """Whether an earlier invocation of this run did not ship its records, or died before it wrote the last."""
        if self.off or not self.log.exists():
            return False
        return not ends_with_close(self.log) or self._unshipped_up_to(self.log.stat().st_size) > 0

    def keep_journal(self, store: Store) -> None:
        """Copy new records to the store, from where a lost server can be rebuilt; a dead shipper starts again."""
        if not self.off and self.log.exists():
            self._keep_shipping()
            keep_journal(store, self.run, self.log)

    def close(self) -> str | None:
        """Wait at most `flush_seconds` for the shipper; one line for the user if records remain."""
        unshipped = 0
        if self._fd is not None:
            self._append(Close(time.time()))
            end = os.fstat(self._fd).st_size
            self._wait_for(end)
            os.close(self._fd)
            self._fd = None
            unshipped = self._unshipped_up_to(end)
        if self._write_error:
            return f"MLflow: records are lost, because {self.log} cannot be written: {self._write_error}"
        if unshipped:
            return (
                f"MLflow: {unshipped} records are kept in {self.log}; the next run ships them "
                f"(the reason is in {self.shipper_log})"
            )
        return None

    def _append(self, record: Record, torn: bool = False) -> None:
        if self._fd is None:
            assert self.off or self._write_error, "start() comes first, and nothing comes after close()"
            return
        try:
            append(self._fd, record, torn or bool(self._write_error))
        except OSError as error:  # a full disk stops the tracking, not the training
            self._write_error = str(error)

    def _keep_shipping(self) -> None:
        """Start a shipper unless one lives, or the last one could not import mlflow. From any thread."""
        with self._starting:
            if self._fd is not None and not (self._shipper and self._shipper.poll() in (None, NO_MLFLOW)):
                self._start_shipper()

    def _start_shipper(self) -> None:
        code = SHIPPER.format(str(Path(__file__).resolve().parents[3]))
        # Without a shipper the records stay in the log, and `close` reports them.
        with contextlib.suppress(OSError), open(open_log(self.shipper_log), "ab") as output:
            self._shipper = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(self.log), str(os.getpid())],
                env=QUICK_MLFLOW | os.environ | {"MLFLOW_TRACKING_URI": self.uri, "PYTHONUTF8": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the run, which then still logs its end
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

    def _unshipped_up_to(self, end: int) -> int:
        """The number of the run's records before the offset `end` that MLflow does not have."""
        reader = LogReader(self.log, read_position(position_file(self.log, self.uri)))
        try:
            records = [record for chunk in iter(reader.read, []) for record, offset in chunk if offset <= end]
        except OSError as error:  # the work folder was deleted meanwhile
            self._write_error = str(error)
            return 0
        return sum(not isinstance(record, Session | Close) for record in records)


def _strings(values: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}
