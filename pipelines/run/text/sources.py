"""Text in a fixed order, from a source that one string of a recipe names.

A source has an identity, which decides its bytes and enters the fingerprint, and documents, numbered from 0 in a fixed
order: an interrupted run resumes at document number n. A source must be pinned to a version.
"""

import functools
import glob
import hashlib
import os
import re
import sysconfig
import tokenize
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.recipe.tokens_config import LLMC, TokensConfig
from pipelines.run.text.files import KINDS, LOADABLE, Files, TextShare, common_kind, identity_of_files, sha256_of_text
from pipelines.run.text.hub import asked, datasets_library
from trainer.config.errors import UserError
from trainer.config.source import FORMS, Kind, Source

# A rule of thumb: GPT-2's tokens are a little longer in English, and shorter in code and in other languages.
BYTES_PER_TOKEN = {"gpt2": 4.0, "bytes": 1.0}
STDLIB = "python-stdlib"
TEXTS: tuple[Kind, ...] = ("dataset", "s3", "path")
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
SOURCES = f"{STDLIB}, {FORMS['dataset']}, or a path, pattern or s3:// URL of .parquet, .jsonl or .txt files"


@dataclass(frozen=True)
class StandardLibrary(Files):
    """Every module of the running Python that can be decoded, one document each, sorted by relative path: no download,
    no account."""

    def identity(self, look: bool = True) -> dict[str, Any]:
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(f"{sha256_of_text(path)} {Path(path).relative_to(self.where).as_posix()}\n".encode())
        return {"source": STDLIB, "sha256": digest.hexdigest()}

    def read(self, piece: TextShare) -> Iterator[bytes]:
        for path in piece.names:
            try:
                with tokenize.open(path) as file:
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError):  # the declared encoding is unknown or wrong
                continue
            yield text.encode()


def standard_library() -> StandardLibrary:
    """The modules of the running Python without its tests and installed packages. UserError without any."""
    library, names = sysconfig.get_path("stdlib"), list[str]()
    for folder, below, files in os.walk(library):
        below[:] = [name for name in below if name not in NOT_LIBRARY]
        names += [(Path(folder).relative_to(library) / name).as_posix() for name in files if name.endswith(".py")]
    if not names:
        raise UserError(f"tokens.source: {STDLIB}: this Python has no .py files in {library}; name text files")
    return StandardLibrary("py", tuple(f"{library}/{name}" for name in sorted(names)), "", library)


@dataclass(frozen=True)
class HubDataset:
    """The train split of a dataset on the Hugging Face Hub at one commit, or its files of a pattern."""

    source: Source
    subset: str | None
    column: str

    def identity(self, look: bool = True) -> dict[str, Any]:
        """Its canonical identity, for the fingerprint."""
        place, commit = self.source.place, self.source.commit
        if self.source.files:
            return identity_of_files(common_kind((place,)), self.column) | {"files": place, "revision": commit}
        return {"source": place, "subset": self.subset, "revision": commit, "text_column": self.column}

    @functools.cache  # noqa: B019  (one dataset a process)
    def resolved(self) -> Files:
        """Its files. UserError for a dataset that cannot be opened: not found, gated, no such subset, no network."""
        source, load = self.source, datasets_library().load_dataset_builder
        where = source.place + (f" ({self.subset})" if self.subset else "")
        how = {"data_files": source.files or None, "revision": source.commit}
        at = f"tokens.source: {where} at {str(source.commit)[:12]}"
        builder = asked(at, lambda: load(source.name, self.subset, **how))
        files = tuple((builder.config.data_files or {}).get("train", ()))
        if not files:
            raise UserError(f"tokens.source: {where} has no files of a train split")
        return Files(common_kind(files), tuple(sorted(files)) if source.files else files, self.column, where)

    def text_bytes(self) -> None:
        """Only the Hub knows."""


Text = Files | HubDataset


def estimated_tokens(config: TokensConfig) -> int | None:
    """About the number of tokens of a text that is not tokenized yet, by its subset's name (sample-10BT) or
    its bytes; None if only a server knows."""
    most, billions = config.max_tokens, re.search(r"(\d+)BT\b", config.subset or "")
    if billions and most is None:
        return int(billions[1]) * 1_000_000_000
    if (size := text_of(config).text_bytes()) is None:
        return most
    estimate = int(size / BYTES_PER_TOKEN[config.tokenizer if config.tokenizer == "bytes" else "gpt2"])
    return estimate if most is None else min(estimate, most)


def source_label(source: str, subset: str | None) -> str:
    """Short name for folders: "python-stdlib", "fineweb-edu-sample-10BT", "files"."""
    found = Source.of(source, "tokens.source", TEXTS)
    if source == STDLIB:
        return source
    if found.kind != "dataset" or found.files:
        return "files"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(filter(None, (found.name.partition("/")[2], subset))))


def text_of(config: TokensConfig) -> Text:
    """The text of a recipe."""
    return open_source(config.source, config.subset, config.text_column)


def first_documents(source: Text) -> Generator[str, None, None]:
    """The documents of a text from its first one on, in this process."""
    for document in source.resolved().documents():
        yield document.decode()


def open_source(source: str, subset: str | None, text_column: str) -> Text:
    """The source that the fields of a recipe name.

    Its identity is the sha256 of local files' contents, in reading order, without their paths; of the standard library,
    one sha256 over paths and contents; of objects in S3, their ETags; of text on the Hub, its commit. Only S3 is asked.
    UserError if the fields do not fit together.
    """
    named = Source.of(source, "tokens.source", TEXTS)
    if named.sha256:
        raise UserError(
            f"tokens.source: remove @sha256:{named.sha256}; the tokens of a run record the content of its text"
        )
    if subset is not None and (named.kind != "dataset" or named.files):
        raise UserError(f"tokens.subset: '{source}' has no subsets; only {FORMS['dataset']} has them; remove it")
    if named.kind == "dataset":
        return HubDataset(named, subset, text_column)
    if named.kind == "s3":
        from pipelines.run.text.objects import matching_objects

        objects = matching_objects(named.place)
        return Files(common_kind(tuple(objects)), tuple(objects), text_column, named.place, objects)
    if source == STDLIB:
        return standard_library()
    source = named.name
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        endings = [Path(name).suffix for name in os.listdir(path)]
        if not endings:
            raise UserError(f"tokens.source: '{source}' is an empty folder; put .parquet, .jsonl or .txt files there")
        kind = max((*KINDS, *LOADABLE), key=lambda kind: endings.count(f".{kind}"))
        if kind in LOADABLE:
            common_kind((f"{source}/*.{kind}",))
        raise UserError(
            f"tokens.source: '{source}' is a folder; name its files: '{source}/*.{kind}', or {LLMC}{source} for token "
            "shards"
        )
    found = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))  # a file may have any name
    paths = tuple(os.path.abspath(name) for name in found if not os.path.isdir(name))
    if not paths:
        raise UserError(f"tokens.source: no file matches '{source}' ({os.path.abspath(path)}); use {SOURCES}")
    return Files(common_kind(paths), paths, text_column, source)
