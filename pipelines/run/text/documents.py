"""Documents as UTF-8, in batches. Bytes that are not UTF-8 become U+FFFD, as do lone surrogates of JSON."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
BATCH_BYTES = 2 << 20  # 500k tokens; 6 ms of work for gigatoken and 1 ms around it, 160 ms for tiktoken
BATCH_DOCUMENTS = 4_000  # the limit for tiny documents
BATCHES_AHEAD = 4  # that are read while one is encoded


def batches_of(documents: Iterable[bytes]) -> Generator[list[bytes], None, None]:
    """Consecutive documents of about BATCH_BYTES; a larger one alone."""
    batch: list[bytes] = []
    size = 0
    for document in documents:
        if batch and len(document) > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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


def column_documents(column: Any) -> Iterator[bytes]:
    """The documents of an Arrow column of strings. A null is an empty document."""
    import pyarrow as pa

    strings = column.cast(pa.large_string())
    documents = [one or b"" for one in strings.cast(pa.large_binary()).to_pylist()]  # fill_null imports pandas
    try:
        strings.validate(full=True)
    except pa.ArrowInvalid:
        documents = [document.decode(errors="replace").encode() for document in documents]
    yield from documents


def utf8(text: str) -> bytes:
    """UTF-8, with U+FFFD for each lone surrogate; a pair of surrogates is one character."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
