"""Commits and rows of a run in its store: encoding, merging, and which checkpoints stay."""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from trainer.base.record import DamagedRecord
from trainer.base.store import LocalStore
from trainer.checkpoint.commits import (
    Commit,
    FileReceipt,
    TrainState,
    checkpoint_seconds,
    committed_folders,
    committed_state,
    segments,
    series,
)
from trainer.config.errors import UserError

FOLDER = "run/checkpoints/step-00000003-a0001"
FILE = asdict(FileReceipt.of("rank-00000-of-00001.safetensors", 9, ["ab" * 32]))


def sealed(values: dict[str, Any]) -> bytes:
    """A COMMIT.json with these fields and their sha256."""
    return json.dumps({**values, "sha256": sha256(json.dumps(values).encode()).hexdigest()}).encode()


@pytest.mark.parametrize(
    "lie",
    [
        {"step": 4},
        {"world_size": "2"},
        {"state": {"step": 4}},
        {"state": {"step": 3, "health": {"losses": ["low"]}}},
        {"files": [FILE | {"name": "../../../../victim.safetensors"}]},
        {"files": [FILE | {"sha256": "../ab"}]},
        {"files": [{name: FILE[name] for name in ("name", "size", "sha256")}]},
        {"files": [FILE | {"chunk_bytes": 0}]},
    ],
)
def test_a_sealed_commit_that_lies_is_detected(lie: dict[str, Any]) -> None:
    commit = json.loads(Commit(3, 1, 2, 1.5e9, TrainState(step=3), "metrics/x", ()).encode())
    del commit["sha256"]
    assert Commit.decode(sealed(commit | {"files": [FILE]}), FOLDER).step == 3
    with pytest.raises(DamagedRecord):
        Commit.decode(sealed(commit | lie), FOLDER)


def test_a_commit_of_a_newer_version_is_no_damage(tmp_path: Path) -> None:
    commit = json.loads(Commit(3, 1, 2, 1.5e9, TrainState(step=3), "metrics/x", ()).encode())
    del commit["sha256"]
    commit["format"] = 2
    store = LocalStore(tmp_path)
    store.put(f"{FOLDER}/COMMIT.json", sealed(commit))
    with pytest.raises(UserError, match=f"{FOLDER}/COMMIT.json: written by a newer skytrain .format 2.*; upgrade"):
        committed_state(store, "run")


def test_names_that_are_not_ours_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore(tmp_path)
    body = Commit(3, 1, 2, 1.5e9, TrainState(step=3), "metrics/x", ()).encode()
    for name in ("step-00000003-a0001", "foo", "step-x-a0001", "step-00000009-a0001.old"):
        store.put(f"run/checkpoints/{name}/COMMIT.json", body)
    store.put("run/checkpoints/notes.txt", b"")
    assert committed_folders(store, "run") == [FOLDER]
    assert "ignored 'run/checkpoints/foo/COMMIT.json', which is not ours" in caplog.text
    for name in ("step-00000003-a0001.jsonl", "notes.txt", "step-3.jsonl"):
        store.put(f"run/metrics/{name}", b'{"step": 1, "time": 1.0}')
    assert list(segments(store, "run")) == [[{"step": 1, "time": 1.0}]]


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize(
    "damaged",
    [
        b"[" * 100_000,
        b'{"step": "2", "time": 1.0}',
        b'{"step": 2, "time": 1.0, "a": 2\xff}',
        b'{"step": 2}',
        b'{"step": -2, "time": 1.0}',
        b'{"step": 2, "time": 1.0, "a": 1e101}',
        b"[1",
        b'{"step": 2, "time": 1.0, "samples": [1]}',
    ],
)
def test_a_damaged_row_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    store = LocalStore(tmp_path)
    store.put(
        "run/metrics/step-00000003-a0001.jsonl", b'{"step": 1, "time": 1}\n' + damaged + b'\n{"step": 3, "time": 1}\n'
    )
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
