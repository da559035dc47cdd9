"""A run that is tracked in MLflow, and the points that MLflow has of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import MlflowServer

from pipelines.tracking.mlflow.shipper import Shipper
from pipelines.tracking.mlflow.tracker import Tracker

RUN = "smoke-1a2b"


def remove_tracking_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "SKYTRAIN_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def until(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain until {what}"
        time.sleep(0.05)


def sqlite_uri(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def started(folder: Path, uri: str, run: str = RUN) -> Tracker:
    tracker = Tracker(folder / "work", run, default_uri=uri)
    tracker.start()
    return tracker


def written(folder: Path) -> Tracker:
    """A tracker without a shipper process: it only writes its log, and the shipper runs in this process."""
    tracker = Tracker(folder / "work", RUN, default_uri=sqlite_uri(folder))
    tracker._keep_shipping = lambda: None  # type: ignore[method-assign]
    tracker.start()
    return tracker


def ship(folder: Path, uri: str | None = None) -> None:
    Shipper(folder / "work" / "mlflow.jsonl", uri or sqlite_uri(folder)).ship(until_end=True)


class Seen:
    """MLflow's records of a run, read by its own client."""

    def __init__(self, uri: str, run: str = RUN) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(uri)
        experiment = self.client.get_experiment_by_name("skytrain")
        found = self.client.search_runs([experiment.experiment_id], f"tags.`skytrain.run` = '{run}'")
        self.runs = {r.info.run_name: r for r in found}
        assert len(self.runs) == len(found), f"run names appear twice: {[r.info.run_name for r in found]}"

    def points(self, name: str, key: str) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(self.runs[name].info.run_id, key)
        return sorted((m.step, m.value) for m in history)


def losses(steps: int) -> list[tuple[int, float]]:
    return [(step, 11.0 / (step + 1)) for step in range(steps)]


def log_losses(tracker: Tracker, steps: int) -> None:
    for step, loss in losses(steps):
        tracker.metrics("train", step, 1.8e9 + step, {"train/loss": loss})


@contextmanager
def mlflow_server(folder: Path, port: int | None = None) -> Iterator[str]:
    """The URI of a tracking server that runs inside the block."""
    server = MlflowServer(folder, port)
    server.start()
    try:
        yield server.uri
    finally:
        server.stop()
