"""The export of a finished run in MLflow: a logged model, and a version in the registry under the recipe's name.

Both refer to the export in the store; no weights are uploaded. Each is found again by the export's fingerprint, so a
repeated record makes no second one. The alias `latest-good` is the newest export whose run has passed a target.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pipelines.tracking.mlflow.journal import Model

if TYPE_CHECKING:
    from mlflow import MlflowClient

FINGERPRINT, CREATED, EXPORT_URI = "skytrain.fingerprint", "skytrain.created", "skytrain.uri"
ALIAS = "latest-good"
MODEL_METRICS = (
    *("train/loss", "val/loss", "val/bits_per_byte", "eval/hellaswag_acc_norm", "eval/core"),
    *("cost/usd", "cost/usd_per_billion_tokens", "time/billed_hours"),
)
HARNESS, BASELINE = "lm_eval/", "baseline/"  # and all results whose names begin so
EXTERNAL = {"mlflow.model.isExternal": "true"}  # MLflow's own mark of a model whose files it does not have
# Error codes of a server without a registry, or one that forbids it to us.
NO_REGISTRY = ("PERMISSION_DENIED", "ENDPOINT_NOT_FOUND", "NOT_FOUND", "NOT_IMPLEMENTED", "FEATURE_DISABLED")


def register(client: MlflowClient, experiment: str, parent: str, record: Model) -> None:
    """Make or complete the logged model, the version and the alias. `parent`: the MLflow run of the run."""
    tags = {FINGERPRINT: record.fingerprint, CREATED: repr(record.created), EXPORT_URI: record.uri}
    tags |= {"skytrain.run": record.run} | record.tags
    model_id = _logged_model(client, experiment, parent, record, tags)
    version = _version(client, parent, record, tags, model_id)
    if record.good and _is_newer(client, record):
        client.set_registered_model_alias(record.name, ALIAS, version)


def _logged_model(client: MlflowClient, experiment: str, parent: str, record: Model, tags: dict[str, str]) -> str:
    """The id of the logged model, with the newest results of the parent and linked to it."""
    from mlflow.entities import LoggedModelOutput

    model_id = _oldest_model(client, experiment, record)
    if model_id is None:
        name = re.sub(r"[^A-Za-z0-9_-]", "-", record.run)  # MLflow allows no dot here
        created = client.create_logged_model(experiment, name, parent, tags | EXTERNAL, record.params).model_id
        model_id = _oldest_model(client, experiment, record) or created
        if model_id != created:  # another process made the same one at the same time, and was first
            client.delete_logged_model(created)
    client.set_logged_model_tags(model_id, tags)
    run = client.get_run(parent)
    if metrics := _newest_results(client, parent, run.data.metrics.keys(), model_id):
        client.log_batch(parent, metrics=metrics)
    if model_id not in [output.model_id for output in run.outputs.model_outputs]:
        client.log_outputs(parent, [LoggedModelOutput(model_id, record.step)])
    client.finalize_logged_model(model_id, "READY")
    return model_id


def _oldest_model(client: MlflowClient, experiment: str, record: Model) -> str | None:
    found = client.search_logged_models([experiment], f"tags.`{FINGERPRINT}` = '{record.fingerprint}'")
    return min(((one.creation_timestamp, one.model_id) for one in found), default=(0, None))[1]


def _newest_results(client: MlflowClient, parent: str, known: Any, model_id: str) -> list[Any]:
    """The parent's newest point of each result, as points of the model. For the parent itself they are not new."""
    from mlflow.entities import Metric

    keys = [key for key in known if key in MODEL_METRICS or key.startswith((HARNESS, BASELINE))]
    histories = (client.get_metric_history(parent, key) for key in keys)
    newest = [max(history, key=lambda m: (m.step, m.timestamp)) for history in histories]
    return [Metric(m.key, m.value, m.timestamp, m.step, model_id=model_id) for m in newest]


def _version(client: MlflowClient, parent: str, record: Model, tags: dict[str, str], model_id: str) -> str:
    """The number of the version that refers to the export."""
    from mlflow.exceptions import MlflowException

    if (version := _oldest_version(client, record)) is None:
        try:
            client.create_registered_model(record.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        created = client.create_model_version(
            record.name, record.uri, parent, tags, await_creation_for=0, model_id=model_id
        ).version
        version = _oldest_version(client, record) or int(created)
        if version != int(created):
            client.delete_model_version(record.name, str(created))
    return str(version)


def _oldest_version(client: MlflowClient, record: Model) -> int | None:
    found = client.search_model_versions(f"name = '{record.name}' and tag.`{FINGERPRINT}` = '{record.fingerprint}'")
    return min((int(one.version) for one in found), default=None)


def _is_newer(client: MlflowClient, record: Model) -> bool:
    """Whether the alias is free, or on an export that is not newer: old journals are shipped again, too."""
    if ALIAS not in (client.get_registered_model(record.name).aliases or {}):
        return True
    present = client.get_model_version_by_alias(record.name, ALIAS)
    return float(present.tags.get(CREATED, 0.0)) <= record.created
