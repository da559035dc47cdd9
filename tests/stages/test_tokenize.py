"""The stage tokenize: which shards it makes again, and which texts it rejects."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from stage_work import SMALL
from texts import FourFiles

from pipelines.artifacts.manifest import File
from pipelines.recipe import load_recipe
from pipelines.stages.tokenize import check_split, forget_removed_artifact
from pipelines.text.parts import PartsProgress, make_parts
from pipelines.text.split import SplitShard
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing
from trainer.errors import UserError


def test_a_finished_artifact_without_its_manifest_is_made_again(tmp_path: Path) -> None:
    files = FourFiles(tmp_path)

    def ended(number: int, state: str) -> PartsProgress:
        mine = files.job(range(3), tmp_path / "store", number)
        attempt = claim(mine.store, mine.plan.prefix, "tiny-1", "tokenize", number, Billing())
        assert attempt
        with attempt:
            forget_removed_artifact(mine.store, mine.plan)
            *_, progress = make_parts(mine)
            attempt.update(state=state)
        return progress

    assert ended(1, "interrupted").new == 12_336
    assert ended(2, "done").new == 0
    assert ended(3, "interrupted").new == 12_336  # a shard was damaged, and the manifest removed as advised
    assert ended(4, "interrupted").new == 0  # the shard that attempt 3 made again is kept


@pytest.mark.parametrize(
    ("parts", "tokens", "message"),
    [
        (2, {"train_01_000000": 1500}, r"val_shards: 2 shard\(s\) .* of the first of 2 parts, and it has 0 tokens"),
        (
            2,
            {"val_00_000000": 1500, "val_00_000001": 9, "train_01_000000": 1500},
            "it has 1,509 tokens: use val_fr",
        ),
        (2, {"val_00_000000": 1500, "val_00_000001": 1500, "train_01_000000": 1500}, None),
        (2, {"val_00_000000": 1500, "val_00_000001": 1500}, "no training sequence"),
        (1, {"val_000000": 1500, "val_000001": 9}, "no training sequence"),
    ],
)
def test_the_validation_split_has_the_requested_size(parts: int, tokens: dict[str, int], message: str | None) -> None:
    recipe = load_recipe("smoke", SMALL)
    config = recipe.tokens.model_copy(update={"parts": parts, "shard_tokens": 1500, "val_shards": 2})
    shards = [SplitShard(File(f"{name}.bin", "", 0, ""), n) for name, n in tokens.items()]
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_split(recipe.model_copy(update={"tokens": config}), shards)
