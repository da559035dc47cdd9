"""Whether token shards can be trained on. They may come from `tokenize` or from llm.c."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.text.tokenizer import TOKENIZER_FILE
from trainer.errors import UserError
from trainer.store import sha256_of

if TYPE_CHECKING:
    import tiktoken

MANIFEST = "MANIFEST.json"
CHUNK_TOKENS = 1 << 22  # that are in memory at a time


def shard_paths(path: Path) -> list[Path]:
    """The shard of a path, or all of a folder or an artifact in order. UserError without any."""
    if path.is_file():
        return [path]
    paths = sorted({*path.glob("*.bin"), *(one for one in digests_by_manifest(path) if one.suffix == ".bin")})
    if not paths:
        raise UserError(f"{path}: contains no .bin shards; name a shard, or a folder with shards")
    return paths


def faults_of(path: Path, encoding: "tiktoken.Encoding") -> Iterator[str]:
    """What is wrong with a shard: its header, its size, an id that the tokenizer lacks, no document, its sha256."""
    import numpy as np

    from trainer.data.shards import HEADER_BYTES, shard_at

    if not path.exists():
        yield "missing, and its MANIFEST.json names it; run tokenize again"
        return
    try:
        shard = shard_at(path)
    except UserError as error:
        yield str(error).removeprefix(f"{path}: ")
        return
    largest = documents = 0
    with path.open("rb") as file:
        file.seek(HEADER_BYTES * shard.header)
        for _ in range(0, shard.tokens, CHUNK_TOKENS):
            tokens = np.fromfile(file, f"<u{shard.token_bytes}", CHUNK_TOKENS)
            largest = max(largest, int(tokens.max()))
            documents += int((tokens == encoding.eot_token).sum())
    if largest >= encoding.n_vocab:
        yield f"its largest id is {largest}, and the tokenizer has {encoding.n_vocab:,} ids"
    if not documents:
        yield f"no document begins here: no token {encoding.eot_token} (<|endoftext|>)"
    digests = digests_by_manifest(artifact_of(path))
    if digests and path not in digests:
        yield f"{MANIFEST} does not name it"
    elif digests and digests[path] != sha256_of(path):
        yield f"its sha256 is not that of {MANIFEST}"


def tokenizer_by_manifest(shard: Path) -> str:
    """The tokenizer of a shard by its MANIFEST.json: a name, or the path of a file. Without one "gpt2", as in llm.c."""
    folder = artifact_of(shard)
    named = manifest_in(folder).get("identity", {}).get("tokenizer", "gpt2")
    return named if isinstance(named, str) else str(folder / TOKENIZER_FILE)


def artifact_of(shard: Path) -> Path:
    """The folder of a shard, or the one above it if that has the manifest: a store has folders of attempts."""
    above = shard.parent.parent
    return above if (above / MANIFEST).is_file() and not (shard.parent / MANIFEST).is_file() else shard.parent


def digests_by_manifest(folder: Path) -> dict[Path, str]:
    """The sha256 of each file that the MANIFEST.json of a folder names. UserError if it cannot be read."""
    digests = {}
    for file in manifest_in(folder).get("files", []):
        if not file.get("at"):  # shards elsewhere belong to another artifact
            stored = folder / file.get("key", file["name"])
            digests[stored if stored.parent.is_dir() else folder / file["name"]] = file["sha256"]
    return digests


def manifest_in(folder: Path) -> dict[str, Any]:
    """The MANIFEST.json of a folder, empty without one. UserError if it cannot be read."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        return content if isinstance(content, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / MANIFEST}: not a manifest ({error}); remove it or bring it again") from error
