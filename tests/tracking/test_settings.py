"""Settings of MLflow: where it is, under which names, and whose password is hidden."""

from pathlib import Path

import pytest
from mlflow_runs import own_experiment
from run_records import RUN, recorded

from pipelines.cloud.request import variables_from_shell
from pipelines.tracking.mlflow.child import MirrorProcess
from pipelines.tracking.mlflow.settings import own_tags, redacted, tracking_uri
from trainer.errors import UserError
from trainer.store import LocalStore


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    own_experiment(monkeypatch)


def test_a_password_in_the_url_of_a_server_is_refused_and_others_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ann:hunter2%2Fc@a.b:5000/c")
    with pytest.raises(UserError, match="has a user or password in it.*MLFLOW_TRACKING_PASSWORD") as error:
        tracking_uri("sqlite:///d")
    assert "hunter2" not in str(error.value) and redacted("refused: hunter2/c") == "refused: ***"
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "own")
    assert redacted("refused: own") == "refused: ***"


def test_the_tracking_uri_is_the_environments_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracking_uri("sqlite:///d") == "sqlite:///d"
    with pytest.raises(UserError, match="takes no % or"):
        tracking_uri("sqlite:////home/a%41b/mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://e")
    assert tracking_uri("sqlite:///d") == "http://e"


def test_experiment_and_own_tags_reach_the_record_of_the_run_and_the_node_of_a_launch(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "speed")
    monkeypatch.setenv("SKYTRAIN_TAGS", tags := "team=research,note=a=b")
    assert own_tags() == {"team": "research", "note": "a=b"}
    job = variables_from_shell()
    assert job["MLFLOW_EXPERIMENT_NAME"] == "speed" and job["SKYTRAIN_TAGS"] == tags
    record = recorded(store, "train")
    assert (record.experiment, record.tags) == ("speed", own_tags())


@pytest.mark.parametrize(
    ("tag", "wrong"),
    [
        ("team", "not of the form NAME=VALUE"),
        *((f"{name}=x", f"MLflow does not take the name '{name}'") for name in ("", ".a", "a:b")),
        *((f"{name}.x=1", "names that start with mlflow. or skytrain.") for name in ("mlflow", "skytrain")),
        *((f"{name}=1", f"as a path: a/y, not {name}") for name in ("a//y", "x/../a/y", "a/y/.")),
    ],
)
def test_a_tag_of_another_form_is_refused_with_the_part_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tag: str, wrong: str
) -> None:
    monkeypatch.setenv("SKYTRAIN_TAGS", f"a=b,{tag}")
    with pytest.raises(UserError) as error:
        own_tags()
    assert str(error.value).startswith(f"SKYTRAIN_TAGS: {tag}: ") and wrong in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SKYTRAIN_TRACKING", "maybe", "'maybe' is neither on nor off"),
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
        MirrorProcess("file:///s", RUN, tmp_path, default_uri="sqlite:///d")
