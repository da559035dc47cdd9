"""Checkpoints of whole runs: damaged, interrupted or late, and the run ends with the same weights."""

import errno
import json
import os
import shutil
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_runs
from safetensors import safe_open
from servers import Fault, FaultyProxy, S3Account
from trainer_runs import (
    EVERY_STEP,
    Runner,
    committed_steps,
    comparable,
    flip_a_byte,
    weights,
)

import trainer.commits
from pipelines.artifacts.store import S3Store
from trainer.commits import Commit, FileReceipt, series
from trainer.errors import StaleAttempt
from trainer.events import (
    Checkpointed,
    CheckpointFailed,
    Damaged,
    Row,
    Started,
)
from trainer.pieces import SHARDING, HostCopy
from trainer.store import LocalStore, sha256_of

_one_thread, data, runner = trainer_runs._one_thread, trainer_runs.data, trainer_runs.runner


def test_only_the_last_checkpoints_are_kept(runner: Callable[..., Runner]) -> None:
    run = runner(checkpoint_minutes=EVERY_STEP, keep_last=3)
    run.attempt()
    assert run.commits() == [12, 11, 10]
    assert len(list((run.out / "run/checkpoints").iterdir())) == 3
    assert len(run.rows()) == 13  # the series of deleted checkpoints stays


def test_the_rows_of_many_commits_are_few_objects(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def objects(run: Runner) -> int:
        return len(run.store.entries("run/metrics/"))

    whole, run = runner("whole", max_steps=30), runner("run", max_steps=30, checkpoint_minutes=EVERY_STEP)
    whole.attempt()
    for stop_after in (9, 8, None):
        run.attempt(stop_after)
    assert len(run.events_of(Checkpointed)) == 30 and objects(run) == 3  # one an attempt
    assert run.rows() == whole.rows()

    monkeypatch.setattr(trainer.commits, "SEGMENT_BYTES", 1000)  # some five rows
    split = runner("split", max_steps=30, checkpoint_minutes=EVERY_STEP)
    split.attempt()
    assert 3 < objects(split) < 10
    assert all(entry.size < 1500 for entry in split.store.entries("run/metrics/"))
    assert split.rows() == whole.rows()


def test_checkpoints_at_multiples_of_keep_every_steps_are_never_deleted(runner: Callable[..., Runner]) -> None:
    run = runner(keep_every_steps=5, keep_last=1)  # nothing else is due in so short a run
    run.attempt()
    assert run.commits() == [12, 10, 5]


def test_a_checkpoint_holds_no_pickle(runner: Callable[..., Runner]) -> None:
    run = runner()
    model, _ = run.attempt()
    files = sorted(run.newest().iterdir())
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    found: dict[str, torch.Tensor] = {}
    for path in files:
        if path.suffix == ".json":
            assert json.loads(path.read_text())
            continue
        with safe_open(path, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    assert len(found) == 3 * len(model.state_dict())
    for name, p in model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], p.flatten())


def test_work_folders_are_left_empty(runner: Callable[..., Runner]) -> None:
    run = runner()
    run.attempt(stop_after=4)
    run.attempt()
    assert [p for p in (run.out / "work").rglob("*") if p.is_file()] == []


# --- damage


def truncate(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def delete_a_file(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def scribble_over_the_commit(folder: Path) -> None:
    (folder / "COMMIT.json").write_bytes(b"\0\xff garbage")


def empty_the_commit(folder: Path) -> None:
    (folder / "COMMIT.json").write_bytes(b"")


def change_a_digit_of_the_commit(folder: Path) -> None:
    path = folder / "COMMIT.json"
    path.write_text(path.read_text().replace('"optimizer_steps": 7', '"optimizer_steps": 2'))


def misspell_a_field_of_the_commit(folder: Path) -> None:
    path = folder / "COMMIT.json"
    path.write_text(path.read_text().replace('"tokens_seen"', '"tokens_sEen"'))


def nest_100_000_brackets_in_the_commit(folder: Path) -> None:
    (folder / "COMMIT.json").write_bytes(b"[" * 100_000)


def put_a_pipe_in_place_of_the_commit(folder: Path) -> None:
    (folder / "COMMIT.json").unlink()
    os.mkfifo(folder / "COMMIT.json")


def put_a_pipe_in_place_of_a_file(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.unlink()
    os.mkfifo(path)


def seal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of the checkpoint's file, and make size and sha256 in COMMIT.json agree."""
    path = next(folder.glob("*.safetensors"))
    body = path.read_bytes()
    (size,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body[8 + size :])
    commit = Commit.decode((folder / "COMMIT.json").read_bytes(), str(folder))
    receipt = FileReceipt(path.name, path.stat().st_size, sha256_of(path))
    (folder / "COMMIT.json").write_bytes(replace(commit, files=(receipt,)).encode())


def leave_out_where_the_pieces_begin(folder: Path) -> None:
    seal(folder, lambda header: header.pop("__metadata__"))


def change_sharding(folder: Path, name: str, **lie: Any) -> None:
    def change(header: dict[str, Any]) -> None:
        sharding = json.loads(header["__metadata__"][SHARDING])
        sharding[name] |= lie
        header["__metadata__"][SHARDING] = json.dumps(sharding)

    seal(folder, change)


def move_a_piece(folder: Path) -> None:
    change_sharding(folder, "model.wte.weight", saved_offsets=[5])


def begin_a_piece_with_a_word(folder: Path) -> None:
    change_sharding(folder, "exp_avg.wte.weight", saved_offsets=["zero"])


def change_a_shape(folder: Path) -> None:
    change_sharding(folder, "model.wte.weight", shape=[32, 128])


def nest_100_000_brackets_in_the_header(folder: Path) -> None:
    seal(folder, lambda header: header["__metadata__"].update({SHARDING: "[" * 100_000}))


@pytest.mark.parametrize(
    "damage",
    [
        nest_100_000_brackets_in_the_commit,
        put_a_pipe_in_place_of_the_commit,
        put_a_pipe_in_place_of_a_file,
        leave_out_where_the_pieces_begin,
        move_a_piece,
        begin_a_piece_with_a_word,
        change_a_shape,
        nest_100_000_brackets_in_the_header,
        flip_a_byte,
        truncate,
        delete_a_file,
        scribble_over_the_commit,
        empty_the_commit,
        change_a_digit_of_the_commit,
        misspell_a_field_of_the_commit,
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_loudly(
    runner: Callable[..., Runner], damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("damaged", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=7)
    assert run.commits() == [7, 6]
    before = {path: path.read_bytes() for path in run.newest().iterdir()}
    damage(run.newest())
    assert before != {path: path.is_file() and path.read_bytes() for path in run.newest().iterdir()}
    resumed, _ = run.attempt()
    assert "DAMAGED checkpoint" in (output := capsys.readouterr().out) and "step-00000007" in output
    assert [e.step for e in run.events_of(Started)] == [0, 6]
    assert [e.checkpoint for e in run.events_of(Damaged)] == ["run/checkpoints/step-00000007-a0001"]
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


def test_damaged_checkpoints_do_not_displace_sound_ones(runner: Callable[..., Runner]) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("damaged", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=7)
    for folder in (run.out / "run/checkpoints").iterdir():
        flip_a_byte(folder)
    run.attempt(stop_after=2)  # it starts at step 0, and its commits have lower steps than the damaged ones
    assert run.commits() == [2, 1]
    resumed, _ = run.attempt()
    assert [e.step for e in run.events_of(Started)] == [0, 0, 2]
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


def test_with_every_checkpoint_damaged_a_run_starts_again(runner: Callable[..., Runner]) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("damaged", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=7)
    for folder in (run.out / "run/checkpoints").iterdir():
        flip_a_byte(folder)
    resumed, _ = run.attempt()
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


# --- interrupted saves and deletions


class DyingStore(LocalStore):
    """Dies in the n-th call of one of its methods."""

    def __init__(self, root: Path, method: str, calls: int) -> None:
        super().__init__(root)
        self.method, self.calls = method, calls

    def _count(self, method: str) -> None:
        if method == self.method:
            self.calls -= 1
            if self.calls <= 0:
                raise ConnectionError(f"the store died in {method}")

    def write(self, parts: Sequence[memoryview], key: str) -> None:
        self._count("write")
        super().write(parts, key)

    def put(self, key: str, body: bytes) -> None:
        self._count("put")
        super().put(key, body)

    def create(self, key: str, body: bytes) -> bool:
        self._count("create")
        return super().create(key, body)

    def delete(self, key: str) -> None:
        self._count("delete")
        super().delete(key)


# Of a save: the file is written, the receipt put, the rows put, the commit created.
@pytest.mark.parametrize(
    ("method", "calls", "failed"), [("write", 4, 4), ("put", 5, 3), ("put", 6, 3), ("put", 7, 4), ("create", 4, 4)]
)
def test_an_interrupted_save_leaves_nothing_that_looks_committed_and_stops_no_step(
    runner: Callable[..., Runner], method: str, calls: int, failed: int
) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("cut", checkpoint_minutes=EVERY_STEP)
    with pytest.raises(ConnectionError):  # at the end: the last step can't be committed either
        run.attempt(store=DyingStore(run.out, method, calls))
    assert [e.step for e in run.events_of(Row)][-1] == 12
    assert {e.step for e in run.events_of(CheckpointFailed)} == set(range(failed, 13))
    assert run.commits() == [failed - 1, failed - 2]
    for folder in (run.out / "run/checkpoints").iterdir():  # nothing is left of the failed saves
        files = {f.name for f in Commit.decode((folder / "COMMIT.json").read_bytes(), str(folder)).files}
        assert files | {"COMMIT.json", "receipt-00000.json"} == {path.name for path in folder.iterdir()}
    resumed, _ = run.attempt()
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


class SmallDisk(DyingStore):
    """Has space for `checkpoints` of them and a half; one call of a method fails."""

    def __init__(self, root: Path, method: str, calls: int, checkpoints: int) -> None:
        super().__init__(root, method, calls)
        self.checkpoints = checkpoints

    def _count(self, method: str) -> None:
        with suppress(ConnectionError):
            super()._count(method)
            return
        self.method = "none"
        raise ConnectionError(f"the store failed once in {method}")

    def write(self, parts: Sequence[memoryview], key: str) -> None:
        size = sum(len(part) for part in parts)
        if sum(e.size for e in self.entries("run/checkpoints/")) + size > (self.checkpoints + 0.5) * size:
            raise OSError(errno.ENOSPC, "No space left on device", key)
        super().write(parts, key)


# Of the save of step 5: the receipt, the rows, the commit.
@pytest.mark.parametrize(("method", "calls"), [("put", 9), ("put", 10), ("create", 5)])
def test_a_save_that_fails_after_its_upload_leaves_space_for_the_next_one(
    runner: Callable[..., Runner], method: str, calls: int
) -> None:
    run = runner(checkpoint_minutes=EVERY_STEP, keep_last=2)
    run.attempt(store=SmallDisk(run.out, method, calls, checkpoints=3))
    assert [e.step for e in run.events_of(CheckpointFailed)] == [5]
    assert run.commits() == [12, 11]
    assert len({entry.key.split("/")[2] for entry in run.store.entries("run/checkpoints/")}) == 2


def test_an_interrupted_save_is_removed_by_the_next_commit(runner: Callable[..., Runner]) -> None:
    run = runner(checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=3)
    shutil.copytree(run.newest(), run.newest().with_name("step-00000004-a0001"))
    (run.out / "run/checkpoints/step-00000004-a0001/COMMIT.json").unlink()  # killed before the commit
    run.attempt(stop_after=2)
    assert sorted(path.name for path in (run.out / "run/checkpoints").iterdir()) == [
        "step-00000004-a0002",
        "step-00000005-a0002",
    ]


@pytest.mark.parametrize("error", [KeyError("an answer without a field"), RecursionError(), SystemExit(3)])
def test_no_exception_in_the_thread_of_a_save_passes_for_a_commit_or_ends_the_run(
    runner: Callable[..., Runner], error: BaseException
) -> None:
    class Strange(LocalStore):
        def write(self, parts: Sequence[memoryview], key: str) -> None:
            if "step-00000005" in key:
                raise error
            super().write(parts, key)

    run = runner(checkpoint_minutes=EVERY_STEP, keep_last=99)
    run.attempt(store=Strange(run.out))
    assert [(e.step, e.reason) for e in run.events_of(CheckpointFailed)] == [(5, repr(error))]
    assert run.commits() == [step for step in range(12, 0, -1) if step != 5]
    assert {e.step for e in run.events_of(Checkpointed)} == set(run.commits())
    assert len(run.rows()) == 13


def test_an_s3_that_misbehaves_in_every_way_stops_no_step_and_later_saves_make_up_for_it(
    runner: Callable[..., Runner], s3_store: S3Store, s3_server: S3Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    proxy = FaultyProxy(s3_server.endpoint)
    proxy.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = S3Store(s3_store.bucket, "some/prefix", time_limit_s=1)
        cured = [Fault(503, "SlowDown"), Fault(reset_at=1000), Fault(forward=True), Fault(500)]
        proxy.fail(*cured, Fault(403, "RequestTimeTooSkewed"), *[Fault(400, "ExpiredToken")] * 2, method="PUT")
        proxy.fail(*[Fault(silence_s=60)] * 2, method="PUT")
        run = runner("run", checkpoint_minutes=EVERY_STEP)
        same, _ = run.attempt(store=store)
    finally:
        proxy.stop()
    failed = [(e.step, e.reason) for e in run.events_of(CheckpointFailed)]
    assert [step for step, _ in failed] == list(range(1, 1 + len(failed)))
    for code in ("RequestTimeTooSkewed", "ExpiredToken", "ReadTimeout"):
        assert len([reason for _, reason in failed if code in reason]) >= 1, (code, failed)
    assert committed_steps(s3_store) == [12, 11]
    assert comparable(series(s3_store, "run")) == whole.rows() and weights(same) == weights(model)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_an_interrupted_deletion_leaves_nothing_that_looks_committed(runner: Callable[..., Runner], calls: int) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("cut", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=5, store=DyingStore(run.out, "delete", calls))
    committed = [f for f in (run.out / "run/checkpoints").iterdir() if (f / "COMMIT.json").exists()]
    assert len(committed) == len(run.commits()) >= 2
    for folder in committed:
        files = {f.name for f in Commit.decode((folder / "COMMIT.json").read_bytes(), str(folder)).files}
        assert files < {path.name for path in folder.iterdir()}
    resumed, _ = run.attempt()
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


def test_a_superseded_attempt_commits_nothing_and_deletes_nothing(runner: Callable[..., Runner]) -> None:
    run = runner(checkpoint_minutes=EVERY_STEP)
    answers = iter([False] * 6 + [True])  # asked before the rows are put, and before and after the commit
    with pytest.raises(StaleAttempt, match="attempt 1 of run was superseded: step 3 not committed"):
        run.attempt(superseded=lambda: next(answers))
    assert run.commits() == [2, 1]


def test_an_attempt_number_used_twice_is_noticed(runner: Callable[..., Runner]) -> None:
    run = runner(checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=3)
    scribble_over_the_commit(run.newest())
    run.attempts = 0
    with pytest.raises(StaleAttempt, match="step 3"):
        run.attempt()


class LateCopy(HostCopy):
    """Copies as late as a GPU may: right before the next update, or else long after the request."""

    taken = threading.Event()

    def take(self) -> None:
        self.taken.clear()

    def before_update(self) -> None:
        if not self.taken.is_set():
            super().take()
            self.taken.set()

    def safetensors(self) -> list[memoryview]:
        if not self.taken.wait(1.0):  # much longer than a step: no update follows, or it did not request the copy
            self.before_update()
        return super().safetensors()


def test_a_copy_that_is_still_being_taken_while_the_next_step_runs_is_that_of_its_own_step(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("late", checkpoint_minutes=EVERY_STEP)
    with monkeypatch.context() as late:
        late.setattr("trainer.checkpoint.HostCopy", LateCopy)
        run.attempt(stop_after=7)
    shutil.rmtree(run.newest())  # the last one: after it there was no update
    resumed, _ = run.attempt()
    assert [e.step for e in run.events_of(Started)] == [0, 6]
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)
