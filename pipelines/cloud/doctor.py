"""What a machine needs to run, launch and look after runs: looked at one by one, each fault with its remedy."""

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "mlflow", "boto3", "skypilot")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    seen: str
    state: str = "ok"  # ok, broken, or missing: not there and not needed by everyone
    remedy: str = ""


def installed() -> Iterator[Finding]:
    """Python, the packages, and the programs beside them."""
    yield Finding("python", platform.python_version())
    for name in PACKAGES:
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            remedy = "pip install '.[cloud]'" if name == "skypilot" else "pip install ."
            yield Finding(name, "not installed", "missing" if name == "skypilot" else "broken", remedy)
    for program, purpose in (("docker", "building images"), ("git", "naming the commit in manifests")):
        path = shutil.which(program)
        yield Finding(program, path or "not installed", "ok" if path else "missing", "" if path else f"for {purpose}")
