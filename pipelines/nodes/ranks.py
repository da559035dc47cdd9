"""The ranks of one node: a launcher starts them, and the files that they leave show how they ended.

A rank that fails leaves its error in its attempt's folder, in a file `<kind>-<rank>.txt`.
"""

import json
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

from pipelines.nodes.address import NodeAddress, interface_to
from pipelines.nodes.launcher_process import prepared_launcher
from pipelines.nodes.results import (
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
from pipelines.recipe import Recipe
from pipelines.secrets import environment_for, services_of
from pipelines.tokens_config import LLMC
from trainer.health import STUCK as STUCK_LINE
from trainer.record import StoredRecord, record_in

RANK_MODULE = "pipelines.stages.rank"  # the program of a rank; imported by name, because stages are above this layer
SPEC_FILE = "spec.json"
LOG_FILE = "train.log"  # output of the launcher and its ranks
LOG_LINES = 30  # of a failed run, shown to the user if no rank left an error file
# For ranks to fail and write their error files, once another rank failed, or those of another node; see also
# trainer/parallel.py.
FAILING_SECONDS = 4.0


@dataclass(frozen=True)
class RankSpec(StoredRecord):
    """The task of all ranks of an attempt. Node 0 writes it; the ranks of every node read it."""

    started: float  # unix seconds at which the pipeline's clock enters the phase "ranks"
    reached: int  # the highest step of any earlier attempt
    recipe: Recipe
    store: str  # URI
    tokens: str  # prefix of the tokens in the store
    prefix: str  # of the training run in the store
    attempt: int
    between_failures: float  # expected, in seconds
    traffic_seconds: float = 0.0  # for which the machines cost as much as the traffic of a checkpoint
    processes: int = 0  # of each node
    port: int = 0  # on node 0, where the ranks of several nodes meet
    cluster: str = ""  # see `NodeAddress`
    weights: str | None = None  # file of trained weights on this node: the ranks evaluate them, and train nothing
    tune: str | None = None  # name of a step of tuning: the ranks tune the model in the folder `weights`

    def to_json(self) -> bytes:
        return json.dumps(vars(self) | {"recipe": self.recipe.model_dump()}).encode()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The spec in the attempt's folder on this node."""
        return record_in(cls, (folder / SPEC_FILE).read_bytes(), str(folder / SPEC_FILE))


def start_ranks(
    spec: RankSpec, folder: Path, home: Path, grace_seconds: float, address: NodeAddress
) -> subprocess.Popen[bytes]:
    """Start this node's ranks. Returns their launcher: after SIGTERM, it kills ranks that still save after
    `grace_seconds`."""
    (folder / SPEC_FILE).write_bytes(spec.to_json())
    (folder / LOG_FILE).touch()
    environment = environment_for(services_of(*asked_by_ranks(spec)))
    if address.count > 1 and (interface := interface_to(address.first)):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    launcher = prepared_launcher()
    task = str(folder), str(home / "cache"), grace_seconds, astuple(address), environment
    assert launcher.stdin and launcher.stderr
    try:
        with launcher.stdin as pipe:
            pipe.write(json.dumps(task).encode())
    except BrokenPipeError:  # it has died, if not of a signal then because it can't import itself
        (folder / LOG_FILE).write_bytes(launcher.stderr.read())
    return launcher


def asked_by_ranks(spec: RankSpec) -> Iterator[str]:
    """The URIs of what the ranks ask: the store, shards that lie elsewhere, and weights on the Hub."""
    yield spec.store
    yield from (text.source.removeprefix(LLMC) for text in spec.recipe.tokens.each() if text.adopts)
    if re.fullmatch(r"[^:]+@[0-9a-f]{40}", spec.recipe.train.init_from or ""):
        yield f"hf://{spec.recipe.train.init_from}"


def wait_or_kill(launcher: subprocess.Popen[bytes]) -> int:
    """End ranks that cannot continue without those of another node. NCCL does not always report the loss.

    Returns the launcher's exit code; 1 if this process killed it.
    """
    try:
        return launcher.wait(FAILING_SECONDS)
    except subprocess.TimeoutExpired:
        kill_ranks(launcher)
        return 1


def wait_for_orphans(launcher: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the ranks of a killed launcher: the kernel has asked them to commit and leave, see die_with_parent."""
    deadline = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(launcher.pid, 0)  # changes nothing; raises once no process of its group is left
            time.sleep(0.1)
        os.killpg(launcher.pid, signal.SIGKILL)


def kill_ranks(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher and its ranks, the processes of its group, immediately."""
    with suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.kill()
    launcher.wait()


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
