"""Text files of one kind, local or remote, as a source of text."""

import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.text.columns import (
    Texts,
    check_column,
    column_texts,
    datasets_library,
    joined,
    no_column,
    reason_of,
    unreadable,
    utf8_bytes,
)
from trainer.errors import UserError
from trainer.store import sha256_of

if TYPE_CHECKING:
    from pipelines.artifacts.store import S3Object

KINDS = ("parquet", "jsonl", "txt")
PACKED = ("gz", "zst")
SAMPLED_LINES = 1_000
ENCODING = "utf-8-sig"  # UTF-8 that accepts the byte order mark of some editors


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
        with closing(self.documents(0)) as texts:  # a wrong column fails now, not on rented machines
            next(texts)
        if self.objects:
            return identity | {"etag": [one.etag.strip('"') for one in self.objects]}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return identity | {"sha256": list(pool.map(self._sha256, self.paths))}

    def _sha256(self, path: str) -> str:
        try:
            return sha256_of(Path(path))
        except OSError as error:
            raise UserError(f"tokens.source: '{path}' cannot be read ({error.strerror})") from error

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
            return sum(map(self._column_bytes, self.paths))
        if self.objects:
            return sum(one.size for one in self.objects)
        size = sum(os.path.getsize(path) for path in self.paths)
        return size if self.kind == "txt" else int(size * self._share_of_text(self.paths[0]))

    def documents(self, start: int, part: int = 0, parts: int = 1) -> Texts:
        paths = tuple(files_of_part(self._found(), part, parts, self.where))
        texts = (
            self._parquet(paths, start)
            if self.kind == "parquet"
            else self._text(paths, start, self._named(part, parts))
        )
        first = list(itertools.islice(texts, 1))
        if not first and not start and parts == 1:  # a part of several may be empty
            raise UserError(f"tokens.source: '{self.where}' has no documents; at least one is required")
        return joined(first, texts)

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
            found = [system.unstrip_protocol(path) for path in sorted(system.glob(pattern))]
        except (OSError, ImportError) as error:
            raise self._not_opened(error) from error
        if not found:
            raise UserError(f"tokens.source: no file matches '{self.where}'")
        return tuple(found)

    def _parquet(self, paths: tuple[str, ...], start: int) -> Iterator[str]:
        with ThreadPoolExecutor(8) as pool:
            rows = list(pool.map(self._count_rows, paths))
        ends = list(itertools.accumulate(rows))
        first = next((index for index, end in enumerate(ends) if end > start), None)
        if first is None:
            return iter(())
        stream = self._stream("parquet", paths[first:], columns=[self.column])
        return column_texts(stream, self.column, self.where, start - (ends[first] - rows[first]))

    def _count_rows(self, path: str) -> int:
        """Rows of a parquet file, by its footer. UserError unless it has the text column."""
        import fsspec
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with fsspec.open(path, "rb") as file:
                parquet = pq.ParquetFile(file)
                schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
        except (OSError, ImportError, pa.ArrowInvalid) as error:
            raise UserError(f"tokens.source: '{path}' cannot be read as parquet ({reason_of(error)})") from error
        check_column(schema, self.column, path)
        return rows

    def _column_bytes(self, path: str) -> int:
        """Bytes of the text column of a parquet file before compression, by its footer."""
        import fsspec
        import pyarrow.parquet as pq

        with fsspec.open(path, "rb") as file:
            groups = pq.ParquetFile(file).metadata
        number = groups.schema.names.index(self.column)
        return sum(groups.row_group(i).column(number).total_uncompressed_size for i in range(groups.num_row_groups))

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

    def _text(self, paths: tuple[str, ...], start: int, named: str) -> Iterator[str]:
        if (
            self.kind == "txt"
            and self.pinned is None
            and not self.objects
            and all(path.endswith("txt") for path in paths)
        ):
            return self._plain(paths[start:])
        sample_by = "line" if self.kind == "jsonl" else "document"
        stream = self._stream("text", paths, sample_by=sample_by, encoding=ENCODING, encoding_errors="replace")
        if self.kind == "txt":
            return column_texts(stream, "text", self.where, start)
        lines = (line for line in column_texts(stream, "text", self.where, 0) if line.strip())
        return self._texts_of(itertools.islice(enumerate(lines), start, None), named)

    def _plain(self, paths: Iterable[str]) -> Iterator[str]:
        """Local files, a document each, without the import of `datasets`, which takes a second."""
        for path in paths:
            try:
                text = Path(path).read_text(ENCODING, errors="replace")
            except OSError as error:
                raise unreadable(self.where, error) from error
            yield text

    def _texts_of(self, lines: Iterator[tuple[int, str]], named: str) -> Iterator[str]:
        for number, line in lines:
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
            yield text or ""

    def _stream(self, builder: str, paths: Iterable[str], **options: Any) -> Any:
        """A streaming dataset over exactly these files, without a cache."""
        # The keys of S3 are names, and URLs of other servers may be patterns.
        escaped = (path if "://" in path and not self.objects else glob.escape(path) for path in paths)
        data_files = list(escaped)
        try:
            return datasets_library().load_dataset(
                builder, data_files={"train": data_files}, split="train", streaming=True, **options
            )
        except (OSError, ImportError, ValueError) as error:
            raise self._not_opened(error) from error

    def _not_opened(self, error: Exception) -> UserError:
        return UserError(f"tokens.source: '{self.where}' cannot be opened ({reason_of(error)})")


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
    if packing == "zst":
        import fsspec.utils

        if packing not in fsspec.utils.compressions:
            raise UserError(f"tokens.source: '{path}': .zst needs the package zstandard; install it")
    return kind
