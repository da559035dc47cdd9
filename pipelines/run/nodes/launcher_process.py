"""The process of a launcher, which a command starts first of all: it imports torch while the command reads its recipe
and asks the store. So this module imports little."""

import atexit
import signal
import subprocess
import sys
import tempfile
from typing import IO

from pipelines.store.secrets import environment_for
from trainer.base.process import die_with_parent
from trainer.config.errors import FULL, UserError

LAUNCHER_MODULE = "pipelines.run.nodes.launcher"
# Environment variables of the ranks that the user has not set.
DEFAULTS = {
    # Turns of the loop in which an OpenMP thread waits for the others, before it sleeps; libgomp's default is 300,000.
    # Where another process has one of two cores, a thread that turns keeps the one that it waits for from running.
    "GOMP_SPINCOUNT": "1000",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # Pin the memory of checkpoints in several threads: one call for 19 GB held up loads and steps for 10 s.
    "PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
}

Launcher = tuple[subprocess.Popen[bytes], IO[bytes]]  # and what it printed before it had a log
_prepared: list[Launcher] = []


def prepare_launcher() -> None:
    """Start a launcher, which `prepared_launcher` returns."""
    _prepared.append(new_launcher())
    atexit.register(_prepared[-1][0].kill)  # if no ranks are needed


def prepared_launcher() -> Launcher:
    """The launcher that was started before, or a new one."""
    return _prepared.pop() if _prepared else new_launcher()


def new_launcher() -> Launcher:
    """A launcher in its own session (this process forwards Ctrl-C); the kernel ends it if this process dies."""
    # No pipe, which nobody would read until the launcher has its task, and so a log.
    try:
        output = tempfile.TemporaryFile("a+b")  # noqa: SIM115
    except FileNotFoundError as error:  # a limit, or no space
        raise UserError(f"TMPDIR: {error.strerror}; {FULL}") from error
    launcher = subprocess.Popen(
        [sys.executable, "-u", "-m", LAUNCHER_MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=output,
        env=DEFAULTS | environment_for(),  # the secrets of the ranks come with their task
        start_new_session=True,
        preexec_fn=before_launcher,
    )
    return launcher, output


def before_launcher() -> None:
    """Runs in the child process before it becomes the launcher."""
    die_with_parent()
    # Slurm sends SIGUSR1 to every process of a step. The ranks handle it; the launcher would die and end them.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
