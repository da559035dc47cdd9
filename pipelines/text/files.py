"""Text files of one kind, local or remote, as a source of text."""

import functools
import glob
import io
import json
import os
from collections.abc import Generator, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from pipelines.text import text
from pipelines.text.columns import (
    TextBatch,
    check_column,
    column_batches,
    no_column,
    packed,
    reading,
)
from pipelines.text.retry import with_retries
from pipelines.text.text import Piece, Text, grouped, read_piece
from trainer.errors import UserError
from trainer.store import Entry, sha256_of

KINDS = ("parquet", "jsonl", "txt")
PACKED = {".gz": "gzip", ".zst": "zstd"}  # names of files, and of pyarrow's codecs
COLUMN_BYTES = 8 << 20  # of text, decoded at once
BUFFER_BYTES = 1 << 20  # of a file
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of some editors
RowGroup = tuple[int, int]  # rows, and bytes of text before compression


@dataclass(frozen=True)
class Files(Text):
    """Files of one kind, read one after the other.

    A document is a row of parquet, a line of jsonl that is not blank, or a file of txt (invalid UTF-8 becomes U+FFFD,
    line ends become \\n).
    """

    kind: str
    paths: tuple[str, ...]  # local paths in reading order, URLs in S3, or one URL or pattern on the Hub
    column: str
    where: str  # as the user wrote it
    pinned: str | None = None  # the commit on the Hub; None: identified by contents
    objects: tuple[Entry, ...] = ()  # of paths in S3

    def identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {"source": "files", "kind": self.kind}
        if self.kind != "txt":
            identity["text_column"] = self.column
        if self.pinned is not None:
            return identity | {"files": self.where, "revision": self.pinned}
        self._look()
        if self.objects:
            return identity | {"etag": [one.etag.strip('"') for one in self.objects]}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return identity | {"sha256": list(pool.map(sha256_of_text, self.paths))}

    def _look(self) -> None:
        """Read the first document: a wrong column fails now, not on rented machines. Only parquet imports numpy, which
        the first heartbeat would wait for."""
        pieces = self.pieces()
        if self.kind == "parquet":
            empty = not any(piece.documents for piece in pieces)
        else:
            empty = next((one for piece in pieces for one in self._documents(piece)), None) is None
        if empty:
            raise UserError(f"tokens.source: '{self.where}' has no documents; at least one is required")

    def text_bytes(self) -> int | None:
        if self.pinned is not None or any(path.endswith(tuple(PACKED)) for path in self.paths):
            return None
        if self.kind == "parquet":
            return sum(size for path in self.paths for _, size in row_groups(path, self.column))
        return sum(self._size(path) or 0 for path in self.paths)  # of jsonl with its other fields

    def pieces(self) -> list[Piece]:
        paths = self._found()
        if self.kind == "txt":
            return grouped(((path, self._size(path)) for path in paths), whole=True)
        if self.kind == "jsonl":
            return [piece for path in paths for piece in self._ranges(path)]
        with ThreadPoolExecutor(8) as pool:
            groups = list(pool.map(lambda path: row_groups(path, self.column), paths))
        return [piece for found in zip(paths, groups, strict=True) for piece in self._row_groups(*found)]

    def read(self, piece: Piece) -> Iterator[TextBatch]:
        return self._rows(piece) if self.kind == "parquet" else packed(self._documents(piece))

    def count(self, piece: Piece) -> int:
        if piece.documents is not None:
            return piece.documents
        return sum(1 for _, line in self._lines(piece) if line.strip())

    def _found(self) -> tuple[str, ...]:
        """The paths, with a pattern of URLs resolved. Called only when documents are read, because it asks a server."""
        if self.pinned is None or not glob.has_magic(self.paths[0]):
            return self.paths
        import fsspec

        with reading(self.where):
            system, pattern = fsspec.core.url_to_fs(self.paths[0])
            found = [system.unstrip_protocol(path) for path in sorted(with_retries(lambda: system.glob(pattern)))]
        if not found:
            raise UserError(f"tokens.source: no file matches '{self.where}'")
        return tuple(found)

    # Parquet

    def _row_groups(self, path: str, groups: list[RowGroup]) -> Iterator[Piece]:
        """Consecutive row groups of a file with about PIECE_BYTES of text."""
        first = rows = size = 0
        for number, (more_rows, more_bytes) in enumerate(groups, 1):
            rows, size = rows + more_rows, size + more_bytes
            if size >= text.PIECE_BYTES or number == len(groups):
                yield Piece((path,), first, number, rows, size)
                first, rows, size = number, 0, 0

    def _rows(self, piece: Piece) -> Iterator[TextBatch]:
        """The text column of some row groups."""
        import pyarrow.parquet as pq

        (path,) = piece.names
        at_once = max(1, (piece.documents or 0) * COLUMN_BYTES // max(piece.bytes, COLUMN_BYTES))
        groups = range(piece.first, piece.end or 0)
        # With a buffer, memory does not depend on the size of a row group.
        with (
            reading(path),
            opened(path) as file,
            pq.ParquetFile(file, metadata=metadata_of(path), buffer_size=BUFFER_BYTES) as parquet,
        ):
            for found in parquet.iter_batches(at_once, groups, [self.column], use_threads=False):
                yield from column_batches(found.column(0))

    # Lines and whole files

    def _size(self, path: str) -> int | None:
        """The bytes of a file; None of a packed one, and if a server had to be asked."""
        if path.endswith(tuple(PACKED)):
            return None
        if self.objects:
            return next(one.size for at, one in zip(self.paths, self.objects, strict=True) if at == path)
        with reading(path):
            return None if "://" in path else os.path.getsize(path)

    def _ranges(self, path: str) -> Iterator[Piece]:
        """A file of lines in ranges of PIECE_BYTES; a line belongs to the range in which it begins."""
        if (size := self._size(path)) is None:
            yield Piece((path,))
            return
        for first in range(0, size, text.PIECE_BYTES):
            yield Piece((path,), first, min(size, first + text.PIECE_BYTES))

    def _documents(self, piece: Piece) -> Iterator[str]:
        """The documents of a piece other than parquet."""
        if self.kind == "jsonl":
            for number, line in self._lines(piece):
                if line.strip():
                    yield self._text_of(line, piece, number)
            return
        for path in piece.names:
            with reading(path), unpacked(path) as file:
                found = file.read().removeprefix(BYTE_ORDER_MARK).decode(errors="replace")
            yield found.replace("\r\n", "\n").replace("\r", "\n")

    def _lines(self, piece: Piece) -> Iterator[tuple[int, bytes]]:
        """The lines that begin in a piece, numbered from 0."""
        path, at = piece.names[0], piece.first
        with reading(path), unpacked(path) as file:
            if at:
                file.seek(at - 1)
                at += len(file.readline()) - 1
            number = 0
            while piece.end is None or at < piece.end:
                line = file.readline()
                if not line:
                    return
                yield number, line.removeprefix(BYTE_ORDER_MARK) if at == 0 else line
                at, number = at + len(line), number + 1

    def _text_of(self, line: bytes, piece: Piece, number: int) -> str:
        """The text of line `number` of a piece. UserError with its place for a damaged one."""
        try:
            row = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"tokens.source: {self._place(piece, number)} is not JSON ({error})") from error
        if not isinstance(row, dict) or self.column not in row:
            names = list(row) if isinstance(row, dict) else []
            raise no_column(self.column, self._place(piece, number), names)
        value = row[self.column]
        if not isinstance(value, str | None):
            raise UserError(
                f"tokens.text_column: '{self.column}' of {self._place(piece, number)} is "
                f"{type(value).__name__}, not a string"
            )
        return value or ""

    def _place(self, piece: Piece, number: int) -> str:
        """A line of a piece, for people: counted from 1 in its file."""
        path = piece.names[0]
        before = sum(1 for _ in self._lines(Piece(piece.names, 0, piece.first))) if piece.first else 0
        return f"line {before + number + 1} of '{path}'"


def opened(path: str) -> IO[bytes]:
    """A file at a path or a URL, for reading."""
    if "://" not in path:
        return open(path, "rb", buffering=BUFFER_BYTES)
    if path.startswith("s3://"):
        from pipelines.text.objects import S3Files

        return cast(IO[bytes], S3Files().open(path))
    import fsspec

    return cast(IO[bytes], with_retries(lambda: fsspec.open(path, "rb").open()))


@functools.lru_cache(maxsize=8)
def metadata_of(path: str) -> Any:
    """The footer of a parquet file."""
    import pyarrow.parquet as pq

    with opened(path) as file:
        return with_retries(lambda: pq.read_metadata(file))


@functools.cache
def row_groups(path: str, column: str) -> list[RowGroup]:
    """The row groups of a parquet file. UserError unless the file has the column."""
    with reading(path):
        metadata = metadata_of(path)
    check_column(metadata.schema.to_arrow_schema(), column, path)
    at = metadata.schema.names.index(column)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return [(one.num_rows, one.column(at).total_uncompressed_size) for one in groups]


def unpacked(path: str) -> IO[bytes]:
    """The contents of a file at a path or a URL, without its compression."""
    codec = PACKED.get(os.path.splitext(path)[1])
    if codec is None:
        return opened(path)
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(opened(path), compression=codec), BUFFER_BYTES)


def first_documents(source: Text) -> Generator[str, None, None]:
    """The documents of a text from its first one on, in this process."""
    source = source.resolved()
    for piece in source.pieces():
        for batch in read_piece(source, piece):
            yield from batch.texts()


def sha256_of_text(path: str) -> str:
    """The sha256 of a local file. UserError if it cannot be read."""
    try:
        return _sha256_in_state(path, state_of(path))
    except OSError as error:
        raise UserError(f"tokens.source: '{path}' cannot be read ({error.strerror})") from error


@functools.cache  # the plan and the check before the first shard ask for the same
def _sha256_in_state(path: str, state: Hashable) -> str:
    return sha256_of(Path(path))


def state_of(path: str | Path) -> tuple[int, ...] | None:
    """A state of a local file that changes when the file does; None for a file that is gone."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def common_kind(paths: tuple[str, ...]) -> str:
    """The kind of all files. UserError for files of several kinds, or of an unknown one."""
    kinds = {kind_of(path) for path in paths}
    if len(kinds) > 1:
        raise UserError(
            f"tokens.source: files of several kinds ({', '.join(sorted(kinds))}); name files of one kind, "
            "as '*.parquet'"
        )
    return kinds.pop()


def kind_of(path: str) -> str:
    """parquet, jsonl or txt, by the name of a file. UserError for another name."""
    stem, packing = os.path.splitext(path.rpartition("/")[2].lower())
    kind = (os.path.splitext(stem)[1] if packing in PACKED else packing).removeprefix(".")
    if kind not in KINDS or (kind == "parquet" and packing in PACKED):
        raise UserError(
            f"tokens.source: '{path}': unknown kind of file; use .parquet, .jsonl or .txt, the last "
            "two also with .gz or .zst"
        )
    return kind
