"""What MLflow has of a run, and the settings under which tests send one there."""

from __future__ import annotations

import os
import uuid
from typing import Any

import pytest
from run_records import RUN


def own_experiment(monkeypatch: pytest.MonkeyPatch) -> str:
    """Remove all settings of MLflow and of tracking. Returns an experiment of this test alone, now the default."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "SKYTRAIN_")):
            monkeypatch.delenv(name)
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")  # our code sets them; monkeypatch removes them again
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", name := f"test-{uuid.uuid4().hex[:8]}")
    return name


class Seen:
    """MLflow's records of a run, read by its own client."""

    def __init__(self, uri: str, experiment: str, run: str = RUN) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(uri)
        found: list[Any] = []
        if known := self.client.get_experiment_by_name(experiment):
            found = self.client.search_runs([known.experiment_id], f"tags.`skytrain.run` = '{run}'")
        assert len(found) <= 1
        self.run: Any = found[0] if found else None

    def points(self, key: str) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(self.run.info.run_id, key) if self.run else []
        return sorted((m.step, m.value) for m in history)
