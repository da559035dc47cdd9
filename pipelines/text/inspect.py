"""A look into token shards in llm.c's format: what they hold, and whether they can be trained on.

The files may come from `tokenize` or from llm.c. A document begins with <|endoftext|>. One that lies in two shards is
counted where it begins, with its length in that shard, and not compared with others.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError
from trainer.store import sha256_of

if TYPE_CHECKING:
    import numpy as np
    import tiktoken

PEEK_TOKENS = 60
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
    lengths: "np.ndarray[Any, Any]" = field(repr=False)  # of the documents that begin here, in tokens
    digests: "np.ndarray[Any, Any]" = field(repr=False)  # uint64, of the documents that lie here as a whole
    faults: tuple[str, ...] = ()


def shard_paths(path: Path) -> list[Path]:
    """The shard of a path, or all of a folder in order. UserError without any."""
    if path.is_dir():
        paths = sorted(p for p in path.glob("*.bin") if p.is_file())
        if not paths:
            raise UserError(f"{path}: contains no .bin shards; name a shard, or a folder with shards")
        return paths
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder; name a shard, or a folder with shards")
    return [path]


def contents_of(path: Path, encoding: "tiktoken.Encoding") -> ShardContents:
    """Read a shard whole. UserError if it is no shard, or truncated.

    Its faults: an id that the tokenizer does not have, and no document at all.
    """
    import numpy as np

    from trainer.shards import read_shard, shard_at

    shard = shard_at(path)
    tokens = read_shard(path, shard.header)
    starts = np.flatnonzero(tokens == encoding.eot_token)
    ends = np.append(starts[1:], len(tokens))
    largest = int(tokens.max(initial=0))
    faults = []
    if largest >= encoding.n_vocab:
        outside = np.flatnonzero(tokens >= encoding.n_vocab)
        first_one = f"the first {tokens[outside[0]]} at token {outside[0]:,}"
        faults.append(f"{len(outside):,} ids outside the {encoding.n_vocab:,} of the tokenizer, {first_one}")
    if len(starts) == 0:
        faults.append(f"no document begins here: no token {encoding.eot_token} (<|endoftext|>)")
    first = int(starts[0]) + 1 if len(starts) else 0
    known = [int(i) for i in tokens[first : first + PEEK_TOKENS] if i < encoding.n_vocab]
    return ShardContents(
        path,
        len(tokens),
        len(starts),
        len(tokens) > 0 and (len(starts) == 0 or int(starts[0]) > 0),
        largest,
        encoding.decode(known),
        ends - starts,
        # The last document may go on in the next shard.
        np.fromiter((_digest(tokens[a:b]) for a, b in zip(starts[:-1], ends[:-1], strict=True)), np.uint64),
        tuple(faults),
    )


def _digest(document: "np.ndarray[Any, Any]") -> int:
    return int.from_bytes(blake2b(document.tobytes(), digest_size=8).digest(), "little")


def contents_of_all(paths: Iterable[Path], encoding: "tiktoken.Encoding") -> Iterator[ShardContents]:
    """The contents of shards, in order; a file that is no sound shard has its fault instead of contents."""
    import numpy as np

    empty = np.empty(0, np.uint64)
    for path in paths:
        try:
            yield contents_of(path, encoding)
        except UserError as error:
            yield ShardContents(path, 0, 0, False, 0, "", empty, empty, (str(error).removeprefix(f"{path}: "),))


def faults_by_manifest(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """The shards whose sha256 is not that of the MANIFEST.json in their folder, or that it does not name.

    UserError for a manifest that cannot be read. Without a manifest there is nothing to compare with.
    """
    for folder in sorted({path.parent for path in paths}):
        manifest = folder / "MANIFEST.json"
        if not manifest.is_file():
            continue
        try:
            named = {file["name"]: file["sha256"] for file in json.loads(manifest.read_bytes())["files"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{manifest}: not a manifest ({type(error).__name__}); remove it or bring it again"
            ) from error
        for path in paths:
            if path.parent != folder:
                continue
            if path.name not in named:
                yield path, "MANIFEST.json does not name it"
            elif sha256_of(path) != named[path.name]:
                yield path, "its sha256 is not that of MANIFEST.json"


@dataclass(frozen=True)
class ShardSet:
    """Sums over all shards."""

    tokens: int
    documents: int
    duplicates: int  # documents that are equal to an earlier one
    lengths: tuple[tuple[str, int], ...]  # of the documents: a range in tokens, and their number
    longest: int


def sums_of(shards: Sequence[ShardContents]) -> ShardSet:
    import numpy as np

    lengths = np.concatenate([shard.lengths for shard in shards])
    digests = np.concatenate([shard.digests for shard in shards])
    counts = np.bincount(np.searchsorted(LENGTH_BOUNDS, lengths, side="right"), minlength=len(LENGTH_BOUNDS) + 1)
    bounds = (0, *LENGTH_BOUNDS)
    names = [f"{a:,} to {b - 1:,}" for a, b in zip(bounds, bounds[1:], strict=False)] + [f"{bounds[-1]:,} or more"]
    return ShardSet(
        sum(shard.tokens for shard in shards),
        sum(shard.documents for shard in shards),
        len(digests) - len(np.unique(digests)),
        tuple(zip(names, counts.tolist(), strict=True)),
        int(lengths.max(initial=0)),
    )
