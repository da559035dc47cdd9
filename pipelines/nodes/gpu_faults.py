"""Signs that a GPU or its links failed, and no program: lines of the kernel log, and errors of CUDA and NCCL.

The NVIDIA driver reports a fault as a line with an Xid number in the kernel log, which a container may read only if it
has /dev/kmsg. CUDA reports it as the error of some later call. The texts are those that NVIDIA's documents and public
reports show; no real fault has been seen by this project.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

KERNEL_LOG = "/dev/kmsg"
XID = re.compile(r"NVRM: Xid \((?P<pci>[^)]*)\): (?P<number>\d+)\b")
# Of NVIDIA's catalog, the Xids of memory, bus, NVLink and the GPU's own processor. 13, 31, 43 and 45 are mostly errors
# of a program: a wrong address, or the end of a process.
HARDWARE_XIDS = frozenset({48, 61, 62, 64, 74, 79, 94, 95, 119, 120, 140, 143, 144, 145, 146, 147, 148, 149, 150})
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
MOST_KERNEL_BYTES = 4 << 20
LINE_CHARACTERS = 300


def hardware_error(lines: Iterable[str]) -> str | None:
    """The first line that shows a failed GPU."""
    for line in lines:
        xid = XID.search(line)
        if int(xid["number"]) in HARDWARE_XIDS if xid else any(sign in line for sign in HARDWARE_ERRORS):
            return line.strip()[:LINE_CHARACTERS]
    return None


def peer_error(text: str) -> str | None:
    """The line of an error in a collective that shows that a peer, or the way to it, is gone."""
    lines = (line for line in text.splitlines() if any(sign in line for sign in PEER_ERRORS))
    return next((line.strip()[:LINE_CHARACTERS] for line in lines), None)


def kernel_lines(since: float) -> Iterator[str]:
    """The lines of the kernel log after `since` (time.monotonic); none where this process may not read it."""
    try:
        descriptor = os.open(os.environ.get("SKYTRAIN_KERNEL_LOG") or KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    text, size = b"", 0
    try:
        while size < MOST_KERNEL_BYTES:
            try:
                record = os.read(descriptor, 8192)  # of /dev/kmsg: one record a call
            except BrokenPipeError:  # the kernel has overwritten records that were not read yet
                continue
            except OSError:  # no more records
                break
            if not record:
                break
            size += len(record)
            text += record
    finally:
        os.close(descriptor)
    for line in text.decode(errors="replace").splitlines():
        # "6,1234,5678901234,-;NVRM: Xid …": priority, number, microseconds since the boot, flags
        head, _, message = line.partition(";")
        with suppress(ValueError, IndexError):
            if int(head.split(",")[2]) / 1e6 >= since:
                yield message


def monotonic_of(unix_seconds: float) -> float:
    """A time of the wall clock, by time.monotonic."""
    return time.monotonic() - (time.time() - unix_seconds)


def name_of_rank(path: Path) -> str:
    """ "rank 3" for the error file of that rank."""
    return f"rank {path.stem.rpartition('-')[2]}"
