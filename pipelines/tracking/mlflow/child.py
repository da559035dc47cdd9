"""The child process that mirrors a run in MLflow, from both sides: it cannot stop, slow or fail the run.

The command starts it and never imports MLflow. It reads the records of the run from the store every REFRESH_SECONDS,
and the rows of the training from the events that rank 0 writes on this machine. So rows arrive within seconds, and
what a slow or lost server missed is still in the store. It ends when its stdin does, which is when the command ends
or is killed, after at most SKYTRAIN_MLFLOW_FLUSH_SECONDS (30) for the rest. Its own requests to the store, some twenty
at each look, are not in the bill.
"""

import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.artifacts.manifest import scratch
from pipelines.artifacts.store import open_store
from pipelines.tracking.mlflow.mirror import Mirror
from pipelines.tracking.mlflow.settings import QUICK_MLFLOW, flush_seconds, log, tracking_is_off, tracking_uri
from pipelines.tracking.runs import Run, find_run
from trainer.events import EVENTS_FILE, Row, Sampled, event_from_json

MODULE = "pipelines.verbs.mirror"
NO_MLFLOW = 3  # exit code of a child that cannot import mlflow: a restart would not help
POLL_SECONDS, RETRY_SECONDS, REFRESH_SECONDS, RESTART_SECONDS = 1.0, 5.0, 30.0, 30.0
MEMORY_BYTES = 2 << 30
BYTES_AT_ONCE = 1 << 19  # of events, so some 1,000 rows
# One thread for numpy and one arena for malloc: on a machine of 100 cores, theirs alone would reach the limit.
SMALL = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "PYTHONUTF8": "1"}


class MirrorProcess:
    """The mirror of a run, as the command sees it. No error of MLflow reaches the command.

    The tracking URI is MLFLOW_TRACKING_URI, else `default_uri`. SKYTRAIN_TRACKING=off starts nothing. UserError for an
    invalid setting.
    """

    def __init__(self, store: str, run: str, home: Path, *, default_uri: str) -> None:
        self.store, self.run, self.home = store, run, home
        self.off, self.flush_seconds = tracking_is_off(), flush_seconds()
        self.uri = default_uri if self.off else tracking_uri(default_uri)
        self.log = home / "tracking" / run / "mlflow.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._started = -math.inf

    def start(self) -> None:
        """Start the child, again if it has died; not if mlflow cannot be imported. From any thread."""
        running = self._child and self._child.poll() in (None, NO_MLFLOW)
        if self.off or running or time.monotonic() < self._started + RESTART_SECONDS:
            return
        self._started = time.monotonic()
        with suppress(OSError):  # no disk, no memory: `close` reports it
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", MODULE, self.store, self.run, str(self.home)],
                    env=QUICK_MLFLOW | os.environ | SMALL | {"MLFLOW_TRACKING_URI": self.uri},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.DEVNULL,  # libraries repeat the URI of a database, with its password
                    start_new_session=True,  # Ctrl-C is for the run, which then still records its end
                )

    def close(self) -> str | None:
        """Let the child send the rest, for at most `flush_seconds`. A line for the user if MLflow lacks something."""
        if self.off:
            return None
        if self._child and self._child.stdin:
            self._child.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                if self._child.wait(self.flush_seconds) == 0:
                    return None
            self._child.kill()
            self._child.wait()
        return (
            f"MLflow lacks records of this run (the reason is in {self.log}); "
            f"send them with: skytrain report {self.run} --rebuild-mlflow"
        )


def mirror_until_end(page: Callable[[Run], str], code_tags: Mapping[str, str]) -> int:
    """The child: mirror the run argv[2] of the store argv[1], with the home folder argv[3], until stdin ends."""
    os.nice(10)  # the cores are for the training; importing mlflow alone is 5 s of one
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the run, whose end is still to come
    try:
        import mlflow  # noqa: F401
    except Exception as error:  # a broken installation counts as none
        log(f"mlflow cannot be imported: {type(error).__name__}: {error}")
        return NO_MLFLOW
    uri = os.environ["MLFLOW_TRACKING_URI"]
    if uri.startswith("sqlite:") and not find_spec("sqlalchemy"):
        log("mlflow-skinny has no SQLite: name a server in MLFLOW_TRACKING_URI, or install mlflow")
        return NO_MLFLOW
    ending = threading.Event()
    threading.Thread(target=_await_end, args=(ending,), daemon=True).start()
    try:
        mirror = Mirror(open_store(sys.argv[1]), sys.argv[2], uri, page, code_tags)
        Follower(mirror, Path(sys.argv[3])).follow(ending)
    except Exception as error:
        log(f"{type(error).__name__}: {error}")
        return 1
    return int(mirror.refused)


def _await_end(ending: threading.Event) -> None:
    """Set `ending` when the command ends, by itself or by a kill; end this process if the rest takes too long."""
    sys.stdin.buffer.read()
    ending.set()
    time.sleep(flush_seconds() + 1)
    log("gave up: the rest took too long")
    os._exit(1)


class Follower:
    """Follows a run: its records in the store, and the events of its training on this machine."""

    def __init__(self, mirror: Mirror, home: Path) -> None:
        self.mirror, self.home = mirror, home
        self.run: Run | None = None  # as last sent
        self._refreshed = 0.0
        self._events: Path | None = None  # of the newest attempt on this machine, and how much of them was sent
        self._offset = 0

    def follow(self, ending: threading.Event) -> None:
        """Send all that is new, again and again, and the rest once `ending`; try again after any error."""
        ended = False
        while not ended or self.run is None:
            ended = ending.wait(POLL_SECONDS)
            try:
                self.send(ended)
            except Exception as error:
                log(f"will try again: {type(error).__name__}: {error}")
                self.mirror.forget()
                self.run = None
                time.sleep(POLL_SECONDS)
                ending.wait(RETRY_SECONDS)

    def send(self, ended: bool) -> None:
        """Send what is new since the last call; `ended`: everything that MLflow lacks."""
        events = self._newest_events(self.run or find_run(self.mirror.store, self.mirror.name))
        whole, now = ended or self.run is None or events != self._events, time.monotonic()
        if whole or now - self._refreshed > REFRESH_SECONDS:
            run = self.mirror.send(ended, series=whole)  # before the rows of a new attempt: those before them
            self.run, self._refreshed = run, now
        if events != self._events:
            self._events, self._offset = events, 0
        with suppress(FileNotFoundError):  # the stage has just finished
            self._send_events()
        self._measure()

    def _newest_events(self, run: Run | None) -> Path | None:
        """The events of the newest attempt on this machine. A finished stage leaves none."""
        prefix = run.record.prefixes.get("train") if run else None
        found = scratch(self.home, self.mirror.store, prefix).glob(f"a*/{EVENTS_FILE}") if prefix else ()
        return max(found, default=None)

    def _send_events(self) -> None:
        """Send rows and samples; the offset moves on once MLflow has them."""
        lines = [b""]
        while self._events and lines:
            with self._events.open("rb") as file:
                file.seek(self._offset)
                lines = [line for line in file.readlines(BYTES_AT_ONCE) if line.endswith(b"\n")]
            self.mirror.send_rows(rows_of(lines))
            self._offset += sum(map(len, lines))

    def _measure(self) -> None:
        """Let MLflow's monitor, a thread, measure CPU, memory, disk, network and GPUs while the training runs."""
        beats = self.run.attempts.get("train") if self.run else None
        training = beats and beats[-1].state == "running" and find_spec("psutil")
        if training and not any(thread.name == "SystemMetricsMonitor" for thread in threading.enumerate()):
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            SystemMetricsMonitor(self.mirror.run_id, resume_logging=True, tracking_uri=self.mirror.uri).start()


def rows_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The rows and samples among lines of events, without lines that a full disk has cut."""
    for line in lines:
        with suppress(ValueError):
            event = event_from_json(line.decode())
            if isinstance(event, Row):
                yield {"step": event.step, "time": event.time, **event.metrics}
            elif isinstance(event, Sampled):
                yield {"step": event.step, "samples": event.texts}
