"""Text in a fixed order, from a source that one string of a recipe names.

A source has an identity, which decides its bytes and enters the fingerprint, and documents, numbered from 0 in a fixed
order: an interrupted run resumes at document number n. The files of a source can be distributed over several parts
(file j belongs to part j mod parts); each part numbers its documents from 0. A source must be pinned to a version.
"""

import difflib
import os
import re
import sysconfig
from collections.abc import Generator, Hashable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from pipelines.recipe import LLMC, TokensConfig
from pipelines.text.columns import Batches, texts_of
from pipelines.text.files import Files, check_parts, common_kind
from pipelines.text.hub import HUB, HubDataset, pinned_commit
from pipelines.text.library import STDLIB, StandardLibrary
from pipelines.text.local import local_paths
from trainer.errors import UserError

# A rule of thumb: GPT-2's tokens are a little longer in English, and shorter in code and in other languages.
BYTES_PER_TOKEN = {"gpt2": 4.0, "bytes": 1.0}
REMOTE = ("https", "http", "s3", "hf")
SOURCES = f"{STDLIB}, {HUB}ORG/NAME, or a path, glob or URL of .parquet, .jsonl or .txt files"


class Source(Protocol):
    """A source of text, pinned to a version."""

    def identity(self) -> dict[str, Any]:
        """Its canonical identity, for the fingerprint: equal identities give equal documents."""
        ...

    def files(self) -> int | None:
        """The number of its files; None if only a server knows."""
        ...

    def text_bytes(self) -> int | None:
        """About the bytes of its text; None if only a server knows, or if it is packed."""
        ...

    def state(self) -> Mapping[str, Hashable]:
        """Its files by name, each with a state that changes when the file does; none for a pinned text."""
        ...

    def batches(self, start: int, part: int = 0, parts: int = 1) -> Batches:
        """The documents of a part in their fixed order, from number `start` on. UserError if it cannot be read."""
        ...


def source_identity(
    source: str,
    subset: str | None,
    revision: str | None,
    text_column: str,
    base: Path | None = None,
    parts: int = 1,
) -> dict[str, Any]:
    """The identity of a source, for the fingerprint: equal identities give equal documents.

    The identity of local files is the sha256 of their contents, in reading order, without their paths; of the standard
    library, one sha256 over paths and contents; of objects in S3, their ETags; of other remote text, its revision.
    Reads all local bytes; only S3 is asked. Relative paths start at `base` (default: the current directory).
    UserError for a source that does not exist, cannot be pinned, or has fewer files than `parts`.
    """
    text = open_source(source, subset, revision, text_column, base)
    if (files := text.files()) is not None:
        check_parts(files, parts, source)
    return text.identity()


def estimated_tokens(config: TokensConfig) -> int | None:
    """About the number of tokens of a text that is not tokenized yet; None if only a server knows."""
    if (tokens := declared_tokens(config)) is not None and config.max_tokens is None:
        return tokens
    text = open_source(config.source, config.subset, config.revision, config.text_column, None)
    if (size := text.text_bytes()) is None:
        return tokens
    estimate = int(size / BYTES_PER_TOKEN[config.tokenizer if config.tokenizer == "bytes" else "gpt2"])
    return estimate if tokens is None else min(estimate, tokens)


def declared_tokens(config: TokensConfig) -> int | None:
    """Tokens by the recipe's limit, or by the number in the subset's name (sample-10BT); None without either."""
    if config.max_tokens is not None:
        return config.max_tokens
    billions = re.search(r"(\d+)BT\b", config.subset or "")
    return int(billions[1]) * 1_000_000_000 if billions else None


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
) -> Generator[str, None, None]:
    """The documents of one part of the source in their fixed order, from number `start` on.

    Parquet files that lie entirely before `start` are not read. A null text is an empty document, so that document
    numbers are row numbers. UserError as for `source_identity`, and for damaged files. Close it (`contextlib.closing`)
    if you stop before its end: `datasets` reports an open parquet file when Python exits.
    """
    text = open_source(source, subset, revision, text_column, base)
    return texts_of(text.batches(start, part, parts))


def open_source(source: str, subset: str | None, revision: str | None, text_column: str, base: Path | None) -> Source:
    """The source that the fields of a recipe name. UserError if they do not fit together."""
    scheme, separator, _ = source.partition("://")
    if separator and scheme not in REMOTE:
        raise UserError(f"tokens.source: '{source}': unknown scheme '{scheme}'; use {SOURCES}")
    repository = source.removeprefix(HUB).split("/") if source.startswith(HUB) else []
    if scheme == "hf" and separator and (len(repository) < 2 or not all(repository) or "@" in source):
        raise UserError(
            f"tokens.source: '{source}' is not a dataset on the Hub; use '{HUB}ORG/NAME', with the commit "
            "in tokens.revision"
        )
    if len(repository) == 2:
        return HubDataset("/".join(repository), subset, pinned_commit(source, revision), text_column)
    if subset is not None:
        raise UserError(f"tokens.subset: '{source}' has no subsets; only {HUB}ORG/NAME has them; remove it")
    if separator:
        return remote_files(source, revision, text_column)
    if revision is not None:
        raise UserError(f"tokens.revision: '{source}' is local and identified by its contents; remove the revision")
    if source == STDLIB:
        return StandardLibrary(Path(sysconfig.get_path("stdlib")))
    return local_files(source, text_column, base or Path())


def local_files(source: str, column: str, base: Path) -> Files:
    """The local files of a path or pattern, sorted by name. UserError if none matches."""
    path = os.path.join(base.absolute(), os.path.expanduser(source))
    if os.path.isdir(path):
        raise UserError(
            f"tokens.source: '{source}' is a folder; name its files: '{source}/*.parquet'"
            f", or {LLMC}{source} for token shards"
        )
    paths = tuple(local_paths(source, base))
    if not paths:
        near = difflib.get_close_matches(source, [STDLIB], n=1)
        meant = f"did you mean '{near[0]}'? " if near else ""
        raise UserError(f"tokens.source: no file matches '{source}' ({path}); {meant}use {SOURCES}")
    return Files(common_kind(paths), paths, column, source)


def s3_files(source: str, revision: str | None, column: str) -> Files:
    """The objects of a URL or pattern in S3. UserError for a revision, and if none matches."""
    from pipelines.text.objects import matching_objects

    if revision is not None:
        raise UserError(f"tokens.revision: '{source}' is identified by the ETags of its objects; remove the revision")
    found = matching_objects(source)
    return Files(common_kind(tuple(found)), tuple(found), column, source, objects=tuple(found.values()))


def remote_files(source: str, revision: str | None, column: str) -> Files:
    """The remote files of a URL or pattern. UserError without a revision, or for a URL with a secret."""
    parts = urlsplit(source)
    is_pattern = parts.scheme == "s3"  # a question mark is one character there
    if "@" in parts.netloc or (not is_pattern and (parts.query or parts.fragment)):
        # Manifests are published: they must not contain a signed URL or a password.
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
        raise UserError(f"tokens.source: '{shown}' contains a user name or a query; use the plain address")
    if parts.scheme == "s3":
        return s3_files(source, revision, column)
    kind = common_kind((source,))
    if source.startswith(HUB):
        commit = pinned_commit(source, revision)
        organisation, name, path = source.removeprefix(HUB).split("/", 2)
        pinned = f"{HUB}{organisation}/{name}@{commit}/{path}"
        return Files(kind, (pinned,), column, source, commit)
    if not revision:
        raise UserError(
            f"tokens.revision: '{source}' may change without notice; give it your own label, such as "
            "a date, and a new label when the files change"
        )
    return Files(kind, (source,), column, source, revision)
