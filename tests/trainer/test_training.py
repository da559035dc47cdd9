"""Whole runs: they learn, survive being killed at any moment, and end where an undisturbed run ends."""

import functools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import trainer_runs
import yaml
from safetensors import safe_open
from servers import Fault, FaultyProxy, S3Account
from trainer_runs import (
    ALONE,
    CONFIG,
    EVERY_STEP,
    LONG,
    REPOSITORY,
    Command,
    PromptCheckpointer,
    Runner,
    configured,
    kept,
    kill_tree,
    weights,
)

from pipelines.artifacts.store import S3Store
from trainer.__main__ import claim
from trainer.checkpoint import Checkpointer, HostCopy
from trainer.commits import checkpoint_seconds, sealed, series, unsealed
from trainer.config import ModelConfig, RuntimeConfig
from trainer.data import TokenData
from trainer.errors import StaleAttempt, UserError
from trainer.evaluate import validation_loss
from trainer.loop import SaveClock
from trainer.metrics import EventLog, PhaseClock, mfu, peak_flops
from trainer.parallel import Flags, World
from trainer.shards import local_shards, write_shard
from trainer.store import LocalStore

_one_thread, data, runner = trainer_runs._one_thread, trainer_runs.data, trainer_runs.runner


def test_a_run_learns_and_tells_every_step(runner: Callable[..., Runner]) -> None:
    run = runner(max_steps=60)
    model, state = run.attempt()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(61))
    assert [row["step"] for row in rows if "val/loss" in row] == list(range(0, 61, 5))
    assert rows[0]["val/loss"] == pytest.approx(math.log(70), abs=0.1)  # knows nothing yet
    assert rows[-1]["train/loss"] < 0.6 * rows[1]["train/loss"]
    assert state.val_loss == rows[-1]["val/loss"] < 0.6 * rows[0]["val/loss"]
    assert (state.step, state.optimizer_steps, state.tokens_seen) == (60, 60, 60 * 256)
    assert len({row["data/digest"] for row in rows[1:]}) == 60
    val = TokenData(local_shards(run.data, "val"), run.data.joinpath, 32, 0)
    assert validation_loss(model, val, 400, 7, ALONE) == pytest.approx(state.val_loss, rel=1e-5)


def test_a_batch_can_be_learned_by_heart(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one-batch"
    folder.mkdir()
    noise = np.random.RandomState(1).randint(0, 70, 4 * 32 + 1).astype(np.uint16)
    write_shard(folder / "train_000000.bin", noise)
    shutil.copy(data / "val_000000.bin", folder)
    config = configured(batch_tokens=128, max_steps=150, val_every=None, weight_decay=0.0)
    run = Runner(folder, tmp_path / "run", config)
    run.attempt()
    assert run.rows()[0]["train/loss"] > 4.0
    assert run.rows()[-1]["train/loss"] < 0.02


def test_a_batch_that_grows_goes_on_where_it_was_interrupted(runner: Callable[..., Runner]) -> None:
    ramp = {"batch_tokens": 256, "batch_ramp_from": 64, "batch_ramp_tokens": 600, "max_steps": 10}
    whole, parts = runner("whole", **ramp), runner("parts", **ramp)
    model, state = whole.attempt()
    assert state.tokens_seen == 4 * 64 + 2 * 128 + 192 + 3 * 256
    for last in (3, 3, 2):
        parts.attempt(stop_after=last)
    assert weights(parts.attempt()[0]) == weights(model) and parts.rows() == whole.rows()


def test_padding_rows_stay_zero(runner: Callable[..., Runner]) -> None:
    model, _ = runner(weight_decay=0.5).attempt()
    assert model.wte.weight.shape == (128, 32)
    assert not model.wte.weight[70:].any() and model.wte.weight[:70].all()


def test_the_accumulated_gradient_is_that_of_the_whole_batch(runner: Callable[..., Runner]) -> None:
    runs = [runner(f"micro-{size}", micro_batch_size=size) for size in (1, 2, 8)]
    for run in runs:
        run.attempt()
    first, *others = (run.rows() for run in runs)
    for rows in others:
        for a, b in zip(first, rows, strict=True):
            assert a.get("data/digest") == b.get("data/digest")
            assert b == pytest.approx(a, rel=1e-4)


def test_recomputed_activations_train_the_same_model(runner: Callable[..., Runner]) -> None:
    plain, recomputed = runner("plain"), runner("recomputed", recompute=True)
    assert weights(plain.attempt()[0]) == weights(recomputed.attempt()[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_close_to_full(runner: Callable[..., Runner], precision: str) -> None:
    full, half = runner("full", max_steps=30), runner("half", max_steps=30, precision=precision)
    full.attempt()
    model, _ = half.attempt()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert [e["precision"] for e in half.events if e["event"] == "start"] == [precision]
    a, b = full.rows()[-1], half.rows()[-1]
    assert a["train/loss"] != b["train/loss"]
    assert b["train/loss"] == pytest.approx(a["train/loss"], rel=0.05)
    assert b["val/loss"] == pytest.approx(a["val/loss"], rel=0.05)


# --- resuming


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_stopped_in_any_step_ends_with_the_same_losses_and_weights(
    runner: Callable[..., Runner], precision: str
) -> None:
    whole = runner("whole", precision=precision)
    model, _ = whole.attempt()
    for stop_after in (1, 5, 11):  # 5: a validation is due where it stops
        run = runner(f"stopped-{stop_after}", precision=precision)
        _, state = run.attempt(stop_after)
        assert state.step == stop_after and run.commits() == [stop_after]
        resumed, state = run.attempt()
        assert state.step == 12
        assert run.rows() == whole.rows()
        assert weights(resumed) == weights(model)


def test_a_finished_run_has_nothing_left_to_do(runner: Callable[..., Runner]) -> None:
    run = runner()
    model, state = run.attempt()
    before = run.rows()
    again, state_again = run.attempt(stop_after=1)
    assert weights(again) == weights(model) and state_again == state
    assert run.rows() == before and run.commits() == [12]


def test_stopped_in_the_last_step_a_run_is_still_evaluated(runner: Callable[..., Runner]) -> None:
    run = runner()
    _, state = run.attempt(stop_after=12)
    assert state.step == state.val_step == 12
    assert run.rows()[-1]["val/loss"] == state.val_loss


def test_fp16s_loss_scale_survives_a_resume(runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    # Starts far too high, so that the first steps overflow, and grows again every three good steps.
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**24, growth_interval=3)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    whole = runner("whole", precision="fp16")
    model, state = whole.attempt()
    assert 0 < state.optimizer_steps < state.step == 12  # some updates were skipped
    for stop_after in (1, 7, 11):
        run = runner(f"stopped-{stop_after}", precision="fp16")
        _, stopped = run.attempt(stop_after)
        assert stopped.loss_scale is not None
        resumed, state_resumed = run.attempt()
        assert state_resumed == state
        assert run.rows() == whole.rows() and weights(resumed) == weights(model)


def test_only_the_last_checkpoints_are_kept(runner: Callable[..., Runner]) -> None:
    run = runner(checkpoint_minutes=EVERY_STEP, keep_last=3)
    run.attempt()
    assert run.commits() == [12, 11, 10]
    assert len(list((run.out / "run/checkpoints").iterdir())) == 3
    assert len(run.rows()) == 13  # the series of deleted checkpoints stays


def test_every_so_many_steps_a_checkpoint_stays_for_good(runner: Callable[..., Runner]) -> None:
    run = runner(keep_every_steps=5, keep_last=1)  # nothing else is due in so short a run
    run.attempt()
    assert run.commits() == [12, 10, 5]


def flip_a_byte(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    body = bytearray(path.read_bytes())
    body[-5] ^= 1
    path.write_bytes(body)


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


@pytest.mark.parametrize(
    "damage",
    [
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
    assert before != {path: path.read_bytes() for path in run.newest().iterdir()}
    resumed, _ = run.attempt()
    assert "DAMAGED checkpoint" in (said := capsys.readouterr().out) and "step-00000007" in said
    assert [e["step"] for e in run.events if e["event"] == "start"] == [0, 6]
    assert [e["checkpoint"] for e in run.events if e["event"] == "damaged"] == ["run/checkpoints/step-00000007-a0001"]
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


def test_damaged_checkpoints_do_not_push_out_sound_ones(runner: Callable[..., Runner]) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("damaged", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=7)
    for folder in (run.out / "run/checkpoints").iterdir():
        flip_a_byte(folder)
    run.attempt(stop_after=2)  # it began anew, and what it commits is older than what is damaged
    assert run.commits() == [2, 1]
    resumed, _ = run.attempt()
    assert [e["step"] for e in run.events if e["event"] == "start"] == [0, 0, 2]
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


def test_with_every_checkpoint_damaged_a_run_begins_anew(runner: Callable[..., Runner]) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("damaged", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=7)
    for folder in (run.out / "run/checkpoints").iterdir():
        flip_a_byte(folder)
    resumed, _ = run.attempt()
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


def test_a_commit_vouches_for_itself() -> None:
    commit = {"step": 3, "state": {"val_loss": 1.25, "loss_scale": None}, "files": []}
    body = sealed(commit)
    assert unsealed(body) == commit
    for wrong in (b"", b"null", b"[]", b"{}", body[:-1], body.replace(b"3", b"4", 1), b'{"sha256": null}'):
        with pytest.raises(ValueError):
            unsealed(wrong)


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
def test_a_save_cut_short_leaves_nothing_that_looks_committed_and_stops_no_step(
    runner: Callable[..., Runner], method: str, calls: int, failed: int
) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("cut", checkpoint_minutes=EVERY_STEP)
    with pytest.raises(ConnectionError):  # at the end: the last step can't be committed either
        run.attempt(store=DyingStore(run.out, method, calls))
    assert [e["step"] for e in run.events if e["event"] == "row"][-1] == 12
    assert {e["step"] for e in run.events if e["event"] == "checkpoint_failed"} == set(range(failed, 13))
    assert run.commits() == [failed - 1, failed - 2]
    for folder in (run.out / "run/checkpoints").iterdir():
        if (folder / "COMMIT.json").exists():
            files = {f["name"] for f in unsealed((folder / "COMMIT.json").read_bytes())["files"]}
            assert files | {"COMMIT.json", "receipt-00000.json"} == {path.name for path in folder.iterdir()}
    resumed, _ = run.attempt()
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


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
    failed = [(e["step"], e["reason"]) for e in run.events if e["event"] == "checkpoint_failed"]
    assert [step for step, _ in failed] == list(range(1, 1 + len(failed)))
    for code in ("RequestTimeTooSkewed", "ExpiredToken", "ReadTimeout"):
        assert len([reason for _, reason in failed if code in reason]) >= 1, (code, failed)
    assert Checkpointer(s3_store, "run", ALONE, run.out / "work").committed_steps() == [12, 11]
    assert kept(series(s3_store, "run")) == whole.rows() and weights(same) == weights(model)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_deletion_cut_short_leaves_nothing_that_looks_committed(runner: Callable[..., Runner], calls: int) -> None:
    whole = runner("whole")
    model, _ = whole.attempt()
    run = runner("cut", checkpoint_minutes=EVERY_STEP)
    run.attempt(stop_after=5, store=DyingStore(run.out, "delete", calls))
    committed = [f for f in (run.out / "run/checkpoints").iterdir() if (f / "COMMIT.json").exists()]
    assert len(committed) == len(run.commits()) >= 2
    for folder in committed:
        files = {f["name"] for f in unsealed((folder / "COMMIT.json").read_bytes())["files"]}
        assert files < {path.name for path in folder.iterdir()}
    resumed, _ = run.attempt()
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


def test_a_superseded_attempt_commits_nothing_and_deletes_nothing(runner: Callable[..., Runner]) -> None:
    run = runner(checkpoint_minutes=EVERY_STEP)
    answers = iter([False] * 4 + [True])  # asked before the rows are put, and before the commit
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
    """Copies as late as a GPU may: when the next update is about to be made, or else long after it was told to."""

    taken = threading.Event()

    def take(self) -> None:
        self.taken.clear()

    def before_update(self) -> None:
        if not self.taken.is_set():
            super().take()
            self.taken.set()

    def safetensors(self) -> list[memoryview]:
        if not self.taken.wait(1.0):  # much longer than a step: none follows, or it forgot to ask
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
    assert [e["step"] for e in run.events if e["event"] == "start"] == [0, 6]
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)


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


# --- when it is time to save


@dataclass(frozen=True)
class Deaf(World):
    """One of two ranks; it hears nothing of the other, and what it asks for is written down and not granted."""

    asked: list[bool] = field(default_factory=list)

    def mean_(self, tensor: torch.Tensor) -> None:
        pass

    def sum(self, *values: float) -> list[float]:
        return [2 * value for value in values]

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def agree(self, loss: float, grad_norm: float, stop: bool, save: bool, digest: int) -> Flags:
        self.asked.append(save)
        return Flags(loss, grad_norm, stop, save=False, digest=digest)


def test_only_rank_0_calls_for_saves_and_only_once_the_last_one_is_through(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is the last to be done with a save: if another rank could call for the next, rank 0 would wait for its own.
    run = runner(checkpoint_minutes=EVERY_STEP, val_every=None)

    def asked(rank: int) -> set[bool]:
        run.attempts = 0  # the same attempt: the receipt that rank 1 leaves is what rank 0 waits for
        run.attempt(world=(world := Deaf(rank, rank, 2, torch.device("cpu"))))
        return set(world.asked)

    assert asked(1) == {False}
    assert asked(0) == {True}
    shutil.rmtree(run.out)
    monkeypatch.setattr(PromptCheckpointer, "busy", True)
    assert asked(1) == {False}
    assert asked(0) == {False}


# --- what ends a run early


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_its_commits(runner: Callable[..., Runner]) -> None:
    run = runner(checkpoint_minutes=EVERY_STEP, learning_rate=1e30, grad_clip=None, warmup_steps=0, val_every=None)
    with pytest.raises(FloatingPointError, match="the last commit stays"):
        run.attempt()
    assert len(run.commits()) == 1


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    store, shards = LocalStore(tmp_path), {"train_000000.bin": 900}
    claim(store, tmp_path, configured(), shards)
    claim(store, tmp_path, configured(keep_last=7, micro_batch_size=4), shards)  # runtime may change
    with pytest.raises(UserError) as mistake:
        claim(store, tmp_path, configured(max_steps=9, n_layer=3), {"train_000000.bin": 901})
    assert str(mistake.value) == (
        f"{tmp_path}: holds a run with another data.train_000000.bin, model.n_layer, train.max_steps; "
        "use another --out, or remove it"
    )


# --- the arithmetic around a run


def test_a_step_that_was_redone_counts_as_the_later_attempt_did_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    segments = {
        "step-00000002-a0001": [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 3}],
        "step-00000004-a0001": [{"step": 3, "a": 4}, {"step": 4, "a": 5}],  # never committed
        "step-00000003-a0002": [{"step": 2, "c": 6}, {"step": 3, "a": 7}],  # resumed at 2, and evaluated
        "step-00000004-a0002": [{"step": 4, "a": 8}],
    }
    for name, rows in segments.items():
        store.put(f"run/metrics/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert series(store, "run") == [
        {"step": 1, "a": 1},
        {"step": 2, "a": 2, "b": 3, "c": 6},
        {"step": 3, "a": 7},
        {"step": 4, "a": 8},
    ]


@pytest.mark.parametrize("damaged", [b'{"step": 2, "a": 2\xff}', b"\0\0\0", b"2", b'{"stfp": 2}', b"[1"])
def test_a_damaged_row_is_missing_loudly_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    store = LocalStore(tmp_path)
    store.put("run/metrics/step-00000003-a0001.jsonl", b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    assert [row["step"] for row in series(store, "run")] == [1, 3]
    assert "step-00000003-a0001.jsonl: line 2 is DAMAGED; the series lacks its step" in caplog.text


def test_the_clock_gives_every_second_to_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "time", lambda: now)
    clock = PhaseClock("setup", started=90.0)
    clock.enter("train")
    now = 107.0
    with clock.phase("evaluate"):
        now = 110.0
        assert clock.so_far() == {"setup": 10.0, "train": 7.0, "evaluate": 3.0}
        now = 111.0
    now = 113.0
    assert clock.so_far() == {"setup": 10.0, "train": 9.0, "evaluate": 4.0}


def test_a_log_tells_each_change_of_phase_and_steps_done_before_have_their_own(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", PhaseClock(), reached=2)
    for step in range(4):
        log.clock.enter(log.training_phase(step))  # of the step that makes step + 1
        log.row(step + 1)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(t["event"], t["phase"]) for t in told] == [
        *(("phase", "redone"), ("row", "redone"), ("row", "redone")),
        *(("phase", "train"), ("row", "train"), ("row", "train")),
    ]
    assert set(told[-1]["phases"]) == {"setup", "redone", "train"}


def test_the_interval_between_checkpoints_loses_least() -> None:
    # Lost per hour at an interval: the saves themselves, and half an interval with every failure.
    def lost(interval: float, save: float, between: float) -> float:
        return save / interval + interval / 2 / between

    for save, between in ((0.5, 14_400.0), (2.0, 14_400.0), (20.0, 3_600.0)):
        best = checkpoint_seconds(save, between)
        assert all(lost(best, save, between) <= lost(best * f, save, between) for f in (0.5, 0.9, 1.1, 2.0))
    assert checkpoint_seconds(1e-6) == 30.0 and checkpoint_seconds(1e6) == 1800.0


def test_the_first_save_which_pins_the_memory_makes_the_next_one_no_later() -> None:
    due = SaveClock(RuntimeConfig(), between_failures=7200.0, rollbacks=False)
    due.saved(10.5)  # 1558M on an H200, as measured: a copy then takes 0.35 s
    assert due.interval == checkpoint_seconds(1.0, 7200.0)
    due.saved(0.35)
    assert due.interval == checkpoint_seconds(0.35, 7200.0)
    due.saved(2.0)  # what later ones cost does count
    assert due.interval == checkpoint_seconds(2.0, 7200.0)


def test_mfu_is_tokens_times_flops_over_the_peak_of_all_gpus() -> None:
    # 124M at 8 x A100 and 1.5M tokens/s: 1.5e6 x (6 x 123.7M + 12 x 12 x 768 x 1024) / (8 x 312e12).
    model = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)
    peak = peak_flops("NVIDIA A100-SXM4-80GB")
    assert peak == 312e12 and peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("Tesla T4") is None
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA H100 NVL") == 835e12
    n = 124_475_904 - 1024 * 768
    assert mfu(1.5e6, model, 8, peak) == pytest.approx(1.5e6 * (6 * n + 113_246_208) / 2.496e15)


# --- the trainer as a command


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Command]:
    @functools.cache
    def run(ranks: int) -> Command:
        command = Command(data, tmp_path_factory.mktemp(f"undisturbed-{ranks}") / "out", configured(**LONG))
        command.finish(ranks)
        return command

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills"), [(1, 4), (2, 3)])
def test_a_run_killed_at_any_moment_ends_with_the_same_losses(
    data: Path, tmp_path: Path, undisturbed: Callable[[int], Command], ranks: int, kills: int
) -> None:
    moments = random.Random(ranks)
    command = Command(data, tmp_path / "out", configured(**LONG))
    for _ in range(kills):
        with command.started(ranks) as process:
            command.wait_for_rows(moments.randint(1, 14), process)
            time.sleep(moments.random() * 0.1)
            kill_tree(process)
            assert process.returncode == -signal.SIGKILL, "it finished before it was killed"
    command.finish(ranks)
    assert command.rows_logged() > 48  # something had to be done again
    assert command.rows() == undisturbed(ranks).rows()
    assert command.model_sha256() == undisturbed(ranks).model_sha256()


@pytest.mark.slow
def test_what_compiles_nothing_imports_no_compiler(data: Path, tmp_path: Path) -> None:
    """torch._dynamo takes seconds to import, and torch.optim's classes do so."""
    said = Command(data, tmp_path / "out", configured(), ("-X", "importtime", "-m", "trainer")).finish()
    assert re.search(r"\| +trainer\.optim$", said, re.M) and "torch._dynamo" not in said


@pytest.mark.slow
def test_ranks_whose_torchrun_was_killed_commit_and_leave(data: Path, tmp_path: Path) -> None:
    command = Command(data, tmp_path / "out", configured(**LONG | {"max_steps": 100_000}))
    with command.started(2) as torchrun:
        command.wait_for_rows(5, torchrun)
        ranks = psutil.Process(torchrun.pid).children(recursive=True)
        torchrun.kill()
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert len(ranks) >= 2 and not alive
    assert command.commits()


@pytest.mark.slow
def test_any_number_of_ranks_reads_the_same_and_learns_the_same(undisturbed: Callable[[int], Command]) -> None:
    one, two, four = (undisturbed(ranks).rows() for ranks in (1, 2, 4))
    assert [row["step"] for row in one] == list(range(49))
    for rows in (two, four):
        assert [row.get("data/digest") for row in rows] == [row.get("data/digest") for row in one]
        for a, b in zip(one, rows, strict=True):
            assert b == pytest.approx(a, rel=2e-3)
        assert rows[1] == pytest.approx(one[1], rel=1e-5)  # before rounding has had time to add up


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_and_with_more_ranks(
    data: Path, tmp_path: Path, undisturbed: Callable[[int], Command]
) -> None:
    command = Command(data, tmp_path / "out", configured(**LONG))
    for ranks in (2, 1):
        with command.started(ranks) as process:
            command.wait_for_rows(14, process)
            command.wait_for_commits(2, process)  # one will be damaged
            kill_tree(process)
            assert process.returncode == -signal.SIGKILL, "it finished before it was killed"
    flip_a_byte(command.commits()[-1].parent)
    assert command.finish(2).count("DAMAGED checkpoint") == 1
    starts = [e for e in command.events() if e["event"] == "start"]
    assert [e["world_size"] for e in starts] == [2, 1, 2]
    assert [e["step"] > 0 for e in starts] == [False, True, True]
    rows, expected = command.rows(), undisturbed(2).rows()
    assert [row.get("data/digest") for row in rows] == [row.get("data/digest") for row in expected]
    for a, b in zip(expected, rows, strict=True):
        assert b == pytest.approx(a, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_commits_the_step_it_came_in(
    data: Path, tmp_path: Path, undisturbed: Callable[[int], Command], ranks: int
) -> None:
    command = Command(data, tmp_path / "out", configured(**LONG | {"checkpoint_minutes": 1000}))
    with command.started(ranks) as process:
        command.wait_for_rows(9, process)
        process.terminate()
        said, _ = process.communicate(timeout=60)
    # torchrun has its own exit codes.
    assert process.returncode == 75 if ranks == 1 else process.returncode != 0, said
    (commit,) = (command.out / "run/checkpoints").glob("*/COMMIT.json")
    step = unsealed(commit.read_bytes())["step"]
    assert 9 <= step == command.rows_logged() < 48
    command.finish(ranks)
    assert command.rows_logged() == 48  # nothing was done twice
    assert command.rows() == undisturbed(ranks).rows()
    assert command.model_sha256() == undisturbed(ranks).model_sha256()


@pytest.mark.slow
def test_an_attempt_that_another_one_superseded_stops(data: Path, tmp_path: Path) -> None:
    command = Command(data, tmp_path / "out", configured(**LONG))
    with command.started() as process:
        command.wait_for_rows(9, process)
        assert LocalStore(command.out).create("run/attempts/0002.json", b"{}")
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "stopped: attempt 1 of run was superseded" in said and "Traceback" not in said
    command.finish()
    starts = [e for e in command.events() if e["event"] == "start"]
    assert [e["step"] > 0 for e in starts] == [False, True]


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(runner: Callable[..., Runner]) -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    if " " in torch.__file__:
        pytest.skip("needs a torch whose path has no space: inductor's call of the C++ compiler does not quote it")
    eager, compiled = runner("eager", max_steps=4), runner("compiled", max_steps=4, engine="compiled")
    eager.attempt()
    compiled.attempt()
    for a, b in zip(eager.rows(), compiled.rows(), strict=True):
        assert b == pytest.approx(a, rel=1e-4)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_trainer_stands_alone() -> None:
    names = sorted(path.stem for path in (REPOSITORY / "trainer").glob("[!_]*.py"))
    assert "loop" in names
    code = f"""
import importlib, sys
for name in {names} + ["__main__"]:
    importlib.import_module("trainer." + name)
print(sorted({{m.partition(".")[0] for m in sys.modules}} & {{"pipelines", "boto3", "mlflow", "sky", "transformers"}}))
"""
    result = python("-c", code)
    assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (yaml.safe_dump(CONFIG | {"train": CONFIG["train"] | {"learning_rte": 1}}), "did you mean 'learning_rate'?"),
        ("- a list\n", "not a YAML file with sections model, train, runtime"),
        ("", "not a YAML file with sections model, train, runtime"),
        ("a: [", "not a YAML file with sections model, train, runtime"),
        (yaml.safe_dump(CONFIG), "no train_*.bin shards there; point to a folder that tokenize wrote"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path: Path, body: str, line: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(body)
    result = python("-m", "trainer", str(config), "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and line in result.stderr and result.stderr.count("\n") == 1
