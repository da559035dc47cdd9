"""Text in a fixed order, from a source that one string of a recipe names.

A source has an identity, which decides its bytes and enters the fingerprint, and documents, numbered from 0 in a fixed
order: an interrupted run resumes at document number n. A source must be pinned to a version.
"""

import glob
import os
import re
import sysconfig
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelines.recipe import LLMC, TokensConfig
from pipelines.text.files import Files, common_kind
from pipelines.text.hub import HUB, HubDataset, pinned_commit
from pipelines.text.library import STDLIB, StandardLibrary
from pipelines.text.text import Text
from trainer.errors import UserError

# A rule of thumb: GPT-2's tokens are a little longer in English, and shorter in code and in other languages.
BYTES_PER_TOKEN = {"gpt2": 4.0, "bytes": 1.0}
REMOTE = ("s3", "hf")
SOURCES = f"{STDLIB}, {HUB}ORG/NAME, or a path, pattern or s3:// URL of .parquet, .jsonl or .txt files"


def source_identity(
    source: str, subset: str | None, revision: str | None, text_column: str, base: Path | None = None
) -> dict[str, Any]:
    """The identity of a source, for the fingerprint: equal identities give equal documents.

    The identity of local files is the sha256 of their contents, in reading order, without their paths; of the standard
    library, one sha256 over paths and contents; of objects in S3, their ETags; of other remote text, its revision.
    Reads all local bytes; only S3 is asked. Relative paths start at `base` (default: the current directory).
    UserError for a source that does not exist or cannot be pinned.
    """
    return open_source(source, subset, revision, text_column, base).identity()


def estimated_tokens(config: TokensConfig) -> int | None:
    """About the number of tokens of a text that is not tokenized yet; None if only a server knows."""
    if (tokens := declared_tokens(config)) is not None and config.max_tokens is None:
        return tokens
    text = text_of(config)
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


def text_of(config: TokensConfig) -> Text:
    """The text of a recipe."""
    return open_source(config.source, config.subset, config.revision, config.text_column)


def open_source(
    source: str, subset: str | None, revision: str | None, text_column: str, base: Path | None = None
) -> Text:
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
    # Brackets in the name of the base folder are not a pattern, and a file may have any name.
    pattern = os.path.join(glob.escape(str((base or Path()).absolute())), os.path.expanduser(source))
    path = os.path.join((base or Path()).absolute(), os.path.expanduser(source))
    if os.path.isdir(path):
        raise UserError(
            f"tokens.source: '{source}' is a folder; name its files: '{source}/*.parquet'"
            f", or {LLMC}{source} for token shards"
        )
    found = [path] if os.path.isfile(path) else sorted(glob.glob(pattern, recursive=True))
    paths = tuple(name for name in found if not os.path.isdir(name))
    if not paths:
        raise UserError(f"tokens.source: no file matches '{source}' ({path}); use {SOURCES}")
    return Files(common_kind(paths), paths, text_column, source)


def remote_files(source: str, revision: str | None, column: str) -> Files:
    """The files of a URL or pattern on the Hub or in S3. UserError without a commit, or for a URL with a secret."""
    if source.startswith(HUB):
        commit = pinned_commit(source, revision)
        organisation, name, path = source.removeprefix(HUB).split("/", 2)
        return Files(common_kind((source,)), (f"{HUB}{organisation}/{name}@{commit}/{path}",), column, source, commit)
    from pipelines.text.objects import matching_objects

    if "@" in urlsplit(source).netloc:  # manifests are published
        raise UserError("tokens.source: the address contains a user name; use the plain address")
    if revision is not None:
        raise UserError(f"tokens.revision: '{source}' is identified by the ETags of its objects; remove the revision")
    found = matching_objects(source)
    return Files(common_kind(tuple(found)), tuple(found), column, source, objects=tuple(found.values()))
