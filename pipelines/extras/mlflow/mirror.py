"""A run in MLflow, as a function of its records in the store: sending them any number of times gives the same.

MLflow stores one point per (key, value, time, step), and every point here has the time of its record, so a repeated
one changes nothing.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING, Any

from pipelines.extras.mlflow.settings import QUICK_MLFLOW, log
from pipelines.run.runs import Run, read_run
from pipelines.store.account import cost_metrics
from pipelines.store.process_id import process_exists
from pipelines.store.secrets import redacted
from trainer.base.answers import answered_within
from trainer.base.store import Store
from trainer.checkpoint.commits import series as series_of
from trainer.config.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient

NAME_CHARACTERS = 250  # MLflow's limit for the name of a metric
METRICS_AT_ONCE = 1_000  # MLflow's limit for one log_batch call
PARAM_CHARACTERS = 6_000  # MLflow's limit for the value of a param
TAG_CHARACTERS = 5_000  # MLflow's limit for the value of a tag
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_./ -]+")  # MLflow refuses these characters in the name of a metric
# The page of an experiment shows charts of runs with this tag; without it, the UI asks for the kind, or guesses.
KIND, MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
STATUSES = {"done": "FINISHED", "running": "RUNNING", "failed": "FAILED", "damaged": "FAILED"}  # others: KILLED
HARDWARE = ("device", "precision", "world_size", "engine", "micro_batch")  # of the last training, as tags

STORE, STORE_ID = "skytrain.store", "skytrain.store.id"  # tags
FINGERPRINT = "skytrain.fingerprint"  # of the export, at a version of the registered model
Point = tuple[str, float, float, int]  # key, value, unix seconds, step


class Mirror:
    """Sends a run of a store to the MLflow at `uri`. All methods raise the errors of MLflow and of the store; after an
    error, a new Mirror goes on. `origin`: `provenance` of the code that runs now, for a training that is not done."""

    def __init__(self, store: Store, name: str, uri: str, origin: Mapping[str, Any] | None = None) -> None:
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        self.client: Any = BoundedClient(client) if uri.startswith("http") else client
        self.origin = origin or {}
        self.run = read_run(store, name)
        self.refused = False  # whether MLflow has refused a metric
        self.run_id = _found_or_created(self.client, self.run, uri)
        logged = self.client.get_run(self.run_id).data._metric_objs
        self._last = {metric.key: metric.step for metric in logged}  # the last step that MLflow has, by metric

    def send(self, ended: bool, series: bool = True) -> None:
        """Send what the store has of the run. `ended`: its command ends, so that results and files are sent, too."""
        self.run = run = read_run(self.run.store, self.run.name)
        self._describe()
        if series:
            for rows in (run.series, *(series_of(run.store, prefix) for prefix in run.record.tunings.values())):
                self.send_rows(rows)
        beats = [one.beat for one in run.heartbeats]
        newest = max((beat.time for beat in beats), default=run.record.updated)
        step = max((beat.progress.highest_step or 0 for beat in beats), default=0)
        self._log([(key, value, newest, step) for key, value in cost_metrics(run.account).items()])
        status = STATUSES.get(run.state, "KILLED")
        if ended:
            self._log(results(run))
            self._register()
            working = [one[-1].process for one in run.attempts.values() if one and one[-1].state == "running"]
            # It ends after an earlier stage; or its command was killed, and the ranks commit and leave.
            if status == "RUNNING" and all(process_exists(replace(one, children=())) is False for one in working):
                status = "KILLED" if working else "FINISHED"
        if status == "RUNNING":
            self.client.update_run(self.run_id, status)
        else:
            self.client.set_terminated(self.run_id, status, end_time=_milliseconds(newest))
        # A thread of MLflow measures CPU, memory, disk, network and GPUs of this machine. It ends with the run.
        if not ended and not any(t.name == "SystemMetricsMonitor" for t in threading.enumerate()):
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.client.tracking_uri).start()

    def send_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Send rows of the series, in order. A step that MLflow has is left out: a redone step has the same loss."""
        points: list[Point] = []
        for row in rows:
            step = row["step"]
            values = ((legal_name(key), value) for key, value in row.items() if "/" in key and key[:5] != "data/")
            points += [(key, value, row["time"], step) for key, value in values if step > self._last.get(key, -1)]
        self._log(points)
        self._last |= {key: step for key, _, _, step in points}

    def _describe(self) -> None:
        """Log params and tags. MLflow never changes a param, so another value becomes a tag."""
        from mlflow.entities import Param, RunTag

        logged = self.client.get_run(self.run_id).data.params
        texts = {key: str(value)[:PARAM_CHARACTERS] for key, value in params_of(self.run).items()}
        changed = {f"param.{key}": value for key, value in texts.items() if logged.get(key, value) != value}
        tags = tags_of(self.run, self.origin) | changed
        self.client.log_batch(
            self.run_id,
            params=[Param(key, value) for key, value in texts.items() if key not in logged],
            tags=[RunTag(key, str(value)[:TAG_CHARACTERS]) for key, value in tags.items()],
        )

    def _log(self, points: list[Point]) -> None:
        """Log metrics; of a batch that the server refuses, all that it takes. MLflow keeps NaN, and infinities as the
        largest float."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        for first in range(0, len(points), METRICS_AT_ONCE):
            batch = points[first : first + METRICS_AT_ONCE]
            metrics = [Metric(key, value, _milliseconds(at), step) for key, value, at, step in batch]
            try:
                self.client.log_batch(self.run_id, metrics=metrics)
            except MlflowException as error:
                if error.get_http_status_code() != HTTPStatus.BAD_REQUEST:
                    raise
                if len(batch) == 1:
                    self.refused = True
                    log(f"MLflow refuses {metrics[0].key} at step {metrics[0].step}: {error.message}")
                else:
                    self._log(batch[: len(batch) // 2])
                    self._log(batch[len(batch) // 2 :])

    def _register(self) -> None:
        """Make the export of a finished run a version of the registered model with the recipe's name. It refers to the
        export in the store; no weights are uploaded. Sending it again makes no second one: its fingerprint is a tag.

        Logs a refusal: some servers have no registry, or take no local folder.
        """
        from mlflow.exceptions import MlflowException

        run, client, name = self.run, self.client, self.run.recipe.name
        export, train = run.manifests.get("export"), run.manifests.get("train")
        if not (export and train):
            return
        key = export.files[0].key if export.files else ""
        folder = f"{run.store.uri}/{export.prefix}/{key}".rpartition("/")[0]
        tags = {FINGERPRINT: export.fingerprint, "skytrain.run": run.name, "skytrain.uri": folder}
        if target := train.facts.get("stopped_by"):
            tags["skytrain.passed"] = str(target)
        try:
            if not client.search_registered_models(f"name = '{name}'"):
                client.create_registered_model(name)
            made = client.search_model_versions(f"name = '{name}' and tag.`{FINGERPRINT}` = '{export.fingerprint}'")
            if not any(one.tags.get("skytrain.uri", folder) == folder for one in made):  # not that of another store
                client.create_model_version(name, folder, self.run_id, tags, await_creation_for=0)
        except MlflowException as error:
            if error.get_http_status_code() >= 500:
                raise
            log(f"the registry of MLflow refuses the export: {error.message}")


def rebuild(store: Store, name: str, uri: str) -> None:
    """Send a run with its series to the MLflow at `uri`. UserError if that fails: MLflow itself retries, by default for
    half a minute, or MLFLOW_HTTP_REQUEST_MAX_RETRIES times."""
    os.environ.update(QUICK_MLFLOW | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4"} | os.environ)
    try:
        Mirror(store, name, uri).send(ended=True)
    except UserError:
        raise
    except Exception as error:
        reason = redacted(" ".join(str(error).split()))[:200]
        raise UserError(f"{redacted(uri)} takes no records ({reason}); start it, or name another server") from error


class BoundedClient:
    """MLflow's client of a server. A call ends after twice the silence that MLflow bears: its own time-outs don't end
    an answer that drips."""

    def __init__(self, client: MlflowClient) -> None:
        from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT

        self._client = client
        self._seconds = 2.0 * MLFLOW_HTTP_REQUEST_TIMEOUT.get() * (1 + MLFLOW_HTTP_REQUEST_MAX_RETRIES.get())

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        if not callable(value):
            return value
        return lambda *arguments, **options: answered_within(self._seconds, partial(value, *arguments, **options))


def legal_name(name: str) -> str:
    """The name of a metric that MLflow takes: a plain relative path of at most 250 characters."""
    return normpath(NOT_IN_A_NAME.sub("-", name)).lstrip("./")[:NAME_CHARACTERS]


def params_of(run: Run) -> dict[str, Any]:
    """The recipe, flat, without its runtime settings."""
    recipe = run.recipe
    params = {"recipe": recipe.name, "parameters": recipe.model.parameters, "train_tokens": recipe.train_tokens}
    sections = {
        name: values for name, values in recipe.model_dump(exclude={"name", "tune", "runtime"}).items() if values
    }
    sections |= {f"tune.{step.name}": step.model_dump(exclude={"name"}) for step in recipe.tune}
    return params | {f"{name}.{field}": value for name, values in sections.items() for field, value in values.items()}


def tags_of(run: Run, origin: Mapping[str, Any]) -> dict[str, Any]:
    """The store and its artifacts, the code that trained (`origin` as long as it trains), where the run began, runtime
    settings, and the hardware that trained last."""
    tags = {STORE: run.store.uri, STORE_ID: run.record.store_id, "skytrain.attempts": run.summary.attempts}
    tags |= {f"skytrain.fingerprint.{stage}": made.fingerprint for stage, made in run.manifests.items() if made}
    train = run.manifests.get("train")
    code = {"mlflow.source.git.commit": "git_commit", "skytrain.image": "image"}
    tags |= {name: value for name, key in code.items() if (value := (train.provenance if train else origin).get(key))}
    if source := run.recipe.train.branch_from or run.recipe.train.init_from:
        tags["skytrain.began.from"] = source
    trained = [beat.progress for beat in run.attempts.get("train", []) if beat.progress.world_size]
    for name in HARDWARE if trained else ():
        tags[name] = getattr(trained[-1], name)
    return tags | {f"runtime.{name}": value for name, value in run.recipe.model_dump()["runtime"].items()}


def results(run: Run) -> list[Point]:
    """What the evaluations measured, at the last step: of the trained weights as "final/…", of a tuned model as
    "tuned/…"."""
    made = {stage: one for stage, one in run.manifests.items() if one and stage.partition(".")[0] == "evaluate"}
    return [
        (legal_name(f"{'tuned' if '.' in stage else 'final'}/{key}"), float(value), one.created, run.summary.steps)
        for stage, one in made.items()
        for key, value in one.facts.items()
        if "/" in key and isinstance(value, int | float)
    ]


def _found_or_created(client: MlflowClient, run: Run, uri: str) -> str:
    """The id of the MLflow run, the oldest one of several. Another store may have a run of this name."""
    experiment = _experiment_id(client, run.record.experiment, uri)
    known = {"skytrain.run": run.name, STORE_ID: run.record.store_id}
    query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in known.items())
    began = min((one.beat.started for one in run.heartbeats), default=run.record.updated)

    def found() -> list[str]:
        return [one.info.run_id for one in client.search_runs([experiment], query, order_by=["attributes.start_time"])]

    if known_ids := found():
        return known_ids[0]
    made: str = client.create_run(experiment, _milliseconds(began), known, run_name=run.name).info.run_id
    first = (found() or [made])[0]
    if first != made:  # a repeated request, or another process, created one and was first
        client.delete_run(made)
    return first


def _experiment_id(client: MlflowClient, name: str, uri: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # A server has a location for artifacts. Without a server they would go to the current folder.
        database = Path(uri.removeprefix("sqlite:///")).absolute()
        beside = (database.parent / "mlartifacts").as_uri() if uri.startswith("sqlite:///") else None
        return client.create_experiment(name, beside, tags={KIND: MODEL_TRAINING})
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
