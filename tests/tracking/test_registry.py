"""A finished run is one logged model and one version in MLflow's registry; its weights stay in the store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow_runs import RUN as NAME
from mlflow_runs import Seen, mlflow_server, remove_tracking_settings, ship, sqlite_uri, written
from run_records import RUN, done_run, finished, recorded

from pipelines.tracking.mlflow import registry
from pipelines.tracking.mlflow import shipper as shipping
from pipelines.tracking.mlflow.journal import Model, position_file
from pipelines.tracking.mlflow.parent import finished_model, parent_results, parent_tags
from pipelines.tracking.mlflow.shipper import rebuild
from pipelines.tracking.mlflow.tracker import Tracker
from pipelines.tracking.runs import read_run
from trainer.store import LocalStore

BEGAN = {"source": "run:gpt2-1a2b@50", "branched": True, "run": "gpt2-1a2b", "fingerprint": "c" * 64, "step": 50}


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tracking_settings(monkeypatch)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as uri:
        yield uri


def model_of(store: LocalStore, **changes: Any) -> Model:
    """The model of a finished run, as if its store were a bucket."""
    found = finished_model(read_run(store, RUN))
    assert found
    return replace(found, **{"uri": found.uri.replace(store.uri, "s3://bucket/runs")} | changes)


def log_model(tracker: Tracker, store: LocalStore, model: Model) -> None:
    tracker.stage_started(None, {}, {})
    for step, created, values in parent_results(read_run(store, RUN)):
        tracker.metrics(None, step, created, values)
    tracker.metrics(None, 200, 1.9e9, {"cost/usd": 41.5})
    tracker.model(model)
    tracker.stage_ended(None, "FINISHED")


def logged_models(seen: Seen, fingerprint: str) -> list[Any]:
    experiment = seen.client.get_experiment_by_name("skytrain")
    return list(
        seen.client.search_logged_models([experiment.experiment_id], f"tags.`skytrain.fingerprint` = '{fingerprint}'")
    )


def test_a_finished_run_is_one_logged_model_and_one_version_however_often_it_is_shipped(
    store: LocalStore, tmp_path: Path, server: str
) -> None:
    done_run(store, evaluate={"lm_eval/piqa/acc": 0.62, "baselines": {"openai-community/gpt2": {"val/loss": 3.1}}})
    tracker = written(tmp_path)
    log_model(tracker, store, model_of(store, name="gpt2-124m", good=True))
    for _ in range(2):
        ship(tmp_path, server)
        position_file(tracker.log, server).unlink()  # as after a kill before the position was written

    seen = Seen(server)
    parent, model = seen.runs[NAME], model_of(store)
    (logged,) = logged_models(seen, model.fingerprint)
    assert logged.source_run_id == parent.info.run_id and logged.status == "READY"
    assert [output.model_id for output in parent.outputs.model_outputs] == [logged.model_id]
    metrics = {metric.key: metric.value for metric in logged.metrics}
    assert len(logged.metrics) == len(metrics)
    assert metrics["val/loss"] == 2.45678 and metrics["eval/hellaswag_acc_norm"] == 0.2945
    assert metrics["eval/core"] == 0.11394 and metrics["cost/usd"] == 41.5
    assert metrics["lm_eval/piqa/acc"] == 0.62 and metrics["baseline/openai-community-gpt2/val/loss"] == 3.1
    assert seen.points(NAME, "val/loss") == [(200, 2.45678)] and seen.points(NAME, "cost/usd") == [(200, 41.5)]
    assert logged.params["parameters"] and logged.params["tokens"] == str(200 * 8192)
    assert logged.tags["skytrain.uri"] == model.uri and logged.tags["skytrain.run"] == RUN
    assert logged.tags["skytrain.fingerprint.train"] == model.tags["skytrain.fingerprint.train"]

    (version,) = seen.client.search_model_versions("name = 'gpt2-124m'")
    assert version.source == model.uri and version.run_id == parent.info.run_id
    assert str(seen.client.get_model_version_by_alias("gpt2-124m", "latest-good").version) == str(version.version)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_latest_good_is_the_newest_export_that_passed_a_target(store: LocalStore, tmp_path: Path) -> None:
    done_run(store)
    tracker = written(tmp_path)
    model = model_of(store, created=100.0)
    log_model(tracker, store, model)
    ship(tmp_path)
    seen = Seen(sqlite_uri(tmp_path))
    assert not seen.client.get_registered_model("smoke").aliases  # its recipe names no target
    for letter, created, good in (("b", 300.0, True), ("c", 200.0, True), ("d", 400.0, False)):
        tracker.model(replace(model, fingerprint=64 * letter, created=created, good=good))
    ship(tmp_path)
    good = seen.client.get_model_version_by_alias("smoke", "latest-good")
    assert good.tags["skytrain.fingerprint"] == 64 * "b"
    assert len(seen.client.search_model_versions("name = 'smoke'")) == 4


def test_a_run_has_passed_a_target_if_its_training_ended_at_it(store: LocalStore) -> None:
    finished(store, "train", stopped_by="hellaswag", began=BEGAN)
    for stage in ("tokenize", "evaluate"):
        finished(store, stage)
    recorded(store)
    assert finished_model(read_run(store, RUN)) is None  # not exported yet
    finished(store, "export")
    model = model_of(store)
    assert model.good and model.tags["skytrain.passed"] == "hellaswag"
    assert model.tags["skytrain.began.run"] == "gpt2-1a2b" and model.tags["skytrain.began.step"] == "50"
    assert parent_tags(read_run(store, RUN))["skytrain.began.from"] == BEGAN["source"]


def test_a_registry_that_refuses_is_noted_once_and_stops_nothing(
    store: LocalStore, tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done_run(store)
    tracker = Tracker(tmp_path / "work", "local-1a2b", default_uri=server)
    tracker._keep_shipping = lambda: None  # type: ignore[method-assign]
    tracker.start()
    model = replace(model_of(store), uri=f"{store.uri}/export/x", name="local", fingerprint="e" * 64)
    log_model(tracker, store, model)  # a server takes no version whose files lie on a local disk
    ship(tmp_path, server)
    notes = [line for line in capsys.readouterr().out.splitlines() if "refuses" in line]
    assert len(notes) == 1 and "Invalid model version source" in notes[0]
    seen = Seen(server, "local-1a2b")
    assert seen.runs["local-1a2b"].info.status == "FINISHED"
    (logged,) = logged_models(seen, "e" * 64)
    assert logged.tags["skytrain.uri"] == f"{store.uri}/export/x"


def test_a_server_that_forbids_its_registry_keeps_the_logged_model(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

    def forbid(*_: Any, **__: Any) -> None:
        raise MlflowException("no", PERMISSION_DENIED)

    monkeypatch.setattr(MlflowClient, "create_registered_model", forbid)
    done_run(store)
    log_model(written(tmp_path), store, model_of(store))
    ship(tmp_path)
    assert capsys.readouterr().out.count("refuses") == 1
    seen = Seen(sqlite_uri(tmp_path))
    assert len(logged_models(seen, model_of(store).fingerprint)) == 1
    assert seen.runs[NAME].info.status == "FINISHED"


def test_a_lost_answer_to_any_call_makes_nothing_twice(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setattr(shipping.time, "sleep", lambda _: None)
    done_run(store)
    tracker = written(tmp_path)
    log_model(tracker, store, model_of(store, good=True))
    lost = []

    def losing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def once(*given: Any, **named: Any) -> Any:
            answer = call(*given, **named)
            if name not in lost:
                lost.append(name)
                raise ConnectionError(f"the answer to {name} is lost")
            return answer

        return once

    calls = ["create_logged_model", "log_outputs", "finalize_logged_model"]
    calls += ["create_registered_model", "create_model_version", "set_registered_model_alias"]
    for name in calls:
        monkeypatch.setattr(MlflowClient, name, losing(name, getattr(MlflowClient, name)))
    shipper = shipping.Shipper(tracker.log, tracker.uri)
    monkeypatch.setattr(shipper.closing, "wait", lambda _: True)
    shipper.ship(until_end=True)

    assert sorted(lost) == sorted(calls)
    seen = Seen(tracker.uri)
    (logged,) = logged_models(seen, model_of(store).fingerprint)
    assert [one.model_id for one in seen.runs[NAME].outputs.model_outputs] == [logged.model_id]
    assert len({metric.key for metric in logged.metrics}) == len(logged.metrics)
    (version,) = seen.client.search_model_versions("name = 'smoke'")
    assert str(seen.client.get_model_version_by_alias("smoke", "latest-good").version) == str(version.version)


def blind_at_first(find: Callable[..., Any]) -> Callable[..., Any]:
    """A search that sees nothing the first time, as before another process has made its own."""
    looks = itertools.count()
    return lambda *given: find(*given) if next(looks) else None


def test_two_processes_at_once_leave_one_model_and_one_version(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done_run(store)
    tracker = written(tmp_path)
    log_model(tracker, store, model_of(store))
    ship(tmp_path)
    for find in (registry._oldest_model, registry._oldest_version):
        monkeypatch.setattr(registry, find.__name__, blind_at_first(find))
    position_file(tracker.log, tracker.uri).unlink()
    ship(tmp_path)
    seen = Seen(sqlite_uri(tmp_path))
    assert len(logged_models(seen, model_of(store).fingerprint)) == 1
    assert [int(one.version) for one in seen.client.search_model_versions("name = 'smoke'")] == [1]


def test_the_journal_rebuilds_the_model_on_a_new_server(store: LocalStore, tmp_path: Path) -> None:
    done_run(store)
    tracker = written(tmp_path / "old")
    log_model(tracker, store, model_of(store, good=True))
    tracker.keep_journal(store)
    for _ in range(2):
        assert rebuild(store, NAME, sqlite_uri(tmp_path)) == 1
    seen = Seen(sqlite_uri(tmp_path))
    (logged,) = logged_models(seen, model_of(store).fingerprint)
    assert {metric.key: metric.value for metric in logged.metrics}["cost/usd"] == 41.5
    assert str(seen.client.get_model_version_by_alias("smoke", "latest-good").version) == "1"
