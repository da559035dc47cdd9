"""Checkpoints of several ranks and attempts: no waiting for dead ranks, no deletion of later attempts, no false damage.

The ranks are threads of this process, each with its Checkpointer. The store and its objects are real.
"""

import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interfering import Interfering, each
from trainer_runs import ALONE, committed_steps, threaded_worlds

import trainer.checkpoint.checkpointer
from trainer.base.events import Event, EventLog, Warned
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World
from trainer.base.store import LocalStore
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import Commit, FileReceipt, TrainState
from trainer.checkpoint.loading import contents_of
from trainer.checkpoint.pieces import SHARDING, DamagedPieces, Piece
from trainer.config.errors import Interrupted, NoSoundCommit, StoreUnavailable, UserError


def pieces(value: float) -> dict[str, Piece]:
    return {
        "model.a": Piece.whole(torch.full((30, 10), float(value))),
        "model.b": Piece.whole(torch.full((200,), float(value))),
        "exp_avg.a": Piece.whole(torch.ones(30, 10)),
    }


def quiet_log(step: int = 0) -> EventLog:
    log = EventLog(None, PhaseClock())
    if step:
        log.row(step, {"train/loss": 1.0})
    return log


def checkpointer(store: LocalStore, world: World = ALONE, attempt: int = 1, **options: Any) -> Checkpointer:
    return Checkpointer(store, "run", world, attempt, **options)


def committed(store: LocalStore, step: int, attempt: int = 1, value: float | None = None, **options: Any) -> None:
    """Commit a checkpoint as an attempt of its own would."""
    one = checkpointer(store, attempt=attempt, **options)
    one.save(TrainState(step=step), pieces(step if value is None else value), log := quiet_log(step))
    one.finish(log)


class Counting(LocalStore):
    bytes_read = 0

    def read_into(self, key: str, start: int, buffer: memoryview, size: int | None = None, take: Any = None) -> int:
        self.bytes_read += size or len(buffer)
        if take:  # begins again, as a bucket after a lost connection
            super().read_into(key, start, buffer, (size or 0) // 2 + 1, take)
        return super().read_into(key, start, buffer, size, take)


# --- ranks


def some_ranks(stores: Sequence[LocalStore]) -> list[Checkpointer]:
    """Ranks that are threads, each on a node of its own."""
    return [checkpointer(store, world) for store, world in zip(stores, threaded_worlds(len(stores)), strict=True)]


def save(step: int, value: float) -> Callable[[Checkpointer], EventLog]:
    def saving(rank: Checkpointer) -> EventLog:
        rank.save(TrainState(step=step), pieces(value), log := quiet_log(step))
        rank.finish(log)
        return log

    return saving


def loaded(rank: Checkpointer) -> tuple[int, float]:
    found = pieces(-1)
    state = rank.load_latest(found, quiet_log())
    return (state.step, float(found["model.b"].live[0])) if state else (-1, -1)


def test_a_rank_that_cannot_upload_reports_it_and_no_rank_waits_or_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its fault has to become an error sooner.
    monkeypatch.setattr(trainer.checkpoint.checkpointer, "RECEIPT_SECONDS", 20.0)

    def full(key: str) -> None:
        if "step-00000002" in key:
            raise OSError(28, "No space left on device")

    ranks = some_ranks([LocalStore(tmp_path), Interfering(tmp_path, write=full)])
    assert [type(log) for log in each(ranks, save(1, 1.0))] == [EventLog, EventLog]
    first, second = each(ranks, save(2, 2.0))
    assert isinstance(first, OSError) and "rank 1: OSError" in str(first) and "No space left" in str(first)
    assert isinstance(second, OSError)
    assert committed_steps(ranks[0].store) == [1]
    each(ranks, save(3, 3.0))  # the next one makes up for it
    assert committed_steps(ranks[0].store) == [3, 1]
    folder = "run/checkpoints/step-00000003-a0001"
    commit = Commit.decode(LocalStore(tmp_path).get(f"{folder}/COMMIT.json") or b"", folder)
    assert [file.name for file in commit.files] == [
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]


@pytest.mark.parametrize("stopped", [True, False])
def test_the_last_state_is_saved_until_the_store_takes_it_or_a_rank_is_asked_to_stop(
    tmp_path: Path, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.checkpoint.checkpointer, "INSIST_SECONDS", 0.2)
    monkeypatch.setattr(trainer.checkpoint.checkpointer, "INSIST_POLL_SECONDS", 0.05)
    left, asked = [6], [False]

    def refuse(key: str) -> None:
        left[0] -= 1
        asked[0] = stopped and left[0] < 2
        if left[0] >= 0 or stopped:
            raise StoreUnavailable("refused")

    ranks = some_ranks([Interfering(tmp_path / "store", write=refuse)] * 2)

    def check_stop(rank: Checkpointer) -> None:
        if any(rank.world.gather(asked[0])):
            raise Interrupted

    def ending(rank: Checkpointer) -> None:
        rank.save(TrainState(step=7), same := pieces(7.0), log := quiet_log(7))
        rank.insist(same, log, lambda: check_stop(rank))
        rank.finish(log)

    answers = each(ranks, ending)
    assert committed_steps(ranks[0].store) == ([] if stopped else [7])
    assert all(isinstance(answer, OSError) for answer in answers) if stopped else answers == [None, None]


def test_no_commit_names_a_file_that_the_store_lost_and_the_commit_before_stays(tmp_path: Path) -> None:
    """As if gc ran while the attempt was frozen between its upload and its commit."""
    committed(LocalStore(tmp_path), 1, keep_last=1)
    one = checkpointer(LocalStore(tmp_path), attempt=2, keep_last=1)

    def superseded() -> bool:
        for path in tmp_path.glob("run/checkpoints/step-00000002-a0002/*.safetensors"):
            path.unlink()
        return False

    one.superseded = superseded
    one.save(TrainState(step=2), pieces(2.0), log := quiet_log(2))
    with pytest.raises(StoreUnavailable, match="step-00000002-a0002/rank-00000-of-00001.safetensors: removed before"):
        one.finish(log)
    assert committed_steps(LocalStore(tmp_path)) == [1]
    assert loaded(checkpointer(LocalStore(tmp_path), attempt=3))[0] == 1


# --- pieces


LONG = {name: torch.arange(8000.0) + i for i, name in enumerate(("model.a", "exp_avg.a"))}


def slices_of(rank: Checkpointer) -> dict[str, Piece]:
    """This rank's equal part of two tensors that no other rank holds: as in ZeRO-1, several ranks a node."""
    n, r = rank.world.world_size, rank.world.rank
    ends = slice(8000 * r // n, 8000 * (r + 1) // n)
    return {name: Piece(whole.clone()[ends], ends.start, (8000,), replicated=False) for name, whole in LONG.items()}


def save_slice(rank: Checkpointer) -> None:
    rank.save(TrainState(step=1), slices_of(rank), log := quiet_log(1))
    rank.finish(log)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_rank_fetches_only_the_chunks_that_it_needs(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.base.store.PART_BYTES", 1000)  # the last float of a chunk ends in the next one
    monkeypatch.setattr("trainer.checkpoint.loading.RANGE_BYTES", 301)
    assert each(some_ranks([LocalStore(tmp_path)] * 4), save_slice) == [None] * 4
    ranks = some_ranks([Counting(tmp_path) for _ in range(count)])
    wanted = [slices_of(rank) for rank in ranks]
    found = [{n: replace(p, live=torch.zeros_like(p.live)) for n, p in pieces.items()} for pieces in wanted]
    outcomes = each(ranks, lambda rank: rank.load_latest(found[rank.world.rank], quiet_log()))
    assert all(isinstance(outcome, TrainState) for outcome in outcomes), outcomes
    for one, expected in zip(found, wanted, strict=True):
        assert all(torch.equal(piece.live, expected[name].live) for name, piece in one.items())
    share = 64_000 / count
    headers, cut_chunks = 1000 * 4, 1000 * 2 * 2 * 4  # both ends of both tensors in each file
    for rank in ranks:
        assert isinstance(rank.store, Counting)
        assert share / 2 < rank.store.bytes_read <= share + headers + cut_chunks
        if count == 1:  # each byte once, those of the headers too
            assert rank.store.bytes_read == sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_loads_the_checkpoint_of_two_ranks(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp  # a second for every worker of pytest
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    each(some_ranks([LocalStore(tmp_path)] * 2), save_slice)
    (folder,) = (tmp_path / "run/checkpoints").iterdir()
    found = {name: torch.zeros(8000) for name in LONG}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in LONG.items())


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("model.a", (10, 30), r"model.a is \[30, 10\]; this version's is \(10, 30\)"),
        ("model.c", (5,), "model.c is incomplete"),
    ],
)
def test_a_checkpoint_of_another_model_is_not_loaded(
    tmp_path: Path, name: str, shape: tuple[int, ...], complaint: str
) -> None:
    store, events = LocalStore(tmp_path), list[Event]()
    committed(store, 1)
    found = {name: Piece.whole(torch.zeros(shape))}
    with pytest.raises(NoSoundCommit, match=complaint):
        checkpointer(store).load_latest(found, EventLog(None, PhaseClock(), watch=events.append))
    (warning,) = events
    assert isinstance(warning, Warned) and re.search(complaint, warning.message) and not found[name].live.any()


def test_a_header_with_a_shape_of_many_huge_numbers_is_damage_at_once() -> None:
    header = {"model.a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    sharding = {"model.a": {"saved_offsets": [0], "shape": [10**18] * 200_000}}  # their product: minutes
    body = json.dumps(header | {"__metadata__": {SHARDING: json.dumps(sharding)}}).encode()
    buffer = memoryview(struct.pack("<Q", len(body)) + body + b"four")
    with pytest.raises(DamagedPieces, match="model.a is at no place"):
        contents_of(FileReceipt.of("rank-00000-of-00001.safetensors", len(buffer), ["0" * 64]), buffer)


# --- concurrent attempts


def test_a_checkpoint_deleted_while_it_is_read_gives_way_to_the_one_that_replaced_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for step in (3, 5):
        committed(store, step, keep_last=2)

    def replace_it(key: str) -> None:
        if "step-00000005" in key:  # the earlier attempt, before it dies, commits once more and deletes
            committed(store, 8, keep_last=1)

    assert loaded(checkpointer(Interfering(tmp_path, read_into=replace_it), attempt=2)) == (8, 8.0)


@pytest.mark.parametrize(
    "trouble",
    [
        UserError("s3://b/k: the credentials have expired; log in again (ExpiredToken)"),
        StoreUnavailable("s3://b/k: no success within 120 s"),
        OSError(28, "No space left on device"),
    ],
)
def test_an_error_of_the_store_is_not_treated_as_damage(tmp_path: Path, trouble: Exception) -> None:
    store = LocalStore(tmp_path)
    committed(store, 5)

    def refuse(key: str) -> None:
        raise trouble

    with pytest.raises(type(trouble)):
        loaded(checkpointer(Interfering(tmp_path, read_into=refuse), attempt=2))
    assert loaded(checkpointer(store, attempt=2)) == (5, 5.0)


# --- the copy


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_next_update_waits_for_the_copy(tmp_path: Path) -> None:
    ones = torch.ones(1 << 26, device="cuda")  # 256 MB: some 5 ms on the bus
    big = {"model.a": Piece.whole(ones)}
    one = checkpointer(LocalStore(tmp_path))
    one.prepare(big)
    one.save(TrainState(step=1), big, log := quiet_log())
    one.before_update()
    ones.add_(1)
    one.finish(log)
    assert one.load_latest(big, log) and bool((ones == 1).all())
