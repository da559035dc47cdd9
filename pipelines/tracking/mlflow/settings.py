"""Settings of the tracking that both processes read: the run's own and the shipper."""

import os

from trainer.config import seconds_from_environment
from trainer.errors import UserError

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


def tracking_uri(option: str | None, default: str) -> str:
    """The MLflow to ship to: the option, MLFLOW_TRACKING_URI, or the default."""
    return option or os.environ.get("MLFLOW_TRACKING_URI") or default
