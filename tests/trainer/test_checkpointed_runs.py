"""Checkpoints of whole runs: damaged, interrupted or late, and the run ends with the same weights."""

import hashlib
import json
import re
import shutil
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interfering import Interfering
from safetensors import safe_open
from trainer_runs import EVERY_STEP, Runner, Runners, flip_a_byte

import trainer.checkpoint.commits
from trainer.base.events import Checkpointed, CheckpointFailed, Row, Started, Warned
from trainer.base.store import Entry, LocalStore
from trainer.checkpoint.commits import Commit, FileReceipt
from trainer.checkpoint.pieces import SHARDING, HostCopy
from trainer.config.errors import NoSoundCommit, ending_of


def test_the_rows_of_many_commits_are_few_objects(runner: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    def objects(run: Runner) -> int:
        return len(run.store.entries("run/metrics/"))

    rows, _ = runner.undisturbed(max_steps=30)
    run = runner("run", max_steps=30, checkpoint_minutes=EVERY_STEP)
    for stop_after in (9, 8, None):
        run.attempt(stop_after)
    assert len(run.events_of(Checkpointed)) == 30 and objects(run) == 3  # one an attempt
    assert run.rows() == rows

    monkeypatch.setattr(trainer.checkpoint.commits, "SEGMENT_BYTES", 1000)  # some five rows
    split = runner("split", max_steps=30, checkpoint_minutes=EVERY_STEP)
    split.attempt()
    assert 3 < objects(split) < 10
    assert all(entry.size < 1500 for entry in split.store.entries("run/metrics/"))
    assert split.rows() == rows


def test_the_last_checkpoints_and_those_at_multiples_of_keep_every_steps_stay(runner: Runners) -> None:
    run = runner(checkpoint_minutes=EVERY_STEP, keep_every_steps=5, keep_last=3)
    run.attempt()
    assert run.commits() == [12, 11, 10, 5]
    assert len(list((run.out / "run/checkpoints").iterdir())) == 4
    assert len(run.rows()) == 13  # the series of deleted checkpoints stays


def test_a_checkpoint_holds_no_pickle(runner: Runners) -> None:
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


# --- damage


def delete_a_file(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def empty_the_commit(folder: Path) -> None:
    (folder / "COMMIT.json").write_bytes(b"")


def change_a_digit_of_the_commit(folder: Path) -> None:
    path = folder / "COMMIT.json"
    path.write_text(path.read_text().replace('"optimizer_steps": 7', '"optimizer_steps": 2'))


def change_a_shape(folder: Path) -> None:
    """Change a shape in the header of the checkpoint's file, and make size and sha256 in COMMIT.json agree."""
    path = next(folder.glob("*.safetensors"))
    body = path.read_bytes()
    (size,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + size])
    sharding = json.loads(header["__metadata__"][SHARDING])
    sharding["model.wte.weight"]["shape"] = [32, 128]
    header["__metadata__"][SHARDING] = json.dumps(sharding)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body[8 + size :])
    commit = Commit.decode((folder / "COMMIT.json").read_bytes(), str(folder))
    whole = path.read_bytes()  # less than a chunk
    receipt = FileReceipt.of(path.name, len(whole), [hashlib.sha256(whole).hexdigest()])
    (folder / "COMMIT.json").write_bytes(replace(commit, files=(receipt,)).encode())


@pytest.mark.parametrize(
    "damage",
    [
        change_a_shape,
        flip_a_byte,
        delete_a_file,
        empty_the_commit,
        change_a_digit_of_the_commit,
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_loudly(
    runner: Runners, damage: Callable[[Path], None]
) -> None:
    run = runner("damaged", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=7)
    assert run.commits() == [7, 6]
    before = {path: path.read_bytes() for path in run.newest().iterdir()}
    damage(run.newest())
    assert before != {path: path.is_file() and path.read_bytes() for path in run.newest().iterdir()}
    resumed, _ = run.attempt()
    assert [e.step for e in run.events_of(Started)] == [0, 6]
    (warning,) = run.events_of(Warned)
    assert re.match(r"DAMAGED checkpoint .*/run/checkpoints/step-00000007-a0001: ", warning.message)
    assert run.ended(resumed) == runner.undisturbed()


def test_a_commit_that_cannot_be_read_displaces_no_sound_one_and_is_not_deleted_for_that(runner: Runners) -> None:
    run = runner("damaged", checkpoint_minutes=EVERY_STEP, keep_last=3)
    run.attempt(stop_after=7)
    for folder in sorted((run.out / "run/checkpoints").iterdir())[1:]:
        flip_a_byte(folder)
    run.attempt(stop_after=1)  # from step 5 on; its commit has a lower step than the newest damaged one
    assert run.commits() == [7, 6, 6, 5]
    resumed, _ = run.attempt()
    assert [e.step for e in run.events_of(Started)] == [0, 5, 6]
    assert run.commits() == [12, 11, 10, 7]
    assert run.ended(resumed) == runner.undisturbed()


def test_a_run_none_of_whose_commits_can_be_read_stops_and_keeps_them_all(runner: Runners) -> None:
    run = runner("damaged", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=7)
    for folder in (run.out / "run/checkpoints").iterdir():
        flip_a_byte(folder)
    with pytest.raises(
        NoSoundCommit, match="none of its commits can be read .* remove that folder to begin anew"
    ) as stop:
        run.attempt()
    ending = ending_of(stop.value)
    assert ending and ending.exit_code == 75
    assert run.commits() == [7, 6]
    for folder in (run.out / "run/checkpoints").iterdir():
        flip_a_byte(folder)  # back: it was the way to them that was damaged
    resumed, _ = run.attempt()
    assert run.ended(resumed) == runner.undisturbed()


def test_a_listing_that_lacks_a_commit_deletes_nothing(runner: Runners) -> None:
    run = runner("listed", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=3)

    class Forgetful(LocalStore):
        def entries(self, prefix: str) -> list[Entry]:
            return [one for one in super().entries(prefix) if not one.key.endswith("step-00000002-a0001/COMMIT.json")]

    run.attempt(stop_after=1, store=Forgetful(run.out))
    assert run.commits() == [4, 3, 2]


# --- interrupted saves and deletions


# Of a save: the file is written, the receipt put, the rows put, the commit created.
@pytest.mark.parametrize(("method", "calls", "failed"), [("write", 4, 4), ("put", 5, 3), ("create", 4, 4)])
def test_an_interrupted_save_leaves_nothing_that_looks_committed_and_stops_no_step(
    runner: Runners, method: str, calls: int, failed: int
) -> None:
    run, called = runner("cut", checkpoint_minutes=EVERY_STEP), []

    def die(key: str) -> None:
        called.append(key)
        if len(called) >= calls:
            raise ConnectionError("the store died")

    with pytest.raises(ConnectionError):  # stopped in its last step, which can't be committed either
        run.attempt(stop_after=12, store=Interfering(run.out, **{method: die}))
    assert [e.step for e in run.events_of(Row)][-1] == 12
    assert {e.step for e in run.events_of(CheckpointFailed)} == set(range(failed, 13))
    assert run.commits() == [failed - 1, failed - 2]
    for folder in (run.out / "run/checkpoints").iterdir():  # nothing is left of the failed saves
        files = {f.name for f in Commit.decode((folder / "COMMIT.json").read_bytes(), str(folder)).files}
        assert files | {"COMMIT.json", "receipt-00000.json"} == {path.name for path in folder.iterdir()}
    resumed, _ = run.attempt()
    assert run.ended(resumed) == runner.undisturbed()


@pytest.mark.parametrize("error", [KeyError("an answer without a field"), RecursionError(), SystemExit(3)])
def test_no_exception_in_the_thread_of_a_save_passes_for_a_commit_or_ends_the_run(
    runner: Runners, error: BaseException
) -> None:
    def fail(key: str) -> None:
        if "step-00000005" in key:
            raise error

    run = runner(checkpoint_minutes=EVERY_STEP, keep_last=99)
    run.attempt(store=Interfering(run.out, write=fail))
    assert [(e.step, e.reason) for e in run.events_of(CheckpointFailed)] == [(5, repr(error))]
    assert run.commits() == [step for step in range(12, 0, -1) if step != 5]
    assert {e.step for e in run.events_of(Checkpointed)} == set(run.commits())
    assert len(run.rows()) == 13


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
    runner: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner("late", checkpoint_minutes=EVERY_STEP)
    with monkeypatch.context() as late:
        late.setattr("trainer.checkpoint.checkpointer.HostCopy", LateCopy)
        run.attempt(stop_after=7)
    shutil.rmtree(run.newest())  # the last one: after it there was no update
    resumed, _ = run.attempt()
    assert [e.step for e in run.events_of(Started)] == [0, 6]
    assert run.ended(resumed) == runner.undisturbed()
