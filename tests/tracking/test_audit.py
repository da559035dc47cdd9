"""An audit recomputes the data of every committed step."""

from typing import Any

from run_records import RECIPE, RUN, TRAIN, finished, recorded, row, segment

from pipelines.artifacts.manifest import File
from pipelines.tracking.audit import Audit, audit
from pipelines.tracking.runs import (
    Run,
)
from trainer.checkpoint.commits import Commit, TrainState
from trainer.data.shards import Order, Shard, sequence_digest, sequences_of, shard_bytes
from trainer.store import LocalStore, Store


def committed(store: Store, step: int, attempt: int, rollbacks: tuple[tuple[int, int], ...] = ()) -> None:
    commit = Commit(step, attempt, 1, 0.0, TrainState(step=step, rollbacks=rollbacks), "", ())
    store.put(f"{TRAIN}/checkpoints/step-{step:08d}-a{attempt:04d}/COMMIT.json", commit.encode())


def read_at(step: int, shards: dict[str, int], place: int | None = None) -> dict[str, Any]:
    """The row of a step that read its own position of the data order, or another one."""
    order = Order([Shard(name, n) for name, n in shards.items()], RECIPE.model.block_size, RECIPE.train.seed)
    mine = sequences_of(step - 1 if place is None else place, RECIPE.model, RECIPE.train, 0, 1)
    return row(step, 1.0) | {"data/digest": sequence_digest(order, mine)}


def test_an_audit_ends_where_the_newest_commit_does(store: LocalStore) -> None:
    shards = {"train_000000.bin": 300_000, "train_000001.bin": 200_000}
    files = tuple(File(name, f"a0001/{name}", shard_bytes(n), "0" * 64) for name, n in shards.items())
    finished(store, "tokenize", files, shards=shards)
    seen = recorded(store)
    rows = [read_at(step, shards) for step in range(1, 7)]
    segment(store, 4, 1, rows[:4])
    segment(store, 6, 1, rows[4:])  # it was never committed
    committed(store, 4, 1)
    assert audit(Run(store, seen)) == Audit(RUN, 4, 4 * 8192 // RECIPE.model.block_size, (), ())
    committed(store, 6, 1)
    assert audit(Run(store, seen)).steps == 6
    committed(store, 8, 2)  # and its rows are missing
    assert audit(Run(store, seen)).missing_steps == (7, 8)
    segment(store, 8, 2, [read_at(7, shards), read_at(8, shards, place=3)])
    assert audit(Run(store, seen)).wrong_steps == (8,)
