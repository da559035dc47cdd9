"""The origin of an artifact: the commit of this code, its image, versions and machine."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("skytrain", "torch", "numpy", "gigatoken", "tiktoken", "tokenizers", "datasets", "safetensors")


def provenance() -> dict[str, Any]:
    """The origin of an artifact: code, versions, machine. For people; not part of a fingerprint."""
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "image": os.environ.get("SKYTRAIN_IMAGE"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _git(*arguments: str) -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
