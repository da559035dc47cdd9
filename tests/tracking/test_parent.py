"""The parent run in MLflow has what people compare, each result once, and the files that explain the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from mlflow_runs import RUN as NAME
from mlflow_runs import Seen, remove_tracking_settings, ship, sqlite_uri, written
from run_records import RECIPE, RUN, attempted, done_run, finished, recorded

from pipelines.cloud.shell import variables_from_shell
from pipelines.tracking.mlflow.parent import parent_files, parent_params, parent_results, parent_tags
from pipelines.tracking.mlflow.settings import experiment_name, own_tags
from pipelines.tracking.mlflow.tracker import Tracker
from pipelines.tracking.records import Progress
from pipelines.tracking.runs import read_run
from pipelines.verbs.options import set_tracking_options
from trainer.errors import UserError
from trainer.store import LocalStore


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tracking_settings(monkeypatch)
    for name in ("MLFLOW_EXPERIMENT_NAME", "SKYTRAIN_TAGS"):
        monkeypatch.setenv(name, "")  # the options set them; monkeypatch removes them again


def log_results(tracker: Tracker, store: LocalStore) -> None:
    run = read_run(store, RUN)
    for step, created, values in parent_results(run):
        tracker.metrics(None, step, created, values)
    for name, text in parent_files(run, lambda run: f"<html>{run.name}").items():
        tracker.text_file(None, name, text)


def test_the_parent_has_each_result_once_however_often_the_run_is_repeated(store: LocalStore, tmp_path: Path) -> None:
    done_run(store)
    attempted(store, "train", 2, progress=Progress(world_size=8, device="NVIDIA H100"))
    tracker = written(tmp_path)
    tracker.stage_started(None, parent_params(RECIPE), {})
    for _ in range(3):
        log_results(tracker, store)
        tracker.tags(None, parent_tags(read_run(store, RUN)))
    ship(tmp_path)

    seen = Seen(sqlite_uri(tmp_path))
    parent = seen.runs[NAME]
    assert seen.points(NAME, "val/loss") == [(200, 2.45678)]  # of evaluate, which validates on more tokens
    assert seen.points(NAME, "train/loss") == [(200, 2.4)]
    assert seen.points(NAME, "perf/tokens_per_second") == [(200, 4321.0)]
    assert seen.points(NAME, "eval/hellaswag_acc_norm") == [(200, 0.2945)]
    assert seen.points(NAME, "tokens") == [(200, 200 * 8192)] and seen.points(NAME, "world_size") == [(200, 8)]
    assert parent.data.tags["skytrain.hardware"] == "8 x NVIDIA H100"
    params = {"parameters", "train_tokens", "train.batch_tokens", "train.learning_rate", "model.n_layer"}
    assert params <= parent.data.params.keys()
    texts = {
        name: Path(seen.client.download_artifacts(parent.info.run_id, name)).read_text()
        for name in ("recipe.yaml", "sample.txt", "report.html")
    }
    assert yaml.safe_load(texts["recipe.yaml"]) == RECIPE.model_dump()
    assert texts["sample.txt"].startswith("def ") and texts["report.html"] == f"<html>{RUN}"


def test_a_run_that_has_not_trained_has_no_results_yet(store: LocalStore) -> None:
    finished(store, "tokenize")
    attempted(store, "train", state="interrupted", progress=Progress(step=120, metrics={"val/loss": 3.0}))
    recorded(store)
    run = read_run(store, RUN)
    assert list(parent_results(run)) == [] and list(parent_files(run, None)) == ["recipe.yaml"]


def test_the_experiment_opens_as_model_training_unless_its_owner_chose_another_kind(tmp_path: Path) -> None:
    tracker = written(tmp_path)
    tracker.stage_started(None, {}, {})
    ship(tmp_path)
    client = Seen(sqlite_uri(tmp_path)).client
    made = client.get_experiment_by_name("skytrain")
    assert made.tags["mlflow.experimentKind"] == "custom_model_development"
    client.set_experiment_tag(made.experiment_id, "mlflow.experimentKind", "automl")
    tracker.stage_ended(None, "FINISHED")
    ship(tmp_path)
    assert client.get_experiment_by_name("skytrain").tags["mlflow.experimentKind"] == "automl"


def test_experiment_and_own_tags_reach_the_runs_and_the_node_of_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_TAGS", "team=research,owner=ann")
    set_tracking_options("speed", ["owner=bob", "note=a=b"])
    assert (experiment_name(), own_tags()) == ("speed", {"team": "research", "owner": "bob", "note": "a=b"})
    job = variables_from_shell()
    assert job == {"MLFLOW_EXPERIMENT_NAME": "speed", "SKYTRAIN_TAGS": "team=research,owner=bob,note=a=b"}
    tracker = written(tmp_path)
    tracker.stage_started("train", {}, {"engine": "fused"})
    assert json.loads(tracker.log.read_text().splitlines()[-1])["tags"] == {"engine": "fused"} | own_tags()
    assert json.loads(tracker.log.read_text().splitlines()[-2])["experiment"] == "speed"


@pytest.mark.parametrize("tag", ["team", "=x", "a=b,c", "mlflow.user=x", "skytrain.run=x"])
def test_a_tag_of_another_form_is_refused(tag: str) -> None:
    with pytest.raises(UserError, match=f"^--tag {tag}: "):
        set_tracking_options(None, [tag])
