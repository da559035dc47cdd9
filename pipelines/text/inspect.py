"""A look into token shards in llm.c's format: what they hold, and whether they can be trained on.

The files may come from `tokenize` or from llm.c. A document begins with <|endoftext|>. One that lies in two shards is
counted where it begins, with its length in that shard. Memory does not grow with the shards: CHUNK_TOKENS of one file.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.text.tokenizer import TOKENIZER_FILE
from trainer.errors import UserError
from trainer.store import sha256_of

if TYPE_CHECKING:
    import numpy as np
    import tiktoken

    from trainer.data.shards import Shard

MANIFEST, ATTEMPT = "MANIFEST.json", re.compile(r"a\d{4,}")  # of an artifact, and the folders beside it
PEEK_TOKENS = 60
CHUNK_TOKENS = 1 << 22  # that are in memory at a time
LENGTH_BOUNDS = (16, 64, 256, 1024, 4096, 16_384)  # of the histogram [tokens]


@dataclass(frozen=True)
class ShardContents:
    """What a shard holds, and what is wrong with it."""

    path: Path
    tokens: int
    documents: int  # that begin here
    begins_inside: bool  # its first tokens belong to the last document of the shard before
    largest_id: int
    peek: str  # the begin of its first document
    faults: tuple[str, ...]


def shard_paths(path: Path) -> list[Path]:
    """The shard of a path, or all of a folder in order: those that lie there, and those that the manifest of an
    artifact names. UserError without any."""
    if path.is_dir():
        here = {p for p in path.glob("*.bin") if p.is_file()}
        paths = sorted(here | {p for p in digests_by_manifest(path) if p.suffix == ".bin"})
        if not paths:
            raise UserError(f"{path}: contains no .bin shards; name a shard, or a folder with shards")
        return paths
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder; name a shard, or a folder with shards")
    return [path]


class Documents:
    """The documents of all shards: the histogram of their lengths [tokens], and how many came before."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LENGTH_BOUNDS) + 1)
        self.longest = 0

    def add_lengths(self, lengths: "np.ndarray") -> None:
        """Count documents of these lengths (n,)."""
        import numpy as np

        for place, count in enumerate(np.bincount(np.searchsorted(LENGTH_BOUNDS, lengths, side="right")).tolist()):
            self.counts[place] += count
        self.longest = max(self.longest, int(lengths.max(initial=0)))

    def lengths(self) -> list[tuple[str, int]]:
        """The histogram: a range in tokens, and its number of documents."""
        bounds = (0, *LENGTH_BOUNDS)
        names = [f"{a:,} to {b - 1:,}" for a, b in zip(bounds, bounds[1:], strict=False)] + [f"{bounds[-1]:,} or more"]
        return list(zip(names, self.counts, strict=True))


def contents_of(path: Path, encoding: "tiktoken.Encoding", documents: Documents) -> ShardContents:
    """Read a shard whole, and add its documents. UserError if it is no shard, or truncated.

    Its faults: an id that the tokenizer does not have, and no document at all.
    """
    import numpy as np

    from trainer.data.shards import shard_at

    shard = shard_at(path)
    open_since = -1  # where the last document began
    count = largest = outside = 0
    first, first_outside = -1, ""
    for at in range(0, shard.tokens, CHUNK_TOKENS):
        tokens = tokens_of(path, shard, at, CHUNK_TOKENS)
        starts = np.flatnonzero(tokens == encoding.eot_token)
        bounds = [open_since, *(starts + at)] if open_since >= 0 else starts + at
        documents.add_lengths(np.diff(bounds))
        open_since = int(bounds[-1]) if len(bounds) else -1
        if count == 0 and len(starts):
            first = at + int(starts[0])
        count += len(starts)
        largest = max(largest, int(tokens.max()))
        if largest >= encoding.n_vocab:
            wrong = np.flatnonzero(tokens >= encoding.n_vocab)
            if len(wrong) and not outside:
                first_outside = f"the first {tokens[wrong[0]]} at token {at + int(wrong[0]):,}"
            outside += len(wrong)
    if open_since >= 0:  # the last document may go on in the next shard
        documents.add_lengths(np.array([shard.tokens - open_since]))
    faults = []
    if outside:
        faults.append(f"{outside:,} ids outside the {encoding.n_vocab:,} of the tokenizer, {first_outside}")
    if count == 0:
        faults.append(f"no document begins here: no token {encoding.eot_token} (<|endoftext|>)")
    known = [int(i) for i in tokens_of(path, shard, first + 1, PEEK_TOKENS) if i < encoding.n_vocab]
    begins_inside = shard.tokens > 0 and first != 0
    return ShardContents(path, shard.tokens, count, begins_inside, largest, encoding.decode(known), tuple(faults))


def tokens_of(path: Path, shard: "Shard", first: int, count: int) -> "np.ndarray":
    """Up to `count` tokens of a shard from number `first` on. A map of the file would count as memory."""
    import numpy as np

    from trainer.data.shards import HEADER_BYTES

    offset = HEADER_BYTES * shard.header + shard.token_bytes * first
    return np.fromfile(path, f"<u{shard.token_bytes}", count, offset=offset)


def contents_of_all(
    paths: Iterable[Path], encoding: "tiktoken.Encoding", documents: Documents
) -> Iterator[ShardContents]:
    """The contents of shards, in order; a file that is no sound shard has its fault instead of contents."""
    for path in paths:
        try:
            if not path.exists():
                raise UserError("missing, and its MANIFEST.json names it; run tokenize again")
            yield contents_of(path, encoding, documents)
        except UserError as error:
            yield ShardContents(path, 0, 0, False, 0, "", (str(error).removeprefix(f"{path}: "),))


def faults_by_manifest(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """The shards whose sha256 is not that of their MANIFEST.json, or that it does not name.

    UserError for a manifest that cannot be read. Without a manifest there is nothing to compare with.
    """
    for folder in sorted({path.parent for path in paths}):
        named = digests_by_manifest(folder)
        for path in paths:
            if path.parent != folder or not path.is_file():
                continue
            if path in named and sha256_of(path) != named[path]:
                yield path, "its sha256 is not that of MANIFEST.json"
            elif path not in named and (named or (folder / MANIFEST).is_file()):
                yield path, "MANIFEST.json does not name it"


def digests_by_manifest(folder: Path) -> dict[Path, str]:
    """The sha256 of each file that a MANIFEST.json names: the one in the folder, whose files lie beside it or, in a
    store, in the folders of attempts; or the one above such a folder. UserError if it cannot be read."""
    manifest = manifest_of(folder)
    if manifest is None:
        return {}
    try:
        # Shards elsewhere (`at`) belong to another artifact.
        files = [file for file in json.loads(manifest.read_bytes())["files"] if not file.get("at")]
        stored = {manifest.parent / file.get("key", file["name"]): file["sha256"] for file in files}
        beside = {folder / file["name"]: file["sha256"] for file in files}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{manifest}: not a manifest ({type(error).__name__}); remove it or bring it again") from error
    if manifest.parent == folder:
        return stored if any(path.parent.is_dir() for path in stored if path.parent != folder) else beside
    return {path: digest for path, digest in stored.items() if path.parent == folder}


def manifest_of(folder: Path) -> Path | None:
    """The MANIFEST.json in a folder, or the one above the folder of an attempt."""
    own, above = folder / MANIFEST, folder.parent / MANIFEST
    return own if own.is_file() else above if ATTEMPT.fullmatch(folder.name) and above.is_file() else None


def tokenizer_by_manifest(shard: Path) -> str:
    """The tokenizer of a shard by its MANIFEST.json: a name, or the path of a file. Without one "gpt2", as in llm.c."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # a damaged one
        if manifest := manifest_of(shard.parent):
            named = json.loads(manifest.read_bytes())["identity"]["tokenizer"]
            return named if isinstance(named, str) else str(manifest.parent / TOKENIZER_FILE)
    return "gpt2"
