"""The export of a finished run in MLflow: a logged model, and a version in the registry under the recipe's name.

Both refer to the export in the store; no weights are uploaded. Each is found again by the export's fingerprint, so
sending it again makes no second one. The alias `latest-good` is the newest export whose run has passed a target.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipelines.tracking.mlflow.settings import log
from pipelines.tracking.runs import Run

if TYPE_CHECKING:
    from mlflow import MlflowClient

FINGERPRINT, CREATED = "skytrain.fingerprint", "skytrain.created"
ALIAS, COMMIT = "latest-good", "mlflow.source.git.commit"
MODEL_METRICS = ("train/loss", "val/", "eval/", "cost/", "time/billed_hours", "lm_eval/")  # beginnings
EXTERNAL = {"mlflow.model.isExternal": "true"}  # MLflow's own mark of a model whose files it does not have


def register(client: MlflowClient, experiment: str, parent: str, run: Run) -> None:
    """Make or complete the logged model, the version and the alias of a run's export, once there is one.

    `parent`: the MLflow run of the run. Prints a refusal: some servers have no registry, or take no local folder.
    """
    from mlflow.exceptions import MlflowException

    export, train = run.manifests.get("export"), run.manifests.get("train")
    if not (export and train):
        return
    tags = {FINGERPRINT: export.fingerprint, CREATED: repr(export.created), "skytrain.run": run.name}
    tags |= {f"skytrain.fingerprint.{stage}": made.fingerprint for stage, made in run.manifests.items() if made}
    tags |= {"skytrain.uri": f"{run.store.uri}/{export.prefix}", "skytrain.attempts": str(run.summary.attempts)}
    of_run = client.get_run(parent).data.tags
    tags |= {name: of_run[name] for name in of_run if not name.startswith("mlflow.") or name == COMMIT}
    if target := train.facts.get("stopped_by"):
        tags["skytrain.passed"] = str(target)
    try:
        model = _logged_model(client, experiment, parent, run, tags)
        version = _version(client, parent, run.recipe.name, tags, model)
        if target and _good_created(client, run.recipe.name) <= export.created:
            client.set_registered_model_alias(run.recipe.name, ALIAS, version)
    except MlflowException as error:
        if error.get_http_status_code() >= 500:
            raise
        log(f"the registry of MLflow refuses the export: {error.message}")


def _good_created(client: MlflowClient, name: str) -> float:
    """When the export with the alias was made, in unix seconds; 0 without one."""
    known = ALIAS in (client.get_registered_model(name).aliases or {})
    return float(client.get_model_version_by_alias(name, ALIAS).tags.get(CREATED, 0.0)) if known else 0.0


def _logged_model(client: MlflowClient, experiment: str, parent: str, run: Run, tags: dict[str, str]) -> str:
    """The id of the logged model, with the newest results of the parent and linked to it."""
    from mlflow.entities import LoggedModelOutput, Metric

    found = client.search_logged_models([experiment], f"tags.`{FINGERPRINT}` = '{tags[FINGERPRINT]}'")
    if found:
        model = min(found, key=lambda one: (one.creation_timestamp, one.model_id))
    else:
        params = {f"model.{name}": str(value) for name, value in run.recipe.model.model_dump().items()}
        params |= {"parameters": str(run.recipe.model.parameters), "tokens": str(run.summary.tokens)}
        name = re.sub(r"[^A-Za-z0-9_-]", "-", run.name)  # MLflow allows no dot here
        model = client.create_logged_model(experiment, name, parent, tags | EXTERNAL, params)
    client.set_logged_model_tags(model.model_id, tags)
    logged = client.get_run(parent)
    newest = [metric for metric in logged.data._metric_objs if metric.key.startswith(MODEL_METRICS)]
    client.log_batch(parent, [Metric(m.key, m.value, m.timestamp, m.step, model_id=model.model_id) for m in newest])
    if model.model_id not in [output.model_id for output in logged.outputs.model_outputs]:
        client.log_outputs(parent, [LoggedModelOutput(model.model_id, run.last_step)])
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


def _version(client: MlflowClient, parent: str, name: str, tags: dict[str, str], model: str) -> str:
    """The number of the version that refers to the export."""
    found = client.search_model_versions(f"name = '{name}' and tag.`{FINGERPRINT}` = '{tags[FINGERPRINT]}'")
    if found:
        return str(min(int(one.version) for one in found))
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    made = client.create_model_version(name, tags["skytrain.uri"], parent, tags, await_creation_for=0, model_id=model)
    return str(made.version)
