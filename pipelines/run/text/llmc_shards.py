"""Shards that exist already: a folder or a prefix in S3 with the shards of tokenize, llm.c or nanoGPT.

`tokens.source: llmc://PLACE` adopts them. The stage reads each shard once (header, ids, sha256), and its manifest names
the files where they lie: nothing is copied, and gc never removes them. Only shards in a folder of this machine go into
a bucket as copies, because other machines could not read them in place.
"""

import re
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipelines.recipe.tokens_config import LLMC, TokensConfig
from pipelines.run.text.shard_writer import SplitShard, rows_in
from pipelines.store.manifest import File
from pipelines.store.s3_store import S3Store, open_store
from pipelines.store.secrets import redacted
from trainer.base.store import Entry, LocalStore, Store, sha256_of
from trainer.config.errors import UserError

AT_ONCE = 4  # shards that are read beside each other


def is_remote(source: str) -> bool:
    """Whether other machines can read a source."""
    return "://" in source.removeprefix(LLMC)


def place_in(config: TokensConfig) -> Store:
    """The folder or prefix that holds the shards. UserError for any other source."""
    place = config.source.removeprefix(LLMC)
    for field in ("subset", "max_tokens"):
        if getattr(config, field) is not None:
            raise UserError(f"tokens.{field}: {config.source} is adopted as it is; set tokens.{field} to null")
    try:
        store = open_store(place)
    except UserError as error:
        raise UserError(
            f"tokens.source: '{redacted(config.source)}': not a place of shards; "
            f"write {LLMC}FOLDER or {LLMC}s3://BUCKET/PREFIX"
        ) from error
    if isinstance(store, LocalStore) and not store.root.is_dir():
        raise UserError(
            f"tokens.source: '{config.source}': {store.root} is not a folder; name the folder of the shards"
        )
    return store


def places_of(config: TokensConfig) -> set[str]:
    """The URIs of the places whose shards a recipe adopts."""
    return {open_store(one.source.removeprefix(LLMC)).uri for one in config.each() if one.adopts}


def shards_found(config: TokensConfig) -> dict[str, Entry]:
    """The shards of a place by their names in the artifact (train_000000.bin …), in the order of their own names.
    UserError unless both splits have some."""
    from trainer.data.shards import split_of

    store, found = place_in(config), dict[str, Entry]()
    if isinstance(store, S3Store):
        files = [one for one in store.objects("") if "/" not in one.key]
    else:
        assert isinstance(store, LocalStore)
        files = [Entry(path.name, path.stat().st_size, 0) for path in store.root.glob("*.bin") if path.is_file()]
    files.sort(key=lambda one: one.key)
    for split in ("train", "val"):
        mine = [one for one in files if split_of(one.key) == split]
        if not mine:
            raise UserError(
                f"tokens.source: '{config.source}' has no {split} shards; they are called {split}_000000.bin, "
                f"NAME_{split}_000000.bin or {split}.bin"
            )
        found |= {f"{split}_{n:06d}.bin": one for n, one in enumerate(mine)}
    return found


def identity_of_shards(config: TokensConfig) -> dict[str, Any]:
    """The identity of adopted shards: sha256 of local files, ETags of objects, by split in the order of reading."""
    store, found = place_in(config), shards_found(config)
    kind, contents = "etag", [one.etag.strip('"') for one in found.values()]
    if isinstance(store, LocalStore):
        with ThreadPoolExecutor() as pool:
            kind, contents = "sha256", list(pool.map(lambda one: sha256_of(store.root / one.key), found.values()))
    named = list(zip(found, contents, strict=True))
    splits = {split: [content for name, content in named if name.startswith(split)] for split in ("train", "val")}
    return {"source": "shards", **{split: {kind: several} for split, several in splits.items()}}


def label_of(config: TokensConfig) -> str:
    """A short name for folders: the last folder of the place."""
    name = config.source.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "shards"


def tokens_by_split(config: TokensConfig) -> dict[str, int]:
    """About the tokens of both splits, by the sizes of the files: of uint16."""
    sizes = {name: one.size for name, one in shards_found(config).items()}
    return {split: sum(sizes[name] for name in sizes if name.startswith(split)) // 2 for split in ("train", "val")}


def adopted_shards(
    config: TokensConfig,
    vocab_size: int,
    eot: int,
    row_tokens: int | None,
    store: Store,
    folder: Path,
    upload: Callable[[Path, str], File],
) -> Generator[tuple[SplitShard, int], None, None]:
    """Read each shard once, and count its documents.

    UserError for a file that is not a shard, or that has an id outside the vocabulary. `row_tokens`: count the rows of
    packed training shards. `upload` copies a local file into the artifact if `store` is not on this machine, and
    `folder` is scratch for objects of S3.
    """
    from trainer.data.shards import read_shard, shard_at

    place, found = place_in(config), shards_found(config)

    def adopt(name: str, key: str) -> tuple[SplitShard, int]:
        here = isinstance(place, LocalStore)
        path = place.path_of(key) if isinstance(place, LocalStore) else folder / "adopting" / name / key
        if not here:
            place.download(key, path)
        try:
            tokens = read_shard(path, shard_at(path).header)
            max_id = int(tokens.max(initial=0))
            if max_id >= vocab_size:
                raise UserError(
                    f"tokens.source: {path.name}: its largest id is {max_id}, and tokens.tokenizer has "
                    f"{vocab_size:,} ids; name the tokenizer of the shards"
                )
            rows = rows_in(eot, row_tokens if name.startswith("train") else None, tokens)
            if here and not isinstance(store, LocalStore):
                file = upload(path, name)
            else:
                file = File(name, key, path.stat().st_size, sha256_of(path), place.uri)
            return SplitShard(file, len(tokens), max_id, rows), int((tokens == eot).sum())
        finally:
            if not here:
                path.unlink(missing_ok=True)

    with ThreadPoolExecutor(AT_ONCE, "adopt") as pool:
        try:
            yield from pool.map(adopt, found, [one.key for one in found.values()])
        finally:
            pool.shutdown(cancel_futures=True)
