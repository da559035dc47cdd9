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
from contextlib import suppress
from pathlib import Path

from pipelines.extras.mlflow.mirror import Mirror
from pipelines.extras.mlflow.settings import QUICK_MLFLOW, flush_seconds, log, tracking_uri
from pipelines.run.trackers import Tracker
from pipelines.store.manifest import scratch
from pipelines.store.provenance import provenance
from pipelines.store.records import Heartbeat
from pipelines.store.s3_store import open_store
from pipelines.store.secrets import MLFLOW, environment_for, services_of
from trainer.base.events import EVENTS_FILE, Row, events_after

MODULE = "pipelines.extras.mlflow.child"
POLL_SECONDS, RETRY_SECONDS, REFRESH_SECONDS, RESTART_SECONDS = 1.0, 5.0, 30.0, 30.0
KILL_SECONDS = 5.0  # for the child to end after SIGKILL
MEMORY_BYTES = 2 << 30
# One thread for numpy and one arena for malloc: on a machine of 100 cores, theirs alone would reach the limit.
SMALL = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "PYTHONUTF8": "1"}


class MirrorProcess(Tracker):
    """The mirror of a run, as the command sees it: the tracker `mlflow`. UserError for an invalid setting."""

    def __init__(self, store: str, run: str, home: Path) -> None:
        super().__init__(store, run, home)
        self.flush_seconds, self.uri = flush_seconds(), tracking_uri(home)
        self.end_seconds = self.flush_seconds + KILL_SECONDS
        self.log = home / "tracking" / run / "mlflow.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._started = -math.inf

    def start(self) -> None:
        """Start the child, again if a signal has killed it: it retries by itself. From any thread."""
        exit_code = self._child.poll() if self._child else -1
        if exit_code is None or exit_code >= 0 or time.monotonic() < self._started + RESTART_SECONDS:
            return
        self._started, own = time.monotonic(), environment_for(MLFLOW + services_of(self.store))
        with suppress(OSError):  # no disk, no memory: `end` reports it
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", MODULE, self.store, self.run, str(self.home)],
                    env=QUICK_MLFLOW | own | SMALL | {"MLFLOW_TRACKING_URI": self.uri},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.DEVNULL,  # libraries repeat the URI of a database, with its password
                    start_new_session=True,  # Ctrl-C is for the run, which then still records its end
                )

    def heartbeat(self, beat: Heartbeat) -> None:
        self.start()

    def end(self, error: BaseException | None) -> str | None:
        """Let the child send the rest, for at most `flush_seconds`. A line for the user if MLflow lacks something."""
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


def main() -> int:
    """The child: mirror the run argv[2] of the store argv[1], with the home folder argv[3], until stdin ends."""
    os.nice(10)  # the cores are for the training; importing mlflow alone is 5 s of one
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the run, whose end is still to come
    ending = threading.Event()
    threading.Thread(target=_await_end, args=(ending,), daemon=True).start()

    (_, store, run, home), origin = sys.argv, provenance()
    while True:
        try:
            mirror = Mirror(open_store(store), run, os.environ["MLFLOW_TRACKING_URI"], origin)
            follow(mirror, Path(home), ending)
            return int(mirror.refused)
        except ImportError as error:
            log(f"needs the package mlflow, and for SQLite all of it, not mlflow-skinny: {error}")
            return 1
        except Exception as error:
            log(f"will try again: {type(error).__name__}: {error}")
        time.sleep(POLL_SECONDS)
        ending.wait(RETRY_SECONDS)


def _await_end(ending: threading.Event) -> None:
    """Set `ending` when the command ends, by itself or by a kill; end this process if the rest takes too long."""
    os.read(0, 1)  # not sys.stdin, whose lock would abort an exit before
    ending.set()
    time.sleep(flush_seconds() + 1)
    log("gave up: the rest took too long")
    os._exit(1)


def follow(mirror: Mirror, home: Path, ending: threading.Event) -> None:
    """Send all that is new of a run until `ending`, then the rest. Raises the errors of MLflow and of the store."""
    record = mirror.run.record
    prefixes = filter(None, [record.prefixes.get("train"), *record.tunings.values()])
    folders = [scratch(home, mirror.run.store, prefix) for prefix in prefixes]
    path, offset, sent, ended = None, 0, 0.0, False
    while not ended:
        ended = ending.wait(POLL_SECONDS)
        found = [one for folder in folders for one in sorted(folder.glob(f"a*/{EVENTS_FILE}"))]
        newest = found[-1] if found else path  # of this machine; a finished stage leaves none
        behind = ended or not sent or newest != path
        if behind or time.monotonic() > sent + REFRESH_SECONDS:
            mirror.send(ended, series=behind)  # before the rows of a new attempt: those before them
            sent = time.monotonic()
        path, offset = newest, offset if newest == path else 0
        while path and (read := events_after(path, offset))[0]:
            events, offset = read
            rows = (event for event in events if isinstance(event, Row))
            mirror.send_rows({"step": row.step, "time": row.time, **row.metrics} for row in rows)


if __name__ == "__main__":
    sys.exit(main())
