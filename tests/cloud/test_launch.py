"""What is looked at before machines are rented: real buckets, registries and servers, and what a job is told.

Submitting itself is tried on a cloud of our own in tests/test_cluster.py.
"""

import base64
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipeline_runs import TINY, write_texts
from servers import Daemon, S3Account, free_ports, http_answers

from pipelines.artifacts.store import S3Store, open_store
from pipelines.cloud.checks import Finding, clouds_allow, image_exists, image_parts, mlflow_answers, store_commits
from pipelines.cloud.launch import report_all
from pipelines.cloud.preflight import credentials, preflight, skypilot_installed
from pipelines.cloud.request import EarlierLaunch, LaunchRecord, LaunchRequest, last_launch, write_launch
from pipelines.cloud.shell import SECRETS, VARIABLES, secrets_from_shell, variables_from_shell
from pipelines.cloud.tasks import managed_job
from pipelines.recipe import load_recipe
from pipelines.show.cloud_plan import print_launch_report
from pipelines.show.findings import finding_text
from pipelines.stage import STAGES, planned, run_name
from pipelines.tracking.runs import record
from trainer.errors import UserError
from trainer.store import LocalStore, Store

ROOT = Path(__file__).resolve().parents[2]
SKYTRAIN = [sys.executable, "-c", "from pipelines.cli import main; main()"]
KEYS = {"AWS_ACCESS_KEY_ID": "an id", "AWS_SECRET_ACCESS_KEY": "a key"}
# `htpasswd -Bbn somebody "a password"`
ACCOUNTS = "somebody:$2b$04$bSvP6zfbQvTP5dF.v6o/vOchFEpOqt2ccqYBx8U0OayXihKiA8cVa\n"


@pytest.fixture(autouse=True)
def _nothing_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *SECRETS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and its text, and in it."""
    write_texts(tmp_path / "texts")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def closed_port() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"


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


def test_a_bucket_that_refuses_a_second_create_will_do_and_keeps_nothing(
    moto_server: S3Account, fresh_s3_store: Callable[[S3Account], S3Store]
) -> None:
    store = fresh_s3_store(moto_server)
    assert store_commits(store).state == "ok"
    assert store.entries("") == []


def test_a_store_that_lets_the_second_create_win_is_found_out(tmp_path: Path) -> None:
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
    assert time.monotonic() - began < 10
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


def test_a_private_registry_wants_credentials_that_are_good(tmp_path: Path) -> None:
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


def test_a_registry_that_gives_tokens_is_asked_for_one_imitated() -> None:
    """Docker Hub and GHCR do so; neither can be reached from everywhere that tests run."""

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


def test_what_is_no_image_name_is_the_users_mistake() -> None:
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
    """The real one that answers is in tests/test_mlflow.py."""
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


# What a job is given


def test_a_job_takes_over_what_reaches_the_store_and_hides_what_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items() | {("AWS_REGION", "eu-west-1"), ("WANDB", "another thing")}:
        monkeypatch.setenv(name, value)
    assert variables_from_shell(["A=b=c"]) == {"AWS_REGION": "eu-west-1", "A": "b=c"}
    assert secrets_from_shell() == KEYS
    assert secrets_from_shell(["WANDB"]) == KEYS | {"WANDB": "another thing"}


@pytest.mark.parametrize("text", ["AWS_SECRET_ACCESS_KEY=x", "MY_API_TOKEN=x", "DB_PASSWORD=x"])
def test_a_secret_is_not_taken_in_the_open(text: str) -> None:
    with pytest.raises(UserError, match="export it and add --secret") as refused:
        variables_from_shell([text])
    assert "=x" not in str(refused.value)


def test_a_password_in_an_address_is_not_taken_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://somebody:hunter2@mlflow.example.org")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI: the value holds a secret") as refused:
        variables_from_shell()
    assert "hunter2" not in str(refused.value)


def test_a_secret_that_is_not_set_is_named() -> None:
    with pytest.raises(UserError, match="--secret HF_TOKEN: not set in this shell"):
        secrets_from_shell(["HF_TOKEN"])


# Looking over a job


def looked(
    store: Store,
    secrets: dict[str, str],
    source: str = "hf://datasets/a/b",
    changes: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Finding]:
    """The findings that are not simply fine, by what they are about."""
    asked = LaunchRequest("tiny-12345678", store.uri, **options)
    recipe = load_recipe("smoke", [f"tokens.source={source}", f"tokens.revision={'a' * 40}", *changes])
    findings = preflight(managed_job(asked, STAGES), asked, recipe, store, secrets)
    return {finding.what: finding for finding in findings if finding.state != "ok"}


def test_a_folder_is_no_store_for_machines_elsewhere(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert looked(store, KEYS, infra="aws")["store"].remedy == "--store s3://BUCKET/PREFIX"
    assert "store" not in looked(store, KEYS, infra="slurm/here")


def test_text_that_lies_here_is_tokenized_here(tmp_path: Path) -> None:
    found = looked(LocalStore(tmp_path), KEYS, "mine/*.txt", infra="aws")["text for tokenize"]
    assert found.state == "broken" and "skytrain run RECIPE --stage tokenize" in found.remedy


def test_gpus_that_cannot_train_the_recipe_are_not_waited_for(tmp_path: Path) -> None:
    def found(gpus: str, *changes: str, nodes: int = 1) -> Finding | None:
        where: dict[str, Any] = {"infra": "slurm/here", "gpus": gpus, "nodes": nodes}
        return looked(LocalStore(tmp_path), KEYS, changes=changes, **where).get("GPUs")

    assert found("H100:1") is None
    for own_count in ("runtime.processes=1", "runtime.device=cpu"):
        assert found("H100:8", own_count) is None
    shared = found("H100:8", nodes=2)
    assert shared and shared.state == "broken" and "2 x H100:8: train.batch_tokens: " in shared.seen
    assert found("H100:1", "train.precision=fp8") is None
    old = found("V100:1", "train.precision=fp8")
    assert old and "1 x V100:1: no hardware for train.precision fp8" in old.seen


def test_an_address_of_this_machine_means_another_one_there(tmp_path: Path) -> None:
    variables = {"AWS_ENDPOINT_URL": "http://localhost:9000", "MLFLOW_TRACKING_URI": "https://mlflow.example.invalid"}
    store = LocalStore(tmp_path)
    assert "AWS_ENDPOINT_URL" in looked(store, KEYS, infra="aws", variables=variables)["network"].seen
    assert "network" not in looked(store, KEYS, infra="slurm/here", variables=variables)
    for local in ("sqlite:///mlflow.db", "file:///somewhere"):
        found = looked(store, KEYS, infra="slurm/here", variables={"MLFLOW_TRACKING_URI": local})
        assert found["network"].state == "broken"
    for private in ("http://10.0.0.8:5000", "http://mlflow:5000"):
        finding = looked(store, KEYS, infra="aws", variables={"MLFLOW_TRACKING_URI": private})["network"]
        assert finding.state == "note" and private in finding.seen and "in its network" in finding.remedy
    assert "network" not in looked(store, KEYS, infra="aws", variables={"AWS_ENDPOINT_URL": "https://8.8.8.8"})


@pytest.mark.parametrize(
    ("secrets", "clouds", "state"),
    [
        (KEYS, ["lambda"], "ok"),
        ({}, ["aws"], "note"),  # the nodes' role
        ({}, ["aws", "lambda"], "broken"),
        ({"AWS_ACCESS_KEY_ID": "an id"}, ["aws"], "broken"),
        (KEYS | {"AWS_SESSION_TOKEN": "for an hour"}, ["aws"], "note"),
    ],
)
def test_a_job_that_could_not_open_the_bucket_is_not_launched(
    secrets: dict[str, str], clouds: list[str], state: str
) -> None:
    assert credentials(S3Store("bucket", client=object()), clouds, secrets).state == state


def test_a_path_that_skypilot_does_not_quote_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a place/bin/python")
    finding = skypilot_installed()
    assert finding.state == "note" and "/a place/bin/python" in finding.seen


def test_everything_wrong_is_said_before_giving_up(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("a", "x", "broken", "mend it"), Finding("b", "fine"), Finding("c", "y", "broken", "do that")]
    with pytest.raises(UserError, match="2 of the findings above"):
        report_all(findings, print_launch_report)
    said = capsys.readouterr().out
    assert "WRONG  a: x\n       -> mend it" in said and "   ok  b: fine" in said and "do that" in said


# run:NAME


def test_a_recorded_run_is_told_by_its_name(texts: Path) -> None:
    store = LocalStore(texts / "store")
    recipe, plans = planned("tiny.yaml", ["train.max_steps=20"], store)
    record(store, run_name(plans), recipe, plans, "export")
    assert planned(f"run:{run_name(plans)}", [], store) == (recipe, plans)
    with pytest.raises(UserError, match="--set would make it another one"):
        planned(f"run:{run_name(plans)}", ["train.max_steps=30"], store)
    with pytest.raises(UserError, match="no such run"):
        planned("run:another", [], store)


def test_a_recorded_run_refuses_text_that_is_another_here(texts: Path) -> None:
    store = LocalStore(texts / "store")
    recipe, plans = planned("tiny.yaml", [], store)
    record(store, run_name(plans), recipe, plans, "train")
    (texts / "texts" / "0.txt").write_text("something else")
    with pytest.raises(UserError, match=f"{plans['tokenize'].prefix} is on record: the text .* is another one here"):
        planned(f"run:{run_name(plans)}", [], store)


@pytest.mark.slow
def test_once_tokenized_a_recorded_run_needs_its_text_no_more(texts: Path) -> None:
    skytrain(texts, "run", "tiny.yaml", "--stage", "tokenize", "--store", "store")
    store = LocalStore(texts / "store")
    recipe, plans = planned("tiny.yaml", [], store)
    record(store, run_name(plans), recipe, plans, "train")
    for path in (texts / "texts").iterdir():
        path.unlink()
    assert planned(f"run:{run_name(plans)}", [], store) == (recipe, plans)


# The record, and the command


def test_a_launch_on_record_can_be_made_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert last_launch(store, "tiny-12345678") is None
    request = LaunchRequest("tiny-12345678", store.uri, nodes=2, spot=True, budget=25.0, variables={"A": "b"})
    earlier = [EarlierLaunch(1e8, ["tokenize"], [6])]
    launched = LaunchRecord(request, ["train", "export"], [7], ["AWS_ACCESS_KEY_ID"], 1e9, earlier)
    write_launch(store, launched)
    assert last_launch(store, "tiny-12345678") == launched
    written = json.loads(store.get("launches/tiny-12345678.json") or b"")
    assert list(written) == ["wish", "stages", "jobs", "secrets", "time", "earlier"]
    assert written["earlier"] == [{"time": 1e8, "stages": ["tokenize"], "jobs": [6]}]


def given(folder: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SKYTRAIN_", "AWS_"))}
    ours = {"PYTHONPATH": str(ROOT), "SKYTRAIN_TRACKING": "off", "SKYTRAIN_NOTICE": "off", "HOME": str(folder)}
    return subprocess.run(
        [*SKYTRAIN, *arguments], cwd=folder, env=kept | ours | more, capture_output=True, text=True, timeout=300
    )


def skytrain(folder: Path, *arguments: str, expect: int = 0, **more: str) -> str:
    done = given(folder, *arguments, **more)
    assert done.returncode == expect, done.stderr
    return done.stdout + done.stderr


def test_a_dry_run_prints_the_job_and_what_a_launch_would_refuse(texts: Path) -> None:
    pytest.importorskip("sky", reason="needs skypilot (pip install '.[cloud]')")
    arguments = [
        "launch",
        "tiny.yaml",
        "--dry-run",
        "--image",
        "none",
        "--nodes",
        "2",
        "--set",
        "tokens.parts=3",
        "--set",
    ]
    arguments.append(f"tokens.source={texts}/texts/*.txt")
    alone = KEYS | {"SKYPILOT_API_SERVER_ENDPOINT": closed_port()}
    unreachable = {"AWS_ENDPOINT_URL": closed_port(), "SKYTRAIN_STORE_SECONDS": "1"}
    said = skytrain(texts, *arguments, "--store", "s3://bucket/prefix", **alone, **unreachable, expect=2)
    assert "error: launch: get s3://bucket/prefix/" in said  # it has to know what is missing

    done = given(texts, *arguments, "--infra", "slurm/here", **alone)
    header, *tasks = yaml.safe_load_all(done.stdout)
    assert header["name"].startswith("tiny-") and [task["name"] for task in tasks] == list(STAGES)
    assert [task["num_nodes"] for task in tasks] == [3, 2, 1, 1]
    assert "a key" not in done.stdout + done.stderr
    assert tasks[1]["envs"]["SKYTRAIN_PRICES"] == "[]"
    assert done.returncode == 0 and "SkyPilot's server: not up, so it is unknown" in done.stderr

    config = {"slurm": {"pricing": {"accelerators": {"H100": 2.0}}}}
    (texts / ".sky").mkdir(exist_ok=True)
    (texts / ".sky" / "config.yaml").write_text(yaml.safe_dump(config))
    done = given(texts, *arguments, "--infra", "slurm/here", "--budget", "5", **alone)
    submitted = {task["name"]: task for task in list(yaml.safe_load_all(done.stdout))[1:]}
    (price,) = json.loads(submitted["train"]["envs"]["SKYTRAIN_PRICES"])
    assert done.returncode == 0 and price["usd_per_hour"] == 16.0

    done = given(texts, *arguments, "--infra", "mars,slurm/here", **alone)
    assert done.returncode == 2 and list(yaml.safe_load_all(done.stdout))
    assert "WRONG  infra: mars: SkyPilot knows no such cloud\n       -> it is one of aws, " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (
            ["--store", "s3://no-such-bucket-anywhere/x"],
            "there is no such bucket; create it, or correct the store's URI",
        ),
        (["--secret", "HF_TOKEN"], "--secret HF_TOKEN: not set in this shell; export it first"),
        (["--infra", "lambda"], "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of a user who may use the bucket"),
        (["--image", "{registry}/team/skytrain:v9"], "push it (skytrain image push {registry}/team/skytrain --target"),
    ],
    ids=["bucket", "secret", "credentials", "image"],
)
def test_what_a_launch_lacks_is_said_within_seconds_with_its_remedy(
    texts: Path, moto_server: S3Account, registry: str, fresh_s3_store: Any, options: list[str], remedy: str
) -> None:
    """The fourth, no capacity, is SkyPilot's to find out: tests/test_sky.py, and tests/test_cluster.py for real."""
    store = fresh_s3_store(moto_server)
    account = dict(moto_server.environment)
    if "lambda" in options:  # the keys are there for us, and not for a job
        (texts / "credentials").write_text(
            "[default]\n"
            + "".join(
                f"{name} = {account.pop(name.upper())}\n" for name in ("aws_access_key_id", "aws_secret_access_key")
            )
        )
        account["AWS_SHARED_CREDENTIALS_FILE"] = str(texts / "credentials")
    began = time.monotonic()
    arguments = ["launch", "tiny.yaml", "--store", store.uri, "--infra", "slurm/here", "--image", "none", "--yes"]
    said = skytrain(texts, *arguments, *(word.format(registry=registry) for word in options), **account, expect=2)
    assert time.monotonic() - began < 30  # on a busy machine; nobody was asked twice
    assert remedy.format(registry=registry) in said
    assert said.splitlines()[-1].startswith("error: ") and "Traceback" not in said


def test_a_launch_without_an_image_says_how_to_get_one(texts: Path) -> None:
    assert "skytrain image build --target skypilot" in skytrain(texts, "launch", "tiny.yaml", expect=2)


# The environment without an image


def test_a_work_trees_own_code_runs_in_an_environment_that_is_there(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SKYTRAIN_VENV": sys.prefix}
    subprocess.run(["bash", ROOT / "sky" / "environment.sh"], env=environment, check=True)
    command = tmp_path / ".local" / "bin" / "skytrain"
    assert str(ROOT) in command.read_text()
    done = subprocess.run(
        [command, "recipes", "--json"], env=environment, cwd=tmp_path, capture_output=True, check=True
    )
    assert "gpt2-124m" in done.stdout.decode()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A node's shell, where `uv` and `getent` are scripts that write down what they were told."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (tmp_path / "home").mkdir()
    scripts = {
        "getent": f"echo 'somebody:x:1:1::{tmp_path}/home:/bin/sh'",
        "uv": f'echo "$@" >> {tmp_path}/uv.log; [ "$1" = pip ] || mkdir -p "${{@: -1}}"',
    }
    for name, body in scripts.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    yield {"HOME": str(tmp_path / "cluster"), "PATH": f"{programs}:{os.environ['PATH']}"}


def test_eight_recoveries_install_once_although_slurm_takes_their_home_away(
    node: dict[str, str], tmp_path: Path
) -> None:
    for i in range(8):
        subprocess.run(["bash", ROOT / "sky" / "environment.sh"], env=node | {"HOME": f"{tmp_path}/{i}"}, check=True)
    told = (tmp_path / "uv.log").read_text().splitlines()
    assert [line.split()[0] for line in told] == ["venv", "pip"]
    (venv,) = (tmp_path / "home" / ".cache" / "skytrain").glob("venv-*/")
    assert f'exec "{venv}/bin/python"' in (tmp_path / "7" / ".local" / "bin" / "skytrain").read_text()
