"""Shards that exist are adopted where they lie: read once, verified whenever they are read, never removed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from servers import S3Account
from stage_work import SMALL, tokenized

from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.run.gc import collect
from pipelines.run.stage import Work
from pipelines.run.stages import tokenize
from pipelines.run.text.llmc_shards import places_of
from pipelines.store.manifest import DamagedArtifact, Manifest
from pipelines.store.s3_store import S3Store
from pipelines.store.shard_cache import ShardCache, shards_in
from trainer.base.store import Store
from trainer.config.errors import UserError
from trainer.data.batches import TokenData
from trainer.data.shards import read_shard, write_shard

EOT = 256


def text(seed: int, documents: int = 60) -> np.ndarray:
    random = np.random.RandomState(seed)
    rows = [np.append(EOT, random.randint(0, 256, random.randint(1, 30))) for _ in range(documents)]
    return np.concatenate(rows).astype(np.uint16)


def llmc_shards(folder: Path) -> Path:
    """As llm.c's dev/data/fineweb.py names them."""
    folder.mkdir(parents=True)
    for name, seed in (("val_000000", 0), ("train_000001", 1), ("train_000002", 2)):
        write_shard(folder / f"fineweb_{name}.bin", text(seed))
    (folder / "hellaswag_val.jsonl").write_text("no shard")
    return folder


def nanogpt_shards(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, seed in (("val", 0), ("train", 1)):
        text(seed).tofile(folder / f"{name}.bin")
    return folder


def recipe_of(source: str, *changes: str) -> Recipe:
    return load_recipe("smoke", [*SMALL, f"tokens.source=llmc://{source}", "tokens.max_tokens=null", *changes])


def adopted(work: Work, source: str, *changes: str, store: Store | None = None) -> Manifest:
    """The tokens of a recipe, as the stage makes them."""
    work.store = store or work.store
    return tokenized(work, recipe_of(source, *changes))


def tokens_of(work: Work, manifest: Manifest, split: str) -> list[list[int]]:
    cache = ShardCache(work.store, manifest, work.home / "cache", "auto", places_of(work.recipe.tokens))
    return [read_shard(cache.fetch(shard.name), shard.header).tolist() for shard in shards_in(manifest, split)]


@pytest.mark.parametrize("make", [llmc_shards, nanogpt_shards])
def test_a_folder_of_shards_is_adopted_in_place(
    work: Callable[[str], Work], tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    mine, source = work("tokenize"), make(tmp_path / "their shards")
    before = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    manifest = adopted(mine, str(source))
    train = [text(seed) for seed in ((1, 2) if make is llmc_shards else (1,))]
    assert tokens_of(mine, manifest, "train") == [tokens.tolist() for tokens in train]
    assert tokens_of(mine, manifest, "val") == [text(0).tolist()]
    facts = manifest.facts
    assert facts["train_tokens"] == sum(map(len, train)) and facts["val_tokens"] == len(text(0))
    assert facts["documents"] == 60 * (1 + len(train)) and set(facts["max_ids"].values()) == {EOT}
    # Nothing was copied, changed or put beside them; gc leaves them alone.
    assert not [entry for entry in mine.store.entries(f"{manifest.prefix}/") if entry.key.endswith(".bin")]
    list(collect(mine.store, 0.0))
    assert {path: path.stat().st_mtime_ns for path in source.iterdir()} == before
    # Its identity is the contents, not the place.
    moved = source.rename(tmp_path / "elsewhere")
    assert tokenize.plan(recipe_of(str(moved)), {}).identity == manifest.identity


def test_adopted_shards_that_change_are_refused_when_they_are_read(work: Callable[[str], Work], tmp_path: Path) -> None:
    mine, source = work("tokenize"), llmc_shards(tmp_path / "shards")
    manifest = adopted(mine, str(source))
    (source / "fineweb_train_000002.bin").unlink()
    write_shard(source / "fineweb_train_000001.bin", text(7))
    with pytest.raises(DamagedArtifact, match=r"fineweb_train_000001.bin: changed after it was adopted: .*; run again"):
        tokens_of(mine, manifest, "train")
    with pytest.raises(UserError, match="changed after its artifact was planned"):
        tokenize.build(mine)
    assert tokenize.plan(mine.recipe, {}).fingerprint != manifest.fingerprint


def test_shards_in_s3_are_adopted_in_place_and_fetched_from_there(
    work: Callable[[str], Work],
    tmp_path: Path,
    moto_server: S3Account,
    fresh_s3_store: Callable[[S3Account], S3Store],
) -> None:
    store, mine = fresh_s3_store(moto_server), work("tokenize")
    theirs = S3Store(store.bucket, "their/shards")
    for path in llmc_shards(tmp_path / "shards").iterdir():
        theirs.upload(path, path.name)
    manifest = adopted(mine, theirs.uri, store=store)
    assert tokens_of(mine, manifest, "train") == [text(1).tolist(), text(2).tolist()]
    assert {file.at for file in manifest.files} == {theirs.uri}
    assert not [entry for entry in store.entries(f"{manifest.prefix}/") if entry.key.endswith(".bin")]
    assert len([path for path in mine.folder.rglob("*") if path.is_file()]) == 0
    theirs.upload(tmp_path / "shards" / "fineweb_train_000002.bin", "fineweb_train_000001.bin")
    assert tokenize.plan(mine.recipe, {}).fingerprint != manifest.fingerprint
    # Other machines cannot read a folder of this one: into a bucket its shards are copied.
    copied = adopted(mine, str(tmp_path / "shards"), store=store)
    assert tokens_of(mine, copied, "train") == [text(1).tolist(), text(2).tolist()]
    assert {file.at for file in copied.files} == {None}


def test_adopted_shards_can_be_packed(work: Callable[[str], Work], tmp_path: Path) -> None:
    mine, source = work("tokenize"), llmc_shards(tmp_path / "shards")
    stream = tokenize.plan(recipe_of(str(source)), {}).identity
    manifest = adopted(mine, str(source), "tokens.packing=documents")
    assert manifest.identity == stream | {"packing": "documents", "row_tokens": 9}
    shards = shards_in(manifest, "train")
    cache = ShardCache(mine.store, manifest, mine.home / "cache", "auto", places_of(mine.recipe.tokens))
    data = TokenData(shards, cache.fetch, 8, 0, eot=manifest.facts["eot"])
    rows = sum(shard.rows or 0 for shard in shards)
    assert all(row[0] == EOT for row in data.windows([data.order[n] for n in range(rows)]))
    assert manifest.facts["cropped_tokens"] == manifest.facts["train_tokens"] - 9 * rows > 0
    assert all(shard.rows is None for shard in shards_in(manifest, "val"))  # validation losses stay comparable


def without_documents(folder: Path) -> None:
    for path in folder.glob("*train*.bin"):
        write_shard(path, np.full(99, 5, np.uint16))


@pytest.mark.parametrize(
    ("spoil", "changes", "message"),
    [
        (lambda f: (f / "fineweb_val_000000.bin").unlink(), (), "has no val shards; they are called val_000000.bin"),
        (lambda f: (f / "fineweb_train_000001.bin").write_bytes(b"no shard"), (), "000001.bin: not a token shard"),
        (
            lambda f: write_shard(f / "fineweb_train_000001.bin", np.full(99, 500, np.uint16)),
            (),
            "fineweb_train_000001.bin: its largest id is 500, and tokens.tokenizer has 257 ids; name the tokenizer",
        ),
        (
            lambda f: write_shard(f / "fineweb_val_000000.bin", np.full(8, 5, np.uint16)),
            (),
            "no validation shard holds a sequence of 9 tokens: the largest has 8",
        ),
        (lambda f: None, ("tokens.max_tokens=500000",), "tokens.max_tokens: llmc:.* is adopted as it is; set"),
        (
            without_documents,
            ("tokens.packing=documents",),
            "tokens.packing: no training shard fills a row of 9 tokens with documents",
        ),
    ],
)
def test_shards_that_cannot_be_trained_on_are_named_in_one_line(
    work: Callable[[str], Work], tmp_path: Path, spoil: Callable[[Path], None], changes: tuple[str, ...], message: str
) -> None:
    mine, source = work("tokenize"), llmc_shards(tmp_path / "shards")
    spoil(source)
    with pytest.raises(UserError, match=message) as refused:
        adopted(mine, str(source), *changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", ["", "no/such/folder", "https://host/shards", "s3://", "s3://user:secret@host/x"])
def test_a_place_without_shards_is_named(tmp_path: Path, place: str) -> None:
    with pytest.raises(UserError, match=r"^tokens\.source: ") as refused:
        tokenize.plan(recipe_of(place and place if ":" in place else str(tmp_path / place)), {})
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)
