"""Commits and rows of a run in its store: encoding, merging, and which checkpoints stay."""

import json
import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer.commits import Commit, FileReceipt, TrainState, checkpoint_seconds, deletable_checkpoints, series
from trainer.config import TrainConfig
from trainer.health import LEVEL, RECENT, Health
from trainer.store import LocalStore


def test_a_damaged_commit_is_detected() -> None:
    health = Health(losses=(4.5, 4.25), calm_step=2)
    state = TrainState(step=3, val_loss=1.25, health=health, rollbacks=((1, 2),))
    commit = Commit(
        3, 1, 2, 1.5e9, state, "metrics/step-00000003-a0001.jsonl", (FileReceipt("a.safetensors", 9, "ab"),)
    )
    body = commit.encode()
    assert Commit.decode(body) == commit
    for wrong in (b"", b"null", b"[]", b"{}", body[:-1], body.replace(b"3", b"4", 1), b'{"sha256": null}'):
        with pytest.raises(ValueError):
            Commit.decode(wrong)


def test_the_state_survives_json() -> None:
    config = TrainConfig(batch_tokens=256, max_steps=1000, learning_rate=0.01, rollback_above_nats=0.5)
    health = Health()
    for number, loss in enumerate([3.0 + i % 7 for i in range(300)] + [math.nan], 1):
        health, _ = health.after(number, loss, 1.0, config)
    state = TrainState(step=7, health=health, rollbacks=((100, 20), (100, 31)))
    assert state.health.calm_step and state.health.not_finite == 1
    again = TrainState.from_json(json.loads(json.dumps(asdict(state))))
    assert (
        again == state and again.data_step == 7 and TrainState.from_json(json.loads(json.dumps(asdict(TrainState()))))
    )


def test_a_commit_from_before_the_rise_is_kept() -> None:
    def left(steps: list[int], calm: int | None, keep_last: int = 2) -> list[int]:
        folders = [f"run/checkpoints/step-{s:08d}-a0001" for s in sorted(steps, reverse=True)]
        return sorted(set(steps) - {int(f[-14:-6]) for f in deletable_checkpoints(folders, keep_last, calm)})

    assert left([128, 256, 384, 400], None) == [384, 400]
    assert left([128, 140, 256, 300, 384, 400, 410], 250) == [128, 256, 400, 410]
    assert left([128, 140, 256, 300, 384, 400, 410], 256) == [256, 384, 400, 410]
    assert left([100, 128, 130, 140], 0) == [128, 130, 140]  # it will be old enough one day
    # For any saves in between, one rollback point always exists, and never more than two beside the last commit.
    dice, kept = random.Random(0), list[int]()
    for step in range(1, 3000):
        if step % 128 == 0 or dice.random() < 0.1:
            calm = step - RECENT if step >= LEVEL + RECENT else 0
            kept = left([*kept, step], calm)
            assert len(kept) <= 4
            assert calm < 128 or max(s for s in kept if s % 128 == 0 and s <= calm) == calm // 128 * 128


def test_a_redone_step_counts_with_the_later_attempts_values(tmp_path: Path) -> None:
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
def test_a_damaged_row_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    store = LocalStore(tmp_path)
    store.put("run/metrics/step-00000003-a0001.jsonl", b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    assert [row["step"] for row in series(store, "run")] == [1, 3]
    assert "step-00000003-a0001.jsonl: line 2 is DAMAGED; the series lacks its step" in caplog.text


def test_the_interval_between_checkpoints_loses_least() -> None:
    # Lost per hour at an interval: the saves themselves, and half an interval with every failure.
    def lost(interval: float, save: float, between: float) -> float:
        return save / interval + interval / 2 / between

    for save, between in ((0.5, 14_400.0), (2.0, 14_400.0), (20.0, 3_600.0)):
        best = checkpoint_seconds(save, between)
        assert all(lost(best, save, between) <= lost(best * f, save, between) for f in (0.5, 0.9, 1.1, 2.0))
    assert checkpoint_seconds(1e-6) == 30.0 and checkpoint_seconds(1e6) == 1800.0
