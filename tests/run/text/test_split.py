"""The validation split: a share of the text, the same for every size of shards."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from texts import FourFiles

from pipelines.recipe.loader import load_recipe
from pipelines.recipe.tokens_config import TokensConfig
from pipelines.run.text.shard_writer import SplitShard, make_shards, split_text
from pipelines.store.manifest import fetch, upload
from trainer.base.store import LocalStore
from trainer.config.errors import UserError
from trainer.data.shards import read_shard

Tokens = dict[str, list[int]]

TOTAL = 4 * 4001  # tokens of the four files


def made(folder: Path, attempt: int = 1, **fields: Any) -> tuple[list[SplitShard], Tokens]:
    """The shards of the four files, made and then split; and their tokens by name."""
    folder.mkdir(exist_ok=True)
    files = FourFiles(folder)
    files.config = TokensConfig(source=f"{folder}/*.txt", tokenizer="bytes", **{"shard_tokens": 1500} | fields)
    store = LocalStore(folder / "store")
    *_, receipts = make_shards(files.job(store.root, attempt))
    shards = split_text(
        receipts,
        files.config,
        lambda file: fetch(store, files.plan.prefix, file, folder),
        partial(upload, store, files.plan.prefix, attempt),
        folder,
    )
    return shards, {s.file.name: read_shard(store.root / files.plan.prefix / s.file.key).tolist() for s in shards}


def held_out(tokens: Tokens) -> list[int]:
    return [token for name, shard in tokens.items() if name.startswith("val") for token in shard]


@pytest.mark.parametrize("shard_tokens", [1024, 1500, 100_000])
def test_one_percent_of_a_small_text_is_held_out_whatever_the_size_of_its_shards(
    shard_tokens: int, tmp_path: Path
) -> None:
    shards, tokens = made(tmp_path / "texts", shard_tokens=shard_tokens)
    assert held_out(tokens) == [256, *b"0 " * 2000][: TOTAL // 100]
    whole = [token for shard in tokens.values() for token in shard]
    assert len(whole) == TOTAL and whole[:4001] == [256, *b"0 " * 2000]  # no token is lost or read twice
    assert [len(tokens[s.file.name]) for s in shards] == [s.tokens for s in shards]
    stored = {
        path.name: read_shard(path).tolist() for path in (tmp_path / "texts" / "store").glob("tokens/*/a*/t*.bin")
    }
    assert {name: stored[name] for name in stored if name.startswith("train")} == {
        name: shard for name, shard in tokens.items() if name.startswith("train")
    }  # a reader of the folder finds no held-out token among them
    assert len({s.file.name for s in shards}) == len({s.file.key for s in shards}) == len(shards)


def test_a_recipe_sets_the_size_of_the_validation_split(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"val_tokens": 5000}, 5000),
        ({"val_shards": 3}, 4500),
        ({"val_shards": 11}, TOTAL // 10),  # else nothing would be left to train on
        ({"val_tokens": TOTAL}, TOTAL // 10),
    ]
    for number, (fields, size) in enumerate(cases):
        _, tokens = made(tmp_path / str(number), **fields)
        assert len(held_out(tokens)) == size and sum(map(len, tokens.values())) == TOTAL


def test_a_split_that_was_interrupted_is_made_again_without_new_shards_of_text(tmp_path: Path) -> None:
    first, tokens = made(tmp_path / "texts")
    again, same = made(tmp_path / "texts", attempt=2)
    assert same == tokens
    changed = {one.file.name for one, other in zip(first, again, strict=True) if one.file.key != other.file.key}
    assert changed == {"val_000000.bin", "train_000000.bin"}


def test_two_ways_to_name_the_split_are_refused() -> None:
    with pytest.raises(UserError, match="val_tokens and val_shards are both given; remove one"):
        load_recipe("smoke", ["tokens.val_tokens=5000"])
    with pytest.raises(UserError, match="no validation shard holds a sequence of 129 tokens: the largest has 100;"):
        load_recipe("smoke", ["tokens.val_shards=null", "tokens.val_tokens=100"])
    with pytest.raises(UserError, match="no training shard holds a sequence of 129 tokens: the largest has 10;"):
        load_recipe("smoke", ["tokens.val_shards=null", "tokens.val_tokens=7999990"])
