"""Checks that find a problem before it costs money. Each examines the real store or server, and names a remedy.

`doctor` makes the checks of a machine, `launch` those of a job. A check returns a finding; it never raises because it
found a problem. It does not retry, so it takes seconds.
"""

import base64
import platform
import re
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.artifacts.store import open_store
from pipelines.cloud.skypilot import api_server_is_up, enabled_clouds
from pipelines.tracking.mlflow.settings import without_credentials
from trainer.errors import StoreUnavailable, UserError
from trainer.store import Store

ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    seen: str
    state: str = "ok"  # ok; note: no problem, but the user should know it; broken: it can't work
    remedy: str = ""


def broken(what: str, seen: str, remedy: str) -> Finding:
    return Finding(what, seen, "broken", remedy)


def store_commits(store: Store) -> Finding:
    """Whether the store refuses the second of two writers that create the same key. Every commit relies on that."""
    key = f"control/tried/{uuid.uuid4().hex}"
    try:
        first = store.create(key, b"first")
        second = store.create(key, b"second")
        body = store.get(key)
        store.delete(key)
    except (UserError, StoreUnavailable) as error:
        return broken("store", store.uri, str(error).removeprefix(f"create {store.uri}/{key} at "))
    if not first or second or body != b"first":
        remedy = "this server ignores If-None-Match: *; commits need a server that obeys it (S3, R2, MinIO, Ceph 17, …)"
        return broken("store", f"{store.uri}: a second create replaced the first", remedy)
    return Finding("store", f"{store.uri} is writable, and refuses a second create")


def mlflow_answers(uri: str, environment: Mapping[str, str]) -> Finding:
    """Whether the tracking server answers and accepts these credentials."""
    uri, credentials = without_credentials(uri)
    environment = credentials | {name: value for name, value in environment.items() if value}
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return Finding("mlflow", f"{parts.scheme or uri}: not checked", "note", "only http(s) servers can be checked")
    address = f"{parts.scheme}://{parts.netloc}"
    request = urllib.request.Request(uri.rstrip("/") + "/api/2.0/mlflow/experiments/search?max_results=1")
    if token := environment.get("MLFLOW_TRACKING_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    elif user := environment.get("MLFLOW_TRACKING_USERNAME"):
        account = f"{user}:{environment.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
        request.add_header("Authorization", "Basic " + base64.b64encode(account).decode())
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):
            return Finding("mlflow", f"{address} answers")
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to an account of this server"
            return broken("mlflow", f"{address} refuses the credentials (HTTP {error.code})", remedy)
        return broken("mlflow", f"{address} answers HTTP {error.code}", "correct MLFLOW_TRACKING_URI")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        return broken("mlflow", f"{address}: {reason}", "start it, correct MLFLOW_TRACKING_URI, or unset it")


def check_image_name(name: str) -> None:
    """UserError unless this can be the name of an image."""
    repository = name.partition("@")[0]
    if not re.fullmatch(r"([\w.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[\w.-]+)?", repository):
        raise UserError(f"--image {name}: not the name of an image; write REGISTRY/NAME@sha256:… or REGISTRY/NAME:TAG")


# This machine


def examine(home: Path, store_uri: str, environment: dict[str, str]) -> Iterator[Finding]:
    """All checks of this machine, its store and its servers. They leave no file behind and start no server."""
    import torch

    yield Finding("python", f"{platform.python_version()}, torch {torch.__version__}")
    if torch.cuda.is_available():
        yield Finding("gpus", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    else:
        yield Finding("gpus", "none here", "note", "runs train on the CPU; skytrain launch rents GPUs")
    try:
        yield store_commits(open_store(store_uri))
    except UserError as error:
        yield broken("store", store_uri, str(error))
    if environment.get("SKYTRAIN_TRACKING") == "off":
        yield Finding("mlflow server", "off")
    elif uri := environment.get("MLFLOW_TRACKING_URI"):
        yield mlflow_answers(uri, environment)
    else:
        yield Finding(
            "mlflow server", f"none: runs are mirrored to {home / 'mlflow.db'}", "note", "MLFLOW_TRACKING_URI names one"
        )
    yield skypilot()


def skypilot() -> Finding:
    """Whether this machine can launch, and to which clouds."""
    try:
        found = version("skypilot")
    except PackageNotFoundError:
        return Finding("skypilot", "not installed", "note", "needed to launch: pip install '.[cloud]'")
    if not api_server_is_up():
        return Finding("skypilot", f"{found}; its server does not answer", "note", "sky api start")
    clouds = enabled_clouds()
    if not clouds:
        return Finding("skypilot", f"{found}; no cloud is enabled", "note", "sky check lists what each cloud needs")
    return Finding("skypilot", f"{found}; may use {', '.join(clouds)}")
