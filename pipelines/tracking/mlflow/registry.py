"""The export of a finished run in MLflow's registry: a version of the registered model with the recipe's name.

It refers to the export in the store; no weights are uploaded. It is found again by the export's fingerprint, so sending
it again makes no second one. The alias `latest-good` is the newest export whose run has passed a target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.tracking.mlflow.settings import log
from pipelines.tracking.runs import Run

if TYPE_CHECKING:
    from mlflow import MlflowClient

FINGERPRINT, CREATED, ALIAS = "skytrain.fingerprint", "skytrain.created", "latest-good"


def register(client: MlflowClient, run_id: str, run: Run) -> None:
    """Make or complete the version and the alias of a run's export, once there is one.

    Prints a refusal: some servers have no registry, or take no local folder.
    """
    from mlflow.exceptions import MlflowException

    export, train, name = run.manifests.get("export"), run.manifests.get("train"), run.recipe.name
    if not (export and train):
        return
    key = export.files[0].key if export.files else ""
    folder = f"{run.store.uri}/{export.prefix}/{key}".rpartition("/")[0]
    tags = {FINGERPRINT: export.fingerprint, CREATED: repr(export.created), "skytrain.run": run.name}
    tags |= {"skytrain.uri": folder, **run.record.tags}
    if target := train.facts.get("stopped_by"):
        tags["skytrain.passed"] = str(target)
    try:
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        found = client.search_model_versions(f"name = '{name}' and tag.`{FINGERPRINT}` = '{export.fingerprint}'")
        made = found or [client.create_model_version(name, folder, run_id, tags, await_creation_for=0)]
        if target and _good_created(client, name) <= export.created:
            client.set_registered_model_alias(name, ALIAS, str(min(int(one.version) for one in made)))
    except MlflowException as error:
        if error.get_http_status_code() >= 500:
            raise
        log(f"the registry of MLflow refuses the export: {error.message}")


def _good_created(client: MlflowClient, name: str) -> float:
    """When the export with the alias was made, in unix seconds; 0 without one."""
    known = ALIAS in (client.get_registered_model(name).aliases or {})
    return float(client.get_model_version_by_alias(name, ALIAS).tags.get(CREATED, 0.0)) if known else 0.0
