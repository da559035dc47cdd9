"""Files at a path or a URL, opened for reading: ranges that are retried, and the next file opened ahead."""

import gzip
import io
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Protocol, TypeVar, cast

from pipelines.text.retry import with_retries

T = TypeVar("T")


class Closable(Protocol):
    def close(self) -> None: ...


F = TypeVar("F", bound=Closable)
READ_BYTES = 1 << 20  # at once, of text
BATCHES_AHEAD = 4  # of 1 MB, or of the documents of one piece of a column


def opened(path: str) -> IO[bytes]:
    """A file at a path or a URL, for reading from any position. OSError, or ImportError for an unknown kind of URL.

    A request to a server that is busy or unreachable is retried.
    """
    if "://" not in path:
        return open(path, "rb")
    import fsspec

    return io.BufferedReader(RetriedFile(with_retries(lambda: fsspec.open(path, "rb").open())), READ_BYTES)


def unpacked(file: IO[bytes], path: str) -> IO[bytes]:
    """The contents of a .gz or .zst file; another file as it is."""
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if path.endswith(".zst"):
        import pyarrow as pa

        return cast(IO[bytes], pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"))
    return file


class RetriedFile(io.RawIOBase):
    """A remote file. Each read is repeated while the server is busy or unreachable, if it serves ranges."""

    def __init__(self, file: Any) -> None:
        self._file, self._position = file, 0
        self._has_ranges = file.seekable()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._has_ranges

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size or 0}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        def read() -> bytes:
            if self._has_ranges:
                self._file.seek(self._position)
            return self._file.read(len(buffer))

        content = with_retries(read) if self._has_ranges else read()
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


def each_opened(paths: Iterable[str], open_: Callable[[str], F]) -> Iterator[tuple[str, F]]:
    """Each file with its path; the next one is opened while the last one is read."""
    with ThreadPoolExecutor(1, "open") as thread:
        ahead: Future[F] | None = None
        names = list(paths)
        try:
            for number, path in enumerate(names):
                file = ahead.result() if ahead else open_(path)
                ahead = thread.submit(open_, names[number + 1]) if number + 1 < len(names) else None
                yield path, file
        finally:
            if ahead and not ahead.cancel() and not ahead.exception():
                ahead.result().close()


def read_ahead(items: Generator[T, None, None], count: int = BATCHES_AHEAD) -> Generator[T, None, None]:
    """The same items, made in a thread, at most `count` ahead. Closes `items`."""
    with ThreadPoolExecutor(1, "read") as thread:
        pending = deque(thread.submit(next, items, None) for _ in range(count))
        try:
            while (item := pending.popleft().result()) is not None:
                pending.append(thread.submit(next, items, None))
                yield item
        finally:
            for future in pending:
                future.cancel()
            thread.submit(items.close).result()
