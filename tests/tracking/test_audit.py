"""An audit recomputes the data of every committed step."""

from pathlib import Path
from typing import Any

import numpy as np
from run_records import PLANS, RECIPE, RUN, committed, finished, recorded, row, segment

from pipelines.artifacts.manifest import upload
from pipelines.tracking.audit import CHECKSUM, Audit, audit
from pipelines.tracking.runs import Run
from trainer.data.batches import TokenData
from trainer.data.shards import HEADER_BYTES, Shard, sequences_of, write_shard
from trainer.store import LocalStore

SHARDS = {"train_000000.bin": 300_000, "train_000001.bin": 200_000}


def stored_shards(store: LocalStore, folder: Path) -> TokenData:
    files = []
    for number, (name, count) in enumerate(SHARDS.items()):
        write_shard(folder / name, np.random.default_rng(number).integers(0, 50_257, count).astype(np.uint16))
        files.append(upload(store, PLANS["tokenize"].prefix, 1, folder / name))
    finished(store, "tokenize", tuple(files), shards=SHARDS)
    shards = [Shard(name, count) for name, count in SHARDS.items()]
    return TokenData(shards, folder.joinpath, RECIPE.model.block_size, RECIPE.train.seed)


def test_an_audit_reads_the_committed_steps_again(store: LocalStore, tmp_path: Path) -> None:
    data, seen, cache = stored_shards(store, tmp_path), recorded(store), tmp_path / "cache"

    def read_at(step: int, place: int | None = None) -> dict[str, Any]:
        """The row of a step that read its own position of the data order, or another one."""
        mine = sequences_of(step - 1 if place is None else place, RECIPE.model, RECIPE.train, 0, 1)
        return row(step, 1.0) | {CHECKSUM: data.checksum(mine)}

    rows = [read_at(step) for step in range(1, 7)]
    segment(store, 4, 1, rows[:4])
    segment(store, 6, 1, rows[4:])  # it was never committed
    committed(store, 4, 1)
    assert audit(Run(store, seen), cache) == Audit(RUN, 4, 4 * 8192 // RECIPE.model.block_size, (), ())
    committed(store, 6, 1)
    assert audit(Run(store, seen), cache).steps == 6
    committed(store, 8, 2)  # and its rows are missing
    assert audit(Run(store, seen), cache).missing_steps == (7, 8)
    segment(store, 8, 2, [read_at(7), read_at(8, place=3)])
    assert audit(Run(store, seen), cache).wrong_steps == (8,)
    for name in SHARDS:  # overwritten while the run read them
        np.memmap(tmp_path / name, np.uint16, "r+", HEADER_BYTES)[:] ^= 1
    segment(store, 8, 2, [read_at(7), read_at(8)])
    assert audit(Run(store, seen), cache).wrong_steps == (7, 8)
