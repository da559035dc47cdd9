"""The stage tokenize: which shards it makes again, and which texts it rejects."""

from pathlib import Path

import pytest
from stage_work import SMALL
from texts import FourFiles, made

from pipelines.artifacts.manifest import File
from pipelines.recipe import load_recipe
from pipelines.stages.tokenize import check_split, forget_removed_artifact
from pipelines.text.receipts import finished_receipts
from pipelines.text.shard_writer import SplitShard
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing
from trainer.errors import UserError


def test_a_finished_artifact_without_its_manifest_is_made_again(tmp_path: Path) -> None:
    files = FourFiles(tmp_path)

    def ended(number: int, state: str) -> int:
        mine = files.job(tmp_path / "store", number)
        attempt = claim(mine.store, mine.plan.prefix, "tiny-1", "tokenize", number, Billing())
        assert attempt
        with attempt:
            forget_removed_artifact(mine.store, mine.plan)
            new = made(mine)[1]
            attempt.update(state=state)
        return new

    assert ended(1, "interrupted") == 13_001
    assert ended(2, "done") == 0
    assert ended(3, "interrupted") == 13_001  # a shard was damaged, and the manifest removed as advised
    assert ended(4, "interrupted") == 0  # the shard that attempt 3 made again is kept


def test_shards_that_the_store_lost_are_made_again(tmp_path: Path) -> None:
    files = FourFiles(tmp_path)
    before = made(files.job(tmp_path / "store", 1))
    mine = files.job(tmp_path / "store", 2)
    shards = [e.key for e in mine.store.entries(f"{mine.plan.prefix}/a0001/")]
    mine.store.delete(shards[-1])
    again = made(mine)
    assert again[0] == before[0] and 0 < again[1] < before[1]
    stored = {entry.key for entry in mine.store.entries("")}
    receipts = finished_receipts(mine.store, mine.plan)
    assert receipts and {f"{mine.plan.prefix}/{one.file.key}" for one in receipts} <= stored


def test_a_text_without_a_training_sequence_is_refused() -> None:
    recipe = load_recipe("smoke", SMALL)
    config = recipe.tokens.model_copy(update={"shard_tokens": 1500, "val_shards": 2})
    shards = [SplitShard(File(f"{name}.bin", "", 0, ""), n) for name, n in (("val_000000", 1500), ("val_000001", 9))]
    with pytest.raises(UserError, match="no training sequence"):
        check_split(recipe.model_copy(update={"tokens": config}), shards)
