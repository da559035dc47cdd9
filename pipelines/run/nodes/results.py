"""How the ranks of a node ended, and the messages that tell an interruption from a bug.

The texts of CUDA and NCCL are those that NVIDIA's documents and public reports show; this project has seen no real
fault of a GPU.
"""

import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from trainer.config.errors import FULL, Diverged, NoSoundCommit, StoreUnavailable, UnfitMachine, UserError, is_full

UNREADABLE = "unreadable"  # kind: the run has commits, and none can be read
UNAVAILABLE = "unavailable"  # kind: the store took no checkpoint, or did not answer
# Errors of a rank that node 0 re-raises with their original type, by kind. The order is their priority.
RERAISED: dict[str, type[Exception]] = {
    UNREADABLE: NoSoundCommit,
    "mistake": UserError,
    "unfit": UnfitMachine,
    UNAVAILABLE: StoreUnavailable,
    "diverged": Diverged,
}
GPU = "gpu"  # kind: the hardware of a node failed
COUNTED = (GPU, UNREADABLE)  # kinds that count as a crash: a rented machine must not start over for ever
PEER = "peer"  # kind: a rank lost its peers; the cause is with one of them, or between them
KILLED = "killed"  # kind: a signal ended a rank or the launcher
GONE = "gone"  # kind: a signal ended a worker's command, so its node starts no ranks again
STUCK = "stuck"  # kind: the watchdog ended ranks that made no progress
FAULT = "fault"  # kind: any other error; it also names the ranks' error files
# Of the results of several nodes, one of an earlier kind explains the later kinds.
KINDS = (*RERAISED, GPU, STUCK, GONE, KILLED, FAULT, PEER)
Kind = Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
# Parts of the messages of CUDA and of the driver.
HARDWARE_ERRORS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "unspecified launch failure",
    "hardware stack error",
    "fallen off the bus",
    "GPU is lost",
)
# Parts of the messages of a rank whose peer, or the way to it, is gone. A rank that raises one is rarely the cause.
PEER_ERRORS = (
    "ncclRemoteError",
    "ncclSystemError",
    "ncclUnhandledCudaError",
    "ncclInternalError",
    "NCCL communicator was aborted",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)
LINE_CHARACTERS = 300


@dataclass(frozen=True)
class NodeResult:
    """How the ranks of a node ended."""

    node: int
    kind: Kind | None = None  # of the error; None: success
    message: str = ""

    @property
    def error(self) -> Exception:
        """The error that node 0 raises for a failed node."""
        assert self.kind, self
        return RERAISED.get(self.kind, RuntimeError)(self.message)


def cause_of(results: Iterable[NodeResult]) -> NodeResult | None:
    """The result that explains the others, of equal ones the first node's; None if all ranks succeeded."""
    return min((one for one in results if one.kind), key=lambda one: KINDS.index(str(one.kind)), default=None)


def kind_and_message(error: Exception, folder: Path) -> tuple[str, str]:
    """Kind and message that report an error of work that writes into `folder`."""
    for kind, known in RERAISED.items():
        if isinstance(error, known):
            return kind, str(error)
    if isinstance(error, OSError) and is_full(error):
        return "mistake", f"{error.filename or folder}: {FULL}"
    if line := first_line_with(HARDWARE_ERRORS, str(error).splitlines()):
        return GPU, line
    if line := first_line_with(PEER_ERRORS, f"{type(error).__name__}: {error}".splitlines()):
        return PEER, line
    return FAULT, "".join(traceback.format_exception(error))


def first_line_with(parts: Iterable[str], lines: Iterable[str]) -> str | None:
    """The first line that has one of these parts, cut at LINE_CHARACTERS."""
    found = (line for line in lines if any(part in line for part in parts))
    return next((line.strip()[:LINE_CHARACTERS] for line in found), None)


def signal_name(number: int) -> str:
    """ "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
