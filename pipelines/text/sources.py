"""Text, in an order that never changes.

A source is named by one string of a recipe. What it names has an identity (what decides the bytes: it goes
into the fingerprint) and documents, numbered from 0 in a fixed order, so that an interrupted run goes on at
document number n. Its files can be dealt out to several parts (file j is of part j mod parts); then each part
has documents of its own, numbered from 0. What can't be pinned down is refused.
"""

import difflib
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from trainer.errors import UserError

Texts = Generator[str, None, None]
T = TypeVar("T")

STDLIB = "python-stdlib"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}

HUB = "hf://datasets/"
REMOTE = ("https", "http", "s3", "hf")
KINDS = ("parquet", "jsonl", "txt")
PACKED = ("gz", "zst")
SOURCES = f"{STDLIB}, {HUB}ORG/NAME, or a path, glob or URL of .parquet, .jsonl or .txt files"

ENCODING = "utf-8-sig"  # UTF-8 that also takes the byte order mark some editors put in front
# What `datasets` and the libraries below it (httpx, aiohttp) raise without a connection, by name: none need be there.
PASSING = {"ConnectionError", "TimeoutError", "TransportError", "ClientConnectionError"}
PATIENCE_SECONDS = 60.0
ROWS = 1_000  # at a time out of Arrow: ~5 MB of web text


def source_identity(
    source: str,
    subset: str | None,
    revision: str | None,
    text_column: str,
    base: Path | None = None,
    parts: int = 1,
) -> dict[str, Any]:
    """What decides a source's documents, for the fingerprint: equal identities give equal documents.

    Local files count by the sha256 of their contents, in the order they are read, wherever they lie; the
    standard library by one sha256 over paths and contents; remote text by its revision. Reads all local
    bytes and opens no connection. Relative paths start at `base` (default: the current directory).
    UserError for what isn't there or can't be pinned down, or is known to have fewer files than `parts`.
    """
    text = _open(source, subset, revision, text_column, base)
    if (files := text.files()) is not None:
        _check_parts(files, parts, source)
    return text.identity()


def source_label(source: str, subset: str | None) -> str:
    """Short name for folders: "python-stdlib", "fineweb-edu-sample-10BT", "files"."""
    if source == STDLIB:
        return source
    parts = source.removeprefix(HUB).split("/")
    if not source.startswith(HUB) or len(parts) != 2:
        return "files"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(filter(None, (parts[1], subset))))


def documents(
    source: str,
    subset: str | None,
    revision: str | None,
    text_column: str,
    start: int = 0,
    base: Path | None = None,
    part: int = 0,
    parts: int = 1,
) -> Texts:
    """The documents of one of the source's parts in their fixed order, from number `start` on.

    Parquet files that lie wholly before `start` are not read. A null text is an empty document, so that
    document numbers are row numbers. UserError as for `source_identity`, and for damaged files. Close it
    (`contextlib.closing`) when you stop before its end: `datasets` complains at the exit of Python about a
    parquet file that is still open.
    """
    text = _open(source, subset, revision, text_column, base)
    return patiently(lambda: text.documents(start, part, parts))


def patiently(request: Callable[[], T]) -> T:
    """What is asked of a server of texts; asked again for a minute while it is busy or out of reach. N nodes that begin
    at once are what it may refuse, and `datasets` asks again only for what it has opened."""
    import tenacity

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_may_pass),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=10),
        stop=tenacity.stop_before_delay(PATIENCE_SECONDS),
        reraise=True,
    )
    return attempts(request)


def _may_pass(error: BaseException | None) -> bool:
    """Whether time alone may cure a fault, by what it came from: no connection, or a server that is busy."""
    if error is None:
        return False
    status = getattr(getattr(error, "response", error), "status_code", getattr(error, "status", None))
    return (
        not PASSING.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        or status in (408, 429)
        or (isinstance(status, int) and status >= 500)
        or _may_pass(error.__cause__)
    )


class _Source(Protocol):
    def identity(self) -> dict[str, Any]: ...

    def files(self) -> int | None:
        """How many files there are; None if only a server knows."""
        ...

    def documents(self, start: int, part: int = 0, parts: int = 1) -> Texts: ...


def _of_part(files: Sequence[str], part: int, parts: int, where: str) -> Sequence[str]:
    _check_parts(len(files), parts, where)
    return files[part::parts]


def _check_parts(files: int, parts: int, where: str) -> None:
    if files < parts:
        raise UserError(
            f"tokens.parts: {parts} are more than '{where}' has files, and every part needs one; "
            f"{files} would be right, or fewer"
        )


def _open(source: str, subset: str | None, revision: str | None, text_column: str, base: Path | None) -> _Source:
    scheme, separator, _ = source.partition("://")
    if separator and scheme not in REMOTE:
        raise UserError(f"tokens.source: '{source}': unknown scheme '{scheme}'; would be right: {SOURCES}")
    repository = source.removeprefix(HUB).split("/") if source.startswith(HUB) else []
    if scheme == "hf" and separator and (len(repository) < 2 or not all(repository) or "@" in source):
        raise UserError(
            f"tokens.source: '{source}' is no dataset on the Hub; '{HUB}ORG/NAME' would be, with the commit "
            "in tokens.revision"
        )
    if len(repository) == 2:
        return HubDataset("/".join(repository), subset, _commit(source, revision), text_column)
    if subset is not None:
        raise UserError(f"tokens.subset: '{source}' has no subsets, only {HUB}ORG/NAME has; remove it")
    if separator:
        return _remote_files(source, revision, text_column)
    if revision is not None:
        raise UserError(f"tokens.revision: '{source}' is local and known by its contents; remove the revision")
    if source == STDLIB:
        return StandardLibrary(Path(sysconfig.get_path("stdlib")))
    return _local_files(source, text_column, base or Path())


@dataclass(frozen=True)
class StandardLibrary:
    """Every module of the running Python that can be decoded, one document each, sorted by relative path."""

    folder: Path

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name in self._names():
            content = hashlib.sha256((self.folder / name).read_bytes()).hexdigest()
            digest.update(f"{content} {name}\n".encode())
        return {"source": STDLIB, "sha256": digest.hexdigest()}

    def files(self) -> int:
        return len(self._names())

    def documents(self, start: int, part: int = 0, parts: int = 1) -> Texts:
        names = _of_part(self._names(), part, parts, STDLIB)
        return _joined([], itertools.islice(self._texts(names), start, None))

    def _texts(self, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            try:
                with tokenize.open(self.folder / name) as file:
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError):  # the declared encoding is unknown, or untrue
                continue
            yield text

    def _names(self) -> list[str]:
        names = []
        for folder, below, files in os.walk(self.folder):
            below[:] = [name for name in below if name not in NOT_LIBRARY]
            relative = Path(folder).relative_to(self.folder)
            names += [(relative / name).as_posix() for name in files if name.endswith(".py")]
        if not names:
            raise UserError(
                f"tokens.source: this Python has no {STDLIB} as .py files in {self.folder}; use another "
                "Python, or name text files"
            )
        return sorted(names)


@dataclass(frozen=True)
class HubDataset:
    """The train split of a dataset on the Hugging Face Hub at one commit."""

    repository: str
    subset: str | None
    commit: str
    column: str

    def identity(self) -> dict[str, Any]:
        return {
            "source": HUB + self.repository,
            "subset": self.subset,
            "revision": self.commit,
            "text_column": self.column,
        }

    def files(self) -> None:
        return None

    def documents(self, start: int, part: int = 0, parts: int = 1) -> Texts:
        datasets = _datasets()
        where = f"{HUB}{self.repository}" + (f" ({self.subset})" if self.subset else "")
        try:
            builder = datasets.load_dataset_builder(self.repository, self.subset, revision=self.commit)
            files = (builder.config.data_files or {}).get("train")
            if type(builder).__name__ == "Parquet" and files:
                # Nearly all of the Hub. Its footers tell which files `start` leaves out.
                return Files("parquet", tuple(files), self.column, where).documents(start, part, parts)
            stream = builder.as_streaming_dataset(split="train")
            if parts > 1:
                _check_parts(stream.num_shards, parts, where)
                stream = stream.shard(parts, part, contiguous=False)  # dealt out by files, as everywhere here
        except UserError:
            raise
        except Exception as error:  # anything: not found, gated, no such subset, no network
            raise UserError(
                f"tokens.source: {where} at {self.commit[:12]} could not be opened ({_reason(error)})"
            ) from error
        return _column(stream, self.column, where, start)


@dataclass(frozen=True)
class Files:
    """Files of one kind, read one after the other.

    parquet: a row is a document. jsonl: a line that isn't blank is one. txt: a file is one (invalid UTF-8
    becomes U+FFFD, line ends become \\n).
    """

    kind: str
    paths: tuple[str, ...]  # local paths in reading order, or URLs, or one pattern of URLs
    column: str
    where: str  # as the user wrote it
    pinned: str | None = None  # the user's own label for remote files; None: local, known by contents

    def identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {"source": "files", "kind": self.kind}
        if self.kind != "txt":
            identity["text_column"] = self.column
        if self.pinned is not None:
            return identity | {"files": self.where, "revision": self.pinned}
        with closing(self.documents(0)) as texts:  # a wrong column shows now, not when machines are rented
            next(texts)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return identity | {"sha256": list(pool.map(_sha256, self.paths))}

    def files(self) -> int | None:
        return None if self._is_pattern else len(self.paths)

    def documents(self, start: int, part: int = 0, parts: int = 1) -> Texts:
        paths = tuple(_of_part(self._found(), part, parts, self.where))
        texts = (
            self._parquet(paths, start)
            if self.kind == "parquet"
            else self._text(paths, start, self._named(part, parts))
        )
        first = list(itertools.islice(texts, 1))
        if not first and not start and parts == 1:  # one part of several may well be empty
            raise UserError(f"tokens.source: '{self.where}' holds no documents; at least one is needed")
        return _joined(first, texts)

    @property
    def _is_pattern(self) -> bool:
        return self.pinned is not None and glob.has_magic(self.paths[0])

    def _found(self) -> tuple[str, ...]:
        """The paths, with a pattern of URLs resolved: asking a server waits until documents are wanted."""
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
        return _column(stream, self.column, self.where, start - (ends[first] - rows[first]))

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
            raise UserError(f"tokens.source: '{path}' can't be read as parquet ({_reason(error)})") from error
        _check_column(schema, self.column, path)
        return rows

    def _named(self, part: int, parts: int) -> str:
        """For messages that count documents: those of one part of several are counted by themselves."""
        which = f" (counted in its files {part}, {part + parts}, {part + 2 * parts}, …)" if parts > 1 else ""
        return f"'{self.where}'{which}"

    def _text(self, paths: tuple[str, ...], start: int, named: str) -> Iterator[str]:
        if self.kind == "txt" and self.pinned is None and all(path.endswith("txt") for path in paths):
            return self._plain(paths[start:])
        sample_by = "line" if self.kind == "jsonl" else "document"
        stream = self._stream("text", paths, sample_by=sample_by, encoding=ENCODING, encoding_errors="replace")
        if self.kind == "txt":
            return _column(stream, "text", self.where, start)
        lines = (line for line in _column(stream, "text", self.where, 0) if line.strip())
        return self._texts_of(itertools.islice(enumerate(lines), start, None), named)

    def _plain(self, paths: Iterable[str]) -> Iterator[str]:
        """Files as they lie here, a document each, without the second that `datasets` takes to be imported."""
        for path in paths:
            try:
                text = Path(path).read_text(ENCODING, errors="replace")
            except OSError as error:
                raise _unreadable(self.where, error) from error
            yield text

    def _texts_of(self, lines: Iterator[tuple[int, str]], named: str) -> Iterator[str]:
        for number, line in lines:
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"tokens.source: document {number} of {named} is no line of JSON ({error})") from error
            if not isinstance(row, dict) or self.column not in row:
                names = list(row) if isinstance(row, dict) else []
                raise _no_column(self.column, f"document {number} of {named}", names)
            text = row[self.column]
            if not isinstance(text, str | None):
                raise UserError(
                    f"tokens.text_column: '{self.column}' of document {number} of {named} is "
                    f"{type(text).__name__}, not a string"
                )
            yield text or ""

    def _stream(self, builder: str, paths: Iterable[str], **options: Any) -> Any:
        """A streaming dataset over exactly these files: read where they lie, nothing is cached."""
        data_files = [path if "://" in path else glob.escape(path) for path in paths]
        try:
            return _datasets().load_dataset(
                builder, data_files={"train": data_files}, split="train", streaming=True, **options
            )
        except (OSError, ImportError, ValueError) as error:
            raise self._not_opened(error) from error

    def _not_opened(self, error: Exception) -> UserError:
        return UserError(f"tokens.source: '{self.where}' could not be opened ({_reason(error)})")


def _local_files(source: str, column: str, base: Path) -> Files:
    named = Path(source).expanduser()
    path = base.absolute() / named
    if path.is_dir():
        raise UserError(f"tokens.source: '{source}' is a folder; name its files: '{source}/*.parquet'")
    # Brackets in the name of the folder itself are no pattern.
    pattern = str(Path(glob.escape(str(base.absolute()))) / named)
    found = [str(path)] if path.is_file() else sorted(glob.glob(pattern, recursive=True))
    paths = tuple(name for name in found if os.path.isfile(name))
    if not paths:
        near = difflib.get_close_matches(source, [STDLIB], n=1)
        meant = f"did you mean '{near[0]}'? " if near else ""
        raise UserError(f"tokens.source: no file matches '{source}' ({path}); {meant}would be right: {SOURCES}")
    return Files(_kind_of_all(paths), paths, column, source)


def _remote_files(source: str, revision: str | None, column: str) -> Files:
    parts = urlsplit(source)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # Fingerprints are published: a signed URL or a password must not get into one.
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
        raise UserError(f"tokens.source: '{shown}' has a user name or a query with it; use the plain address")
    kind = _kind_of_all((source,))
    if source.startswith(HUB):
        commit = _commit(source, revision)
        organisation, name, path = source.removeprefix(HUB).split("/", 2)
        pinned = f"{HUB}{organisation}/{name}@{commit}/{path}"
        return Files(kind, (pinned,), column, source, commit)
    if not revision:
        raise UserError(
            f"tokens.revision: '{source}' may change without notice; give it a label of your own, such as "
            "a date, and a new one when the files change"
        )
    return Files(kind, (source,), column, source, revision)


def _kind_of_all(paths: tuple[str, ...]) -> str:
    kinds = {_kind(path) for path in paths}
    if len(kinds) > 1:
        raise UserError(
            f"tokens.source: files of several kinds ({', '.join(sorted(kinds))}); name those of one kind, "
            "as '*.parquet'"
        )
    return kinds.pop()


def _kind(path: str) -> str:
    name = path.rpartition("/")[2].lower()
    stem, _, packing = name.rpartition(".")
    kind = stem.rpartition(".")[2] if packing in PACKED else packing
    if kind not in KINDS or (kind == "parquet" and packing in PACKED):
        raise UserError(
            f"tokens.source: '{path}': unknown kind of file; .parquet, .jsonl and .txt are known, the last "
            "two also with .gz or .zst"
        )
    if packing == "zst":
        import fsspec.utils

        if packing not in fsspec.utils.compressions:
            raise UserError(f"tokens.source: '{path}': .zst needs the package zstandard; install it")
    return kind


def _commit(source: str, revision: str | None) -> str:
    """The revision, if it is a full commit hash: a branch or tag can move, and the tokens would with it."""
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    repository = "/".join(source.removeprefix(HUB).split("/")[:2])
    given = f"'{revision}' can move" if revision else "none is given"
    raise UserError(
        f"tokens.revision: {given}; '{source}' needs the 40 hex digits of a commit, which "
        f"`git ls-remote https://huggingface.co/datasets/{repository} main` prints"
    )


def _joined(first: list[str], rest: Iterator[str]) -> Texts:
    yield from first
    yield from rest


def _column(stream: Any, column: str, where: str, start: int) -> Texts:
    """The texts of one column of a streaming dataset, from row `start` on."""
    import pyarrow as pa

    try:
        for table in stream.skip(start).with_format("arrow").iter(batch_size=ROWS):
            _check_column(table.schema, column, where)
            for text in table.column(column).to_pylist():
                yield text or ""
    except (EOFError, zlib.error, pa.ArrowInvalid, OSError) as error:  # cut off, damaged, gone
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> UserError:
    return UserError(f"tokens.source: '{where}' can't be read on ({_reason(error)})")


def _check_column(schema: Any, column: str, where: str) -> None:
    """UserError unless the Arrow schema has that column and it holds strings."""
    import pyarrow as pa

    if column not in schema.names:
        raise _no_column(column, f"'{where}'", schema.names)
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"tokens.text_column: '{column}' in '{where}' holds {kind}, not strings")


def _no_column(column: str, where: str, names: Iterable[str]) -> UserError:
    return UserError(f"tokens.text_column: no '{column}' in {where}; there: {', '.join(names) or 'none'}")


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


@functools.cache
def _datasets() -> Any:
    """The library `datasets`, without progress bars and without counting our loads on its server."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    datasets.config.TORCH_AVAILABLE = False  # else a stream imports torch, 2 s, and needs nothing of it
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else 3 s of waiting where there is no network
    return datasets
