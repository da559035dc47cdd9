"""The secrets in the environment: which process gets which, and texts without them.

A command has all secrets of its shell. A process that it starts gets the secrets of the services that it asks:
a library that dumps its environment then shows no other. Whatever a server or a library writes into a message of ours
passes `redacted`: a server may repeat the headers of a request, and libraries repeat URLs.
"""

import os
import re
from base64 import b64encode
from urllib.parse import quote, unquote

# The beginnings of the names of a service's variables.
HUB, MLFLOW = ("HF_", "HUGGING_FACE_"), ("MLFLOW_", "DATABRICKS_", "PGPASSWORD")
# Those that skytrain knows. A job gets them, if they are set.
SECRETS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "SKYTRAIN_S3_ACCESS_KEY_ID", "SKYTRAIN_S3_SECRET_ACCESS_KEY", "SKYTRAIN_S3_SESSION_TOKEN",
    "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN",
    "SKYPILOT_DOCKER_USERNAME", "SKYPILOT_DOCKER_PASSWORD", "SKYPILOT_DOCKER_SERVER",
)  # fmt: skip
HIDDEN = re.compile("PASSWORD|TOKEN|SECRET")  # in a text, of SECRETS; ids, users and servers are shown

SECRET_NAME = re.compile(r"(?i)(?:(?:^|_)(?:secret|token|key|credentials?)|password|passwd)(?:_|$)")
SECRET_TEXT = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s@]+@|\bgh[pousr]_\w{30,}|\bhf_\w{30,}"
    r"|(?i:\b\w*(?:password|secret|token|api_key)=[^\s$'\"]+)"
)
# Behind "://", up to the last @. A password may hold a slash; a port before one is none.
USER_IN_URL = re.compile(r"://(?:[^/\s'\"@]*:(?!\d{1,5}/)[^\s'\"]*|[^/\s'\"]*)@")
IN_HEADER = re.compile(r"""(?i)(authorization['"]?\s*[:=,]\s*['"]?(?:basic|bearer)\s+)[^\s'"<&]+""")


def is_secret_name(name: str) -> bool:
    return name in SECRETS or bool(SECRET_NAME.search(name) and not name.endswith("_FILE"))


def has_own_keys() -> bool:
    """Whether the store has credentials of its own; then AWS's only rent machines."""
    return bool(os.environ.get("SKYTRAIN_S3_ACCESS_KEY_ID"))


def services_of(*uris: str) -> tuple[str, ...]:
    """The beginnings of the names of variables for the services of URIs: of S3, of the Hub, or of none."""
    s3 = ("SKYTRAIN_S3_",) if has_own_keys() else ("SKYTRAIN_S3_", "AWS_")
    services = {"s3": s3, "hf": HUB}
    return tuple(name for uri in uris for name in services.get(uri.partition("://")[0], ()))


def environment_for(services: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment of this process, with the secrets of `services` alone. The password of a proxy is for every
    process."""

    def is_given(name: str, value: str) -> bool:
        own = name.startswith(services) or name.lower().endswith("_proxy")
        return own or not (is_secret_name(name) or SECRET_TEXT.search(value))

    return {name: value for name, value in os.environ.items() if is_given(name, value)}


def redacted(text: str) -> str:
    """The text without the secrets of this process, and without users and passwords in URLs and headers."""
    user, password, uri = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD", "URI"))
    address = uri.partition("://")[2].partition("/")[0]
    secrets = {os.environ.get(name, "") for name in SECRETS if HIDDEN.search(name)}
    secrets.add(address.rpartition("@")[0].partition(":")[2])  # of a database
    if password:
        secrets.add(b64encode(f"{user}:{password}".encode()).decode().rstrip("="))  # as HTTP sends them
    forms = {form for secret in secrets for form in (secret, unquote(secret), quote(secret, safe=""))}
    for form in sorted(forms - {""}, key=len, reverse=True):
        text = text.replace(form, "***")
    return USER_IN_URL.sub("://***@", IN_HEADER.sub(r"\1***", text))
