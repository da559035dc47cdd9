"""The container image: build it with its provenance in labels, push it, and check it.

This module runs Docker on the user's machine. `check` also runs it in the container, by `python -m
pipelines.cloud.image`, where it prints the facts that only the container has, as JSON.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pipelines.cloud.checks import Finding, broken
from trainer.errors import UserError

TARGETS = ("runtime", "cpu", "skypilot")
UID = 10001
# The rights in a strict cluster; with more rights the image works too.
HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp")
# The source is a label too, but a clone may have no remote.
LABELS = tuple(f"org.opencontainers.image.{name}" for name in ("version", "revision", "base.name"))

NEEDED = ("torch", "tiktoken", "datasets", "boto3", "mlflow", "safetensors", "psutil", "pipelines.cli", "trainer.loop")
UNWANTED = ("skypilot", "mlflow", "pytest", "moto", "transformers", "ruff", "mypy", "pip")

# Names of settings that hold a secret. GPG_KEY is the fingerprint of a public key, set by the python image.
SECRET_SETTING = re.compile(r"(?i)(?:^|_)(?:password|passwd|secret|token|key|credentials?)(?:_|$)")
HARMLESS_SETTINGS = ("GPG_KEY",)
SECRET_TEXT = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s@]+@|\bgh[pousr]_\w{30,}|\bhf_\w{30,}"
    r"|(?i:\b\w*(?:password|secret|token|api_key)=[^\s$'\"]+)"
)
SECRET_FILE = re.compile(
    r"(?:^|/)(?:\.netrc|\.pypirc|\.git-credentials|\.env|\.aws/credentials|\.docker/config\.json|etc/pip\.conf"
    r"|run/secrets/.+|id_(?:rsa|dsa|ecdsa|ed25519)|ssh_host_\w+_key|\.git/config)$"
)


@dataclass(frozen=True)
class Image:
    """An image that this machine built."""

    target: str
    tag: str
    version: str
    revision: str  # git commit
    dirty: bool  # built from files that are in no commit
    id: str
    pushed: str | None = None  # REGISTRY/NAME@sha256:…


# Building and pushing


def build(
    root: Path,
    home: Path,
    target: str,
    base_image: str | None = None,
    pip_conf: Path | None = None,
    ca_bundle: Path | None = None,
    network: str | None = None,
    build_args: tuple[str, ...] = (),
) -> Image:
    """Build a target from the clone at `root`, and record it in `home`.

    The build gets `pip_conf` and `ca_bundle` as secrets, which leave nothing in a layer. UserError without Docker,
    outside a clone, or when the build fails (its output shows the reason).
    """
    if not (root / "docker" / "Dockerfile").exists():
        raise UserError("image build: there is no docker/Dockerfile beside this code; run it from a clone of skytrain")
    program = docker_program()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    revision, dirty = revision_of(root)
    tag = f"skytrain:{tag_of(target, project['version'], revision, dirty)}"
    arguments = {
        "VERSION": project["version"],
        "REVISION": revision,
        "SOURCE": source_of(git(root, "remote", "get-url", "origin")),
        "DIRTY": str(dirty).lower(),
    }
    if base_image:
        arguments["BASE_IMAGE"] = base_image
    command = [program, "build", "--file", str(root / "docker" / "Dockerfile"), "--target", target, "--tag", tag]
    for argument in (*(f"{name}={value}" for name, value in arguments.items()), *build_args):
        command += ["--build-arg", argument]
    for name, path in (("pip_conf", pip_conf), ("ca_bundle", ca_bundle)):
        if path:
            if not path.is_file():
                raise UserError(f"image build: {path}: no such file")
            command += ["--secret", f"id={name},src={path.absolute()}"]
    if network:
        command += ["--network", network]
    environment = os.environ | {"DOCKER_BUILDKIT": "1"}  # the default since Docker 23
    done = subprocess.run([*command, str(root)], stdin=subprocess.DEVNULL, env=environment)
    if done.returncode:
        raise UserError(f"image build: docker ended with status {done.returncode}; see its output above")
    image = Image(target, tag, project["version"], revision, dirty, docker("image", "inspect", "-f", "{{.Id}}", tag))
    remember(home, image)
    return image


def push(home: Path, name: str, target: str) -> Image:
    """Push the last build of a target to REGISTRY/NAME, with the user's own docker login.

    A launch pins the registry's digest: a tag can move, a digest can't.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._:-]*(/[a-z0-9][a-z0-9._-]*)+", name):
        raise UserError(f"image push {name}: not of the form REGISTRY/NAME, in lower case, without a tag")
    image = remembered(home).get(target)
    if image is None:
        raise UserError(f"image push: no '{target}' was built here; first: skytrain image build --target {target}")
    remote = f"{name}:{tag_of(target, image.version, image.revision, image.dirty)}"
    docker("image", "tag", image.id, remote)
    done = subprocess.run([docker_program(), "push", remote], stdin=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(f"image push: docker could not push {remote}; see its output above (docker login?)")
    short = name.removeprefix("docker.io/")
    digests = json.loads(docker("image", "inspect", "-f", "{{json .RepoDigests}}", remote))
    (digest,) = {digest.partition("@")[2] for digest in digests if digest.partition("@")[0] in (name, short)}
    pushed = Image(**asdict(image) | {"pushed": f"{name}@{digest}"})
    remember(home, pushed)
    return pushed


def tag_of(target: str, version: str, revision: str, dirty: bool) -> str:
    """For people; launches go by digest."""
    return f"{target}-{version}-{revision[:12]}" + ("-dirty" if dirty else "")


def remember(home: Path, image: Image) -> None:
    """Record an image as the last one of its target in `home`/image.json."""
    images = {target: asdict(each) for target, each in (remembered(home) | {image.target: image}).items()}
    home.mkdir(parents=True, exist_ok=True)
    temporary = home / f"image.json.{os.getpid()}"
    temporary.write_text(json.dumps(images, indent=1))
    temporary.replace(home / "image.json")


def remembered(home: Path) -> dict[str, Image]:
    """The images that this machine built or pushed last, by target."""
    path = home / "image.json"
    try:
        return {t: Image(**each) for t, each in json.loads(path.read_text()).items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{path}: damaged or unreadable; remove it, and push the image again") from error


def revision_of(root: Path) -> tuple[str, bool]:
    """The commit, and whether the image's files differ from it. Unknown and dirty outside a repository."""
    commit = git(root, "rev-parse", "HEAD")
    changes = git(root, "status", "--porcelain", "--", "pyproject.toml", "trainer", "pipelines", "docker")
    return commit or "unknown", commit is None or changes != ""


def source_of(remote: str | None) -> str:
    """A git remote as a web address, without a user and password."""
    if not remote:
        return "unknown"
    if ssh := re.fullmatch(r"(?:[^@/]+@)?([^:/]+):(?!//)(.+)", remote):
        remote = f"https://{ssh[1]}/{ssh[2]}"
    parts = urlsplit(remote)
    if not parts.hostname:
        return "unknown"  # a path on this machine
    port = f":{parts.port}" if parts.port and parts.scheme in ("http", "https") else ""
    scheme = parts.scheme if parts.scheme == "http" else "https"
    return f"{scheme}://{parts.hostname}{port}{parts.path.removesuffix('.git')}"


# Checking an image


def promise(what: str, violation: str = "") -> Finding:
    """A promise of the image, and its violation; empty if the image keeps it."""
    return broken(what, violation, "") if violation else Finding(what, "")


def check(image: str) -> Iterator[Finding]:
    """A finding for each promise of an image. UserError if there is no such image."""
    inspected = json.loads(docker("image", "inspect", image))[0]
    yield from promises_of(inspected["Config"])
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    yield promise("no secret in the commands of its history", listed(SECRET_TEXT.findall(history)))
    yield promise("no file with secrets in any layer", listed(path for path in files_in(image) if is_secret(path)))
    command = ["run", "--rm", *HARDENED, "--network=none", "--entrypoint=python", image, "-m", "pipelines.cloud.image"]
    try:
        facts = ContainerFacts(**json.loads(docker(*command).splitlines()[-1]))
    except UserError as error:
        yield promise("runs locked down, without a network", str(error))
        return
    yield promise("runs locked down, without a network", "")
    yield promise(f"runs as UID {UID} by itself", "" if facts.uid == UID else f"UID {facts.uid}")
    yield promise("its user cannot change its files", listed(facts.writable))
    yield promise("holds the imports of every stage", listed(facts.missing))
    yield promise("holds nothing else", listed(facts.unwanted))
    yield promise("has the GPT-2 vocabulary without a network", facts.tokenizer)
    yield promise("compiles and runs a training step", facts.compiled)


def promises_of(config: dict[str, Any]) -> Iterator[Finding]:
    """The promises that the image's configuration shows."""
    labels, settings = config.get("Labels") or {}, config.get("Env") or []
    missing = [name for name in LABELS if labels.get(name, "unknown") == "unknown"]
    yield promise("labels name version, commit and base", listed(missing))
    user = str(config.get("User")).partition(":")[0]
    yield promise("its user is a number and not root", "" if user.isdigit() and int(user) else f"USER {user}")
    first = (config.get("Entrypoint") or [""])[0]
    yield promise("tini is its first process", "" if first.endswith("/tini") else f"ENTRYPOINT {first}")
    names = [s.partition("=")[0] for s in settings if SECRET_SETTING.search(s.partition("=")[0])]
    texts = [text for s in settings for text in SECRET_TEXT.findall(s)]
    yield promise("no secret in its environment", listed([*(n for n in names if n not in HARMLESS_SETTINGS), *texts]))


def is_secret(path: str) -> bool:
    return bool(SECRET_FILE.search(path)) and "/site-packages/" not in path


def listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def files_in(image: str) -> Iterator[str]:
    """The path of every non-empty file of every layer, with those that a later layer hides."""
    with subprocess.Popen([docker_program(), "save", image], stdout=subprocess.PIPE) as save:
        assert save.stdout
        with tarfile.open(fileobj=save.stdout, mode="r|") as archive:
            for member in archive:
                # layer.tar of `docker save` before Docker 25, a blob among others since
                layer = archive.extractfile(member) if member.isfile() else None
                if layer:
                    with suppress(tarfile.ReadError), tarfile.open(fileobj=layer, mode="r|*") as files:
                        yield from (file.name for file in files if file.isfile() and file.size)
        save.stdout.read()


# Docker and git


def docker_program() -> str:
    """The docker client. UserError without one, or without an engine that answers it."""
    program = shutil.which("docker")
    if not program:
        raise UserError("docker: not installed; images need Docker Engine 20.10 or newer, or Docker Desktop")
    done = subprocess.run(
        [program, "version", "-f", "{{.Server.Version}}"], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise UserError(f"docker: no engine answers ({last_line(done.stderr)}); start it, or set DOCKER_HOST")
    return program


def docker(*arguments: str) -> str:
    """The output of a docker command. UserError with the last line of its error output."""
    done = subprocess.run([docker_program(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"docker {arguments[0]}: {last_line(done.stderr)}")
    return done.stdout.strip()


def git(root: Path, *arguments: str) -> str | None:
    """The output of a git command in `root`; None if git fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


# Inside the container


@dataclass(frozen=True)
class ContainerFacts:
    """The facts that only the container has, for `check`."""

    uid: int
    writable: list[str]  # paths that should not be
    missing: list[str]  # modules
    unwanted: list[str]  # packages
    tokenizer: str  # the error; empty without one
    compiled: str  # the same

    @classmethod
    def here(cls) -> Self:
        installed = {d.metadata["Name"].lower() for d in distributions()}
        return cls(
            uid=os.getuid(),
            writable=[p for p in ("/", "/etc", "/opt/venv", str(Path(__file__).parent)) if os.access(p, os.W_OK)],
            missing=[name for name in NEEDED if not imports(name)],
            unwanted=[name for name in UNWANTED if name in installed],
            tokenizer=error_of(load_vocabulary),
            compiled=error_of(compiled_step),
        )


def imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def error_of(action: Callable[[], None]) -> str:
    """The error of an action in one line; empty without one."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return ""


def load_vocabulary() -> None:
    import tiktoken

    assert tiktoken.get_encoding("gpt2").encode("skytrain") == [15688, 27432]


def compiled_step() -> None:
    """Forward, backward and update of a small model through torch.compile: it needs gcc, g++ and a writable cache."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = torch.compile(model)(torch.ones(4, 16, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)


if __name__ == "__main__":
    json.dump(asdict(ContainerFacts.here()), sys.stdout)
