"""How the work of a node ends, in a form that can be sent to the head and re-raised there."""

import platform
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.nodes.gpu_faults import hardware_error, peer_error
from trainer.errors import FULL, Diverged, StoreUnavailable, UserError, is_full

UNAVAILABLE = "unavailable"  # kind: the store took no checkpoint, or did not answer
# Errors of a rank or a node that the head re-raises with their original type, by kind. The order is their priority.
RERAISED: dict[str, type[Exception]] = {
    "mistake": UserError,
    UNAVAILABLE: StoreUnavailable,
    "diverged": Diverged,
}
GPU = "gpu"  # kind: the hardware of a node failed
PEER = "peer"  # kind: a rank lost its peers; the cause is with one of them, or between them
KILLED = "killed"  # kind: a signal ended a rank or torchrun
STUCK = "stuck"  # kind: the watchdog ended ranks that made no progress
FAULT = "fault"  # kind: any other error; it also names the ranks' error files


@dataclass(frozen=True)
class NodeResult:
    """How the ranks of a node ended, or its parts of the text."""

    node: int
    kind: str | None = None  # of the error: one of RERAISED, GPU, PEER, KILLED, STUCK or FAULT; None: success
    message: str = ""
    host: str = field(default_factory=platform.node)

    @property
    def error(self) -> Exception:
        """The error that the head raises for a failed node."""
        assert self.kind, self
        return RERAISED.get(self.kind, RuntimeError)(self.message)


def kind_and_message(error: Exception, folder: Path) -> tuple[str, str]:
    """Kind and message that report an error of work that writes into `folder`."""
    for kind, known in RERAISED.items():
        if isinstance(error, known):
            return kind, str(error)
    if isinstance(error, OSError) and is_full(error):
        return "mistake", f"{error.filename or folder}: {FULL}"
    if line := hardware_error(str(error).splitlines()):
        return GPU, line
    if line := peer_error(f"{type(error).__name__}: {error}"):
        return PEER, line
    return FAULT, "".join(traceback.format_exception(error))
