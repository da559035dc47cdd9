"""Settings of MLflow, and the log of its mirror, each line of which is redacted.

User and password of a server belong in MLflow's own variables. The URI of a database needs its password, and libraries
repeat it in their errors.
"""

import os
import time
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.store.secrets import redacted
from trainer.config.config import seconds_from_environment
from trainer.config.errors import UserError

SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")

# The mirror retries and logs its retries. Retries inside MLflow would hold a call to a dead server for 4 minutes.
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


def tracking_uri(home: Path) -> str:
    """The MLflow to mirror to: MLFLOW_TRACKING_URI, or a SQLite file in `home`. UserError for a URI that cannot be
    mirrored to."""
    default = f"sqlite:///{home / 'mlflow.db'}"
    uri = os.environ.get("MLFLOW_TRACKING_URI") or default
    if uri == default and set("%?") & set(uri):
        raise UserError(f"{uri}: MLflow's SQLite takes no % or ? in a path; choose another SKYTRAIN_HOME")
    return checked_uri(uri)


def checked_uri(uri: str) -> str:
    """The URI of a server or a database. UserError for another scheme, and for a password in the URL of a server, which
    people are shown."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise UserError(f"MLFLOW_TRACKING_URI: not a URL ({error})") from error
    if parts.scheme.partition("+")[0] not in SCHEMES:
        raise UserError(
            f"MLFLOW_TRACKING_URI: {redacted(uri)}: not a server, and MLflow keeps no runs in folders any more; use "
            "http(s)://SERVER, or a database such as sqlite:///mlflow.db"
        )
    if parts.scheme in ("http", "https") and "@" in parts.netloc:
        account = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        raise UserError(f"MLFLOW_TRACKING_URI: has a user or password in it; put them into {account}")
    return uri


def log(message: str) -> None:
    """Write a line to the log of the mirror's process, without control characters of a server's answer."""
    text = "".join(character if character.isprintable() else " " for character in redacted(message))
    print(time.strftime("%Y-%m-%dT%H:%M:%S"), text, flush=True)
