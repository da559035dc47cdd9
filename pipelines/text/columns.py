"""Documents as UTF-8 in batches: out of Arrow columns without a str for each, or packed from texts. And the errors of
a bad column or file.

Bytes that are not UTF-8 become U+FFFD, as do lone surrogates of JSON.
"""

import functools
import logging
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pipelines.text.retry import is_transient
from trainer.errors import StoreUnavailable, UserError

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
BATCH_BYTES = 2 << 20  # 500k tokens; 6 ms of work for gigatoken and 1 ms around it, 160 ms for tiktoken
BATCH_TEXTS = 4_000  # the limit for tiny texts
BATCHES_AHEAD = 4  # that are read while one is encoded


@dataclass(frozen=True)
class TextBatch:
    """Consecutive documents as UTF-8, one behind the other."""

    content: bytes
    bounds: "np.ndarray[Any, np.dtype[np.int64]]"  # (documents + 1,): document n is content[bounds[n]:bounds[n + 1]]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def text(self, number: int) -> str:
        return self.content[self.bounds[number] : self.bounds[number + 1]].decode()

    def texts(self) -> list[str]:
        return [self.text(number) for number in range(len(self))]


Batches = Generator[TextBatch, None, None]


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


def packed(texts: Iterable[str]) -> Iterator[TextBatch]:
    """Batches of texts."""
    contents: list[bytes] = []
    size = 0
    for text in texts:
        contents.append(utf8(text))
        size += len(contents[-1])
        if size >= BATCH_BYTES or len(contents) >= BATCH_TEXTS:
            yield batch_of(contents)
            contents, size = [], 0
    if contents:
        yield batch_of(contents)


def batch_of(contents: list[bytes]) -> TextBatch:
    """Documents in UTF-8 as a batch."""
    import numpy as np

    bounds = np.zeros(len(contents) + 1, np.int64)
    np.cumsum([len(content) for content in contents], out=bounds[1:])
    return TextBatch(b"".join(contents), bounds)


def column_batches(column: Any) -> Iterator[TextBatch]:
    """Batches of an Arrow column of strings. A null is an empty document."""
    import numpy as np
    import pyarrow as pa

    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    array = column.cast(pa.large_binary()).fill_null(b"")
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        yield from packed(row.decode(errors="replace") for row in array.to_pylist())
        return
    _, bounds, content = array.buffers()
    bounds = np.frombuffer(bounds, np.int64)[array.offset : array.offset + len(array) + 1]
    first = 0
    while first < len(array):
        wanted = int(bounds.searchsorted(bounds[first] + BATCH_BYTES))
        end = min(max(first + 1, wanted), first + BATCH_TEXTS, len(array))
        piece = content[bounds[first] : bounds[end]].to_pybytes() if content else b""
        yield TextBatch(piece, bounds[first : end + 1] - bounds[first])
        first = end


def utf8(text: str) -> bytes:
    """UTF-8, with U+FFFD for each lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return without_surrogates(text).encode()


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for each lone surrogate; a pair of surrogates is one character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@contextmanager
def reading(where: str) -> Iterator[None]:
    """UserError for a text that is truncated, damaged or removed, or whose server does not answer."""
    try:
        yield
    except (UserError, StoreUnavailable):
        raise
    except Exception as error:
        # pyarrow's by its name: texts other than parquet don't wait for its import.
        known = isinstance(error, EOFError | zlib.error | OSError | ImportError) or is_transient(error)
        if not (known or type(error).__name__ == "ArrowInvalid"):
            raise
        raise UserError(f"tokens.source: '{where}' cannot be read ({reason_of(error)})") from error


def check_column(schema: Any, column: str, where: str) -> None:
    """UserError unless the Arrow schema has that column and it holds strings."""
    import pyarrow as pa

    if column not in schema.names:
        raise no_column(column, f"'{where}'", schema.names)
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"tokens.text_column: '{column}' in '{where}' holds {kind}, not strings")


def no_column(column: str, where: str, names: Iterable[str]) -> UserError:
    """The error for a missing text column."""
    return UserError(f"tokens.text_column: no '{column}' in {where}; it has: {', '.join(names) or 'none'}")


def reason_of(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


@functools.cache
def datasets_library() -> Any:
    """The library `datasets`, without progress bars and without download counts on its server."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each retry in long lines
    datasets.config.TORCH_AVAILABLE = False  # else a stream imports torch, which takes 2 s and is not needed
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it waits 3 s without a network
    return datasets
