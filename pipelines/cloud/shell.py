"""The variables and secrets that a job takes over from the shell that launches it."""

import os
import re
from collections.abc import Iterable

from trainer.errors import UserError

# A dry run and the launch record show these.
VARIABLES = (
    "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
    "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "SKYTRAIN_TAGS",
)  # fmt: skip
SECRETS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN",
    "SKYPILOT_DOCKER_USERNAME", "SKYPILOT_DOCKER_PASSWORD", "SKYPILOT_DOCKER_SERVER",
)  # fmt: skip

SECRET_NAME = re.compile(r"(?i)(?:^|_)(?:password|passwd|secret|token|key|credentials?)(?:_|$)")
SECRET_TEXT = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s@]+@|\bgh[pousr]_\w{30,}|\bhf_\w{30,}"
    r"|(?i:\b\w*(?:password|secret|token|api_key)=[^\s$'\"]+)"
)


def variables_from_shell(extra: Iterable[str] = ()) -> dict[str, str]:
    """VARIABLES that are set in this shell, and `extra` ones ("NAME=VALUE"). UserError for a secret among them."""
    own = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    variables = {}
    for text in (*own, *extra):
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise UserError(f"--env {name}: not of the form NAME=VALUE")
        if name in SECRETS or SECRET_NAME.search(name):
            raise UserError(
                f"--env {name}: looks like a secret, and variables are shown; export it and use --secret {name}"
            )
        if SECRET_TEXT.search(value):
            raise UserError(
                f"{name}: the value holds a secret, and variables are shown; "
                "MLflow's belong in MLFLOW_TRACKING_USERNAME/PASSWORD"
            )
        variables[name] = value
    return variables


def secrets_from_shell(extra: Iterable[str] = ()) -> dict[str, str]:
    """SECRETS that are set in this shell, and `extra` ones, by name. Only SkyPilot gets them; no file of ours does."""
    extra = list(extra)
    if absent := [name for name in extra if not os.environ.get(name)]:
        raise UserError(f"--secret {absent[0]}: not set in this shell; export it first, without writing it to a file")
    return {name: os.environ[name] for name in (*SECRETS, *extra) if os.environ.get(name)}
