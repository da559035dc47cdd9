"""What can be known to go wrong before it costs money: each check looks at the real thing and says how to mend it.

`doctor` makes the checks that concern a machine, `launch` those that concern a job. A check never raises for what it
finds; it takes seconds, because it asks once.
"""

import base64
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from ipaddress import ip_address
from urllib.parse import urlsplit

from trainer.errors import StoreUnavailable, UserError
from trainer.store import Store

ANSWER_SECONDS = 10.0
MOST_BYTES = 1 << 20
# What a registry may answer with for a tag or digest: one image, or one for each platform.
MANIFEST_TYPES = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "docker.distribution.manifest.v2", "docker.distribution.manifest.list.v2",
        "oci.image.manifest.v1", "oci.image.index.v1",
    )
)  # fmt: skip
MARKS = {"ok": "   ok", "note": "    .", "broken": "WRONG"}
HUB = "registry-1.docker.io"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    seen: str
    state: str = "ok"  # ok, note: nothing is wrong, but to be known; broken: it can't work so
    remedy: str = ""

    def __str__(self) -> str:
        return f"{MARKS[self.state]}  {self.what}: {self.seen}" + (f"\n       -> {self.remedy}" if self.remedy else "")


def broken(what: str, seen: str, remedy: str) -> Finding:
    return Finding(what, seen, "broken", remedy)


# The store


def store_commits(store: Store) -> Finding:
    """Whether the store keeps its one promise: of two writers that create a key, one is refused."""
    key = f"control/tried/{uuid.uuid4().hex}"
    try:
        first = store.create(key, b"first")
        second = store.create(key, b"second")
        kept = store.get(key)
        store.delete(key)
    except (UserError, StoreUnavailable) as error:
        return broken("store", store.uri, str(error).removeprefix(f"create {store.uri}/{key} at "))
    if not first or second or kept != b"first":
        remedy = (
            "this server ignores If-None-Match: *; commits need one that has it (S3, R2, MinIO, Ceph 17 or newer, …)"
        )
        return broken("store", f"{store.uri}: a second create replaced the first", remedy)
    return Finding("store", f"{store.uri} can be written, and refuses a second create")


# HTTP, asked once


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    body: bytes


def ask(url: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
    """What a server answers, whatever the status. OSError where none does."""
    request = urllib.request.Request(url, method=method, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return Answer(answer.status, answer.headers, answer.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read(MOST_BYTES))


def reason_of(error: Exception) -> str:
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner)


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def is_private(url: str) -> bool:
    """Whether an address means something in its own network alone: one such as 10.0.0.8, or a name without a dot."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ip_address(host).is_private
    return "." not in host


# MLflow


def mlflow_answers(uri: str, environment: Mapping[str, str]) -> Finding:
    """Whether the tracking server is there and takes these credentials."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return Finding("mlflow", f"{parts.scheme or uri}: not asked", "note", "only http(s) servers can be looked at")
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    headers = {}
    if token := environment.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    elif user := environment.get("MLFLOW_TRACKING_USERNAME"):
        headers["Authorization"] = basic(user, environment.get("MLFLOW_TRACKING_PASSWORD", ""))
    try:
        answer = ask(uri.rstrip("/") + "/api/2.0/mlflow/experiments/search?max_results=1", headers=headers)
    except (OSError, ValueError) as error:
        return broken(
            "mlflow", f"{shown}: {reason_of(error)}", "start it, correct MLFLOW_TRACKING_URI, or leave it out"
        )
    if answer.status in (401, 403):
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to an account of this server"
        return broken("mlflow", f"{shown} refuses the credentials (HTTP {answer.status})", remedy)
    if answer.status != 200:
        return broken("mlflow", f"{shown} answers HTTP {answer.status}", "correct MLFLOW_TRACKING_URI")
    return Finding("mlflow", f"{shown} answers")


# The image


def image_exists(name: str, environment: Mapping[str, str]) -> Finding:
    """Whether a registry has an image, asked as docker would: anonymously, or with SKYPILOT_DOCKER_* credentials."""
    host, repository, reference = image_parts(name)
    scheme = "http" if is_loopback(f"//{host}") else "https"
    url = f"{scheme}://{host}/v2/{repository}/manifests/{reference}"
    headers = {"Accept": MANIFEST_TYPES}
    user, password = (environment.get(f"SKYPILOT_DOCKER_{part}", "") for part in ("USERNAME", "PASSWORD"))
    if user:
        headers["Authorization"] = basic(user, password)
    try:
        answer = ask(url, "HEAD", headers)
        if answer.status == 401 and (token := registry_token(answer, repository, user, password)):
            answer = ask(url, "HEAD", headers | {"Authorization": f"Bearer {token}"})
    except (OSError, ValueError) as error:
        remedy = "the nodes will pull it all the same, if they can reach it"
        return Finding("image", f"{host} can't be asked from here ({reason_of(error)})", "note", remedy)
    if answer.status == 200:
        return Finding("image", f"{name} is there")
    if answer.status in (401, 403):
        remedy = "set SKYPILOT_DOCKER_USERNAME, SKYPILOT_DOCKER_PASSWORD and SKYPILOT_DOCKER_SERVER, or correct --image"
        return broken("image", f"{host} shows {repository} to nobody without credentials, or has none", remedy)
    if answer.status == 404:
        remedy = f"push it (skytrain image push {host}/{repository} --target skypilot), or correct --image"
        return broken("image", f"{host} has no {repository} {reference}", remedy)
    return Finding("image", f"{host} answers HTTP {answer.status}: not known whether it has the image", "note")


def image_parts(name: str) -> tuple[str, str, str]:
    """Registry, repository, and tag or digest of an image's name, as docker completes it."""
    rest, at, digest = name.partition("@")
    host, slash, path = rest.partition("/")
    if not (slash and re.search(r"[.:]|^localhost$", host)):
        host, path = HUB, rest if slash else f"library/{rest}"
    if host == "docker.io":
        host, path = HUB, path if "/" in path else f"library/{path}"
    repository, _, tag = path.partition(":")
    if not re.fullmatch(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", repository):
        raise UserError(f"--image {name}: no image's name; write REGISTRY/NAME@sha256:… or REGISTRY/NAME:TAG")
    return host, repository, digest if at else tag or "latest"


def registry_token(refusal: Answer, repository: str, user: str, password: str) -> str | None:
    """A token to pull with, from where the registry's refusal points to."""
    scheme, _, words = refusal.headers.get("WWW-Authenticate", "").partition(" ")
    challenge = dict(re.findall(r'(\w+)="([^"]*)"', words))
    if scheme.lower() != "bearer" or "realm" not in challenge:
        return None  # a registry with accounts of its own: it has seen ours
    query = {"service": challenge.get("service", ""), "scope": f"repository:{repository}:pull"}
    headers = {"Authorization": basic(user, password)} if user else {}
    answer = ask(f"{challenge['realm']}?{urllib.parse.urlencode(query)}", headers=headers)
    with suppress(ValueError):
        values = json.loads(answer.body)
        return values.get("token") or values.get("access_token")
    return None


# SkyPilot


def api_server_is_up() -> bool:
    """Whether the API server that SkyPilot would ask answers, here or elsewhere."""
    from sky.client import sdk

    try:
        sdk.api_info()
    except Exception:  # whatever keeps it from answering
        return False
    return True


def reach_api_server() -> None:
    """Have SkyPilot's API server up. One of this machine is started if need be, and that is said before.

    UserError without SkyPilot.
    """
    try:
        from sky import sky_logging
        from sky.client import sdk
        from sky.server import common
    except ImportError as error:
        raise UserError("SkyPilot is not installed: pip install '.[cloud]'") from error
    if common.is_api_server_local() and not api_server_is_up():
        print("starting SkyPilot's API server on this machine; `sky api stop` ends it", file=sys.stderr, flush=True)
        with sky_logging.silent():
            sdk.api_start()


def enabled_clouds() -> list[str]:
    """The clouds that SkyPilot may use, in its server's words, lower case. Starts a local server if there is none."""
    from sky.client import sdk

    return sorted(cloud.lower() for cloud in sdk.get(sdk.enabled_clouds()))


def clouds_allow(wanted: Iterable[str], enabled: Iterable[str]) -> Finding:
    """Whether at least one of the clouds that a task may run on is enabled."""
    wanted, enabled = sorted(set(wanted)), sorted(set(enabled))
    usable = sorted({"k8s": "kubernetes"}.get(cloud, cloud) for cloud in wanted)
    there = [cloud for cloud in usable if cloud in enabled]
    if not there:
        seen = f"SkyPilot may use {', '.join(enabled) or 'no cloud at all'}, and not {' or '.join(usable)}"
        return broken("clouds", seen, f"sky check {' '.join(usable)} says what each needs")
    away = [cloud for cloud in usable if cloud not in enabled]
    return Finding("clouds", ", ".join(there) + (f"; without {', '.join(away)} (sky check)" if away else ""))
