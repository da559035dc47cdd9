"""Tracking cannot hurt a run: MLflow may be missing, slow, silent or gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mlflow_runs import (
    RUN,
    Seen,
    log_losses,
    losses,
    remove_tracking_settings,
    ship,
    sqlite_uri,
    started,
    until,
    written,
)

from pipelines.tracking.mlflow import shipper as shipping
from pipelines.tracking.mlflow.tracker import Tracker
from trainer.errors import UserError
from trainer.store import LocalStore


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tracking_settings(monkeypatch)


def test_tracking_off_writes_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYTRAIN_TRACKING", "off")
    tracker = started(tmp_path, sqlite_uri(tmp_path))
    tracker.stage_started("train", {}, {})
    log_losses(tracker, 3)
    tracker.stage_ended("train", "FINISHED")
    assert tracker.close() is None
    assert list(tmp_path.iterdir()) == []


def test_a_killed_command_owes_its_last_records_even_if_all_others_are_shipped(tmp_path: Path) -> None:
    tracker = written(tmp_path)
    assert not Tracker(tmp_path / "elsewhere", RUN, default_uri="sqlite:///d").owes_records()
    tracker.text_file(None, "report.html", 5000 * "x")
    ship(tmp_path)
    assert tracker.owes_records()  # it died before the results and the model
    tracker.flush_seconds = 0
    tracker.close()
    ship(tmp_path)
    assert not tracker.owes_records()


def test_tracking_is_on_or_off_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYTRAIN_TRACKING", "maybe")
    with pytest.raises(UserError, match="SKYTRAIN_TRACKING: 'maybe' is neither on nor off"):
        Tracker(tmp_path, RUN, default_uri="sqlite:///d")


def test_the_tracking_uri_is_the_given_one_then_the_environments_then_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Tracker(tmp_path, RUN, default_uri="sqlite:///d").uri == "sqlite:///d"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://e")
    assert Tracker(tmp_path, RUN, default_uri="sqlite:///d").uri == "http://e"
    assert Tracker(tmp_path, RUN, uri="http://g", default_uri="sqlite:///d").uri == "http://g"


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_an_invalid_flush_time_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", text)
    with pytest.raises(UserError, match="SKYTRAIN_MLFLOW_FLUSH_SECONDS.*for example"):
        Tracker(tmp_path, RUN, default_uri="sqlite:///d")


def test_the_run_continues_without_an_importable_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "mlflow.py").write_text("raise ImportError('none here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    tracker = started(tmp_path, sqlite_uri(tmp_path))
    log_losses(tracker, 3)
    until(lambda: tracker._shipper and tracker._shipper.poll() is not None, 30, "the shipper gave up")
    tracker.stage_ended("train", "FINISHED")
    assert tracker.close() == (
        f"MLflow: 4 records are kept in {tracker.log}; the next run ships them (the reason is in {tracker.shipper_log})"
    )
    assert tracker.shipper_log.read_text().count("mlflow cannot be imported: ImportError: none here") == 1


def test_a_work_folder_that_cannot_be_written_is_a_notice_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file where the folder should be")
    tracker = started(tmp_path, sqlite_uri(tmp_path))
    tracker.stage_started("train", {}, {})
    log_losses(tracker, 2)
    assert str(tracker.close()).startswith("MLflow: records are lost")


def test_a_full_disk_is_a_notice_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "0")
    tracker = written(tmp_path)
    full = os.open("/dev/full", os.O_WRONLY)
    kept, tracker._fd = tracker._fd, full
    log_losses(tracker, 2)
    tracker._fd = kept
    os.close(full)
    assert str(tracker.close()).startswith("MLflow: records are lost")


def test_the_position_of_a_deleted_log_does_not_outlive_it(tmp_path: Path) -> None:
    first = written(tmp_path)
    log_losses(first, 50)
    ship(tmp_path)
    first.log.unlink()
    second = written(tmp_path)
    second.metrics("train", 99, 1.8e9, {"train/loss": 0.5})
    ship(tmp_path)
    assert Seen(sqlite_uri(tmp_path)).points(f"{RUN}/train", "train/loss") == [*losses(50), (99, 0.5)]


def test_the_runs_own_process_never_imports_mlflow(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from pipelines.tracking.mlflow.tracker import Tracker\n"
        f"t = Tracker(Path({str(tmp_path)!r}), 'r', default_uri='http://127.0.0.1:9'); t.start()\n"
        "t.stage_started('train', {}, {}); t.metrics('train', 0, 1.8e9, {'a': 1}); t.close()\n"
        "print('mlflow' in sys.modules)"
    )
    environment = os.environ | {
        "SKYTRAIN_MLFLOW_FLUSH_SECONDS": "0",
        "PYTHONPATH": str(Path(shipping.__file__).parents[3]),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_shipper_that_died_is_started_again_while_the_stage_runs(tmp_path: Path) -> None:
    tracker = started(tmp_path, sqlite_uri(tmp_path))
    assert (dead := tracker._shipper)
    dead.kill()
    dead.wait()
    tracker.keep_journal(LocalStore(tmp_path / "store"))
    assert tracker._shipper and tracker._shipper.pid != dead.pid and tracker._shipper.poll() is None
    tracker._shipper.kill()
    tracker._shipper.wait()


def test_system_metrics_survive_an_error_of_a_monitor_and_still_hear_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(monitors: list[object]) -> dict[str, float]:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(shipping, "_sample", broken)
    monkeypatch.setattr(shipping, "LONGEST_PAUSE_SECONDS", 0.1)
    tracker = written(tmp_path)
    tracker.stage_started("train", {}, {})
    follower = shipping.SystemMetrics(tracker.log, threading.Event())
    threading.Thread(target=follower.follow, args=(tracker._fd,), daemon=True).start()
    until(lambda: follower.training, 20, "the stage began")
    tracker.close()
    until(follower.closing.is_set, 20, "the end was heard")
