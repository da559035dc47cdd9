"""The ranks of one node: a launcher starts them, and the files that they leave show how they ended.

A rank that fails leaves its error in its attempt's folder, in a file `<kind>-<rank>.txt`.
"""

import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from pipelines.recipe.recipe import Recipe
from pipelines.recipe.tokens_config import LLMC
from pipelines.run.nodes.address import NodeAddress, interface_to
from pipelines.run.nodes.launcher_process import prepared_launcher
from pipelines.run.nodes.results import (
    FAULT,
    GPU,
    HARDWARE_ERRORS,
    KILLED,
    PEER,
    RERAISED,
    STUCK,
    NodeResult,
    first_line_with,
    kind_and_message,
    signal_name,
)
from pipelines.store.secrets import environment_for, services_of
from trainer.base.metrics import PhaseClock
from trainer.base.process import Background
from trainer.base.record import Count, Key, StoredRecord, UnixSeconds, record_in
from trainer.loop.watchdog import STUCK as STUCK_LINE
from trainer.loop.watchdog import Watchdog

RANK_MODULE = (
    "pipelines.run.stages.rank"  # the program of a rank; imported by name, because stages are above this layer
)
TASK_FILE = "task.json"
LOG_FILE = "train.log"  # output of the launcher and its ranks
Seconds = Annotated[float, Field(gt=0)]
ALIVE, ALIVE_SECONDS = ".alive", 1.0
LOG_LINES = 30  # of a failed run, shown to the user if no rank left an error file
# For ranks to fail and write their error files, once another rank failed, or those of another node; see also
# trainer/base/parallel.py.
FAILING_SECONDS = 4.0


@dataclass(frozen=True, kw_only=True)
class RankTask(StoredRecord):
    """The task of a node's ranks, which their command writes into the attempt's folder on the node. Each stage adds the
    fields that only its ranks read."""

    stage: str  # whose ranks these are
    recipe: Recipe
    store: str  # URI
    tokens: Key  # prefix of the tokens in the store
    started: UnixSeconds  # at which the pipeline's clock enters the phase "ranks"
    processes: Count  # of each node

    def to_json(self) -> bytes:
        return json.dumps(vars(self) | {"recipe": self.recipe.model_dump()}).encode()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The task in the attempt's folder on this node."""
        return record_in(cls, (folder / TASK_FILE).read_bytes(), str(folder / TASK_FILE))


@dataclass(frozen=True, kw_only=True)
class SavingTask(RankTask):
    """The task of ranks that commit checkpoints."""

    prefix: Key  # of the artifact in the store
    attempt: Count
    reached: Count  # the highest step of any earlier attempt
    between_failures: Seconds  # expected


@dataclass(frozen=True, kw_only=True)
class TrainTask(SavingTask):
    """The task of the ranks of the stage train."""

    traffic_seconds: Annotated[float, Field(ge=0)] = 0.0  # that cost as much as the traffic of a checkpoint


@dataclass(frozen=True, kw_only=True)
class RankNumbers(StoredRecord):
    """The part of a TrainTask that node 0 alone knows, and that workers read from the store: numbers, so that a writer
    of the store leads no worker to another folder or store."""

    started: UnixSeconds
    reached: Count
    between_failures: Seconds
    traffic_seconds: Annotated[float, Field(ge=0)] = 0.0
    processes: Count = 0
    port: Annotated[int, Field(ge=0, le=65_535)] = 0  # see `NodeAddress`
    cluster: str = ""  # likewise


def start_ranks(task: RankTask, folder: Path, home: Path, grace_seconds: float, address: NodeAddress) -> "Ranks":
    """Start this node's ranks. After a stop, they have `grace_seconds` to save."""
    (folder / TASK_FILE).write_bytes(task.to_json())
    (folder / LOG_FILE).touch()
    environment = environment_for(services_of(*asked_by_ranks(task)))
    if address.count > 1 and (interface := interface_to(address.first)):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    launcher, output = prepared_launcher()
    given = str(folder), str(home / "cache"), grace_seconds, astuple(address), environment
    assert launcher.stdin
    try:
        with launcher.stdin as pipe:
            pipe.write(json.dumps(given).encode())
    except BrokenPipeError:  # it has died, if not of a signal then because it can't import itself
        output.seek(0)
        (folder / LOG_FILE).write_bytes(output.read())
    return Ranks(launcher, task, folder, grace_seconds, address.rank)


def asked_by_ranks(task: RankTask) -> Iterator[str]:
    """The URIs of what the ranks ask: the store, shards that lie elsewhere, and weights on the Hub."""
    yield task.store
    yield from (text.source.removeprefix(LLMC) for text in task.recipe.tokens.each() if text.adopts)
    yield task.recipe.train.init_from or ""


class Ranks:
    """The ranks of this node and their launcher, with deadlines that their command enforces: a process that SIGSTOP has
    stopped, or that never gives up its interpreter, obeys no signal, and watches neither itself nor others.
    """

    def __init__(
        self, launcher: subprocess.Popen[bytes], task: RankTask, folder: Path, grace_seconds: float, node: int = 0
    ) -> None:
        self.launcher, self.task, self.folder, self.grace_seconds = launcher, task, folder, grace_seconds
        self.stopping = False
        first = task.processes * node
        self.names = ["launcher", *(f"rank {number}" for number in range(first, first + task.processes))]
        Background("ranks", self._supervise).start()

    def stop(self) -> None:
        """Let the ranks commit the last step and exit."""
        with suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGCONT)
        self.launcher.send_signal(signal.SIGTERM)
        self.stopping = True

    def kill(self) -> None:
        """End the launcher and its ranks, the processes of its group, immediately."""
        with suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()

    def wait_or_kill(self) -> int:
        """End ranks that cannot continue without the ranks of another node. NCCL does not always report the loss.

        Returns the launcher's exit code; 1 if this process killed it.
        """
        try:
            return self.launcher.wait(FAILING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return 1

    def wait_for_orphans(self) -> None:
        """Wait for the ranks of a killed launcher: the kernel asks them to commit and leave, see die_with_parent."""
        deadline = time.monotonic() + self.grace_seconds
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.launcher.pid, 0)  # changes nothing; raises once no process of its group is left
                time.sleep(0.1)
            os.killpg(self.launcher.pid, signal.SIGKILL)

    def _supervise(self) -> None:
        """Kill all once one of the processes has not started in time or is silent for longer than a step may take, or
        once a stop takes too long. Counts looks, not time: while a machine is suspended, nobody looks."""
        start, step = (Watchdog(self.task.recipe.runtime, PhaseClock(p)).limit_seconds() for p in ("imports", "train"))
        dates: dict[str, int] = {}  # when each was last seen alive
        silent, stopping = dict.fromkeys(self.names, 0.0), 0.0  # seconds
        while self.launcher.poll() is None:
            time.sleep(ALIVE_SECONDS)
            for name in self.names:
                silent[name] += ALIVE_SECONDS
                with suppress(FileNotFoundError):  # it has not started, or the folder is gone with the attempt
                    if dates.get(name) != (date := (self.folder / f"{name}{ALIVE}").stat().st_mtime_ns):
                        dates[name], silent[name] = date, 0.0
                if silent[name] > (step if name in dates else start):
                    with suppress(OSError), (self.folder / LOG_FILE).open("a") as log:
                        log.write(f"{name}: {STUCK_LINE} for {silent[name]:.0f} s; the command kills the ranks\n")
                    self.kill()
            stopping += ALIVE_SECONDS * self.stopping
            if stopping > self.grace_seconds + FAILING_SECONDS:
                self.kill()


def show_alive(folder: Path, *names: str) -> None:
    """Show the command that these processes need no end, by files in the attempt's folder; every ALIVE_SECONDS."""
    for name in names:
        with suppress(OSError):  # a full disk: the pipeline's process detects it on its own
            (folder / f"{name}{ALIVE}").touch()


def result_of_ranks(node: int, folder: Path, exit_code: int) -> NodeResult:
    """How the ranks of this node ended, by its exit code and by the files in their attempt's folder."""
    files = sorted(folder.glob("*-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    # By kind, the rank that failed first and its error: the other ranks only fail because of it.
    first = {kind: (rank, path) for path in reversed(files) for kind, _, rank in [path.stem.rpartition("-")]}
    errors = {kind: path.read_text() for kind, (_, path) in first.items()}
    for kind in RERAISED:
        if kind in errors:
            return NodeResult(node, kind, errors[kind])
    if not exit_code:
        return NodeResult(node)
    log = (folder / LOG_FILE).read_text(errors="replace").splitlines()
    if line := first_line_with(HARDWARE_ERRORS, [*errors.get(GPU, "").splitlines(), *log]):
        rank = next((f", rank {first[kind][0]}" for kind in (GPU, KILLED, PEER, FAULT) if kind in first), "")
        return NodeResult(node, GPU, f"GPU fault: {line}{rank} on node {node} ({platform.node()})")
    for line in (line for line in log if STUCK_LINE in line):
        return NodeResult(node, STUCK, line)
    if KILLED in errors:
        return NodeResult(node, KILLED, errors[KILLED])
    if exit_code < 0:
        return NodeResult(node, KILLED, f"the launcher of node {node} was killed by {signal_name(-exit_code)}")
    if PEER in errors and FAULT not in errors:
        return NodeResult(node, PEER, f"{errors[PEER]}, seen on node {node} ({platform.node()})")
    return NodeResult(node, FAULT, errors.get(FAULT) or "\n".join(log[-LOG_LINES:]))


def leave_error_message(error: Exception, folder: Path) -> None:
    """Write the error of this rank into a file of the attempt's folder."""
    kind, message = kind_and_message(error, folder)
    with suppress(OSError):  # a full disk: the pipeline's process detects it on its own
        (folder / f"{kind}-{os.environ.get('RANK', '0')}.txt").write_text(message)
