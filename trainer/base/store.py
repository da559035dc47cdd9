"""Storage that outlives the machine: named objects that exist completely or not at all.

`Store` is the contract. `LocalStore` implements it in a folder, `pipelines.store.s3_store.S3Store` in a bucket.
Every commit of the project relies on one operation, `create`: if several writers race for a key, exactly one gets True,
and no reader ever sees a half-written object.
"""

import bisect
import errno
import itertools
import os
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from trainer.config.errors import FULL, DiskFull, Interrupted, NotAFile, StoreUnavailable, UserError, is_full

# An incomplete file has a temporary name with this prefix. `entries` leaves such names out, because a killed process
# leaves such files. So no key may have the prefix.
PARTIAL = ".partial-"
# Bytes of an object that `get` reads as a whole. The largest of ours are records of 64 MiB.
LARGEST = 512 << 20
POLL_SECONDS = 0.5  # between two looks of a thread that waits
READERS = 16  # small objects at once: a bucket answers each request after a hundredth of a second
PART_BYTES = 16 << 20  # of a large object; the repetition of a lost one costs 0.2 s
MOST_PARTS = 10_000  # that a bucket takes
HASHING_THREADS = 3  # beside the one that writes
Check = Callable[[], object]  # raises an exception to end the work
Take = Callable[[int, memoryview], object]  # gets a part of an object, and its place
A = TypeVar("A")
B = TypeVar("B")
# Only these errors say that an object does not exist. After any other one it may exist.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclass(frozen=True)
class Entry:
    """One stored object. `size` in bytes, `modified` in unix seconds by the store's clock. In a bucket, `etag` changes
    with the contents."""

    key: str
    size: int
    modified: float
    etag: str = ""


class Store(Protocol):
    """Objects by key. Keys are relative POSIX paths ("train/smoke-1a2b/MANIFEST.json"); any other key is a ValueError.
    A key is never the folder of another one ("a" and "a/b"). All methods are thread-safe. UserError for a mistake
    of the user, StoreUnavailable if the store does not answer in time.
    """

    @property
    def uri(self) -> str:
        """The address of the store for `open_store`: "file:///abs/path" or "s3://bucket/prefix"."""

    @property
    def connections(self) -> int:
        """How many reads or writes at once this process needs for its share of the node's bandwidth."""

    def create(self, key: str, body: bytes) -> bool:
        """Store `body` unless the key exists. Returns whether this call stored it: one of several racers gets True.
        Racers must have different bodies (include an id): after a lost answer, or a refusal of a request that was
        delivered twice, the bytes show whose body it is."""

    def put(self, key: str, body: bytes) -> None:
        """Create the object or replace it."""

    def get(self, key: str) -> bytes | None:
        """The whole object; None if it does not exist. NotAFile for more than LARGEST bytes, which no object has that
        is read as a whole."""

    def read_into(
        self, key: str, start: int, buffer: memoryview, size: int | None = None, take: Take | None = None
    ) -> int:
        """Fill `buffer` with the object's bytes from byte `start` on. Returns how many they are: fewer than the buffer
        holds only at the end of the object. FileNotFoundError if the object does not exist.

        With `take`, read `size` bytes through the buffer, part by part; after a failure, again from place 0 on."""

    def upload(self, path: Path, key: str, check: Check | None = None) -> None:
        """Create or replace the object from a local file of any size. Readers see the old object or the new one.
        `check` is called before each part; its exception ends the upload."""

    def write(self, parts: Sequence[memoryview], key: str, length: int) -> list[str]:
        """Create or replace the object from memory of any size, the concatenation of `parts`; like `upload`. Returns
        the sha256 of each `length` bytes of it; a bucket needs 5 MiB at least, and takes 10,000 such chunks."""

    def download(self, key: str, path: Path) -> str:
        """Write the object to a local file and make its folders. `path` is replaced once the object has arrived
        completely. Returns the sha256 of its bytes. FileNotFoundError if the object does not exist."""

    def entries(self, prefix: str) -> list[Entry]:
        """Every object whose key starts with `prefix` (as text: "train/a" also finds "train/ab"), by key."""

    def delete(self, key: str) -> None:
        """Remove the object, if it exists."""

    def clock(self) -> float:
        """Unix seconds by the store's clock, for comparison with `Entry.modified`: clocks of machines may differ."""

    def other_connections(self) -> Iterator[None]:
        """Take other connections for the next requests, after a pause, at each step; a few seconds in all. None where
        objects come without a network."""


class LocalStore:
    """A store in a folder of a local (or strictly POSIX) file system. The first write creates the folder."""

    def __init__(self, root: Path) -> None:
        try:
            self.root = Path(os.path.abspath(Path(root).expanduser()))
        except RuntimeError as error:
            raise UserError(f"store {str(root)!r}: the user does not exist; write the path of a folder") from error

    @property
    def uri(self) -> str:
        return f"file://{self.root}"

    @property
    def connections(self) -> int:
        return share_of_node(16)

    def path_of(self, key: str) -> Path:
        """The file of `key`, which need not exist. Readers use the files of local artifacts directly."""
        return self.root / checked_key(key)

    def create(self, key: str, body: bytes) -> bool:
        path = self.path_of(key)
        with unavailable_if_failing(path), _partial_beside(path) as file:
            file.write(body)
            _sync(file)
            # Unlike rename, link never replaces a file, and it is atomic for every reader.
            try:
                os.link(file.name, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                    raise UserError(
                        f"{self.uri}: this file system has no hard links, which create-only writes need; "
                        "put the store on a local disk or in s3://"
                    ) from error
                raise
        _sync_folder(path.parent)
        return True

    def put(self, key: str, body: bytes) -> None:
        self._replace(key, [body])

    def _replace(self, key: str, parts: Iterable[bytes | memoryview]) -> None:
        path = self.path_of(key)
        with unavailable_if_failing(path), replacing(path) as file:
            file.writelines(parts)

    def get(self, key: str) -> bytes | None:
        path = self.path_of(key)
        with unavailable_if_failing(path):
            try:
                return read_regular(path)
            except ABSENT:
                return None

    def read_into(
        self, key: str, start: int, buffer: memoryview, size: int | None = None, take: Take | None = None
    ) -> int:
        path = self.path_of(key)
        with unavailable_if_failing(path):
            try:
                with open_regular(path) as file:
                    os.lseek(file.fileno(), start, os.SEEK_SET)
                    return read_through(lambda part: os.readv(file.fileno(), [part]), size or len(buffer), buffer, take)
            except ABSENT:
                absent = FileNotFoundError(errno.ENOENT, "no such object", f"{self.uri}/{key}")
        raise absent

    def upload(self, path: Path, key: str, check: Check | None = None) -> None:
        with open(path, "rb") as source:
            self._replace(key, parts_of(source, check))

    def write(self, parts: Sequence[memoryview], key: str, length: int) -> list[str]:
        starts = range(0, sum(len(part) for part in parts), length)

        def digest(start: int) -> str:
            hashed = sha256()
            for part in slices(parts, start, length):
                hashed.update(part)
            return hashed.hexdigest()

        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            digests = pool.map(digest, starts)
            self._replace(key, parts)
            return list(digests)

    def download(self, key: str, path: Path) -> str:
        stored = self.path_of(key)
        with unavailable_if_failing(stored):
            try:
                source = open_regular(stored)
            except ABSENT as error:
                raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.uri}/{key}") from error
            digest = sha256()
            with source, replacing(Path(path)) as target:
                for part in parts_of(source, None):
                    target.write(part)
                    digest.update(part)
            return digest.hexdigest()

    def entries(self, prefix: str) -> list[Entry]:
        # Only the folder of the prefix: a store may hold a thousand runs.
        found = []
        top = self.root / checked_prefix(prefix).rpartition("/")[0]
        with unavailable_if_failing(top):
            for folder, _, names in os.walk(top, onerror=_raise_unless_absent):
                for name in names:
                    path = Path(folder, name)
                    key = path.relative_to(self.root).as_posix()
                    if name.startswith(PARTIAL) or not key.startswith(prefix):
                        continue
                    with suppress(*ABSENT):  # deleted after the listing
                        status = path.stat()
                        if stat.S_ISREG(status.st_mode):
                            found.append(Entry(key, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        path = self.path_of(key)
        with unavailable_if_failing(path), suppress(*ABSENT):
            path.unlink()
            # Folders are not objects: deleting the last object removes them, as in a bucket.
            for folder in path.parents:
                if folder == self.root:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break

    def other_connections(self) -> Iterator[None]:
        return iter(())

    def clock(self) -> float:
        try:
            if not self.root.is_dir():  # nothing to compare with, and a look at the clock makes no folder
                return time.time()
            with _partial_beside(self.root / "clock") as file:
                return os.fstat(file.fileno()).st_mtime  # a file server has a clock of its own
        except (OSError, UserError):  # read-only
            return time.time()


def share_of_node(most: int) -> int:
    """This process's share of `most` threads of a node, which torchrun's ranks divide; few cores have fewer."""
    return max(2, min(most, 4 * (os.cpu_count() or 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Waiting(threading.local):
    """What this thread calls while it waits for an answer of a store; its exception ends the wait."""

    check: Check = staticmethod(lambda: None)


WAITING = Waiting()


def pause(seconds: float) -> None:
    """Sleep until `WAITING.check` ends it."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        WAITING.check()
        time.sleep(min(POLL_SECONDS, left))


def side_by_side(read: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """What `read` returns for each item, in order, in several threads: for small objects of a store. Raises the first
    error, which ends the other reads, as an exception of this thread does."""
    check, ended = WAITING.check, threading.Event()

    def check_both() -> None:
        check()
        if ended.is_set():
            raise Interrupted

    def read_in_thread(item: A) -> B:
        WAITING.check = check_both
        return read(item)

    with ThreadPoolExecutor(READERS, thread_name_prefix="read") as readers:
        try:
            return list(readers.map(read_in_thread, items))
        except BaseException:
            ended.set()
            raise


def read_again(store: Store, read: Callable[[], A], *damage: type[Exception]) -> A:
    """What `read` returns. After `damage`, which the network may have done, it reads again on other connections, before
    it raises the last one: only then is the object itself damaged."""
    others = store.other_connections()
    while True:
        try:
            return read()
        except damage:
            if next(others, "none is left") == "none is left":
                raise


def read_through(read: Callable[[memoryview], int], size: int, buffer: memoryview, take: Take | None = None) -> int:
    """Read `size` bytes, of which `read` puts the next few into a buffer, 0 at their end. Returns how many they are."""
    done = 0
    while done < size:
        at = done % len(buffer)
        if not (count := read(buffer[at : at + size - done])):
            break
        done += count
        if take and (done == size or done % len(buffer) == 0):
            take(done - at - count, buffer[: at + count])
    return done


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """A file, opened for reading. NotAFile for a device, a pipe or a socket, which might never answer or end."""
    # The caller closes it; a pipe's opening waits for no writer.
    file = open(path, "rb", buffering, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotAFile(f"{path}: not a regular file, but a pipe, a device or a socket; remove it, or name a file")
    return file


def read_regular(path: Path) -> bytes:
    """The content of a file. NotAFile for a device, a pipe or a socket, and for more than LARGEST bytes."""
    with open_regular(path) as file:
        refuse_huge(str(path), os.fstat(file.fileno()).st_size)
        return file.read()


def part_length(size: int) -> int:
    """The bytes of each part of an object of `size` bytes."""
    return max(PART_BYTES, -(-size // MOST_PARTS))


def slices(parts: Sequence[memoryview], start: int, size: int) -> Iterator[memoryview]:
    """Views of the bytes `start` to `start + size` of the concatenation of `parts`."""
    starts = list(itertools.accumulate((len(part) for part in parts), initial=0))
    first, end = bisect.bisect_right(starts, start) - 1, bisect.bisect_left(starts, start + size)
    for part, at in zip(parts[first:end], starts[first:end], strict=False):
        yield part[max(0, start - at) : start + size - at]


def refuse_huge(where: str, size: int) -> None:
    """NotAFile for an object that is too large to be read into memory."""
    if size > LARGEST:
        raise NotAFile(f"{where}: has {size:,} bytes, and no such object of ours has {LARGEST:,}; remove it")


def checked_key(key: str) -> str:
    """`key` itself if every store can hold it; ValueError otherwise."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(ord(char) < 32 for char in key):
        raise ValueError(f"not a key: {key!r}; a key is a relative path such as 'train/a-1/MANIFEST.json'")
    if any(part.startswith(PARTIAL) for part in parts):
        raise ValueError(f"not a key: {key!r}; names starting with {PARTIAL!r} are for incomplete files")
    return key


def checked_prefix(prefix: str) -> str:
    """`prefix` itself if some key can start with it; ValueError otherwise."""
    complete, slash, _ = prefix.rpartition("/")
    if slash:
        checked_key(complete)
    return prefix


def _raise_unless_absent(error: OSError) -> None:
    """For os.walk, which by default passes over a folder that it cannot list: its objects would seem not to exist."""
    if not isinstance(error, ABSENT):
        raise error


@contextmanager
def unavailable_if_failing(path: Path) -> Iterator[None]:
    """UserError for a refusal of permission, StoreUnavailable for an error that may pass: any but those of the path
    itself, and a full disk."""
    try:
        yield
    except PermissionError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}; correct its permissions") from error
    except OSError as error:
        of_path = isinstance(error, (*ABSENT, FileExistsError)) or error.errno in (errno.EROFS, errno.ENAMETOOLONG)
        if of_path or is_full(error):
            raise
        raise StoreUnavailable(f"{error.filename or path}: {error.strerror or error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears at `path`, complete and on disk, when the block ends without an exception."""
    with _partial_beside(path) as file:
        yield file
        _sync(file)
        os.replace(file.name, path)
    _sync_folder(path.parent)


@contextmanager
def _partial_beside(path: Path) -> Iterator[BinaryIO]:
    """A new file in the folder of `path`, which is created if needed. Its temporary name is removed after the block."""
    try:
        file = _open_partial(path)
        try:
            with file:
                yield file
        finally:
            Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        if is_full(error):
            raise DiskFull(f"{path.parent}: {FULL}") from error
        raise


def _open_partial(path: Path) -> BinaryIO:
    # delete() in another process may remove the empty folder between the two steps: then try again. A folder with a
    # file stays.
    for _ in range(100):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path.parent / f"{PARTIAL}{uuid.uuid4().hex}", "x+b")
        except (FileNotFoundError, FileExistsError):  # mkdir raises both for a folder that disappears meanwhile
            if path.parent.is_file():
                raise
    raise UserError(f"{path.parent}: cannot be made, or is removed again and again; choose another folder")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Write the folder's names to disk. Otherwise a power cut could undo a commit."""
    with suppress(FileNotFoundError):  # the object and its folder are already deleted
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sha256_of(path: Path, check: Check | None = None) -> str:
    """sha256 of a file's content, in hex. `check` is called again and again; its exception ends the work."""
    digest = sha256()
    with open_regular(path) as file:
        for part in parts_of(file, check):
            digest.update(part)
    return digest.hexdigest()


def parts_of(file: BinaryIO, check: Check | None) -> Iterator[bytes]:
    """The content of a file in parts of 1 MiB, with a call of `check` before each."""
    while True:
        if check:
            check()
        if not (part := file.read(1 << 20)):
            return
        yield part
