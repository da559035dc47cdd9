"""Texts from columns of Arrow tables, with the library `datasets`; and the errors of a bad column or file."""

import functools
import zlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from trainer.errors import UserError

Texts = Generator[str, None, None]

ROWS = 1_000  # a batch of Arrow rows: ~5 MB of web text


def joined(first: list[str], rest: Iterator[str]) -> Texts:
    """Two sequences of texts as one."""
    yield from first
    yield from rest


def column_texts(stream: Any, column: str, where: str, start: int) -> Texts:
    """The texts of one column of a streaming dataset, from row `start` on."""
    import pyarrow as pa

    try:
        for table in stream.skip(start).with_format("arrow").iter(batch_size=ROWS):
            check_column(table.schema, column, where)
            for text in table.column(column).to_pylist():
                yield text or ""
    except (EOFError, zlib.error, pa.ArrowInvalid, OSError) as error:  # truncated, damaged or removed
        raise unreadable(where, error) from error


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
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
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
