"""Signs in error messages of CUDA and NCCL that a GPU or its links failed, and not the program.

The texts are those that NVIDIA's documents and public reports show; this project has seen no real fault.
"""

from collections.abc import Iterable
from pathlib import Path

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


def hardware_error(lines: Iterable[str]) -> str | None:
    """The first line that shows a failed GPU."""
    for line in lines:
        if any(sign in line for sign in HARDWARE_ERRORS):
            return line.strip()[:LINE_CHARACTERS]
    return None


def peer_error(text: str) -> str | None:
    """The line of an error in a collective that shows that a peer, or the way to it, is gone."""
    lines = (line for line in text.splitlines() if any(sign in line for sign in PEER_ERRORS))
    return next((line.strip()[:LINE_CHARACTERS] for line in lines), None)


def name_of_rank(path: Path) -> str:
    """ "rank 3" for the error file of that rank."""
    return f"rank {path.stem.rpartition('-')[2]}"
