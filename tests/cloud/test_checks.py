"""Checks of real buckets, registries and servers."""

import base64
import hashlib
import http.server
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cloud_support import closed_port
from servers import Daemon, S3Account, free_ports, http_answers

from pipelines.artifacts.store import S3Store, open_store
from pipelines.cloud.checks import Finding, clouds_allow, image_exists, image_parts, mlflow_answers, store_commits
from pipelines.show.findings import finding_text
from trainer.errors import UserError
from trainer.store import LocalStore

# `htpasswd -Bbn somebody "a password"`
ACCOUNTS = "somebody:$2b$04$bSvP6zfbQvTP5dF.v6o/vOchFEpOqt2ccqYBx8U0OayXihKiA8cVa\n"


@contextmanager
def listening(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


# The store


def test_a_bucket_that_refuses_a_second_create_is_accepted_and_keeps_nothing(
    moto_server: S3Account, fresh_s3_store: Callable[[S3Account], S3Store]
) -> None:
    store = fresh_s3_store(moto_server)
    assert store_commits(store).state == "ok"
    assert store.entries("") == []


def test_a_store_that_lets_the_second_create_win_is_rejected(tmp_path: Path) -> None:
    class Forgetful(LocalStore):
        """Stands for a server that ignores If-None-Match."""

        def create(self, key: str, body: bytes) -> bool:
            self.put(key, body)
            return True

    finding = store_commits(Forgetful(tmp_path))
    assert finding.state == "broken" and "If-None-Match" in finding.remedy


@pytest.mark.parametrize("fault", ["no such bucket", "nobody there"])
def test_a_store_that_cannot_be_used_is_named_within_seconds(
    fault: str, moto_server: S3Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYTRAIN_STORE_SECONDS", "2")
    for name, value in moto_server.environment.items():
        monkeypatch.setenv(name, value)
    if fault == "nobody there":
        monkeypatch.setenv("AWS_ENDPOINT_URL", closed_port())
    began = time.monotonic()
    finding = store_commits(open_store("s3://no-such-bucket-anywhere/x"))
    assert time.monotonic() - began < 60  # with the default patience it takes 120
    assert finding.state == "broken"
    assert ("create it, or correct the store's URI" in finding.remedy) is (fault == "no such bucket")


# The image


def test_an_image_is_looked_up_in_a_real_registry(registry: str) -> None:
    digest = push_empty_image(registry, "team/skytrain", "v1")
    assert image_exists(f"{registry}/team/skytrain:v1", {}).state == "ok"
    assert image_exists(f"{registry}/team/skytrain@{digest}", {}).state == "ok"
    for absent in (":v2", "@sha256:" + "0" * 64):
        finding = image_exists(f"{registry}/team/skytrain{absent}", {})
        assert finding.state == "broken" and "skytrain image push" in finding.remedy


def test_a_private_registry_needs_valid_credentials(tmp_path: Path) -> None:
    if not Path("/usr/bin/docker-registry").exists():
        pytest.skip("needs docker-registry (apt)")
    (port,) = free_ports(1)
    (tmp_path / "accounts").write_text(ACCOUNTS)
    (tmp_path / "registry.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/registry}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\nauth: {{htpasswd: {{realm: here, path: {tmp_path}/accounts}}}}\n"
    )
    daemon = Daemon(["docker-registry", "serve", tmp_path / "registry.yml"], tmp_path / "registry.log")
    host = f"127.0.0.1:{port}"
    try:
        daemon.wait_until(lambda: http_answers(f"http://{host}/v2/"))
        push_empty_image(host, "team/skytrain", "v1", "somebody:a password")
        known = {"SKYPILOT_DOCKER_USERNAME": "somebody", "SKYPILOT_DOCKER_PASSWORD": "a password"}
        assert image_exists(f"{host}/team/skytrain:v1", known).state == "ok"
        for unknown in ({}, known | {"SKYPILOT_DOCKER_PASSWORD": "another"}):
            finding = image_exists(f"{host}/team/skytrain:v1", unknown)
            assert finding.state == "broken" and "SKYPILOT_DOCKER_USERNAME" in finding.remedy
    finally:
        daemon.stop()


def test_a_token_is_requested_from_a_registry_that_needs_one_imitated() -> None:
    """Docker Hub and GHCR do this; some machines that run the tests cannot reach them."""

    class Hub(http.server.BaseHTTPRequestHandler):
        server: http.server.HTTPServer

        def do_HEAD(self) -> None:
            if self.headers.get("Authorization") == "Bearer granted":
                self.answer(200)
            else:
                realm = f"http://127.0.0.1:{self.server.server_port}/token"
                self.answer(401, b"", **{"WWW-Authenticate": f'Bearer realm="{realm}",service="hub"'})

        def do_GET(self) -> None:
            assert self.path == "/token?service=hub&scope=repository%3Ateam%2Fskytrain%3Apull"
            self.answer(200, b'{"token": "granted"}')

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with listening(Hub) as host:
        assert image_exists(f"{host}/team/skytrain:v1", {}).state == "ok"


def test_a_registry_out_of_reach_stops_no_launch() -> None:
    finding = image_exists(f"{closed_port().removeprefix('http://')}/team/skytrain:v1", {})
    assert finding.state == "note" and "can't be reached from here" in finding.seen


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("skytrain", ("registry-1.docker.io", "library/skytrain", "latest")),
        ("team/skytrain:v1", ("registry-1.docker.io", "team/skytrain", "v1")),
        ("docker.io/team/skytrain", ("registry-1.docker.io", "team/skytrain", "latest")),
        ("ghcr.io/team/skytrain@sha256:12", ("ghcr.io", "team/skytrain", "sha256:12")),
        ("localhost:5000/skytrain:v1", ("localhost:5000", "skytrain", "v1")),
    ],
)
def test_an_images_name_is_completed_as_docker_does(name: str, parts: tuple[str, ...]) -> None:
    assert image_parts(name) == parts


def test_an_invalid_image_name_is_a_user_error() -> None:
    with pytest.raises(UserError, match="write REGISTRY/NAME@sha256"):
        image_parts("ghcr.io/Team/Skytrain")


def push_empty_image(host: str, repository: str, tag: str, account: str = "") -> str:
    """Put a manifest with an empty configuration into a registry; returns its digest."""
    headers = {"Authorization": "Basic " + base64.b64encode(account.encode()).decode()} if account else {}

    def send(method: str, url: str, body: bytes | None, kind: str = "application/octet-stream") -> Any:
        request = urllib.request.Request(url, body, {"Content-Type": kind} | headers, method=method)
        return urllib.request.urlopen(request, timeout=10)

    def blob(body: bytes) -> dict[str, Any]:
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        place = send("POST", f"http://{host}/v2/{repository}/blobs/uploads/", b"").headers["Location"]
        send("PUT", f"{place}&digest={digest}", body)
        return {"digest": digest, "size": len(body)}

    kind = "application/vnd.docker.distribution.manifest.v2+json"
    config = blob(b"{}") | {"mediaType": "application/vnd.docker.container.image.v1+json"}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": []}).encode()
    return send("PUT", f"http://{host}/v2/{repository}/manifests/{tag}", manifest, kind).headers[
        "Docker-Content-Digest"
    ]


# MLflow and SkyPilot


def test_a_tracking_server_that_is_gone_or_refuses_us_is_named_imitated() -> None:
    """tests/tracking/test_shipper.py has the test with a real server that answers."""
    assert "start it" in mlflow_answers(closed_port(), {}).remedy

    class Guarded(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = "Basic " + base64.b64encode(b"somebody:a password").decode()
            self.send_response(200 if self.headers.get("Authorization") == good else 401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with listening(Guarded) as host:
        uri, password = f"http://{host}", {"MLFLOW_TRACKING_USERNAME": "somebody"}
        assert mlflow_answers(uri, password | {"MLFLOW_TRACKING_PASSWORD": "a password"}).state == "ok"
        refused = mlflow_answers(uri, password | {"MLFLOW_TRACKING_PASSWORD": "another"})
        assert refused.state == "broken" and "MLFLOW_TRACKING_PASSWORD" in refused.remedy
        assert "another" not in finding_text(refused)


def test_one_enabled_cloud_is_enough_and_the_others_are_named() -> None:
    assert clouds_allow(["aws", "gcp"], ["gcp", "slurm"]) == Finding("clouds", "gcp; without aws (sky check)")
    none = clouds_allow(["lambda"], ["gcp"])
    assert none.state == "broken" and none.remedy.startswith("sky check lambda")
