"""Checks that find a problem before it costs money. Each examines the real store or server, and names a remedy.

`doctor` makes the checks of a machine, `launch` those of a job. A check returns a finding; it never raises because it
found a problem. It does not retry, so it takes seconds.
"""

import base64
import json
import re
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

from pipelines.tracking.mlflow.secrets import without_credentials
from trainer.errors import StoreUnavailable, UserError
from trainer.store import Store

ANSWER_SECONDS = 10.0
MOST_BYTES = 1 << 20
# The types of a registry's answer for a tag or digest: one image, or one for each platform.
MANIFEST_TYPES = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "docker.distribution.manifest.v2", "docker.distribution.manifest.list.v2",
        "oci.image.manifest.v1", "oci.image.index.v1",
    )
)  # fmt: skip
HUB = "registry-1.docker.io"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    seen: str
    state: str = "ok"  # ok; note: no problem, but the user should know it; broken: it can't work
    remedy: str = ""


def broken(what: str, seen: str, remedy: str) -> Finding:
    return Finding(what, seen, "broken", remedy)


# The store


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


# HTTP without retries


@dataclass(frozen=True)
class HttpAnswer:
    """An answer of any status, with at most MOST_BYTES of its body."""

    status: int
    headers: Message
    body: bytes


def ask(url: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> HttpAnswer:
    """A server's answer of any status. OSError without an answer."""
    request = urllib.request.Request(url, method=method, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return HttpAnswer(answer.status, answer.headers, answer.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        return HttpAnswer(error.code, error.headers, error.read(MOST_BYTES))


def reason_of(error: Exception) -> str:
    """The reason of a failed request, without the URL."""
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner)


def basic(user: str, password: str) -> str:
    """The value of an Authorization header for a user and password."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def is_loopback(url: str) -> bool:
    """Whether an address means the machine that uses it."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def is_private(url: str) -> bool:
    """Whether an address has a meaning only in its own network: one such as 10.0.0.8, or a name without a dot."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ip_address(host).is_private
    return "." not in host


# MLflow


def mlflow_answers(uri: str, environment: Mapping[str, str]) -> Finding:
    """Whether the tracking server answers and accepts these credentials."""
    uri, credentials = without_credentials(uri)
    environment = credentials | {name: value for name, value in environment.items() if value}
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return Finding("mlflow", f"{parts.scheme or uri}: not checked", "note", "only http(s) servers can be checked")
    address = f"{parts.scheme}://{parts.netloc}"
    headers = {}
    if token := environment.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    elif user := environment.get("MLFLOW_TRACKING_USERNAME"):
        headers["Authorization"] = basic(user, environment.get("MLFLOW_TRACKING_PASSWORD", ""))
    try:
        answer = ask(uri.rstrip("/") + "/api/2.0/mlflow/experiments/search?max_results=1", headers=headers)
    except (OSError, ValueError) as error:
        return broken("mlflow", f"{address}: {reason_of(error)}", "start it, correct MLFLOW_TRACKING_URI, or unset it")
    if answer.status in (401, 403):
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to an account of this server"
        return broken("mlflow", f"{address} refuses the credentials (HTTP {answer.status})", remedy)
    if answer.status != 200:
        return broken("mlflow", f"{address} answers HTTP {answer.status}", "correct MLFLOW_TRACKING_URI")
    return Finding("mlflow", f"{address} answers")


# The image


def image_exists(name: str, environment: Mapping[str, str]) -> Finding:
    """Whether a registry has an image. Asks as docker does: anonymously, or with SKYPILOT_DOCKER_* credentials."""
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
        remedy = "the nodes will try to pull it anyway"
        return Finding("image", f"{host} can't be reached from here ({reason_of(error)})", "note", remedy)
    if answer.status == 200:
        return Finding("image", f"{name} exists")
    if answer.status in (401, 403):
        remedy = "set SKYPILOT_DOCKER_USERNAME, SKYPILOT_DOCKER_PASSWORD and SKYPILOT_DOCKER_SERVER, or correct --image"
        return broken("image", f"{host} wants credentials for {repository}, or does not have it", remedy)
    if answer.status == 404:
        remedy = f"push it (skytrain image push {host}/{repository} --target skypilot), or correct --image"
        return broken("image", f"{host} has no {repository} {reference}", remedy)
    return Finding("image", f"{host} answers HTTP {answer.status}: it is unknown whether it has the image", "note")


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
        raise UserError(f"--image {name}: not the name of an image; write REGISTRY/NAME@sha256:… or REGISTRY/NAME:TAG")
    return host, repository, digest if at else tag or "latest"


def registry_token(refusal: HttpAnswer, repository: str, user: str, password: str) -> str | None:
    """A token to pull with, from the server that the registry's refusal names."""
    scheme, _, parameters = refusal.headers.get("WWW-Authenticate", "").partition(" ")
    challenge = dict(re.findall(r'(\w+)="([^"]*)"', parameters))
    if scheme.lower() != "bearer" or "realm" not in challenge:
        return None  # a registry with its own accounts: it already had ours
    query = {"service": challenge.get("service", ""), "scope": f"repository:{repository}:pull"}
    headers = {"Authorization": basic(user, password)} if user else {}
    answer = ask(f"{challenge['realm']}?{urllib.parse.urlencode(query)}", headers=headers)
    with suppress(ValueError):
        values = json.loads(answer.body)
        return values.get("token") or values.get("access_token")
    return None


# SkyPilot


def clouds_allow(wanted: Iterable[str], enabled: Iterable[str]) -> Finding:
    """Whether at least one of a task's clouds is enabled."""
    wanted, enabled = sorted(set(wanted)), sorted(set(enabled))
    usable = sorted({"k8s": "kubernetes"}.get(cloud, cloud) for cloud in wanted)
    allowed = [cloud for cloud in usable if cloud in enabled]
    if not allowed:
        seen = f"SkyPilot may use {', '.join(enabled) or 'no cloud'}, but not {' or '.join(usable)}"
        return broken("clouds", seen, f"sky check {' '.join(usable)} lists what each needs")
    missing = [cloud for cloud in usable if cloud not in enabled]
    return Finding("clouds", ", ".join(allowed) + (f"; without {', '.join(missing)} (sky check)" if missing else ""))
