"""The journal in the store rebuilds a lost MLflow server."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from mlflow_runs import RUN, Seen, losses, remove_tracking_settings, ship, sqlite_uri, written
from servers import free_ports

from pipelines.tracking.mlflow import journal
from pipelines.tracking.mlflow.journal import sessions_in_journal
from pipelines.tracking.mlflow.shipper import rebuild
from trainer.errors import UserError
from trainer.store import LocalStore


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tracking_settings(monkeypatch)


@pytest.mark.slow
def test_a_journal_has_the_records_of_every_machine_in_the_order_of_their_sessions(tmp_path: Path) -> None:
    store, uri, fresh = LocalStore(tmp_path / "store"), sqlite_uri(tmp_path), f"sqlite:///{tmp_path}/fresh.db"
    for machine, steps in (("z", range(1, 6)), ("a", range(4, 9))):  # their names sort the other way round
        tracker = written(tmp_path / machine)
        tracker.stage_started("train", {"seed": 1}, {"machine": machine})
        for step in steps:
            tracker.metrics("train", step, 1.9e9 + step + (machine == "a"), {"train/loss": 10.0 - step})
            tracker.keep_journal(store)
        with tracker.log.open("ab") as log:
            log.write(b'{"kind": "met')  # the last line is incomplete
        tracker.keep_journal(store)
        ship(tmp_path / machine, uri)
    pieces = store.entries(f"tracking/{RUN}/")
    assert len(pieces) == 10
    assert rebuild(store, RUN, fresh) == 2
    for known in (Seen(uri), Seen(fresh)):
        train = known.runs[f"{RUN}/train"]
        assert known.points(f"{RUN}/train", "train/loss") == [(step, 10.0 - step) for step in range(1, 9)]
        assert (train.data.params, train.data.tags["machine"]) == ({"seed": "1"}, "a")
    times = [
        [m.timestamp for m in seen.client.get_metric_history(seen.runs[f"{RUN}/train"].info.run_id, "train/loss")]
        for seen in (Seen(uri), Seen(fresh))
    ]
    assert sorted(times[0]) == sorted(times[1])


@pytest.mark.slow
def test_a_rebuild_gives_up_on_a_server_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "2")
    store, (port,) = LocalStore(tmp_path / "store"), free_ports(1)
    tracker = written(tmp_path)
    tracker.metrics(None, 0, 1.9e9, {"cost/usd": 2.0})
    tracker.keep_journal(store)
    with pytest.raises(UserError, match=f"http://127.0.0.1:{port} has taken nothing for 2 s .*start it, or name"):
        rebuild(store, RUN, f"http://127.0.0.1:{port}")


def test_a_line_that_a_crash_truncated_loses_only_itself(tmp_path: Path) -> None:
    tracker = written(tmp_path)
    tracker.metrics("train", 0, 1.8e9, {"train/loss": 11.0})
    with open(tracker.log, "ab") as log:
        log.write(b'{"kind": "metrics", "time": 1.8e9, "sta')
    again = written(tmp_path)
    again.metrics("train", 1, 1.8e9, {"train/loss": 5.5})
    ship(tmp_path)
    assert Seen(sqlite_uri(tmp_path)).points(f"{RUN}/train", "train/loss") == losses(2)


def test_a_damaged_piece_of_a_journal_costs_its_own_lines_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    tracker = written(tmp_path)
    tracker.keep_journal(store)
    (sound,) = sessions_in_journal(store, RUN)
    name = f"tracking/{RUN}/{'0' * 12}/{{:012d}}-{{:012d}}.jsonl.gz"
    monkeypatch.setattr(journal, "MOST_PIECE_BYTES", 1 << 20)
    newer = b'{"kind": "close", "time": 1.5, "mood": "good"}'
    orphan = b'{"kind": "close", "time": 1.5}'
    outside = b'{"kind": "text_file", "time": 1.5, "stage": null, "name": "../../.bashrc", "text": "x"}'
    lines = [b"[" * 100_000, newer, orphan, outside, b'{"kind": "close", "time": 1e999}', b"9" * 6000]
    hostile = [b"no gzip", gzip.compress(b"x")[:-9], gzip.compress(b"\n" * (2 << 20)), gzip.compress(b"\n".join(lines))]
    for number, body in enumerate(hostile):
        store.put(name.format(number, number + 1), body)
    store.put(f"tracking/{RUN}/notes.txt", b"mine")
    assert sessions_in_journal(store, RUN) == [sound]
    assert caplog.text.count("its lines are left out") == 3
    assert "left out 6 lines that are damaged or of a newer skytrain" in caplog.text
    assert "ignored" in caplog.text and "notes.txt" in caplog.text
