"""Settings of the tracking that both processes read: the run's own and the shipper."""

import os
import re
from collections.abc import Iterable

from pipelines.tracking.mlflow.secrets import without_credentials
from trainer.config import seconds_from_environment
from trainer.errors import UserError

TAG_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./ -]{0,99}")
NO_MLFLOW = 3  # exit code of a shipper that cannot import mlflow: a restart would not help

# The shipper retries and logs its retries. Retries inside MLflow would hold a call to a dead server for 4 minutes.
# 1,000 metrics took a server on one busy core 0.1 to 0.9 s. The user's own settings win.
QUICK_MLFLOW = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def flush_seconds() -> float:
    """Seconds to wait for an MLflow server that does not answer."""
    return seconds_from_environment("SKYTRAIN_MLFLOW_FLUSH_SECONDS", 30.0)


def tracking_is_off() -> bool:
    """Whether SKYTRAIN_TRACKING is off. UserError if it is neither on nor off."""
    value = os.environ.get("SKYTRAIN_TRACKING") or "on"
    if value.lower() not in ("on", "off"):
        raise UserError(f"SKYTRAIN_TRACKING: {value!r} is neither on nor off")
    return value.lower() == "off"


def experiment_name() -> str:
    """The experiment in MLflow: MLFLOW_EXPERIMENT_NAME, which is MLflow's own setting, or "skytrain"."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "skytrain"


def own_tags() -> dict[str, str]:
    """The user's own tags of a run, from SKYTRAIN_TAGS: NAME=VALUE,NAME=VALUE. UserError for another form."""
    return parse_tags(filter(None, os.environ.get("SKYTRAIN_TAGS", "").split(",")), "SKYTRAIN_TAGS: ")


def parse_tags(texts: Iterable[str], where: str) -> dict[str, str]:
    """Tags of the form NAME=VALUE. UserError for another form, and for names that skytrain or MLflow set."""
    tags = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (equals and TAG_NAME.fullmatch(name)) or "," in value:
            raise UserError(f"{where}{text}: not of the form NAME=VALUE without commas, such as team=research")
        if name.startswith(("mlflow.", "skytrain.")):
            raise UserError(f"{where}{text}: names that begin with mlflow. and skytrain. are taken; use another")
        tags[name] = value
    return tags


def tracking_uri(option: str | None, default: str) -> str:
    """The MLflow to ship to: the option, MLFLOW_TRACKING_URI, or the default.

    The user and password of a URL move to MLflow's variables, which the shipper inherits: the URI can be shown.
    """
    uri, credentials = without_credentials(option or os.environ.get("MLFLOW_TRACKING_URI") or default)
    os.environ.update(credentials | {name: os.environ[name] for name in credentials if os.environ.get(name)})
    return uri
