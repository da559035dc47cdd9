"""Checks that find a problem before it costs money. Each examines the real store or server, and names a remedy.

`doctor` checks a machine, `launch` a job. A check returns a finding; it never raises because it
found a problem. It does not retry, so it takes seconds.
"""

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelines.extras.mlflow.settings import checked_uri
from pipelines.store.layout import momentary_key
from pipelines.store.s3_client import clients_from_environment
from pipelines.store.s3_store import S3Store, open_store
from pipelines.store.secrets import redacted
from pipelines.store.store_id import OBEY
from pipelines.user.cloud.skypilot import api_server_is_up, enabled_clouds, skypilot_version
from trainer.base.answers import answered_within
from trainer.base.install import how_to_install
from trainer.base.store import Store
from trainer.config.errors import StoreUnavailable, UserError

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
    key = momentary_key("tried")
    try:
        first = store.create(key, b"first")
        second = store.create(key, b"second")
        body = store.get(key)
        store.delete(key)
    except (UserError, StoreUnavailable) as error:
        return broken("store", store.uri, str(error).replace(f"/{key}", ""))
    if not first or second or body != b"first":
        return broken("store", f"{store.uri}: a second create replaced the first", OBEY)
    return Finding("store", f"{store.uri} is writable, and refuses a second create")


def old_versions(store: Store) -> Iterator[Finding]:
    """Whether a bucket keeps, and bills, what a run removes: of a checkpoint, gigabytes each time."""
    if isinstance(store, S3Store) and keeps_old_versions(store):
        seen = "the bucket is versioned, and keeps every checkpoint that a run removes, for $0.023 a GB and month on S3"
        remedy = "end old versions after a day by a lifecycle rule (NoncurrentVersionExpiration), or suspend versioning"
        yield Finding("old versions", seen, "note", remedy)


def keeps_old_versions(store: S3Store) -> bool:
    """Whether the bucket is versioned, and no lifecycle rule ends old versions. False where nobody may ask."""
    from botocore.exceptions import BotoCoreError, ClientError

    (client,) = clients_from_environment(store.uri, ANSWER_SECONDS, 1)
    try:
        if client.get_bucket_versioning(Bucket=store.bucket).get("Status") != "Enabled":
            return False
        rules = client.get_bucket_lifecycle_configuration(Bucket=store.bucket)["Rules"]
    except (BotoCoreError, ClientError) as error:
        return "NoSuchLifecycleConfiguration" in str(error)
    return not any(ends_old_versions(rule, store.prefix) for rule in rules)


def ends_old_versions(rule: dict[str, Any], prefix: str) -> bool:
    """Whether a lifecycle rule ends old versions of all objects under a prefix."""
    limits = rule.get("Filter") or {"Prefix": rule.get("Prefix", "")}
    covers = "Prefix" in limits and prefix.startswith(limits["Prefix"])
    return covers and rule["Status"] == "Enabled" and "NoncurrentVersionExpiration" in rule


def mlflow_answers(uri: str, environment: Mapping[str, str]) -> Finding:
    """Whether the tracking server answers and accepts these credentials."""
    try:
        parts = urlsplit(checked_uri(uri))
    except UserError as error:
        return broken("mlflow", "not usable", str(error))
    if parts.scheme not in ("http", "https"):
        return Finding("mlflow", f"{parts.scheme or uri}: not checked", "note", "only http(s) servers can be checked")
    address = f"{parts.scheme}://{parts.netloc}"
    user, token = environment.get("MLFLOW_TRACKING_USERNAME"), environment.get("MLFLOW_TRACKING_TOKEN")
    import requests  # 0.1 s, for which `status` would wait, too

    def ask() -> int:
        """Its status alone: a body may have any size."""
        with requests.get(
            uri.rstrip("/") + "/api/2.0/mlflow/experiments/search?max_results=1",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            auth=(user, environment.get("MLFLOW_TRACKING_PASSWORD", "")) if user and not token else None,
            timeout=ANSWER_SECONDS,
            stream=True,
        ) as answer:
            return answer.status_code

    try:
        status = answered_within(ANSWER_SECONDS, ask)
    except (OSError, ValueError) as error:
        seen = f"{address}: no answer ({type(error).__name__})"
        return broken("mlflow", seen, "start it, correct MLFLOW_TRACKING_URI, or unset it")
    if status != 200:
        account = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        return broken("mlflow", f"{address} answers HTTP {status}", f"correct MLFLOW_TRACKING_URI, or {account}")
    return Finding("mlflow", f"{address} answers")


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
        store = open_store(store_uri)
        yield store_commits(store)
        yield from old_versions(store)
    except UserError as error:
        yield broken("store", redacted(store_uri), str(error))
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
    if (found := skypilot_version()) is None:
        return Finding("skypilot", "not installed", "note", f"needed to launch: {how_to_install('cloud')}")
    if not api_server_is_up():
        return Finding("skypilot", f"{found}; its server does not answer", "note", "sky api start")
    try:
        clouds = enabled_clouds(ANSWER_SECONDS)
    except UserError as error:
        return Finding("skypilot", f"{found}; {error}", "note", "sky api stop; sky api start")
    if not clouds:
        return Finding("skypilot", f"{found}; no cloud is enabled", "note", "sky check lists what each cloud needs")
    return Finding("skypilot", f"{found}; may use {', '.join(clouds)}")
