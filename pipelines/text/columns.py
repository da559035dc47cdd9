"""Documents as UTF-8 in batches: out of Arrow columns without a str for each, or packed from texts. And the errors of
a bad column or file.

Bytes that are not UTF-8 become U+FFFD, as do lone surrogates of JSON; their documents are counted.
"""

import functools
import zlib
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError

if TYPE_CHECKING:
    import numpy as np

BATCH_BYTES = 2 << 20  # 500k tokens; 6 ms of work for gigatoken and 1 ms around it, 160 ms for tiktoken
BATCH_TEXTS = 4_000  # the limit for tiny texts
ROWS = 1_000  # of a dataset that only `datasets` can read: ~5 MB of web text


@dataclass(frozen=True)
class TextBatch:
    """Consecutive documents as UTF-8, one behind the other."""

    content: bytes
    bounds: "np.ndarray[Any, np.dtype[np.int64]]"  # (documents + 1,): document n is content[bounds[n]:bounds[n + 1]]
    invalid: tuple[int, ...] = ()  # the documents in which U+FFFD stands for what was not valid

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def text(self, number: int) -> str:
        return self.content[self.bounds[number] : self.bounds[number + 1]].decode()

    def texts(self) -> list[str]:
        return [self.text(number) for number in range(len(self))]

    def from_document(self, first: int) -> "TextBatch":
        """The documents from number `first` on."""
        start = self.bounds[first]
        invalid = tuple(number - first for number in self.invalid if number >= first)
        return TextBatch(self.content[start:], self.bounds[first:] - start, invalid)


Batches = Generator[TextBatch, None, None]


def joined(first: list[TextBatch], rest: Iterator[TextBatch]) -> Batches:
    """Two sequences of batches as one."""
    try:
        yield from first
        yield from rest
    finally:
        if isinstance(rest, Generator):
            rest.close()


def texts_of(batches: Batches) -> Generator[str, None, None]:
    """The documents of all batches."""
    try:
        for batch in batches:
            yield from batch.texts()
    finally:
        batches.close()


def packed(texts: Iterable[tuple[str, bool]]) -> Iterator[TextBatch]:
    """Batches of texts, each with the mark that it was not valid UTF-8."""
    contents: list[bytes] = []
    invalid: list[int] = []
    size = 0
    for text, replaced in texts:
        try:
            content = text.encode()
        except UnicodeEncodeError:
            content, replaced = utf8(text), True
        if replaced:
            invalid.append(len(contents))
        contents.append(content)
        size += len(contents[-1])
        if size >= BATCH_BYTES or len(contents) >= BATCH_TEXTS:
            yield batch_of(contents, invalid)
            contents, invalid, size = [], [], 0
    if contents:
        yield batch_of(contents, invalid)


def batch_of(contents: list[bytes], invalid: Iterable[int] = ()) -> TextBatch:
    """Documents in UTF-8 as a batch."""
    import numpy as np

    bounds = np.zeros(len(contents) + 1, np.int64)
    np.cumsum([len(content) for content in contents], out=bounds[1:])
    return TextBatch(b"".join(contents), bounds, tuple(invalid))


def column_batches(column: Any) -> Iterator[TextBatch]:
    """Batches of an Arrow column of strings. A null is an empty document."""
    import numpy as np
    import pyarrow as pa

    try:
        column.validate(full=True)
        valid = True
    except pa.ArrowInvalid:
        valid = False
    array = column.cast(pa.large_binary())
    if array.null_count:
        array = array.fill_null(b"")
    _, bounds, content = array.buffers()
    bounds = np.frombuffer(bounds, np.int64)[array.offset : array.offset + len(array) + 1]
    first = 0
    while first < len(array):
        wanted = int(bounds.searchsorted(bounds[first] + BATCH_BYTES))
        end = min(max(first + 1, wanted), first + BATCH_TEXTS, len(array))
        piece = content[bounds[first] : bounds[end]].to_pybytes() if content else b""
        batch = TextBatch(piece, bounds[first : end + 1] - bounds[first])
        yield batch if valid else _repaired(batch)
        first = end


def _repaired(batch: TextBatch) -> TextBatch:
    """The batch with U+FFFD for what is not UTF-8."""
    contents = [batch.content[start:end] for start, end in zip(batch.bounds, batch.bounds[1:], strict=False)]
    invalid = [number for number, content in enumerate(contents) if not is_utf8(content)]
    for number in invalid:
        contents[number] = contents[number].decode(errors="replace").encode()
    return batch_of(contents, invalid)


def stream_batches(stream: Any, column: str, where: str, start: int) -> Batches:
    """Batches of one column of a streaming dataset, from row `start` on."""
    import pyarrow as pa

    try:
        for table in stream.skip(start).with_format("arrow").iter(batch_size=ROWS):
            check_column(table.schema, column, where)
            for chunk in table.column(column).chunks:
                yield from column_batches(chunk)
    except (EOFError, zlib.error, pa.ArrowInvalid, OSError) as error:  # truncated, damaged or removed
        raise unreadable(where, error) from error


def is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def has_surrogates(text: str) -> bool:
    """Whether a text has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def utf8(text: str) -> bytes:
    """UTF-8, with U+FFFD for each lone surrogate."""
    return (without_surrogates(text) if has_surrogates(text) else text).encode()


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for each lone surrogate; a pair of surrogates is one character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def unreadable(where: str, error: Exception) -> UserError:
    """The error for a text that fails while it is read."""
    return UserError(f"tokens.source: '{where}' cannot be read further ({reason_of(error)})")


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
    datasets.config.TORCH_AVAILABLE = False  # else a stream imports torch, which takes 2 s and is not needed
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it waits 3 s without a network
    return datasets
