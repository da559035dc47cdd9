"""A run in MLflow, as a function of its records in the store: sending them any number of times gives the same.

MLflow stores one point per (key, value, time, step), and every point here has the time of its record, so a repeated
one changes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING, Any

import yaml
from tenacity import Retrying, stop_after_delay, wait_exponential

from pipelines.tracking.account import cost_metrics
from pipelines.tracking.mlflow.registry import register
from pipelines.tracking.mlflow.settings import QUICK_MLFLOW, flush_seconds, log, redacted
from pipelines.tracking.runs import Run, find_run
from trainer.errors import UserError
from trainer.store import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

NAME_CHARACTERS = 250  # MLflow's limit for the name of a metric
METRICS_AT_ONCE = 1_000  # MLflow's limit for one log_batch call
PARAM_CHARACTERS = 6_000  # MLflow's limit for the value of a param
TAG_CHARACTERS = 5_000  # MLflow's limit for the value of a tag
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_./ -]+")  # MLflow refuses these characters in the name of a metric
# The page of an experiment shows charts of runs with this tag; without it, the UI asks for the kind, or guesses.
KIND, MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
STATUSES = {"done": "FINISHED", "running": "RUNNING", "failed": "FAILED", "damaged": "FAILED"}  # others: KILLED
HARDWARE = ("device", "precision", "world_size", "engine", "micro_batch")  # of the last training, as tags

Point = tuple[str, float, float, int]  # key, value, unix seconds, step


class Mirror:
    """Sends a run of a store to the MLflow at `uri`. Its methods raise the errors of MLflow and of the store.

    `code_tags`: tags of the code that runs now, for a training that is not done. `page`: the report of a run, as HTML.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        uri: str,
        page: Callable[[Run], str] | None = None,
        code_tags: Mapping[str, str] | None = None,
    ) -> None:
        self.store, self.name, self.uri, self.page, self.code_tags = store, name, uri, page, dict(code_tags or {})
        self.refused = False  # whether MLflow has refused a metric
        self._sampled: set[int] = set()  # steps whose samples were sent
        self.forget()

    def forget(self) -> None:
        """Look everything up again at the next call, after an error."""
        self._client: MlflowClient | None = None
        self.run_id = ""
        self._last: dict[str, int] = {}  # the last step that MLflow has, by metric

    @property
    def client(self) -> MlflowClient:
        from mlflow import MlflowClient

        if self._client is None:
            self._client = MlflowClient(self.uri)
        return self._client

    def send(self, ended: bool, series: bool = True) -> Run:
        """Send what the store has of the run. `ended`: its command ends, so that results and files are sent, too.
        Returns the snapshot that was sent."""
        run = find_run(self.store, self.name)
        assert run, f"{self.store.uri} has no run {self.name}"
        beats = [one.beat for one in run.heartbeats]
        self._find_or_create(run, min((beat.started for beat in beats), default=run.record.updated))
        self._describe(run)
        if series:
            self.send_rows(run.series)
        newest = max((beat.time for beat in beats), default=run.record.updated)
        step = max((beat.progress.highest_step or 0 for beat in beats), default=0)
        self._log([(key, value, newest, step) for key, value in cost_metrics(run.account).items()])
        status = STATUSES.get(run.state, "KILLED")
        if ended:
            self._log(results(run))
            recipe = yaml.safe_dump(run.recipe.model_dump(), sort_keys=False, allow_unicode=True)
            self._log_text("recipe.yaml", recipe)
            if self.page:
                self._log_text("report.html", self.page(run))
            register(self.client, self.run_id, run)
            works = any(of_stage and of_stage[-1].state == "running" for of_stage in run.attempts.values())
            status = "FINISHED" if status == "RUNNING" and not works else status  # it ends after an earlier stage
        if status == "RUNNING":
            self.client.update_run(self.run_id, status)
        else:
            self.client.set_terminated(self.run_id, status, end_time=_milliseconds(newest))
        return run

    def send_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Send rows of the series, in order. A step that MLflow has is left out: a redone step has the same loss."""
        points: list[Point] = []
        for row in rows:
            step = row["step"]
            if row.get("samples") and step not in self._sampled:
                self._log_text(f"samples/step-{step:08d}.txt", f"\n\n{'-' * 8}\n\n".join(row["samples"]))
                self._sampled.add(step)
            values = ((legal_name(key), value) for key, value in row.items() if "/" in key and key != "data/digest")
            points += [(key, value, row["time"], step) for key, value in values if step > self._last.get(key, -1)]
        self._log(points)
        self._last |= {key: step for key, _, _, step in points}

    def _describe(self, run: Run) -> None:
        """Log params and tags. MLflow never changes a param, so another value becomes a tag."""
        from mlflow.entities import Param, RunTag

        logged = self.client.get_run(self.run_id).data.params
        texts = {key: str(value)[:PARAM_CHARACTERS] for key, value in params_of(run).items()}
        changed = {f"param.{key}": value for key, value in texts.items() if logged.get(key, value) != value}
        tags = {**tags_of(run), **self._code(run), **run.record.tags, **changed}
        self.client.log_batch(
            self.run_id,
            params=[Param(key, value) for key, value in texts.items() if key not in logged],
            tags=[RunTag(key, str(value)[:TAG_CHARACTERS]) for key, value in tags.items()],
        )

    def _code(self, run: Run) -> dict[str, str]:
        """The code that trained the weights, or trains them now."""
        if not (made := run.manifests.get("train")):
            return self.code_tags
        found = {"mlflow.source.git.commit": "git_commit", "skytrain.image": "image"}
        return {tag: str(made.provenance[name]) for tag, name in found.items() if made.provenance.get(name)}

    def _log(self, points: list[Point]) -> None:
        """Log metrics. MLflow keeps NaN, and infinities as the largest float."""
        from mlflow.entities import Metric

        metrics = [Metric(legal_name(key), value, _milliseconds(at), step) for key, value, at, step in points]
        for first in range(0, len(metrics), METRICS_AT_ONCE):
            self._log_batch(metrics[first : first + METRICS_AT_ONCE])

    def _log_batch(self, metrics: list[Metric]) -> None:
        """Log metrics, and if the server refuses one of them, all others."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.log_batch(self.run_id, metrics=metrics)
        except MlflowException as error:
            if error.get_http_status_code() != HTTPStatus.BAD_REQUEST:
                raise
            if len(metrics) == 1:
                self.refused = True
                return log(f"MLflow refuses {metrics[0].key} at step {metrics[0].step}: {error.message}")
            for half in (metrics[: len(metrics) // 2], metrics[len(metrics) // 2 :]):
                self._log_batch(half)

    def _log_text(self, name: str, text: str) -> None:
        """Store a file. Files use another connection than metrics, which this machine may lack: it tries once."""
        try:
            self.client.log_text(self.run_id, text, name)
        except Exception as error:
            log(f"the file {name} is not in MLflow: {type(error).__name__}: {error}")

    def _find_or_create(self, run: Run, began: float) -> None:
        if not self.run_id:
            experiment, tags = _experiment_id(self.client, run.record.experiment, self.uri), {"skytrain.run": self.name}
            if not (found := self._found(experiment)):
                made = self.client.create_run(experiment, _milliseconds(began), tags, run_name=self.name).info.run_id
                found = self._found(experiment)
                if found != made:  # another process created one at the same time, and was first
                    self.client.delete_run(made)
            logged = self.client.get_run(found).data._metric_objs
            self.run_id, self._last = found, {metric.key: metric.step for metric in logged}

    def _found(self, experiment: str) -> str:
        """The id of the MLflow run, the oldest one of several; "" if there is none. Version 0.1 had more, by stage."""
        found = self.client.search_runs([experiment], f"tags.`skytrain.run` = '{self.name}'")
        ids = ((one.info.start_time, one.info.run_id) for one in found if "skytrain.stage" not in one.data.tags)
        return str(min(ids, default=(0, ""))[1])


def rebuild(store: Store, name: str, uri: str, page: Callable[[Run], str] | None = None) -> None:
    """Send a run with its series to the MLflow at `uri`. UserError if that takes nothing for
    SKYTRAIN_MLFLOW_FLUSH_SECONDS (30)."""
    os.environ.update(QUICK_MLFLOW | os.environ | {"MLFLOW_TRACKING_URI": uri})
    mirror, patience = Mirror(store, name, uri, page), flush_seconds()
    retrying = Retrying(
        stop=stop_after_delay(patience),
        wait=wait_exponential(max=30),
        before_sleep=lambda _: mirror.forget(),
        reraise=True,
    )
    try:
        retrying(mirror.send, ended=True)
    except UserError:
        raise
    except Exception as error:
        reason = redacted(" ".join(str(error).split()))[:200]
        raise UserError(
            f"{redacted(uri)} has accepted nothing for {patience:g} s ({reason}); start it, or name another server"
        ) from error


def legal_name(name: str) -> str:
    """The name of a metric that MLflow takes: a plain relative path of at most 250 characters."""
    return normpath(NOT_IN_A_NAME.sub("-", name)).lstrip("./")[:NAME_CHARACTERS]


def params_of(run: Run) -> dict[str, Any]:
    """The recipe, flat, without its runtime settings."""
    recipe = run.recipe
    params = {"recipe": recipe.name, "parameters": recipe.model.parameters, "train_tokens": recipe.train_tokens}
    sections = {name: values for name, values in recipe.model_dump(exclude={"name", "runtime"}).items() if values}
    return params | {f"{name}.{field}": value for name, values in sections.items() for field, value in values.items()}


def tags_of(run: Run) -> dict[str, Any]:
    """The store and its artifacts, where the run began, runtime settings, and the hardware that trained last."""
    tags = {"skytrain.store": run.store.uri, "skytrain.attempts": run.summary.attempts}
    tags |= {f"skytrain.fingerprint.{stage}": made.fingerprint for stage, made in run.manifests.items() if made}
    if source := run.recipe.train.branch_from or run.recipe.train.init_from:
        tags["skytrain.began.from"] = source
    trained = [beat.progress for beat in run.attempts.get("train", []) if beat.progress.world_size]
    for name in HARDWARE if trained else ():
        tags[name] = getattr(trained[-1], name)
    return tags | {f"runtime.{name}": value for name, value in run.recipe.model_dump()["runtime"].items()}


def results(run: Run) -> list[Point]:
    """What the evaluation measured of the trained weights, as points of "final/…" at the last step."""
    made = run.manifests.get("evaluate")
    scores = {key: value for key, value in made.facts.items() if "/" in key} if made else {}
    numbers = {key: float(value) for key, value in scores.items() if isinstance(value, int | float)}
    return [(f"final/{key}", value, made.created, run.summary.steps) for key, value in numbers.items() if made]


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
