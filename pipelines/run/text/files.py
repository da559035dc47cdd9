"""Text files of one kind, local or remote, as a source of text."""

import functools
import gzip
import io
import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from pipelines.run.text.documents import column_documents, utf8
from pipelines.run.text.hub import reading, with_retries
from pipelines.run.text.machine import free_memory, memory_error_at_the_limit
from trainer.base.store import Entry, open_regular, sha256_of
from trainer.config.errors import UserError

KINDS = ("parquet", "jsonl", "txt")
PACKED = {".gz": "gzip", ".zst": "zstd"}  # names of files, and of pyarrow's codecs
LOADABLE = ("csv", "arrow")  # by the library `datasets`, also on the Hub
PIECE_BYTES = 64 << 20  # of text
DICTIONARY_BYTES = 4 << 20  # of a row group: a writer whose dictionary is larger writes each text as it comes
SAMPLE_ROWS = 100
COLUMN_BYTES = 8 << 20  # of text, decoded at once
BUFFER_BYTES = 1 << 20  # of a file
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of some editors
# Of a document, at most, between its file and its tokens: 945 MB of JSON took 3.5 GB, 500 MB of Parquet 1.6 GB.
COPIES = 4
BINARY_BYTES = 8000  # at the start of a file; as git does, a NUL in them means that it is not text
MOST_ODD = 16  # places at the start of a text that are not UTF-8, or 1%: a Latin-1 text has more


@dataclass(frozen=True)
class TextShare:
    """A share of a text that one process reads: some files, or some row groups or bytes of a file."""

    names: tuple[str, ...]
    first: int = 0  # row group or byte
    end: int | None = None  # behind the last one; None: to the end of the file
    documents: int | None = None  # None: not known before it is read
    bytes: int = 0  # of the text of row groups


@dataclass(frozen=True)
class Files:
    """Files of one kind, read one after the other: a text of a fixed order, pinned to a version.

    A document is a row of parquet, a line of jsonl that is not blank, or a file of txt (invalid UTF-8 becomes U+FFFD).
    A null of parquet or jsonl is an empty document: to leave it out would change the tokens of recorded fingerprints.
    """

    kind: str
    paths: tuple[str, ...]  # local paths, or URLs in S3 or on the Hub, in reading order
    column: str
    where: str  # as the user wrote it
    objects: dict[str, Entry] = field(default_factory=dict)  # of paths in S3

    def identity(self, look: bool = True) -> dict[str, Any]:
        """Its canonical identity, for the fingerprint: equal identities give equal documents. UserError for a text that
        cannot be read, if its first document is to be looked at."""
        identity = identity_of_files(self.kind, self.column)
        if look and next(self.documents(), None) is None:  # a wrong column fails now, not on rented machines
            raise UserError(f"tokens.source: '{self.where}' has no documents; at least one is required")
        if self.objects:
            return identity | {"etag": [one.etag.strip('"') for one in self.objects.values()]}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            if look and self.kind != "parquet":
                list(pool.map(look_at_start, self.paths))
            return identity | {"sha256": list(pool.map(sha256_of_text, self.paths))}

    def documents(self) -> Iterator[bytes]:
        """All documents, in this process."""
        for piece in self.pieces():
            yield from self.read(piece)

    def resolved(self) -> Self:
        """The same text."""
        return self

    def connect(self) -> None:
        """Make the client of its server, if that is S3."""
        if self.objects:
            from pipelines.run.text.objects import store_of

            store_of(self.paths[0].split("/")[2])

    def text_bytes(self) -> int | None:
        """About the bytes of its text; None if only a server knows, or if it is packed."""
        if any(path.endswith(tuple(PACKED)) for path in self.paths):
            return None
        if self.kind == "parquet":
            return sum(size for path in self.paths for _, size in row_groups(path, self.column))
        return sum(self._size(path) or 0 for path in self.paths)  # of jsonl with its other fields

    def pieces(self) -> list[TextShare]:
        """All of the text, in order. UserError if it cannot be read."""
        if self.kind == "parquet":
            with ThreadPoolExecutor(8) as pool:
                by_path = zip(self.paths, pool.map(lambda path: row_groups(path, self.column), self.paths), strict=True)
                return [piece for path, groups in by_path for piece in pieces_of(path, groups)]
        if self.kind == "jsonl":
            return [piece for path in self.paths for piece in self._ranges(path)]
        groups = grouped([PIECE_BYTES if (size := self._size(path)) is None else size for path in self.paths])
        names = [self.paths[group.start : group.stop] for group in groups]
        return [TextShare(few, documents=len(few) if self.kind == "txt" else None) for few in names]

    def count(self, piece: TextShare) -> int:
        """The number of documents of a piece."""
        if piece.documents is None and self.kind == "jsonl":
            return sum(1 for _, line in self.lines(piece) if not line.isspace())
        return sum(1 for _ in self.read(piece)) if piece.documents is None else piece.documents

    def read(self, piece: TextShare) -> Iterator[bytes]:
        """The documents of a piece, in UTF-8. UserError for a damaged file, with its place."""
        if self.kind == "parquet":
            yield from self._rows(piece)
        elif self.kind == "jsonl":
            for number, line in self.lines(piece):
                if not line.isspace():  # strip would copy a long one
                    yield utf8(self._text_of(line, piece, number))
        else:
            for path in piece.names:
                with reading(path), unpacked(path) as file:
                    found = bounded(path, file.read).removeprefix(BYTE_ORDER_MARK)
                refuse_binary(path, found[:BINARY_BYTES])
                yield found.decode(errors="replace").encode()

    def _rows(self, piece: TextShare) -> Iterator[bytes]:
        """The text column of some row groups."""
        (path,) = piece.names
        at_once = max(1, (piece.documents or 0) * COLUMN_BYTES // max(piece.bytes, COLUMN_BYTES))
        with reading(path), memory_error_at_the_limit():  # no size in the file bounds a dictionary, decoded
            for found in parquet_batches(path, at_once, range(piece.first, piece.end or 0), [self.column]):
                for document in column_documents(found.column(0)):
                    # Two of the copies exist by now.
                    if len(document) > PIECE_BYTES and len(document) * COPIES // 2 > free_memory():
                        raise too_long(path, len(document))
                    yield document

    # Lines and whole files

    def _size(self, path: str) -> int | None:
        """The bytes of a file; None of a packed one, and if a server had to be asked."""
        if path.endswith(tuple(PACKED)):
            return None
        if self.objects:
            return self.objects[path].size
        if "://" in path:
            return None
        with reading(path), open_regular(Path(path)) as file:
            return os.fstat(file.fileno()).st_size

    def _ranges(self, path: str) -> Iterator[TextShare]:
        """A file of lines in ranges of PIECE_BYTES; a line belongs to the range in which it begins."""
        if (size := self._size(path)) is None:
            yield TextShare((path,))
            return
        for first in range(0, size, PIECE_BYTES):
            yield TextShare((path,), first, min(size, first + PIECE_BYTES))

    def lines(self, piece: TextShare) -> Iterator[tuple[int, bytes]]:
        """The lines that begin in a piece, numbered from 0."""
        path, at = piece.names[0], piece.first
        with reading(path), unpacked(path) as file:
            if at:
                file.seek(at - 1)
                at += len(file.readline()) - 1
            number = 0
            while piece.end is None or at < piece.end:
                line = bounded(path, file.readline)
                if not line:
                    return
                yield number, line.removeprefix(BYTE_ORDER_MARK) if at == 0 else line
                at, number = at + len(line), number + 1

    def row_of(self, line: bytes, piece: TextShare, number: int, errors: str = "strict") -> Any:
        """The JSON of line `number` of a piece. UserError with its place for a damaged one."""
        try:
            return json.loads(line.decode(errors=errors))
        except (ValueError, RecursionError) as error:
            why = str(error).partition(": line ")[0]  # json's own, which counts from the beginning of this line
            raise UserError(f"tokens.source: {self._place(piece, number)} is not JSON ({why})") from error

    def _text_of(self, line: bytes, piece: TextShare, number: int) -> str:
        """The text of line `number` of a piece. UserError with its place for a damaged one."""
        row = self.row_of(line, piece, number, "replace")
        if not isinstance(row, dict) or self.column not in row:
            raise no_column(self.column, self._place(piece, number), row if isinstance(row, dict) else ())
        value = "" if row[self.column] is None else row[self.column]
        if not isinstance(value, str):
            kind, place = type(value).__name__, self._place(piece, number)
            raise UserError(f"tokens.text_column: '{self.column}' of {place} is {kind}, not a string")
        return value

    def _place(self, piece: TextShare, number: int) -> str:
        before = sum(1 for _ in self.lines(TextShare(piece.names, 0, piece.first))) if piece.first else 0
        return f"line {before + number + 1} of '{piece.names[0]}'"


def identity_of_files(kind: str, column: str) -> dict[str, Any]:
    """What the identities of all texts of files begin with."""
    return {"source": "files", "kind": kind} | ({} if kind == "txt" else {"text_column": column})


def look_at_start(path: str) -> None:
    """UserError if a local file is not text in UTF-8, before another machine is rented to find that out."""
    with reading(path), unpacked(path) as file:
        refuse_binary(path, file.read(BINARY_BYTES))


def refuse_binary(path: str, start: bytes) -> None:
    """UserError if the first bytes of a file are not text in UTF-8."""
    if b"\0" in start:
        raise UserError(f"tokens.source: '{path}' is binary (it contains NUL); name files of text in UTF-8")
    odd = start.decode(errors="replace").count("\ufffd") - start.count("\ufffd".encode())
    if odd > max(MOST_ODD, len(start) // 100):
        where = f"{odd:,} places of its first {len(start):,} bytes"
        raise UserError(f"tokens.source: '{path}' is not UTF-8 ({where}); convert it: iconv -f latin1 -t utf8")


def grouped(sizes: list[int]) -> Iterator[range]:
    """Numbers of consecutive items of about PIECE_BYTES together."""
    first = total = 0
    for end, size in enumerate(sizes, 1):
        total += size
        if total >= PIECE_BYTES or end == len(sizes):
            yield range(first, end)
            first, total = end, 0


def pieces_of(path: str, groups: list[tuple[int, int]]) -> Iterator[TextShare]:
    """Consecutive row groups of a parquet file."""
    for numbers in grouped([size for _, size in groups]):
        rows, sizes = zip(*groups[numbers.start : numbers.stop], strict=True)
        yield TextShare((path,), numbers.start, numbers.stop, sum(rows), sum(sizes))


def opened(path: str) -> IO[bytes]:
    """A file at a path or a URL, for reading."""
    if "://" not in path:
        return open_regular(Path(path), BUFFER_BYTES)
    if path.startswith("s3://"):
        from pipelines.run.text.objects import opened_object

        return opened_object(path)
    import fsspec

    file: Any = with_retries(lambda: fsspec.open(path, "rb").open())
    return io.BufferedReader(file, BUFFER_BYTES)  # whose readline takes a limit


def parquet_batches(path: str, rows: int, groups: Iterable[int] | None, columns: list[str] | None) -> Iterator[Any]:
    """Rows of a parquet file, `rows` at a time, from all groups and columns by default.

    Only this thread reads: a thread of Arrow's that still reads at the end of the process would abort it. With a
    buffer, memory does not depend on the size of a row group.
    """
    import pyarrow.parquet as pq

    how = {"metadata": metadata_of(path), "buffer_size": BUFFER_BYTES, "pre_buffer": False}
    with opened(path) as file, pq.ParquetFile(file, **how) as parquet:
        yield from parquet.iter_batches(rows, groups, columns, use_threads=False)


@functools.lru_cache(maxsize=8)
def metadata_of(path: str) -> Any:
    """The footer of a parquet file."""
    import pyarrow.parquet as pq

    with opened(path) as file:
        return with_retries(lambda: pq.read_metadata(file))


@functools.cache
def row_groups(path: str, column: str) -> list[tuple[int, int]]:
    """The rows, and about the bytes of text, of each row group of a parquet file. UserError unless there is one such
    column and it holds strings."""
    import pyarrow as pa

    with reading(path):
        metadata = metadata_of(path)
    schema = metadata.schema.to_arrow_schema()
    if column not in schema.names:
        raise no_column(column, f"'{path}'", schema.names)
    if (same := schema.names.count(column)) > 1:
        raise UserError(f"tokens.text_column: '{path}' has {same} columns '{column}'; rename all but the text")
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"tokens.text_column: '{column}' in '{path}' holds {kind}, not strings")
    # By its path: a field inside another column may have the same name.
    at = next(n for n in range(metadata.num_columns) if metadata.schema.column(n).path == column)
    chunks, times = [metadata.row_group(number).column(at) for number in range(metadata.num_row_groups)], 1.0

    def may_repeat(chunk: Any) -> bool:
        """Whether each text may lie there once, for several rows."""
        dictionary = chunk.has_dictionary_page and chunk.num_values
        return bool(dictionary and chunk.total_uncompressed_size < DICTIONARY_BYTES)

    if repeated := [number for number, chunk in enumerate(chunks) if may_repeat(chunk)]:
        with reading(path):
            sample = next(parquet_batches(path, SAMPLE_ROWS, repeated[:1], [column]))
        first = chunks[repeated[0]]
        times = max(1.0, sample.nbytes / len(sample) * first.num_values / first.total_uncompressed_size)
    return [(one.num_values, int(one.total_uncompressed_size * (times if may_repeat(one) else 1))) for one in chunks]


def no_column(column: str, where: str, names: Iterable[str]) -> UserError:
    """The error for a missing text column."""
    return UserError(f"tokens.text_column: no '{column}' in {where}; it has: {', '.join(names) or 'none'}")


def unpacked(path: str) -> IO[bytes]:
    """The contents of a file at a path or a URL, without its compression."""
    codec, file = PACKED.get(os.path.splitext(path)[1]), opened(path)
    if codec is None:
        return file
    if codec == "gzip":  # Python's, as zeros behind its last member end a file
        packed = gzip.GzipFile(fileobj=file)
        packed.myfileobj = file  # type: ignore[assignment]  # closed with it
        return io.BufferedReader(packed, BUFFER_BYTES)
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(file, compression=codec), BUFFER_BYTES)


def bounded(path: str, read: Callable[[int], bytes]) -> bytes:
    """The next line or the content of a file, as `read` gives it. UserError for one that is too long for the memory of
    this machine, before it is read: a kernel that runs out of memory kills without a message."""
    found = read(PIECE_BYTES)
    if len(found) == PIECE_BYTES:
        most = free_memory() // COPIES
        found += read(max(0, most - PIECE_BYTES))
        if len(found) >= most:
            raise too_long(path, most)
    return found


def too_long(path: str, size: int) -> UserError:
    """The error for a document of `size` bytes or more that does not fit into memory."""
    return UserError(
        f"tokens.source: a document of '{path}' has {size / 1e6:,.0f} MB or more, and needs {COPIES} times as much "
        "memory, which is not free; split it"
    )


def sha256_of_text(path: str) -> str:
    """The sha256 of a local file. UserError if it cannot be read."""
    with reading(path):
        seen = os.stat(path)
        state = seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns
        return _sha256_in_state(path, state)


@functools.cache  # the plan and the check before the first shard ask for the same
def _sha256_in_state(path: str, state: Hashable) -> str:
    return sha256_of(Path(path))


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
        load = f"datasets.load_dataset('{kind}', data_files='{path}', split='train').to_parquet('text.parquet')"
        convert = f'; convert it: python -c "import datasets; {load}"' if kind in LOADABLE else ""
        raise UserError(
            f"tokens.source: '{path}': unknown kind of file; use .parquet, .jsonl or .txt files (in a folder: "
            f"FOLDER/*.parquet), the last two also with .gz or .zst{convert}"
        )
    return kind
