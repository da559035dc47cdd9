"""Text files of one kind, local or remote, as a source of text."""

import glob
import io
import itertools
import json
import os
import time
import zlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pipelines.text.columns import (
    Batches,
    TextBatch,
    check_column,
    column_batches,
    has_surrogates,
    joined,
    no_column,
    packed,
    reason_of,
    unreadable,
    utf8_bytes,
)
from pipelines.text.opened import each_opened, opened, unpacked
from pipelines.text.retry import is_transient, with_retries
from trainer.errors import UserError
from trainer.store import sha256_of

if TYPE_CHECKING:
    from pipelines.artifacts.store import S3Object

KINDS = ("parquet", "jsonl", "txt")
PACKED = ("gz", "zst")
SAMPLED_LINES = 1_000
COLUMN_BYTES = 8 << 20  # of text, decoded at once
BUFFER_BYTES = 1 << 20  # of a file
SETTLED_SECONDS = 5.0
_DIGESTS: dict[tuple[str, tuple[int, ...] | None], str] = {}  # of local files, by path and state
_FOOTERS: dict[tuple[str, str, str], tuple[int, int]] = {}  # of remote files, by path, column and version
ENCODING = "utf-8-sig"  # UTF-8 that accepts the byte order mark of some editors


Documents = Generator[tuple[str, bool], None, None]


@dataclass(frozen=True)
class Files:
    """Files of one kind, read one after the other.

    A document is a row of parquet, a line of jsonl that is not blank, or a file of txt (invalid UTF-8 becomes U+FFFD,
    line ends become \\n).
    """

    kind: str
    paths: tuple[str, ...]  # local paths in reading order, URLs, or one pattern of URLs
    column: str
    where: str  # as the user wrote it
    pinned: str | None = None  # the user's label for remote files; None: identified by contents
    objects: "tuple[S3Object, ...]" = ()  # of paths in S3

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
        if self.kind == "parquet":
            self.batches(0).close()
            return
        with closing(self._documents(self._found(), 0, self._named(0, 1))) as documents:
            if next(documents, None) is None:
                raise self._is_empty()

    def _is_empty(self) -> UserError:
        return UserError(f"tokens.source: '{self.where}' has no documents; at least one is required")

    def state(self) -> dict[str, Any]:
        if self.objects:
            from pipelines.text.objects import matching_objects

            return {path: found for path, found in matching_objects(self.where).items() if path in self.paths}
        return {path: state_of(path) for path in self.paths} if self.pinned is None else {}

    def files(self) -> int | None:
        return None if self._is_pattern else len(self.paths)

    def text_bytes(self) -> int | None:
        if self.pinned is not None or any(path.endswith(PACKED) for path in self.paths):
            return None
        if self.kind == "parquet":
            return sum(self._footer(path)[1] for path in self.paths)
        if self.objects:
            return sum(one.size for one in self.objects)
        size = sum(os.path.getsize(path) for path in self.paths)
        return size if self.kind == "txt" else int(size * self._share_of_text(self.paths[0]))

    def batches(self, start: int, part: int = 0, parts: int = 1) -> Batches:
        paths = tuple(files_of_part(self._found(), part, parts, self.where))
        found = (
            self._parquet(paths, start)
            if self.kind == "parquet"
            else packed(self._documents(paths, start, self._named(part, parts)))
        )
        first = next(found, None)
        if first is None and not start and parts == 1:  # a part of several may be empty
            raise self._is_empty()
        return joined([] if first is None else [first], found)

    @property
    def _is_pattern(self) -> bool:
        return self.pinned is not None and glob.has_magic(self.paths[0])

    def _found(self) -> tuple[str, ...]:
        """The paths, with a pattern of URLs resolved. Called only when documents are read, because it asks a server."""
        if not self._is_pattern:
            return self.paths
        import fsspec

        try:
            system, pattern = fsspec.core.url_to_fs(self.paths[0])
            found = [system.unstrip_protocol(path) for path in sorted(with_retries(lambda: system.glob(pattern)))]
        except (OSError, ImportError) as error:
            raise self._not_opened(error) from error
        if not found:
            raise UserError(f"tokens.source: no file matches '{self.where}'")
        return tuple(found)

    def _parquet(self, paths: tuple[str, ...], start: int) -> Iterator[TextBatch]:
        with ThreadPoolExecutor(8) as pool:
            rows = [rows for rows, _ in pool.map(self._footer, paths)]
        ends = list(itertools.accumulate(rows))
        first = next((index for index, end in enumerate(ends) if end > start), None)
        if first is None:
            return iter(())
        return self._rows(paths[first:], start - (ends[first] - rows[first]))

    def _rows(self, paths: tuple[str, ...], skipped: int) -> Iterator[TextBatch]:
        """The text column of parquet files, from row `skipped` of the first one on."""
        import pyarrow as pa

        for path, parquet in each_opened(paths, _readable_parquet):
            with reading(path), parquet:
                groups = parquet.metadata
                first = 0
                while first < groups.num_row_groups and skipped >= groups.row_group(first).num_rows:
                    skipped -= groups.row_group(first).num_rows
                    first += 1
                pieces = parquet.iter_batches(
                    self._rows_at_once(groups),
                    row_groups=range(first, groups.num_row_groups),
                    columns=[self.column],
                    use_threads=False,
                )
                for piece in pieces:
                    column = piece.column(0)[skipped:]
                    skipped -= len(piece) - len(column)
                    if pa.types.is_string_view(column.type):
                        column = column.cast(pa.large_string())
                    yield from column_batches(column)

    def _rows_at_once(self, groups: Any) -> int:
        """Rows of about COLUMN_BYTES of text."""
        size = sum(_column_of(groups, i, self.column).total_uncompressed_size for i in range(groups.num_row_groups))
        return max(1, min(groups.num_rows, groups.num_rows * COLUMN_BYTES // max(1, size)))

    def _footer(self, path: str) -> tuple[int, int]:
        """Rows of a parquet file, and bytes of its text column before compression, by its footer. UserError unless it
        has that column. The footer of a remote file is read once for its plan, its size and its text."""
        version = next((one.etag for at, one in zip(self.paths, self.objects, strict=False) if at == path), self.pinned)
        known = _FOOTERS.get((path, self.column, version or ""))
        found = known or self._read_footer(path)
        if version is not None:
            _FOOTERS[path, self.column, version] = found
        return found

    def _read_footer(self, path: str) -> tuple[int, int]:
        import pyarrow as pa

        try:
            with parquet_file(path) as parquet:
                schema, groups = parquet.schema_arrow, parquet.metadata
        except (OSError, ImportError, pa.ArrowInvalid) as error:
            raise UserError(f"tokens.source: '{path}' cannot be read as parquet ({reason_of(error)})") from error
        except Exception as error:
            if not is_transient(error):
                raise
            raise UserError(f"tokens.source: '{path}' cannot be read as parquet ({reason_of(error)})") from error
        check_column(schema, self.column, path)
        columns = (_column_of(groups, i, self.column) for i in range(groups.num_row_groups))
        return groups.num_rows, sum(column.total_uncompressed_size for column in columns)

    def _share_of_text(self, path: str) -> float:
        """The text's share of the bytes of a local jsonl file, by its first lines: the rest is fields and escapes."""
        with (
            suppress(OSError, ValueError, AttributeError, RecursionError),  # reported when read
            open(path, encoding=ENCODING) as file,
        ):
            lines = [line for line in itertools.islice(file, SAMPLED_LINES) if line.strip()]
            texts = [str(json.loads(line).get(self.column) or "") for line in lines]
            return sum(map(utf8_bytes, texts)) / max(1, sum(map(utf8_bytes, lines)))
        return 1.0

    def _named(self, part: int, parts: int) -> str:
        """The source in messages with a document number; numbers count within a part."""
        which = f" (counted in its files {part}, {part + parts}, {part + 2 * parts}, …)" if parts > 1 else ""
        return f"'{self.where}'{which}"

    def _documents(self, paths: tuple[str, ...], start: int, named: str) -> Documents:
        """The documents of files other than parquet, and whether each was not valid UTF-8."""
        if self.kind == "txt":
            return self._whole(paths[start:])
        lines = (line for line in self._lines(paths) if line.strip())
        return self._texts_of(itertools.islice(enumerate(lines), start, None), named)

    def _whole(self, paths: tuple[str, ...]) -> Documents:
        """Each file as one document, and whether it was not valid UTF-8."""
        for path, file in each_opened(paths, self._opened):
            with reading(path), file:
                text = text_lines(unpacked(file, path)).read()
            yield replaced(text)

    def _lines(self, paths: tuple[str, ...]) -> Iterator[str]:
        """The lines of all files. A byte that is not UTF-8 is a surrogate."""
        for path, file in each_opened(paths, self._opened):
            with reading(path), file:
                yield from text_lines(unpacked(file, path))

    def _opened(self, path: str) -> IO[bytes]:
        try:
            return opened(path)
        except (OSError, ImportError, ValueError) as error:
            raise self._not_opened(error) if "://" in path else unreadable(path, error) from error

    def _texts_of(self, lines: Iterator[tuple[int, str]], named: str) -> Documents:
        for number, line in lines:
            line, invalid = replaced(line)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"tokens.source: document {number} of {named} is not JSON ({error})") from error
            if not isinstance(row, dict) or self.column not in row:
                names = list(row) if isinstance(row, dict) else []
                raise no_column(self.column, f"document {number} of {named}", names)
            text = row[self.column]
            if not isinstance(text, str | None):
                raise UserError(
                    f"tokens.text_column: '{self.column}' of document {number} of {named} is "
                    f"{type(text).__name__}, not a string"
                )
            yield text or "", invalid

    def _not_opened(self, error: Exception) -> UserError:
        return UserError(f"tokens.source: '{self.where}' cannot be opened ({reason_of(error)})")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """UserError for a file that is truncated, damaged or removed, or a server that stays away."""
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        raise unreadable(path, error) from error
    except UserError:
        raise
    except Exception as error:
        # By its name: texts other than parquet don't wait for the import of pyarrow.
        if not (is_transient(error) or type(error).__name__ == "ArrowInvalid"):
            raise
        raise unreadable(path, error) from error


def parquet_file(path: str) -> Any:
    """A parquet file at a path or a URL."""
    import pyarrow.parquet as pq

    # With a buffer, memory does not depend on the size of a row group.
    if "://" not in path:
        return pq.ParquetFile(path, buffer_size=BUFFER_BYTES)
    file = opened(path)
    try:
        return pq.ParquetFile(file, buffer_size=BUFFER_BYTES)
    except BaseException:
        file.close()
        raise


def _readable_parquet(path: str) -> Any:
    with reading(path):
        return parquet_file(path)


def _column_of(groups: Any, group: int, column: str) -> Any:
    return groups.row_group(group).column(groups.schema.names.index(column))


def text_lines(file: IO[bytes]) -> io.TextIOWrapper:
    """A file as text with plain line ends, in which a byte that is not UTF-8 is a surrogate."""
    return io.TextIOWrapper(file, ENCODING, errors="surrogateescape")


def replaced(text: str) -> tuple[str, bool]:
    """The text with U+FFFD for bytes that are not UTF-8, and whether it had such bytes."""
    if not has_surrogates(text):
        return text, False
    return text.encode(errors="surrogateescape").decode(errors="replace"), True


def sha256_of_text(path: str) -> str:
    """The sha256 of a local file. UserError if it cannot be read.

    The plan and its check before the first shard want the same: a file in the state that was hashed is not read again.
    A change right after another one may leave the same times, so only files older than SETTLED_SECONDS count.
    """
    state = state_of(path)
    if known := _DIGESTS.get((path, state)):
        return known
    settled = state is not None and time.time() - state[-1] / 1e9 > SETTLED_SECONDS
    try:
        digest = sha256_of(Path(path))
    except OSError as error:
        raise UserError(f"tokens.source: '{path}' cannot be read ({error.strerror})") from error
    if settled and state == state_of(path):
        _DIGESTS[path, state] = digest
    return digest


def state_of(path: str | Path) -> tuple[int, ...] | None:
    """A state of a local file that changes when the file does; None for a file that is gone."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def files_of_part(files: Sequence[str], part: int, parts: int, where: str) -> Sequence[str]:
    """Every `parts`-th file from number `part` on. UserError if there are fewer files than parts."""
    check_parts(len(files), parts, where)
    return files[part::parts]


def check_parts(files: int, parts: int, where: str) -> None:
    """UserError if there are fewer files than parts."""
    if files < parts:
        raise UserError(
            f"tokens.parts: '{where}' has only {files} file(s), and each of the {parts} parts needs one; "
            f"use at most {files} parts"
        )


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
    name = path.rpartition("/")[2].lower()
    stem, _, packing = name.rpartition(".")
    kind = stem.rpartition(".")[2] if packing in PACKED else packing
    if kind not in KINDS or (kind == "parquet" and packing in PACKED):
        raise UserError(
            f"tokens.source: '{path}': unknown kind of file; use .parquet, .jsonl or .txt, the last "
            "two also with .gz or .zst"
        )
    return kind
