"""`skytrain` in the process of the tests: without a start of Python, and with the ranks of a run as a thread."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
NO_PROCESS = 1 << 23  # more than any process id


class Output(StringIO):
    """Standard output of the main thread. The rank's threads write to the log of ranks."""

    log: TextIO | None = None

    def write(self, text: str) -> int:
        if threading.current_thread() is threading.main_thread():
            return super().write(text)
        return self.log.write(text) if self.log else len(text)


class RanksInThread:
    """The only rank of a run, with the interface of the launcher's process."""

    pid = NO_PROCESS
    returncode: int | None = None

    def __init__(self, folder: Path, cache: Path) -> None:
        from stage_work import NoSignals

        self._stop = NoSignals()
        self._thread = threading.Thread(target=self._run, args=[folder, cache], name="rank", daemon=True)
        self._thread.start()

    def _run(self, folder: Path, cache: Path) -> None:
        from pipelines.run.stages import rank

        out = sys.stdout if isinstance(sys.stdout, Output) else Output()
        with (folder / "train.log").open("a") as log:
            out.log = log
            try:
                self.returncode = rank.run(folder, cache, self._stop)
            except Exception:
                traceback.print_exc(file=log)
                self.returncode = 1
            finally:
                out.log = None

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.returncode

    def send_signal(self, _number: int) -> None:
        self._stop.asked = True

    def terminate(self) -> None:
        self._stop.asked = True

    kill = terminate


def start_ranks_here(task: Any, folder: Path, home: Path, grace: int, address: Any) -> Any:
    """Stands in for `start_ranks`, which several ranks still need."""
    from pipelines.run.nodes import ranks

    if task.processes > 1 or address.count > 1:
        return ranks.start_ranks(task, folder, home, grace, address)
    (folder / ranks.TASK_FILE).write_bytes(task.to_json())
    ranks.show_alive(folder, "launcher")
    return ranks.Ranks(RanksInThread(folder, home / "cache"), task, folder, grace)  # type: ignore[arg-type]


def clean_environment(**more: str) -> dict[str, str]:
    """The variables of this process, without settings of ours, SkyPilot's, AWS's and MLflow's; and more."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SKY", "AWS_", "MLFLOW_"))}
    return kept | {"PYTHONPATH": str(REPOSITORY), "SKYTRAIN_NOTICE": "off"} | more


def skytrain(folder: Path, environment: Mapping[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder, with this environment and no other."""
    import torch

    from pipelines import cli
    from pipelines.run.nodes import launcher_process
    from pipelines.run.stages import follow, train
    from pipelines.store import meter, process_id

    began, out, err, code = time.time(), Output(), StringIO(), 0
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ, environment, clear=True),
        signals_unchanged(),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.chdir(folder)
        patch.setattr("sys.argv", ["skytrain", *arguments])
        for stage in (train, follow):
            patch.setattr(stage, "start_ranks", start_ranks_here)
        patch.setattr(launcher_process, "prepare_launcher", lambda: None)
        for module in (meter, process_id):
            patch.setattr(module, "process_began", lambda: began)
        torch.set_num_threads(1)  # as in a process of its own: the order of sums depends on it
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            code = 1
            traceback.print_exc()
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@contextmanager
def signals_unchanged() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in REQUESTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
