"""The shipper loses nothing and doubles nothing, on SQLite and on a real server."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow_runs import (
    RUN,
    Seen,
    log_losses,
    losses,
    mlflow_server,
    remove_tracking_settings,
    ship,
    sqlite_uri,
    started,
    until,
    written,
)
from servers import free_ports

from pipelines.cloud.checks import mlflow_answers
from pipelines.tracking.mlflow import shipper as shipping
from pipelines.tracking.mlflow.journal import Metrics, Record, Tags, position_file, read_position, write_position
from pipelines.tracking.mlflow.shipper import Refused, Shipper, groups


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tracking_settings(monkeypatch)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as uri:
        yield uri


@pytest.fixture
def blackhole() -> Iterator[str]:
    """A server that accepts every connection and never responds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_run_is_a_parent_with_a_nested_run_for_each_stage(tmp_path: Path) -> None:
    tracker = written(tmp_path)
    tracker.stage_started(None, {"recipe": "smoke"}, {"git": "abc"})
    for stage in ("tokenize", "train"):
        tracker.stage_started(stage, {"seed": 1337}, {})
        tracker.stage_ended(stage, "FINISHED")
    tracker.tags("train", {"artifact": "file:///x"})
    tracker.stage_ended(None, "FINISHED")
    ship(tmp_path)

    seen = Seen(sqlite_uri(tmp_path))
    assert set(seen.runs) == {RUN, f"{RUN}/tokenize", f"{RUN}/train"}
    parent, train = seen.runs[RUN], seen.runs[f"{RUN}/train"]
    assert train.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert train.data.tags["skytrain.stage"] == "train"
    assert train.data.tags["artifact"] == "file:///x"
    assert train.data.params == {"seed": "1337"}
    assert parent.data.tags["git"] == "abc"
    assert {run.info.status for run in seen.runs.values()} == {"FINISHED"}


def test_shipping_the_whole_log_again_adds_nothing(tmp_path: Path) -> None:
    tracker = written(tmp_path)
    tracker.stage_started("train", {"lr": 1}, {})
    log_losses(tracker, 1500)  # more than MLflow takes in one call
    tracker.metrics("train", 1500, 1.8e9, {"train/loss": math.nan, "grad_norm": math.inf})
    tracker.dataset("train", "tokens/smoke", "f" * 64, "file:///tokens")
    tracker.stage_ended("train", "FAILED")
    ship(tmp_path)
    position_file(tracker.log, tracker.uri).unlink()
    ship(tmp_path)

    seen = Seen(sqlite_uri(tmp_path))
    points = seen.points(f"{RUN}/train", "train/loss")
    assert points[:1500] == losses(1500)
    assert len(points) == 1501 and math.isnan(points[1500][1])
    assert seen.points(f"{RUN}/train", "grad_norm") == [(1500, sys.float_info.max)]
    assert len(seen.runs[f"{RUN}/train"].inputs.dataset_inputs) == 1
    assert seen.runs[f"{RUN}/train"].info.status == "FAILED"


def test_the_dataset_is_the_input_of_its_stage(tmp_path: Path) -> None:
    tracker = written(tmp_path)
    tracker.stage_started("train", {}, {})
    tracker.dataset("train", "tokens/smoke-77", "0123456789" * 6, "s3://bucket/tokens/smoke-77")
    ship(tmp_path)

    (given,) = Seen(sqlite_uri(tmp_path)).runs[f"{RUN}/train"].inputs.dataset_inputs
    assert given.dataset.name == "tokens/smoke-77"
    assert given.dataset.digest == ("0123456789" * 6)[:36]
    assert given.dataset.source_type == "s3"
    assert json.loads(given.dataset.source) == {"uri": "s3://bucket/tokens/smoke-77"}


def test_an_interrupted_run_is_rejoined_and_a_changed_param_becomes_a_tag(tmp_path: Path) -> None:
    first = written(tmp_path)
    first.stage_started(None, {}, {})
    first.stage_started("train", {"lr": 1, "seed": 7}, {})
    log_losses(first, 3)
    first.stage_ended("train", "KILLED")
    ship(tmp_path)
    before = Seen(sqlite_uri(tmp_path)).runs

    second = written(tmp_path)
    second.stage_started("train", {"lr": 2, "seed": 7}, {})
    second.metrics("train", 3, 1.9e9, {"train/loss": 0.5})
    ship(tmp_path)
    seen = Seen(sqlite_uri(tmp_path))
    train = seen.runs[f"{RUN}/train"]
    assert {r.info.run_id for r in seen.runs.values()} == {r.info.run_id for r in before.values()}
    assert train.info.status == "RUNNING"
    assert train.data.params == {"lr": "1", "seed": "7"}
    assert train.data.tags["param.lr"] == "2" and "param.seed" not in train.data.tags
    assert seen.points(f"{RUN}/train", "train/loss") == [*losses(3), (3, 0.5)]


def test_another_work_folder_joins_the_same_mlflow_runs(tmp_path: Path) -> None:
    uri = sqlite_uri(tmp_path)
    for machine in ("a", "b"):
        tracker = written(tmp_path / machine)
        tracker.stage_started("train", {}, {machine: "was here"})
        ship(tmp_path / machine, uri)
    assert {"a", "b"} <= set(Seen(uri).runs[f"{RUN}/train"].data.tags)


def test_steps_redone_on_another_machine_are_shipped_once(tmp_path: Path) -> None:
    uri = sqlite_uri(tmp_path)
    for machine, steps in (("a", range(1, 6)), ("b", range(4, 9))):
        tracker = written(tmp_path / machine)
        for step in steps:
            tracker.metrics("train", step, 1.9e9 + step + (machine == "b"), {"train/loss": 10.0 - step})
        tracker.metrics("train", 0, 1.9e9 + (machine == "b"), {"cost/usd": 1.0})
        ship(tmp_path / machine, uri)
    seen = Seen(uri)
    assert seen.points(f"{RUN}/train", "train/loss") == [(step, 10.0 - step) for step in range(1, 9)]
    assert len(seen.points(f"{RUN}/train", "cost/usd")) == 2  # values outside of a series may be sent again


def test_after_a_rollback_both_points_stay_and_the_later_counts(tmp_path: Path) -> None:
    uri = sqlite_uri(tmp_path)
    for machine, again in (("a", False), ("b", True)):
        tracker = written(tmp_path / machine)
        for step in (4, 5):
            tracker.metrics("train", step, 1.9e9 + step + 10 * again, {"train/loss": 3.0 - again}, again)
        ship(tmp_path / machine, uri)
    seen = Seen(uri)
    assert seen.points(f"{RUN}/train", "train/loss") == [(4, 2.0), (4, 3.0), (5, 2.0), (5, 3.0)]
    assert seen.runs[f"{RUN}/train"].data.metrics["train/loss"] == 2.0


def test_a_table_is_an_artifact_of_its_run_and_a_table_without_a_destination_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    tracker = written(tmp_path)
    tracker.table(None, "account.json", {"stage": ["tokenize", "train"], "usd": [1.0, None]})
    ship(tmp_path)
    info = Seen(sqlite_uri(tmp_path)).runs[RUN].info
    run_id = info.run_id
    (kept,) = (tmp_path / "mlartifacts").rglob("account.json")  # and not in the current folder
    assert run_id in kept.parts
    table = Path(MlflowClient(sqlite_uri(tmp_path)).download_artifacts(run_id, "account.json")).read_text()
    assert json.loads(table) == {"columns": ["stage", "usd"], "data": [["tokenize", 1.0], ["train", None]]}

    monkeypatch.setattr(MlflowClient, "log_text", lambda *_: (_ for _ in ()).throw(OSError("no bucket")))
    tracker.table(None, "account.json", {"stage": []})
    tracker.metrics(None, 0, 1.9e9, {"cost/usd": 2.0})
    ship(tmp_path)
    assert Seen(sqlite_uri(tmp_path)).points(RUN, "cost/usd") == [(0, 2.0)]


def test_the_older_of_two_parents_made_at_once_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = sqlite_uri(tmp_path)
    for machine in ("a", "b"):
        written(tmp_path / machine).stage_started(None, {}, {machine: "was here"})
        time.sleep(0.01)  # MLflow's clock ticks in milliseconds
    ship(tmp_path / "a", uri)
    looked = []
    find = Shipper._find

    def too_early(shipper: Shipper, client: Any) -> dict[str | None, str]:
        looked.append(1)
        return find(shipper, client) if len(looked) > 1 else {}

    monkeypatch.setattr(Shipper, "_find", too_early)
    ship(tmp_path / "b", uri)
    assert {"a", "b"} <= set(Seen(uri).runs[RUN].data.tags)


def test_only_the_refused_record_is_dropped_and_this_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = written(tmp_path)
    tracker.stage_started("train", {}, {})
    log_losses(tracker, 2)
    tracker.metrics("train", 2, 1.8e9, {"a name that MLflow refuses: $$$": 1.0})
    tracker.metrics("train", 3, 1.8e9, {"train/loss": 0.5})
    ship(tmp_path)
    assert Seen(sqlite_uri(tmp_path)).points(f"{RUN}/train", "train/loss") == [*losses(2), (3, 0.5)]
    dropped = [line for line in capsys.readouterr().out.splitlines() if "dropped" in line]
    assert len(dropped) == 1 and "$$$" in dropped[0]


def test_a_refusal_that_a_passing_fault_explains_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = written(tmp_path)
    tracker.metrics("train", 0, 1.8e9, {"train/loss": 1.0})
    shipper = Shipper(tracker.log, tracker.uri)
    shipper.closing.set()
    outcomes = iter([Refused("400"), ConnectionError("no"), Refused("400"), ConnectionError("no"), None])
    sent = []

    def send(group: list[Record]) -> None:
        if isinstance(group[0], Metrics):
            assert read_position(shipper.position) < tracker.log.stat().st_size, "noted before it was shipped"
            if outcome := next(outcomes):
                raise outcome
        sent.append(group[0].kind)

    monkeypatch.setattr(shipper, "_send", send)
    monkeypatch.setattr(shipping.time, "sleep", lambda seconds: None)
    shipper.ship(until_end=True)
    assert sent == ["session", "metrics"]


def test_metrics_go_in_groups_of_one_stage_that_mlflow_takes() -> None:
    def metric(stage: str, values: int) -> Metrics:
        return Metrics(0.0, stage, 0, {str(i): 0.0 for i in range(values)})

    tags = Tags(0.0, "train", {})
    log: list[Record] = [
        *[metric("train", 400)] * 3,
        tags,
        tags,
        metric("train", 1),
        metric("evaluate", 1),
        metric("train", 2500),
    ]
    grouped = list(groups((record, end) for end, record in enumerate(log, 1)))
    assert [(len(group), end) for group, end in grouped] == [
        (2, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8)
    ]  # fmt: skip
    assert [record for group, _ in grouped for record in group] == log


@pytest.mark.slow
def test_the_check_of_a_launch_accepts_a_server_that_answers(server: str) -> None:
    assert mlflow_answers(server, {}).state == "ok"


@pytest.mark.slow
def test_a_killed_shipper_loses_and_doubles_nothing(tmp_path: Path, server: str) -> None:
    tracker = started(tmp_path, server, "killed-1")
    tracker.stage_started("train", {}, {})
    log_losses(tracker, 20_000)
    position = position_file(tracker.log, server)
    until(lambda: read_position(position) > 100_000, 60, "a part of the log is shipped")
    assert tracker._shipper
    os.kill(tracker._shipper.pid, signal.SIGKILL)
    tracker._shipper.wait()
    assert read_position(position) < tracker.log.stat().st_size, "killed too late to show anything"
    # The kill may come between MLflow's commit and the position. Force it, with the widest possible gap.
    write_position(position, 0)
    tracker.stage_ended("train", "FINISHED")
    tracker.flush_seconds = 120
    assert tracker.close() is None
    seen = Seen(server, "killed-1")
    assert seen.points("killed-1/train", "train/loss") == losses(20_000)
    assert seen.runs["killed-1/train"].info.status == "FINISHED"


@pytest.mark.slow
def test_a_server_that_starts_late_gets_everything(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    tracker = started(tmp_path, f"http://127.0.0.1:{port}")
    tracker.stage_started("train", {}, {})
    log_losses(tracker, 10)
    until(lambda: "will try again" in tracker.shipper_log.read_text(), 60, "the shipper has failed once")
    with mlflow_server(tmp_path / "server", port) as uri:
        tracker.stage_ended("train", "FINISHED")
        assert tracker.close() is None
        assert Seen(uri).points(f"{RUN}/train", "train/loss") == losses(10)


@pytest.mark.slow
def test_records_that_no_server_took_are_shipped_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "2")
    first = started(tmp_path, f"http://127.0.0.1:{port}")
    first.stage_started(None, {}, {})  # not "train": its system metrics would be counted too
    log_losses(first, 10)
    assert str(first.close()).startswith(f"MLflow: 11 records are kept in {first.log}")

    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "60")
    with mlflow_server(tmp_path / "server", port) as uri:
        second = started(tmp_path, uri)
        second.stage_ended("train", "FINISHED")
        assert second.close() is None
        seen = Seen(uri)
        assert seen.points(f"{RUN}/train", "train/loss") == losses(10)
        assert seen.runs[f"{RUN}/train"].info.status == "FINISHED"


@pytest.mark.slow
def test_a_silent_server_delays_neither_the_metrics_nor_the_end(
    tmp_path: Path, blackhole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    tracker = started(tmp_path, blackhole)
    tracker.stage_started("train", {}, {})
    until(lambda: "will try again" in tracker.shipper_log.read_text(), 60, "the silence is noticed")
    over = threading.Event()

    def train() -> None:
        log_losses(tracker, 2_000)
        notices.append(tracker.close())
        over.set()

    notices: list[str | None] = []
    threading.Thread(target=train, daemon=True).start()
    # 2,000 records take 0.02 s and the flush may take 1: MLflow's own calls would stand here for minutes.
    assert over.wait(30)
    assert str(notices[0]).startswith("MLflow: ")
    assert tracker._shipper and tracker._shipper.poll() is not None


@pytest.mark.slow
def test_a_gateway_that_refuses_everything_costs_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gateway(BaseHTTPRequestHandler):
        asked: list[int] = []

        def do_GET(self) -> None:
            self.asked.append((400, 403, 500)[len(self.asked) % 3])
            self.send_error(self.asked[-1])

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "1")
        tracker = started(tmp_path, f"http://127.0.0.1:{gateway.server_port}")
        tracker.stage_started(None, {}, {})  # not "train": its system metrics would be counted too
        log_losses(tracker, 5)
        until(lambda: len(Gateway.asked) > 2, 60, "every answer was given")
        assert str(tracker.close()).startswith("MLflow: 6 records are kept")
        assert "dropped" not in tracker.shipper_log.read_text()
        gateway.shutdown()


def test_a_work_folder_deleted_meanwhile_is_a_notice_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "0")
    tracker = started(tmp_path, sqlite_uri(tmp_path))
    until(tracker.shipper_log.exists, 60, "the shipper has started")
    shutil.rmtree(tracker.log.parent)
    log_losses(tracker, 2)
    assert str(tracker.close()).startswith("MLflow: records are lost")


@pytest.mark.slow
def test_the_machine_is_measured_during_the_train_stage_and_only_then(tmp_path: Path, server: str) -> None:
    tracker = started(tmp_path, server, "measured-1")
    for stage in ("tokenize", "train", "evaluate"):
        tracker.stage_started(stage, {}, {})
        tracker.metrics(stage, 7, time.time(), {"x": 1.0})
        if stage == "train":
            until(lambda: b"system/cpu" in tracker.log.read_bytes(), 60, "a sample is taken")
        tracker.stage_ended(stage, "FINISHED")
    assert tracker.close() is None
    seen = Seen(server, "measured-1")
    ((step, memory),) = seen.points("measured-1/train", "system/system_memory_usage_megabytes")
    assert step == 7 and memory > 0
    for stage in ("tokenize", "evaluate"):
        assert set(seen.runs[f"measured-1/{stage}"].data.metrics) == {"x"}


@pytest.mark.slow
def test_a_shipper_does_not_outlive_its_run(tmp_path: Path, blackhole: str) -> None:
    script = (
        "from pathlib import Path; from pipelines.tracking.mlflow.tracker import Tracker\n"
        f"t = Tracker(Path({str(tmp_path)!r}), 'r', default_uri={blackhole!r}); t.start()\n"
        "print(t._shipper.pid, flush=True); import time; time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(shipping.__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    shipper = int(parent.stdout.readline())
    assert running(shipper)
    parent.kill()
    parent.wait()
    until(lambda: not running(shipper), 30, "the shipper is gone")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_two_processes_of_one_run_share_its_mlflow_runs(tmp_path: Path, server: str) -> None:
    trackers = [started(tmp_path, server, "twice-1") for _ in range(2)]
    for i, tracker in enumerate(trackers):
        tracker.stage_started(None, {}, {})
        tracker.stage_started("train", {}, {f"process-{i}": "yes"})
        tracker.metrics("train", i, 1.8e9, {"train/loss": 11.0 / (i + 1)})
    assert [tracker.close() for tracker in trackers] == [None, None]
    seen = Seen(server, "twice-1")
    assert set(seen.runs) == {"twice-1", "twice-1/train"}
    assert {"process-0", "process-1"} <= set(seen.runs["twice-1/train"].data.tags)
    assert seen.points("twice-1/train", "train/loss") == losses(2)


@pytest.mark.slow
def test_a_leftover_log_can_be_shipped_by_hand(tmp_path: Path) -> None:
    tracker = written(tmp_path)
    log_losses(tracker, 5)
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": tracker.uri,
        "PYTHONPATH": str(Path(shipping.__file__).parents[3]),
    }
    command = [sys.executable, "-m", "pipelines.tracking.mlflow", str(tracker.log)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    assert Seen(tracker.uri).points(f"{RUN}/train", "train/loss") == losses(5)
