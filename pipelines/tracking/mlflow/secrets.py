"""Passwords of an MLflow server: out of its URI, and out of every text that we write.

A URL of a server is used without its user and password; MLflow reads those from its own variables. The URI of a
database needs its password, and libraries repeat it in their errors: all output of the shipper is redacted.
"""

import io
import os
from collections.abc import Mapping
from typing import TextIO
from urllib.parse import unquote, urlsplit

from trainer.errors import UserError

USER, PASSWORD, TOKEN = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"
HIDDEN = "***"


def without_credentials(uri: str) -> tuple[str, dict[str, str]]:
    """The URL of a server without user and password, and these as MLflow's variables. Other URIs stay as they are."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise UserError(f"MLFLOW_TRACKING_URI: not a URL ({error})") from error
    user_info, at, host = parts.netloc.rpartition("@")
    if not at or parts.scheme not in ("http", "https"):
        return uri, {}
    user, _, password = user_info.partition(":")
    return parts._replace(netloc=host).geturl(), {USER: unquote(user), PASSWORD: unquote(password)}


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """The passwords and tokens of MLflow in an environment, the longest first."""
    found = {environment.get(PASSWORD, ""), environment.get(TOKEN, "")}
    address = environment.get("MLFLOW_TRACKING_URI", "").partition("://")[2].partition("/")[0]
    password = address.rpartition("@")[0].partition(":")[2]
    return sorted(filter(None, found | {password, unquote(password)}), key=len, reverse=True)


def redacted(text: str, secrets: list[str] | None = None) -> str:
    """The text with each secret replaced; by default those of this process's environment."""
    for secret in secrets_in(os.environ) if secrets is None else secrets:
        text = text.replace(secret, HIDDEN)
    return text


class RedactedStream(io.TextIOBase):
    """A text stream that hides the secrets of this process's environment."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.secrets = stream, secrets_in(os.environ)

    def write(self, text: str) -> int:
        self.stream.write(redacted(text, self.secrets))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()
