"""A run in MLflow, as a function of its records in the store: sending them any number of times gives the same.

The run is a parent with a nested run for each stage. MLflow stores one point per (key, value, time, step), and every
point here has the time of its record, so a repeated one changes nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from tenacity import Retrying, stop_after_delay, wait_exponential

from pipelines.artifacts.manifest import Manifest
from pipelines.recipe import Recipe
from pipelines.tracking.account import Account, account, account_tags, cost_metrics
from pipelines.tracking.mlflow.registry import register
from pipelines.tracking.mlflow.settings import QUICK_MLFLOW, flush_seconds, log, redacted
from pipelines.tracking.records import Heartbeat, Progress
from pipelines.tracking.runs import Run, find_run, state_of
from trainer.errors import UserError
from trainer.store import Store

if TYPE_CHECKING:
    from mlflow import MlflowClient

METRICS_AT_ONCE = 1_000  # MLflow's limit for one log_batch call
PARAM_CHARACTERS = 6_000  # MLflow's limit for the value of a param
TAG_CHARACTERS = 5_000  # MLflow's limit for the value of a tag
DIGEST_CHARACTERS = 36  # MLflow's limit for the digest of a dataset
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_./ -]+")  # MLflow refuses these characters in the name of a metric
# The page of an experiment shows charts of runs with this tag; without it, the UI asks for the kind, or guesses.
KIND, MODEL_TRAINING = "mlflow.experimentKind", "custom_model_development"
STATUSES = {"done": "FINISHED", "running": "RUNNING", "failed": "FAILED", "damaged": "FAILED"}  # others: KILLED
SECTIONS = {"tokenize": ("tokens",), "train": ("model", "train")}  # of the recipe, by stage; others: of its own name
RESULTS = (
    *("train/loss", "val/loss", "val/bits_per_byte", "eval/hellaswag_acc_norm", "eval/core"),
    "perf/tokens_per_second",
)


class Mirror:
    """Sends a run of a store to the MLflow at `uri`. Its methods raise the errors of MLflow and of the store.

    `code_tags`: tags of the code that runs now, for stages that are not done. `page`: the report of a run, as HTML.
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
        self._client: MlflowClient | None = None
        self._experiment = ""
        self._ids: dict[str | None, str] = {}
        self._steps: dict[str, set[int]] = {}  # of the training that MLflow has, by metric
        self._sampled: set[int] = set()  # steps whose samples were sent

    @property
    def client(self) -> MlflowClient:
        from mlflow import MlflowClient

        if self._client is None:
            self._client = MlflowClient(self.uri)
        return self._client

    def stage_id(self, stage: str) -> str | None:
        """The MLflow run of a stage, if this mirror has sent it."""
        return self._ids.get(stage)

    def send(self, ended: bool, series: bool = True) -> Run:
        """Send what the store has of the run. `ended`: its command ends, so that results and files are sent, too.
        Returns the snapshot that was sent."""
        run = find_run(self.store, self.name)
        assert run, f"{self.store.uri} has no run {self.name}"
        began = min((one.beat.started for one in run.heartbeats), default=run.record.updated)
        parent = self._run_id(run, None, began)
        tags = parent_tags(run) | self._tags(run, run.manifests.get("train"))
        self._describe(parent, parent_params(run.recipe), tags)
        for stage, beats in run.attempts.items():
            if beats:
                self._send_stage(run, stage, beats)
        self._send_costs(parent, run.account, [one.beat for one in run.heartbeats])
        if series and "train" in self._ids:
            self.send_rows(run.series)
        status = STATUSES.get(run.state, "KILLED")
        if ended:
            self._log(parent, [results(run)])
            for name, text in self._files(run).items():
                self._log_text(parent, name, text)
            register(self.client, self._experiment, parent, run)
            works = any(beats and beats[-1].state == "running" for beats in run.attempts.values())
            status = "FINISHED" if status == "RUNNING" and not works else status  # it ends after an earlier stage
        self._set_status(parent, status, max((one.beat.time for one in run.heartbeats), default=began))
        return run

    def send_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Send rows of the series. A point at a step that MLflow has is left out: a redone step has the same loss."""
        train = self._ids["train"]
        points = []
        for row in rows:
            step = row["step"]
            if row.get("samples") and step not in self._sampled:
                self._log_text(train, f"samples/step-{step:08d}.txt", f"\n\n{'-' * 8}\n\n".join(row["samples"]))
                self._sampled.add(step)
            values = {key: value for key, value in row.items() if "/" in key and key != "data/digest" and "time" in row}
            if fresh := {key: value for key, value in values.items() if step not in self._known(train, key)}:
                points.append((step, row["time"], fresh))
        self._log(train, points)
        for step, _, fresh in points:
            for key in fresh:
                self._steps[key].add(step)

    def forget(self) -> None:
        """Look everything up again at the next call, after an error."""
        self._client, self._ids, self._steps = None, {}, {}

    def _send_stage(self, run: Run, stage: str, beats: list[Heartbeat]) -> None:
        prefix, made, progress = run.record.prefixes[stage], run.manifests.get(stage), beats[-1].progress
        run_id = self._run_id(run, stage, beats[0].started)
        recipe = run.recipe.model_dump()
        sections = SECTIONS.get(stage, (stage,))
        params = {f"{name}.{key}": value for name in sections for key, value in recipe[name].items()}
        tags = {f"runtime.{key}": value for key, value in recipe["runtime"].items()}
        tags |= {"skytrain.artifact": f"{self.store.uri}/{prefix}", "skytrain.attempt": beats[-1].attempt}
        hardware = ("device", "precision", "world_size", "engine", "micro_batch")
        tags |= {name: getattr(progress, name) for name in hardware if getattr(progress, name) is not None}
        if made:
            tags["skytrain.fingerprint"] = made.fingerprint
        self._describe(run_id, params, tags | self._tags(run, made))
        tokens, text = run.manifests.get("tokenize"), run.recipe.tokens
        if tokens and stage == "tokenize":
            self._log_input(run_id, stage, tokens.label, tokens.fingerprint, text.source or text.named)
        elif tokens and stage == "train":
            uri = f"{self.store.uri}/{tokens.prefix}"
            self._log_input(run_id, stage, tokens.prefix, tokens.fingerprint, uri)
        of_stage = [one for one in run.heartbeats if one.beat.stage == stage]
        costs = account(self.name, of_stage, run.recipe.train.batch_tokens)
        self._send_costs(run_id, costs, [one.beat for one in of_stage])
        if made and stage != "train":  # its last loss ends a series; it is no point at step 0
            scores = {k: float(v) for k, v in made.facts.items() if "/" in k and isinstance(v, int | float)}
            self._log(run_id, [(0, made.created, scores)])
        state = "done" if made else state_of([[one for one in of_stage if one.prefix == prefix]], self.store.clock)
        self._set_status(run_id, STATUSES.get(state, "KILLED"), beats[-1].time)

    def _send_costs(self, run_id: str, costs: Account, beats: list[Heartbeat]) -> None:
        """The costs up to the newest heartbeat, at the highest step that any attempt reached."""
        if beats:
            step = max(beat.progress.highest_step or 0 for beat in beats)
            self._log(run_id, [(step, max(beat.time for beat in beats), cost_metrics(costs))])

    def _tags(self, run: Run, made: Manifest | None) -> dict[str, str]:
        """The user's own tags, and the code that made an artifact, or makes it now."""
        code = self.code_tags
        if made:
            found = {"mlflow.source.git.commit": "git_commit", "skytrain.image": "image"}
            code = {tag: str(made.provenance[name]) for tag, name in found.items() if made.provenance.get(name)}
        return code | run.record.tags

    def _describe(self, run_id: str, params: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        """Log params and tags. MLflow never changes a param, so another value becomes a tag."""
        from mlflow.entities import Param, RunTag

        logged = self.client.get_run(run_id).data.params
        texts = {key: str(value)[:PARAM_CHARACTERS] for key, value in params.items()}
        changed = {f"param.{key}": value for key, value in texts.items() if logged.get(key, value) != value}
        self.client.log_batch(
            run_id,
            params=[Param(key, value) for key, value in texts.items() if key not in logged],
            tags=[RunTag(key, str(value)[:TAG_CHARACTERS]) for key, value in {**tags, **changed}.items()],
        )

    def _set_status(self, run_id: str, status: str, ended: float) -> None:
        if status == "RUNNING":
            self.client.update_run(run_id, status)
        else:
            self.client.set_terminated(run_id, status, end_time=_milliseconds(ended))

    def _log(self, run_id: str, points: Iterable[tuple[int, float, Mapping[str, float]]]) -> None:
        """Log metrics at (step, unix seconds). MLflow keeps NaN, and infinities as the largest float."""
        from mlflow.entities import Metric

        metrics = [
            Metric(NOT_IN_A_NAME.sub("-", key), value, _milliseconds(at), step)
            for step, at, values in points
            for key, value in values.items()
        ]
        for first in range(0, len(metrics), METRICS_AT_ONCE):
            self.client.log_batch(run_id, metrics=metrics[first : first + METRICS_AT_ONCE])

    def _known(self, run_id: str, key: str) -> set[int]:
        if key not in self._steps:
            self._steps[key] = {metric.step for metric in self.client.get_metric_history(run_id, key)}
        return self._steps[key]

    def _files(self, run: Run) -> dict[str, str]:
        """The files of the parent by name: the recipe, the account, a sample of the model, and the report."""
        recipe = yaml.safe_dump(run.recipe.model_dump(), sort_keys=False, allow_unicode=True)
        files = {"recipe.yaml": recipe, "account.json": json.dumps(run.account.to_json(), indent=1)}
        if (evaluated := run.manifests.get("evaluate")) and evaluated.facts.get("sample"):
            files["sample.txt"] = str(evaluated.facts["sample"])
        return files | ({"report.html": self.page(run)} if self.page else {})

    def _log_input(self, run_id: str, stage: str, name: str, digest: str, uri: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        kind, separator, _ = uri.partition("://")
        source = kind if separator else "local", json.dumps({"uri": uri})
        dataset = Dataset(name, digest[:DIGEST_CHARACTERS], *source)
        self.client.log_inputs(run_id, datasets=[DatasetInput(dataset, [InputTag("mlflow.data.context", stage)])])

    def _log_text(self, run_id: str, name: str, text: str) -> None:
        """Store a file. Files use another connection than metrics, which this machine may lack: it tries once."""
        try:
            self.client.log_text(run_id, text, name)
        except Exception as error:
            log(f"the file {name} is not in MLflow: {type(error).__name__}: {error}")

    def _run_id(self, run: Run, stage: str | None, started: float) -> str:
        """The MLflow run of a stage, or of the run itself (None): found by its tags, or created."""
        if not self._experiment or not self._ids:
            self._experiment = _experiment_id(self.client, run.record.experiment, self.uri)
            self._ids = self._found()
        if stage not in self._ids:
            tags = {"skytrain.run": self.name}
            if stage:
                tags |= {"skytrain.stage": stage, "mlflow.parentRunId": self._run_id(run, None, started)}
            name = f"{self.name}/{stage}" if stage else self.name
            created = self.client.create_run(self._experiment, _milliseconds(started), tags, run_name=name).info.run_id
            self._ids = {stage: created} | self._found()
            if self._ids[stage] != created:  # another process created one at the same time, and was first
                self.client.delete_run(created)
        return self._ids[stage]

    def _found(self) -> dict[str | None, str]:
        """The MLflow run of every stage; the oldest one where two processes have created one each."""
        found = self.client.search_runs([self._experiment], f"tags.`skytrain.run` = '{self.name}'")
        newest_first = sorted(found, key=lambda run: (run.info.start_time, run.info.run_id), reverse=True)
        return {run.data.tags.get("skytrain.stage"): run.info.run_id for run in newest_first}


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


def parent_params(recipe: Recipe) -> dict[str, Any]:
    """Size, text and optimization of a run: they never change while it trains."""
    sections = {"model": recipe.model.model_dump(), "train": recipe.train.model_dump()}
    return {
        "recipe": recipe.name,
        "parameters": recipe.model.parameters,
        "train_tokens": recipe.train_tokens,
        "tokens.source": recipe.tokens.source or recipe.tokens.named,
        "tokens.tokenizer": str(recipe.tokens.tokenizer),
    } | {f"{section}.{field}": value for section, values in sections.items() for field, value in values.items()}


def parent_tags(run: Run) -> dict[str, str]:
    """The store, the account, where the run began, and the hardware that trained last: "8 x NVIDIA H100"."""
    tags = {f"skytrain.{name}": value for name, value in account_tags(run.account).items()}
    tags["skytrain.store"] = run.store.uri
    if source := run.recipe.train.branch_from or run.recipe.train.init_from:
        tags["skytrain.began.from"] = source
    if trained := last_training(run):
        tags["skytrain.hardware"] = f"{trained.world_size} x {trained.device}"
    return tags


def last_training(run: Run) -> Progress | None:
    """The progress of the last attempt that trained."""
    progress = [beat.progress for beat in run.attempts.get("train", []) if beat.progress.world_size]
    return progress[-1] if progress else None


def results(run: Run) -> tuple[int, float, dict[str, float]]:
    """The step and the end of the training, in unix seconds, and what the finished stages have measured."""
    made = [one for stage in ("train", "evaluate") if (one := run.manifests.get(stage))]
    facts = {name: value for one in made for name, value in one.facts.items()}
    wanted = (name for name in facts if name in RESULTS or name.startswith("lm_eval/"))
    values = {name: float(facts[name]) for name in wanted if isinstance(facts[name], int | float)}
    if made:
        values["tokens"] = float(run.summary.tokens)
        if (trained := last_training(run)) and trained.world_size:
            values["world_size"] = float(trained.world_size)
    return run.summary.steps, max((one.created for one in made), default=0.0), values


def _experiment_id(client: MlflowClient, name: str, uri: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # A server has a location for artifacts. Without a server they would go to the current folder.
        database = Path(uri.removeprefix("sqlite:///")).absolute()
        beside = (database.parent / "mlartifacts").as_uri() if uri.startswith("sqlite:///") else None
        return client.create_experiment(name, beside, tags={KIND: MODEL_TRAINING})
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    if KIND not in experiment.tags:
        client.set_experiment_tag(experiment.experiment_id, KIND, MODEL_TRAINING)
    return experiment.experiment_id


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
