"""The stage tokenize: which shards it makes again, and which texts it rejects."""

import re
import resource
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from stage_work import SMALL, tokenized
from texts import FourFiles, made

from pipelines.recipe.loader import load_recipe
from pipelines.run.stage import Work
from pipelines.run.stages.tokenize import check_splits
from pipelines.run.text.receipts import existing_receipts
from pipelines.run.text.shard_writer import SplitShard
from pipelines.store.manifest import File
from trainer.config.errors import UserError
from trainer.data.shards import read_shard


def test_shards_that_the_store_lost_are_made_again(tmp_path: Path) -> None:
    files = FourFiles(tmp_path)
    before = made(files.job(tmp_path / "store", 1))
    mine = files.job(tmp_path / "store", 2)
    shards = [e.key for e in mine.store.entries(f"{mine.plan.prefix}/a0001/")]
    mine.store.delete(shards[-1])
    again = made(mine)
    assert again[0] == before[0] and 0 < again[1] < before[1]
    stored = {entry.key for entry in mine.store.entries("")}
    receipts = existing_receipts(mine.store, mine.plan)
    assert receipts and {f"{mine.plan.prefix}/{one.file.key}" for one in receipts} <= stored


@pytest.mark.parametrize("source", ["own", "mixture"])
def test_a_finished_text_leaves_its_shards_alone_and_counts_the_document_that_is_cut(
    work: Callable[[str], Work], tmp_path: Path, source: str
) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("some text " * 10)
    mine = work("tokenize")
    text = f"{{source: {tmp_path}/*.txt, weight: 1, max_tokens: 650}}"
    fields = [f"tokens.source={tmp_path}/*.txt", "tokens.max_tokens=650"]
    mixed = ["tokens.source=''", f"tokens.sources=[{text}]", "tokens.max_tokens=null"]
    recipe = load_recipe(
        "smoke", [*SMALL, "tokens.val_shards=null", "tokens.val_tokens=100", *(fields if source == "own" else mixed)]
    )
    manifest = tokenized(mine, recipe)
    left = {entry.key.rpartition("/")[2] for entry in mine.store.entries("tokens/") if re.search(r"/a\d+/", entry.key)}
    assert left == {"val_000000.bin", "train_000000.bin"}
    assert not existing_receipts(mine.store, mine.plan)  # so without its manifest all shards are made again
    shards = [read_shard(tmp_path / "store" / entry.key) for entry in mine.store.entries("tokens/")
              if entry.key.endswith(".bin")]  # fmt: skip
    assert manifest.facts["documents"] == sum(int((shard == 256).sum()) for shard in shards) == 7


def test_a_shard_beyond_the_memory_of_the_machine_is_refused(work: Callable[[str], Work], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 100)
    fields = [f"tokens.source={tmp_path}/a.txt", "tokens.max_tokens=null", f"tokens.shard_tokens={2**31 - 1}"]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 30), limits[1]))
    try:
        with pytest.raises(UserError, match=r"tokenize: not enough free memory .* \(.* 4.00 GiB .*lower tokens.sha"):
            tokenized(work("tokenize"), load_recipe("smoke", [*SMALL, *fields]))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_text_without_a_training_sequence_is_refused() -> None:
    recipe = load_recipe("smoke", SMALL)
    config = recipe.tokens.model_copy(update={"shard_tokens": 1500, "val_shards": 2})
    shards = [SplitShard(File(f"{name}.bin", "", 0, ""), n, 0) for name, n in (("val_000000", 1500), ("val_000001", 9))]
    with pytest.raises(UserError, match="no training shard holds a sequence"):
        check_splits(recipe.model_copy(update={"tokens": config}), shards)
