"""The bytes that the processes of this machine exchange with buckets, and their requests: clouds bill both.

The processes add what they count to a sum in one file in memory, which SKYTRAIN_TRAFFIC names to child processes. So a
killed process takes no byte of the bill with it, and a full disk loses none.
"""

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from operator import add, sub
from typing import Any, Self

FILE = "SKYTRAIN_TRAFFIC"
NUMBERS = struct.Struct("=QQQQ")
LOCK = threading.Lock()  # the threads of a process; fcntl's lock, which ends with its process, is between processes
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
GB = 1 << 30  # as clouds bill it


@dataclass(frozen=True)
class Traffic:
    """Bytes of bodies, without headers, and requests. Repeated requests count each time."""

    sent: int = 0  # bytes to buckets
    received: int = 0  # bytes from buckets
    writes: int = 0  # requests that write or list
    reads: int = 0  # requests that read

    def __add__(self, other: Self) -> "Traffic":
        return Traffic(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: Self) -> "Traffic":
        return Traffic(*map(sub, astuple(self), astuple(other)))


def count(more: Traffic) -> Traffic:
    """Add to the traffic of the processes that count together. Returns its sum; nothing outside of
    `counted_together`."""
    with suppress(KeyError, OSError), LOCK, open(os.environ[FILE], "r+b", buffering=0) as file:
        for _ in range(1000):  # 1 s: a process that hangs may hold the lock, and no request waits for its end
            with suppress(BlockingIOError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
                break
            time.sleep(0.001)
        total = Traffic(*NUMBERS.unpack(file.read())) + more
        os.pwrite(file.fileno(), NUMBERS.pack(*astuple(total)), 0)
        return total
    return Traffic()


def count_request(event_name: str, request: Any, **_: Any) -> None:
    """Count a request of this process and its body, by boto3's event before it is sent. Clouds ask nothing for
    removals."""
    operation = event_name.rpartition(".")[2]
    if operation.startswith(("Get", "Head")):
        count(Traffic(reads=1))
    elif not operation.startswith(("Delete", "Abort")):
        has_body = operation in ("PutObject", "UploadPart")
        count(Traffic(sent=int(request.headers.get("Content-Length", 0)) if has_body else 0, writes=1))


def count_answer(event_name: str, parsed: dict[str, Any], **_: Any) -> None:
    """Count the body that answers a request, by boto3's event after it."""
    if event_name.endswith(".GetObject"):
        count(Traffic(received=parsed.get("ContentLength", 0)))


def traffic_here() -> Traffic:
    """The traffic so far of all processes that count together with this one."""
    return count(Traffic())


@contextmanager
def counted_together() -> Iterator[None]:
    """Within it, this process and its children count together."""
    file = os.memfd_create("skytrain-traffic")
    os.truncate(file, NUMBERS.size)
    os.environ[FILE] = f"/proc/{os.getpid()}/fd/{file}"
    try:
        yield
    finally:
        del os.environ[FILE]
        os.close(file)
