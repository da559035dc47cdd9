"""Settings of MLflow: where it is, under which names, and whose password is hidden."""

from pathlib import Path

import pytest
from mlflow_runs import own_experiment
from run_records import RUN, recorded

from pipelines.extras.mlflow.settings import redacted, tracking_uri
from pipelines.run.trackers import trackers_of
from pipelines.user.cloud.request import variables_from_shell
from trainer.base.store import LocalStore
from trainer.config.errors import UserError


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    own_experiment(monkeypatch)


def test_a_password_in_the_url_of_a_server_is_refused_and_others_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ann:hunter2%2Fc@a.b:5000/c")
    with pytest.raises(UserError, match="has a user or password in it.*MLFLOW_TRACKING_PASSWORD") as error:
        tracking_uri(Path("/d"))
    assert "hunter2" not in str(error.value) and redacted("refused: hunter2/c") == "refused: ***"
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "own")
    assert redacted("refused: own") == "refused: ***"


def test_the_tracking_uri_is_the_environments_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracking_uri(Path("/d")) == "sqlite:////d/mlflow.db"
    with pytest.raises(UserError, match="takes no % or"):
        tracking_uri(Path("/data/a%41b"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://e")
    assert tracking_uri(Path("/d")) == "http://e"


def test_the_experiment_reaches_the_record_of_the_run_and_the_node_of_a_launch(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "speed")
    assert variables_from_shell()["MLFLOW_EXPERIMENT_NAME"] == recorded(store, "train").experiment == "speed"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SKYTRAIN_TRACKING", "maybe", "unknown tracker 'maybe'; installed are mlflow"),
        ("SKYTRAIN_MLFLOW_FLUSH_SECONDS", "soon", "for example"),
        *(  # MLflow would not write there
            ("MLFLOW_TRACKING_URI", uri, f"{uri}: .*sqlite:///mlflow.db")
            for uri in ("./mlruns", "mlruns", "file:///data/mlruns", "s3://bucket/mlruns")
        ),
    ],
)
def test_an_invalid_setting_is_a_user_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}.*{message}"):
        trackers_of("file:///s", RUN, tmp_path)
