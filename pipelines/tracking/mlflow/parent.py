"""The parent run in MLflow: what people compare between runs, and the files that explain one."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from pipelines.artifacts.manifest import Manifest
from pipelines.recipe import Recipe
from pipelines.tracking.mlflow.journal import Model
from pipelines.tracking.mlflow.registry import BASELINE, HARNESS
from pipelines.tracking.origins import beginning_of_run
from pipelines.tracking.records import Progress
from pipelines.tracking.runs import Run

RESULTS = (
    *("train/loss", "val/loss", "val/bits_per_byte", "eval/hellaswag_acc_norm", "eval/core"),
    "perf/tokens_per_second",
)


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


def parent_results(run: Run) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Step, time and values of the results of finished stages.

    The time is that of the artifact, so that a later command logs the same point and MLflow keeps one.
    """
    train, evaluated = run.manifests.get("train"), run.manifests.get("evaluate")
    if not train:
        return
    for manifest in filter(None, (train, evaluated)):
        values = {name: float(manifest.facts[name]) for name in RESULTS if manifest.facts.get(name) is not None}
        if manifest is train:
            values["tokens"] = float(run.summary.tokens)
            if (progress := last_training(run)) and progress.world_size:
                values["world_size"] = float(progress.world_size)
            if evaluated:  # whose validation is the larger one
                values.pop("val/loss", None)
        else:
            values |= harness_scores(manifest) | baseline_scores(manifest)
        if values:
            yield train.fact("steps"), manifest.created, values


def harness_scores(evaluated: Manifest) -> dict[str, float]:
    """The scores of EleutherAI's harness, `lm_eval/TASK/METRIC`."""
    facts = evaluated.facts.items()
    return {n: float(value) for n, value in facts if n.startswith(HARNESS) and isinstance(value, int | float)}


def baseline_scores(evaluated: Manifest) -> dict[str, float]:
    """The results of the recipe's baselines, `baseline/NAME/METRIC`, in characters that MLflow takes."""
    return {
        f"{BASELINE}{re.sub('[^A-Za-z0-9_.-]+', '-', name).strip('-.')}/{metric}": float(measured[metric])
        for name, measured in evaluated.facts.get("baselines", {}).items()
        for metric in RESULTS
        if metric in measured
    }


def parent_tags(run: Run) -> dict[str, str]:
    """Where the run began, and the hardware that trained last, such as "8 x NVIDIA H100"; a resumed run may have had
    another before."""
    tags, progress = beginning_tags(run), last_training(run)
    if progress and progress.device:
        tags["skytrain.hardware"] = f"{progress.world_size} x {progress.device}"
    return tags


def beginning_tags(run: Run) -> dict[str, str]:
    """The weights or the commit that a run began with; nothing for random weights."""
    began = beginning_of_run(run)
    if began is None:
        return {}
    origin = {"from": began.source, "run": began.run, "step": began.step, "fingerprint": began.fingerprint}
    tags = {f"skytrain.began.{name}": str(value) for name, value in origin.items() if value is not None}
    return tags | {"skytrain.began.how": "branch" if began.branched else "weights"}


def finished_model(run: Run) -> Model | None:
    """The export of a run with its origin; None until it is committed."""
    export, train = run.manifests.get("export"), run.manifests.get("train")
    if not (export and train):
        return None
    tags = {f"skytrain.fingerprint.{stage}": made.fingerprint for stage, made in run.manifests.items() if made}
    tags |= {"skytrain.store": run.store.uri, "skytrain.attempts": str(run.summary.attempts)}
    if commit := train.provenance.get("git_commit"):
        tags["mlflow.source.git.commit"] = str(commit)
    tags |= beginning_tags(run)
    if target := train.facts.get("stopped_by"):
        tags["skytrain.passed"] = str(target)
    model = {f"model.{name}": str(value) for name, value in run.recipe.model.model_dump().items()}
    params = {"parameters": str(run.recipe.model.parameters), "tokens": str(run.summary.tokens)} | model
    uri = f"{run.store.uri}/{export.prefix}"
    about = (run.recipe.name, run.name, export.fingerprint, uri, export.created, train.fact("steps"), bool(target))
    return Model(time.time(), None, *about, params, tags)


def last_training(run: Run) -> Progress | None:
    """The progress of the last attempt that trained."""
    progress = [beat.progress for beat in run.attempts.get("train", []) if beat.progress.world_size]
    return progress[-1] if progress else None


def parent_files(run: Run, report: Callable[[Run], str] | None) -> dict[str, str]:
    """Contents of the parent's files by name: the recipe, a sample of the model, and the report page."""
    files = {"recipe.yaml": yaml.safe_dump(run.recipe.model_dump(), sort_keys=False, allow_unicode=True)}
    evaluated = run.manifests.get("evaluate")
    if evaluated and evaluated.facts.get("sample"):
        files["sample.txt"] = str(evaluated.facts["sample"])
    if report:
        files["report.html"] = report(run)
    return files
