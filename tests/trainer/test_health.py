"""A run that falls ill skips, turns back or leaves, and whatever it does, it does again when it is resumed."""

import functools
import json
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import trainer_runs
import troubled
from pipeline_runs import FOLDER_NAME, Project
from safetensors.torch import load_file
from trainer_runs import EVERY_STEP, Command, Runner, configured, kill_tree, weights
from troubled import afflict

import trainer.health
import trainer.loop
from trainer.commits import TrainState, series, superfluous
from trainer.config import RuntimeConfig, TrainConfig
from trainer.data import TokenData
from trainer.engine import PlainEngine, make_engine
from trainer.errors import Diverged, StaleAttempt
from trainer.health import LEVEL, RECENT, Health, Watchdog, data_step, diagnosis
from trainer.metrics import PhaseClock
from trainer.optim import learning_rate_at
from trainer.parallel import collective_timeout
from trainer.shards import local_shards, sequences_of

_one_thread, data, runner = trainer_runs._one_thread, trainer_runs.data, trainer_runs.runner
TROUBLED = (str(Path(troubled.__file__)),)
BASE: dict[str, Any] = {"batch_tokens": 256, "max_steps": 1000, "learning_rate": 0.01}


def judged(losses: list[float], norms: list[float] | None = None, **config: Any) -> tuple[Health, list[int]]:
    """The health after a series, and the steps (from 1) that were skipped."""
    health, skipped = Health(), []
    settings = TrainConfig(**BASE, **config)
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), 1):
        health, why = health.after(step, loss, norm, settings)
        skipped += [step] if why else []
    return health, skipped


# --- what is an outlier, what is divergence


@pytest.mark.parametrize("limit", [2.0, 3.0, 6.0])
def test_the_z_score_is_that_of_an_independent_implementation(limit: float) -> None:
    noise = np.random.RandomState(0)
    losses = 5 * np.exp(-np.arange(700) / 300) + 0.05 * noise.randn(700)
    norms = 1 + 0.1 * noise.randn(700)
    losses[noise.rand(700) < 0.02] += 3.0
    norms[noise.rand(700) < 0.02] *= 40.0

    def expected(values: np.ndarray) -> list[int]:
        seen: list[float] = []
        found = []
        for step, value in enumerate(values, 1):
            window = np.array(seen[-128:])
            most = window.mean() + limit * window.std() if len(window) == 128 else np.inf
            found += [step] if value > most else []
            seen.append(min(value, most))
        return found

    on_loss, on_norm = expected(losses), expected(norms)
    assert min(len(on_loss), len(on_norm)) > 2 and on_loss != on_norm
    as_lists = losses.tolist(), norms.tolist()
    assert judged(*as_lists, skip_loss_zscore=limit)[1] == on_loss
    assert judged(*as_lists, skip_grad_norm_zscore=limit)[1] == on_norm
    both, skipped = judged(*as_lists, skip_loss_zscore=limit, skip_grad_norm_zscore=limit)
    assert skipped == sorted({*on_loss, *on_norm}) and both.skipped == len(skipped)
    assert judged(*as_lists)[1] == []


def test_nothing_is_an_outlier_before_there_is_a_window_nor_in_a_constant_one() -> None:
    assert judged([1.0, 2.0] * 63 + [1e9], skip_loss_zscore=3.0)[1] == []
    assert judged([1.0, 2.0] * 64 + [1e9], skip_loss_zscore=3.0)[1] == [129]
    assert judged([1.0] * 200 + [2.0], skip_loss_zscore=3.0)[1] == []
    assert judged([1.0, 2.0] * 64 + [-1e9], skip_loss_zscore=3.0)[1] == []  # too good is no illness


def test_an_outlier_does_not_hide_the_next_one_and_a_lasting_rise_is_accepted() -> None:
    noise = (3 + 0.01 * np.random.RandomState(1).randn(400)).tolist()
    assert judged([*noise[:200], 1e30, *noise[:20], 4.0, *noise[:20]], skip_loss_zscore=6.0)[1] == [201, 222]
    _, skipped = judged([*noise[:200], *(x + 1 for x in noise)], skip_loss_zscore=6.0)
    assert skipped == list(range(201, 201 + len(skipped))) and 1 < len(skipped) < 40


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_skipped_without_any_window(bad: float) -> None:
    health, skipped = judged([4.0, bad, 4.0, 4.0], [1.0, 1.0, bad, 1.0])
    assert skipped == [2, 3] and (health.skipped, health.not_finite) == (2, 0)
    assert health.losses == (4.0, 4.0) and health.grad_norms == (1.0, 1.0)
    config = TrainConfig(**BASE)
    for in_a_row in range(1, 10):
        ill, _ = judged([4.0] + [bad] * in_a_row)
        assert bool(ill.diverged(config)) == (in_a_row >= 8)
    # fp16's overflow is the scaler's business, as long as the loss is finite.
    assert Health().after(1, 4.0, bad, config, overflow_allowed=True) == (Health(losses=(4.0,)), None)
    assert Health().after(1, bad, 1.0, config, overflow_allowed=True)[1]


def test_a_run_has_diverged_when_32_losses_are_above_the_best_128_by_the_limit() -> None:
    def diverged(losses: list[float], limit: float | None = 0.5) -> bool:
        config = TrainConfig(**BASE, rollback_above_nats=limit)
        return judged(losses, rollback_above_nats=limit)[0].diverged(config) is not None

    assert LEVEL == 128 and RECENT == 32
    calm = [3.0] * 400
    assert diverged(calm + [3.51] * 32) and not diverged(calm + [3.51] * 31) and not diverged(calm + [3.49] * 500)
    assert not diverged(calm + [3.51] * 32, None) and not diverged(calm + [3.51] * 32, 0.6)
    assert not diverged(calm + [4.0] * 15 + [3.0] * 20)  # a spike that heals
    assert diverged(calm + [40.0])  # no need to wait for what can't be a spike
    slowly = [3.0 + 0.002 * i for i in range(400)]
    assert diverged(calm + slowly)
    assert not diverged([9.0] * 127 + [12.0] * 32)  # a level takes 128 updates


def test_the_calm_step_lies_before_the_rise_whatever_its_shape() -> None:
    shapes = random.Random(0)
    config = TrainConfig(**BASE, rollback_above_nats=0.5)
    for _ in range(50):
        onset, height, slope = shapes.randint(200, 500), shapes.uniform(0.55, 20), shapes.uniform(0.01, 5)
        health = Health()
        for step in range(1, 1200):
            rise = min(height, slope * max(0, step - onset))
            health, _ = health.after(step, 3.0 + shapes.gauss(0, 0.02) + rise, 1.0, config)
            if health.diverged(config):
                break
        assert health.diverged(config) and health.calm_step is not None
        # A slow rise is noticed at half the limit on the mean of 32: by then it may have begun 9 steps too early.
        assert onset - 40 <= health.calm_step <= onset + 0.25 / slope


def test_data_that_was_left_out_is_never_read_and_nothing_is_read_twice() -> None:
    dice = random.Random(3)
    for _ in range(100):
        rollbacks: list[tuple[int, int]] = []
        path: dict[int, int] = {}
        read: list[int] = []
        step = 0
        for _ in range(200):
            path[step] = data_step(step, rollbacks)
            read.append(path[step])
            step += 1
            if dice.random() < 0.05:
                to = dice.randint(max([0, *(at for at, _ in rollbacks)]), step - 1)
                rollbacks.append((to, step - to))
                step = to
        kept = [path[s] for s in range(step)]
        assert all(data_step(s, rollbacks) == place for s, place in enumerate(kept))
        assert kept == sorted(set(kept))
        assert len(read) == len(set(read)) == max(read) + 1  # each place once, in whichever branch


def test_the_state_survives_its_way_through_json() -> None:
    health, _ = judged([3.0 + i % 7 for i in range(300)] + [math.nan], rollback_above_nats=0.5)
    state = TrainState(step=7, health=health, rollbacks=((100, 20), (100, 31)))
    assert state.health.calm_step and state.health.not_finite == 1
    again = TrainState.of(json.loads(json.dumps(asdict(state))))
    assert again == state and again.data_step == 7 and TrainState.of(json.loads(json.dumps(asdict(TrainState()))))


def test_a_commit_from_before_the_rise_is_kept() -> None:
    def left(steps: list[int], calm: int | None, keep_last: int = 2) -> list[int]:
        folders = [f"run/checkpoints/step-{s:08d}-a0001" for s in sorted(steps, reverse=True)]
        return sorted(set(steps) - {int(f[-14:-6]) for f in superfluous(folders, keep_last, calm)})

    assert left([128, 256, 384, 400], None) == [384, 400]
    assert left([128, 140, 256, 300, 384, 400, 410], 250) == [128, 256, 400, 410]
    assert left([128, 140, 256, 300, 384, 400, 410], 256) == [256, 384, 400, 410]
    assert left([100, 128, 130, 140], 0) == [128, 130, 140]  # it will be old enough one day
    # Whatever else is saved in between: there is always one to return to, and never more than two beside the last.
    dice, kept = random.Random(0), list[int]()
    for step in range(1, 3000):
        if step % 128 == 0 or dice.random() < 0.1:
            calm = step - RECENT if step >= LEVEL + RECENT else 0
            kept = left([*kept, step], calm)
            assert len(kept) <= 4
            assert calm < 128 or max(s for s in kept if s % 128 == 0 and s <= calm) == calm // 128 * 128


def test_the_diagnosis_says_what_was_seen_and_tried_and_what_may_help() -> None:
    on, off = TrainConfig(**BASE, rollback_above_nats=0.5), TrainConfig(**BASE)
    words = diagnosis(431, "train/loss was 6.1", ((300, 100), (300, 131)), on)
    assert "diverged at step 431: train/loss was 6.1" in words and "the last commit stays" in words
    assert "Tried: 2 rollback(s) (from step 400 to 300, from step 431 to 300)" in words
    assert "train.learning_rate (now 0.01)" in words and "data around step 431" in words
    assert "no commit to return to" in diagnosis(9, "", (), on)
    assert "train.rollback_above_nats is off" in diagnosis(9, "", (), off)


# --- the watchdog


def watched(minutes: float | None | str = "auto", phase: str = "train", **options: Any) -> tuple[Watchdog, list[str]]:
    said: list[str] = []
    runtime = RuntimeConfig.model_validate({"watchdog_minutes": minutes})
    return Watchdog(runtime, PhaseClock(phase), on_stuck=said.append, look_seconds=0.01, **options), said


def test_the_limit_is_ten_minutes_or_twenty_steps_and_six_times_that_outside_of_steps() -> None:
    dog, _ = watched()
    assert dog.limit_seconds() == 600
    for seconds in (1.0, 2.0, 3.0):
        dog.stepped(seconds)
    assert dog.limit_seconds() == 600
    for _ in range(9):
        dog.stepped(50.0)
    assert dog.limit_seconds() == 1000
    for phase in ("evaluate", "checkpoint", "compile", "download", "setup"):
        dog.clock.enter(phase)
        assert dog.limit_seconds() == 6000
    assert watched(2.5)[0].limit_seconds() == 150
    assert watched(None)[0].limit_seconds() == math.inf


@pytest.mark.parametrize("minutes", ["auto", 0.01, 1.0, 30.0])
def test_a_collective_outlasts_the_watchdog_whose_exit_is_one_that_is_recovered(minutes: Any) -> None:
    runtime = RuntimeConfig(watchdog_minutes=minutes)
    for phase in ("compile", "train", "evaluate", "checkpoint"):
        watchdog = Watchdog(runtime, PhaseClock(phase))
        for _ in range(100):
            watchdog.stepped(30.0)  # longer steps than any recipe's
        assert collective_timeout(runtime).total_seconds() > watchdog.limit_seconds() + 2 * watchdog.look_seconds
    assert collective_timeout(RuntimeConfig(watchdog_minutes=None)).total_seconds() == 600


def test_the_watchdog_barks_once_when_nothing_moves_and_names_the_phase() -> None:
    dog, said = watched(0.1 / 60)
    with dog:
        dog._thread.join(timeout=30)
    assert len(said) == 1 and said[0].startswith("rank 0: no progress in phase 'train' for ")


def test_the_watchdog_is_calm_while_something_moves() -> None:
    dog, said = watched(0.4 / 60)
    with dog:
        for _ in dog.over(range(12)):
            time.sleep(0.05)
        dog.clock.enter("checkpoint")
        time.sleep(0.6)  # longer than a step may take
    assert said == []


def test_the_watchdog_does_not_count_time_in_which_it_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    dog, said = watched(60.0)
    looks = iter(range(0, 10**9, 3600))  # a machine that is suspended for an hour between two looks
    monkeypatch.setattr(trainer.health, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    with dog:
        time.sleep(0.3)
    assert next(looks) > 5 * 3600 and said == []


def test_without_minutes_there_is_no_watchdog() -> None:
    dog, _ = watched(None)
    with dog:
        assert not dog._thread.is_alive()


def test_a_long_validation_and_a_slow_save_wake_no_watchdog(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(trainer.loop, "Watchdog", functools.partial(Watchdog, on_stuck=said.append, look_seconds=0.01))
    validation_loss, save = trainer.loop.validation_loss, trainer.loop.save

    def slow(function: Callable[..., Any], *args: Any) -> Any:
        time.sleep(1.3)
        return function(*args)

    monkeypatch.setattr(trainer.loop, "validation_loss", functools.partial(slow, validation_loss))
    monkeypatch.setattr(trainer.loop, "save", functools.partial(slow, save))
    run = runner(max_steps=3, val_every=3, watchdog_minutes=1 / 60)
    run.attempt()
    # A busy machine may be slow at other things.
    assert not [line for line in said if "evaluate" in line or "checkpoint" in line] and run.commits() == [3]


# --- runs that fall ill


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that a run of seconds can fill."""
    for name, length in (("OUTLIER_WINDOW", 10), ("RECENT", 4), ("LEVEL", 12), ("LANDMARK_STEPS", 5)):
        monkeypatch.setattr(trainer.health, name, length)


def events(run: Runner, kind: str) -> list[dict[str, Any]]:
    return [e for e in run.events if e["event"] == kind]


def tensors_at(run: Runner, step: int) -> dict[str, torch.Tensor]:
    (folder,) = (run.out / "run/checkpoints").glob(f"step-{step:08d}-*")
    return load_file(next(folder.glob("*.safetensors")))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a | b)


def test_a_healthy_run_is_the_plain_loop_bit_for_bit(runner: Callable[..., Runner], small_windows: None) -> None:
    plain, armed = runner("plain", max_steps=30), runner("armed", max_steps=30, **ARMED | {"skip_loss_zscore": 1e6})
    model, _ = plain.attempt()
    assert weights(armed.attempt()[0]) == weights(model) and armed.rows() == plain.rows()
    c = plain.config
    engine = make_engine(c.model, c.train, c.runtime, trainer_runs.ALONE)
    assert isinstance(engine, PlainEngine)
    engine.initialize(c.train.seed)
    tokens = TokenData(local_shards(plain.data, "train"), plain.data.joinpath, c.model.block_size, c.train.seed)
    for number, row in enumerate(plain.rows()[1:]):
        engine.optimizer.learning_rate = learning_rate_at(number, c.train)
        engine.gradients.zero_()
        total = torch.zeros(())
        for batch in tokens.micro_batches(sequences_of(number, c.model, c.train, 0, 1), 2, torch.device("cpu")):
            loss = engine.model(*batch) / 4
            loss.backward()
            total += loss.detach()
        norm = engine.gradients.norm()
        engine.gradients.clip_(norm, c.train.grad_clip)
        assert row["train/loss"] == float(total) and row["train/grad_norm"] == float(norm)
        engine.optimizer.step()
    assert weights(engine.model) == weights(model)
    assert not {k for row in series(plain.store, "run") for k in row if "skipped" in k}


ARMED = {"skip_loss_zscore": 20.0, "skip_grad_norm_zscore": 30.0, "rollback_above_nats": 50.0}


@pytest.mark.parametrize(("kind", "place"), [("nan", 4), ("infinite", 4), ("huge", 14)])
def test_a_bad_batch_is_skipped_counted_and_leaves_weights_and_moments_alone(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, small_windows: None, kind: str, place: int
) -> None:
    afflict({kind: [place]}, monkeypatch.setattr)
    run = runner(checkpoint_minutes=EVERY_STEP, keep_last=99, max_steps=20, skip_grad_norm_zscore=30.0)
    _, state = run.attempt()
    assert (state.step, state.optimizer_steps, state.tokens_seen) == (20, 19, 20 * 256)
    assert state.health.skipped == 1 and not state.rollbacks
    (event,) = events(run, "skipped")
    assert event["step"] == place + 1
    assert ("standard deviations above its last 10" if kind == "huge" else "train/loss is ") in event["reason"]
    rows = {row["step"]: row for row in series(run.store, "run")}
    assert {s: row["train/skipped_updates"] for s, row in rows.items() if "train/skipped_updates" in row} == {
        place + 1: 1
    }
    assert sorted(rows) == list(range(21)) and all(math.isfinite(v) for row in rows.values() for v in row.values())
    if kind == "huge":  # of a step that was not finite there is no commit: weights might be ruined already
        assert same(tensors_at(run, place), tensors_at(run, place + 1))
    else:
        assert place + 1 not in run.commits()
    assert not same(tensors_at(run, place), tensors_at(run, place + 2))


def test_a_run_with_skips_is_resumed_bit_for_bit(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    afflict({"nan": [3, 4, 15], "huge": [13, 17]}, monkeypatch.setattr)
    whole = runner("whole", max_steps=20, **ARMED)
    model, state = whole.attempt()
    assert state.health.skipped == 5 and state.optimizer_steps == 15
    for stop_after in (3, 4, 14, 18):  # before, in and after a skip
        run = runner(f"stopped-{stop_after}", max_steps=20, **ARMED)
        run.attempt(stop_after)
        resumed, again = run.attempt()
        assert again == state and run.rows() == whole.rows() and weights(resumed) == weights(model)


def test_a_loss_that_stays_not_finite_ends_the_run_with_a_diagnosis(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    afflict({"nan": list(range(5, 99))}, monkeypatch.setattr)
    run = runner(checkpoint_minutes=EVERY_STEP, max_steps=20)
    for first in (1, 9):  # the same command meets the same
        with pytest.raises(Diverged, match="diverged at step 13: loss or gradient were not finite in 8 updates"):
            run.attempt()
        assert run.commits() == [5, 4]
        assert len(events(run, "skipped")) == 8 * (1 if first == 1 else 2)


def test_fp16_overflows_are_the_scalers_and_a_nan_loss_is_skipped(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**24, growth_interval=3)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    afflict({"nan": [8]}, monkeypatch.setattr)
    run = runner("whole", precision="fp16")
    model, state = run.attempt()
    assert state.health.skipped == 1 < state.step - state.optimizer_steps
    assert [e["step"] for e in events(run, "skipped")] == [9]
    stopped = runner("stopped", precision="fp16")
    stopped.attempt(9)
    assert weights(stopped.attempt()[0]) == weights(model) and stopped.rows() == run.rows()


# A spike of the learning rate at places 30 and 31 of the data.
SPIKED: dict[str, Any] = {
    "max_steps": 50,
    "schedule": "constant",
    "rollback_above_nats": 2.0,
    "val_every": 25,
}


def test_a_diverged_run_turns_back_leaves_the_data_out_and_ends_well(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    healthy = runner("healthy", **SPIKED)
    healthy.attempt()
    afflict({"spike": [30, 31]}, monkeypatch.setattr)
    ruined = runner("ruined", **SPIKED | {"rollback_above_nats": None})
    ruined.attempt()
    run = runner("cured", **SPIKED)
    _, state = run.attempt()
    last, expected = run.rows()[-1]["val/loss"], healthy.rows()[-1]["val/loss"]
    assert last == pytest.approx(expected, rel=0.2) and ruined.rows()[-1]["val/loss"] > expected + 1

    ((to, left_out),) = state.rollbacks
    (event,) = events(run, "rollback")
    assert (event["to"], event["left_out"], event["step"]) == (to, left_out, to + left_out)
    assert to == 25 and 32 <= to + left_out < 35
    assert state.step == 50 and state.optimizer_steps == 50
    # The series has one row a step, of the way that was taken, and tells which data it read.
    assert [row["step"] for row in run.rows()] == list(range(51))
    c = run.config
    tokens = TokenData(local_shards(run.data, "train"), run.data.joinpath, c.model.block_size, c.train.seed)
    for row in run.rows()[1:]:
        place = row["step"] - 1 if row["step"] <= to else row["step"] - 1 + left_out
        assert row["data/digest"] == tokens.digest(sequences_of(place, c.model, c.train, 0, 1))
    assert run.rows()[: to + 1] == healthy.rows()[: to + 1]


def test_a_run_that_turned_back_is_resumed_bit_for_bit(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    afflict({"spike": [30, 31], "nan": [24, 44]}, monkeypatch.setattr)
    whole = runner("whole", **SPIKED)
    model, state = whole.attempt()
    ((to, left_out),) = state.rollbacks
    back = to + left_out  # looks of the loop until it turns back
    for stop_after in (back - 1, back, back + 7):
        run = runner(f"stopped-{stop_after}", **SPIKED)
        run.attempt(stop_after)
        resumed, again = run.attempt()
        assert again == state and run.rows() == whole.rows() and weights(resumed) == weights(model)


@pytest.mark.slow
def test_a_run_that_died_while_turning_back_takes_the_same_way(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    afflict({"spike": [30, 31]}, monkeypatch.setattr)
    whole = runner("whole", **SPIKED)
    model, state = whole.attempt()
    forget_after, roll_back = trainer_runs.PromptCheckpointer.forget_after, trainer.loop.roll_back

    def forget_not(*args: Any) -> None:
        raise KeyboardInterrupt

    def forget(checkpointer: Any, step: int) -> None:
        forget_after(checkpointer, step)
        raise KeyboardInterrupt

    def turn_back(*args: Any) -> TrainState:
        roll_back(*args)
        raise KeyboardInterrupt

    for where, place, name, dies in (
        ("before deleting", trainer_runs.PromptCheckpointer, "forget_after", forget_not),
        ("after deleting", trainer_runs.PromptCheckpointer, "forget_after", forget),
        ("in the next step", trainer.loop, "roll_back", turn_back),
    ):
        run = runner(f"died {where}", **SPIKED)
        with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
            dying.setattr(place, name, dies)
            run.attempt()
        resumed, again = run.attempt()
        assert again == state and run.rows() == whole.rows() and weights(resumed) == weights(model), where


def test_after_so_many_rollbacks_a_run_stops_with_a_diagnosis(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    afflict({"spike": list(range(30, 999))}, monkeypatch.setattr)  # wherever it turns: nothing helps
    run = runner(**SPIKED, max_rollbacks=2)
    with pytest.raises(Diverged, match=r"Tried: 2 rollback\(s\)") as stopped:
        run.attempt()
    assert len(events(run, "rollback")) == 2
    assert all(f"from step {e['step']} to {e['to']}" in str(stopped.value) for e in events(run, "rollback"))
    with pytest.raises(Diverged, match=r"Tried: 2 rollback\(s\)"):  # the same command has no more tries
        run.attempt()
    assert len(events(run, "rollback")) == 2


def test_without_a_commit_to_return_to_a_diverged_run_says_so(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    afflict({"spike": [30, 31]}, monkeypatch.setattr)
    monkeypatch.setattr(trainer.health, "LANDMARK_STEPS", 1000)
    with pytest.raises(Diverged, match="there was no commit to return to"):
        runner(**SPIKED, checkpoint_minutes=EVERY_STEP).attempt()


def test_a_superseded_attempt_deletes_nothing_when_it_diverges(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, small_windows: None
) -> None:
    afflict({"spike": [30, 31]}, monkeypatch.setattr)
    run = runner(**SPIKED, checkpoint_minutes=EVERY_STEP)
    turning = {"back": False}
    resume = trainer.loop.resume

    def noted(*args: Any, **options: Any) -> Any:
        turning["back"] = options.get("before") is not None
        return resume(*args, **options)

    monkeypatch.setattr(trainer.loop, "resume", noted)
    before: list[int] = []

    def superseded() -> bool:
        if turning["back"]:
            before.extend(run.commits())
        return turning["back"]

    with pytest.raises(StaleAttempt, match="nothing is rolled back"):
        run.attempt(superseded=superseded)
    assert run.commits() == before and max(before) > 30


# --- as a command, with several ranks, killed and frozen

ILL: dict[str, Any] = {"max_steps": 200, "schedule": "constant", "val_every": 50, "checkpoint_minutes": 0.0005}
ILL |= {"skip_grad_norm_zscore": 30.0, "rollback_above_nats": 2.0}
TROUBLE = {"nan": [5, 6, 40], "huge": [140], "spike": [170, 171]}


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Command]:
    @functools.cache
    def run(ranks: int) -> Command:
        command = Command(data, tmp_path_factory.mktemp(f"ill-{ranks}") / "out", configured(**ILL), TROUBLED)
        command.finish(ranks)
        return command

    return run


@pytest.fixture(name="troubled")
def _troubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUBLE", json.dumps(TROUBLE))


@pytest.mark.slow
def test_one_and_two_ranks_skip_and_turn_back_alike(troubled: None, undisturbed: Callable[[int], Command]) -> None:
    one, two = undisturbed(1), undisturbed(2)
    for command in (one, two):
        assert [e["step"] for e in command.events() if e["event"] == "skipped"] == [6, 7, 41, 141]
        assert len([e for e in command.events() if e["event"] == "rollback"]) == 1
    for a, b in zip(one.rows()[:141], two.rows()[:141], strict=True):
        assert a.get("data/digest") == b.get("data/digest") and ("train/loss" in a) == ("train/loss" in b)
        assert b == pytest.approx(a, rel=2e-2)
    assert one.rows()[-1]["val/loss"] == pytest.approx(two.rows()[-1]["val/loss"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_ill_run_killed_at_any_moment_ends_as_the_undisturbed_one(
    data: Path, tmp_path: Path, troubled: None, undisturbed: Callable[[int], Command], ranks: int
) -> None:
    moments = random.Random(ranks)
    command = Command(data, tmp_path / "out", configured(**ILL), TROUBLED)
    for rows in (6, 130, moments.randint(30, 60)):
        with command.started(ranks) as process:
            command.wait_for_rows(rows, process)
            time.sleep(moments.random() * 0.1)
            kill_tree(process)
            assert process.returncode == -signal.SIGKILL, "it finished before it was killed"
    command.finish(ranks)
    assert command.rows() == undisturbed(ranks).rows()
    assert command.model_sha256() == undisturbed(ranks).model_sha256()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGSTOP", "sleep"])
def test_a_rank_that_is_stuck_ends_the_attempt_and_the_next_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("TROUBLE", json.dumps({"sleep": [20]} if how == "sleep" else {}))
    monkeypatch.setenv(*FROZEN_SECONDS)
    config = configured(max_steps=60, val_every=None, checkpoint_minutes=0.0005, watchdog_minutes=4 / 60)
    command = Command(data, tmp_path / "out", config, TROUBLED)
    ranks = 1 if how == "sleep" else 2
    with command.started(ranks) as process:
        if how == "SIGSTOP":
            command.wait_for_rows(10, process)
            victim = next(p for p in psutil.Process(process.pid).children(recursive=True) if is_rank(p, 1))
            os.kill(victim.pid, signal.SIGSTOP)
        said, _ = process.communicate(timeout=90)
    assert process.returncode == (75 if ranks == 1 else 1), said
    assert "no progress in phase 'train' for " in said and "most recent call first" in said
    assert ("doze" if how == "sleep" else "all_reduce") in said  # where it hangs
    done = command.rows_logged()
    assert done < 60
    command.finish(ranks)
    assert [row["step"] for row in command.rows()] == list(range(1, 61))
    assert [e["step"] > 0 for e in command.events() if e["event"] == "start"] == [False, True]


# How long torchrun (2.12 or newer; 30 else) waits for a frozen rank to end before it kills it.
FROZEN_SECONDS = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")


def is_rank(process: psutil.Process, rank: int) -> bool:
    return "troubled.py" in " ".join(process.cmdline()) and process.environ().get("RANK") == str(rank)


# --- through the pipeline


@pytest.mark.slow
def test_a_stuck_rank_interrupts_the_command_that_then_goes_on(tmp_path: Path) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    project.environment |= [FROZEN_SECONDS]
    changes = ("runtime.processes=2", "runtime.watchdog_minutes=0.1", "train.max_steps=150")
    command = ("run", "tiny.yaml", "--stage", "train", *(word for change in changes for word in ("--set", change)))
    with project.started(*command) as process:
        deadline = time.monotonic() + 120
        while not (victims := second_ranks(process)) or project.rows_logged() < 10:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        os.kill(victims[0].pid, signal.SIGSTOP)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 75
    assert "interrupted (rank 0: no progress in phase " in err and "the same command goes on from here" in err
    assert project.report()["state"] == "interrupted"
    project.run(*command)


def second_ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it may end while we look
            if child.environ().get("RANK") == "1":
                found.append(child)
    return found
