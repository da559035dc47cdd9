"""The stage tokenize: which shards it makes again, and which texts it rejects."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stage_work import SMALL, tiny_work
from texts import FourFiles

from pipelines.artifacts.manifest import File
from pipelines.recipe import load_recipe
from pipelines.stages import tokenize
from pipelines.stages.tokenize import check_split, forget_removed_artifact
from pipelines.text import columns
from pipelines.text.receipts import finished_receipts
from pipelines.text.shard_writer import Progress, make_shards
from pipelines.text.split import SplitShard
from pipelines.tracking.ledger import claim
from pipelines.tracking.records import Billing
from trainer.errors import UserError


def test_a_finished_artifact_without_its_manifest_is_made_again(tmp_path: Path) -> None:
    files = FourFiles(tmp_path)

    def ended(number: int, state: str) -> Progress:
        mine = files.job(tmp_path / "store", number)
        attempt = claim(mine.store, mine.plan.prefix, "tiny-1", "tokenize", number, Billing())
        assert attempt
        with attempt:
            forget_removed_artifact(mine.store, mine.plan)
            *_, progress = make_shards(mine)
            attempt.update(state=state)
        return progress

    assert ended(1, "interrupted").new == 13_001
    assert ended(2, "done").new == 0
    assert ended(3, "interrupted").new == 13_001  # a shard was damaged, and the manifest removed as advised
    assert ended(4, "interrupted").new == 0  # the shard that attempt 3 made again is kept


def test_shards_that_the_store_lost_are_made_again(tmp_path: Path) -> None:
    files = FourFiles(tmp_path)
    *_, before = make_shards(files.job(tmp_path / "store", 1))
    mine = files.job(tmp_path / "store", 2)
    shards = [e.key for e in mine.store.entries(f"{mine.plan.prefix}/a0001/")]
    mine.store.delete(shards[-1])
    *_, again = make_shards(mine)
    assert again.stored == before.stored and 0 < again.new < before.new
    stored = {entry.key for entry in mine.store.entries("")}
    receipts = finished_receipts(mine.store, mine.plan)
    assert receipts and {f"{mine.plan.prefix}/{one.file.key}" for one in receipts} <= stored


def test_a_text_without_a_training_sequence_is_refused() -> None:
    recipe = load_recipe("smoke", SMALL)
    config = recipe.tokens.model_copy(update={"shard_tokens": 1500, "val_shards": 2})
    shards = [SplitShard(File(f"{name}.bin", "", 0, ""), n) for name, n in (("val_000000", 1500), ("val_000001", 9))]
    with pytest.raises(UserError, match="no training sequence"):
        check_split(recipe.model_copy(update={"tokens": config}), shards)


@dataclass
class Drawn:
    """A screen whose bars keep what they show."""

    totals: list[float | None] = field(default_factory=list)
    shown: list[tuple[float, str]] = field(default_factory=list)

    @contextmanager
    def bar(self, title: str, total: float | None) -> "Iterator[Drawn]":
        self.totals.append(total)
        yield self

    def update(self, completed: float, note: str = "") -> None:
        self.shown.append((completed, note))

    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_the_bar_of_own_files_moves_within_a_shard_and_ends_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tokenize, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(columns, "BATCH_TEXTS", 2)  # a batch is read ahead
    texts = [f"{number} é " * 500 for number in range(60)]
    if kind == "txt":
        for number, text in enumerate(texts):
            (tmp_path / f"{number:02d}.txt").write_text(text)
    elif kind == "jsonl":
        (tmp_path / "a.jsonl").write_text(
            "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        )
    else:
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False)
    work = tiny_work(tmp_path, "tokenize")
    screen = work.screen = Drawn()
    tokens = {"source": f"{tmp_path}/*.{kind}", "shard_tokens": 10_000_000, "max_tokens": None, "val_tokens": None}
    work.recipe = load_recipe(
        "smoke", [*SMALL, *(f"tokens.{k}={'null' if v is None else v}" for k, v in tokens.items())]
    )
    work.plan = tokenize.plan(work.recipe, {})
    tokenize.make_all_shards(work)
    (size,) = screen.totals
    done = [completed for completed, _ in screen.shown]
    assert size == pytest.approx(sum(len(text.encode()) for text in texts), rel=0.1)
    assert done == sorted(done) and done[-1] == size
    assert len(set(done)) > 5  # within the only shard
    assert screen.shown[-2][1].endswith("tok/s") and " of " in screen.shown[-2][1]
