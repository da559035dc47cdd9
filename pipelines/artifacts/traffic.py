"""The bytes that the processes of this machine exchange with buckets, and their requests: clouds bill both.

Every process counts in a file of its own in one folder, which SKYTRAIN_TRAFFIC names to child processes. The file is
mapped into memory, so a killed process takes no byte of the bill with it.
"""

import fcntl
import mmap
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from operator import add, sub
from pathlib import Path
from typing import Any, Self

PREFIX = "skytrain-traffic-"  # of the name of such a folder
FOLDER = "SKYTRAIN_TRAFFIC"
NUMBERS = struct.Struct("<QQQQ")
GB = 1 << 30  # as clouds bill it


@dataclass(frozen=True)
class Traffic:
    """Bytes of bodies, without headers, and requests; with those of repeated requests."""

    sent: int = 0  # bytes to buckets
    received: int = 0  # bytes from buckets
    writes: int = 0  # requests that write or list
    reads: int = 0  # requests that read

    def __add__(self, other: Self) -> "Traffic":
        return Traffic(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: Self) -> "Traffic":
        return Traffic(*map(sub, astuple(self), astuple(other)))


class _Counter:
    """The traffic of this process; in its file, if there is a folder that takes one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: mmap.mmap | bytearray = bytearray(NUMBERS.size)
        self._place: tuple[str, int] | None = None  # the folder and the process of `_numbers`

    def add(self, more: Traffic) -> None:
        with self._lock:
            self._settle()
            NUMBERS.pack_into(self._numbers, 0, *astuple(Traffic(*NUMBERS.unpack_from(self._numbers)) + more))

    def read(self) -> Traffic:
        with self._lock:
            self._settle()
            return Traffic(*NUMBERS.unpack_from(self._numbers))

    def _settle(self) -> None:
        """Count in the file from now on. After a fork the child begins with a file of its own."""
        place = (os.environ.get(FOLDER, ""), os.getpid())
        if place == self._place:
            return
        self._place, self._numbers = place, bytearray(NUMBERS.size)
        if place[0]:
            with suppress(OSError), open(Path(place[0]) / str(place[1]), "x+b", buffering=0) as file:
                file.write(bytes(NUMBERS.size))  # takes its block of the disk now: a full one would kill a map
                self._numbers = mmap.mmap(file.fileno(), NUMBERS.size)


_counter = _Counter()


def count(more: Traffic) -> None:
    """Add to the traffic of this process."""
    _counter.add(more)


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
    """The traffic so far of all processes that count in this one's folder; without a folder, those of this process."""
    own = _counter.read()
    try:
        bodies = [file.read_bytes() for file in Path(os.environ[FOLDER]).iterdir()]
    except (KeyError, OSError):
        return own
    return sum((Traffic(*NUMBERS.unpack(body)) for body in bodies if len(body) == NUMBERS.size), Traffic())


def _locked(folder: Path) -> int:
    """A descriptor of the folder, which no other process has locked. OSError if one has."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def counted_together() -> Iterator[None]:
    """Within it, this process and its children count in one folder. Removes those of commands that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or in use
            os.close(_locked(left))
            shutil.rmtree(left)
    folder, before = tempfile.mkdtemp(prefix=PREFIX), os.environ.get(FOLDER)
    lock = _locked(Path(folder))
    os.environ[FOLDER] = folder
    try:
        yield
    finally:
        os.close(lock)
        if before is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = before
        shutil.rmtree(folder, ignore_errors=True)
