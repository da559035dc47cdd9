"""Checks of a machine: everything that it needs to run and launch runs. Each problem has its remedy."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipelines.artifacts.store import open_store
from pipelines.cloud.checks import Finding, broken, mlflow_answers, store_commits
from pipelines.cloud.skypilot import api_server_is_up, enabled_clouds
from trainer.errors import UserError

PACKAGES = ("torch", "mlflow", "boto3")
# gpt2-124m keeps 20 GB of shards and two checkpoints of 1.5 GB on the machine that trains it.
ENOUGH_BYTES = 30 * 10**9


def examine(home: Path, store_uri: str, environment: dict[str, str]) -> Iterator[Finding]:
    """All checks of this machine, its store and its servers. They leave no file behind and start no server."""
    yield from installed()
    yield gpus()
    yield disk(home)
    try:
        yield store_commits(open_store(store_uri))
    except UserError as error:
        yield broken("store", store_uri, str(error))
    if environment.get("SKYTRAIN_TRACKING") == "off":
        yield Finding("mlflow server", "off")
    elif uri := environment.get("MLFLOW_TRACKING_URI"):
        yield mlflow_answers(uri, environment)
    else:
        yield Finding(
            "mlflow server", f"none: runs are mirrored to {home / 'mlflow.db'}", "note", "MLFLOW_TRACKING_URI names one"
        )
    yield skypilot()


def installed() -> Iterator[Finding]:
    """Python and the packages."""
    yield Finding("python", platform.python_version())
    for name in PACKAGES:
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield broken(name, "not installed", "pip install .")


def gpus() -> Finding:
    """The GPUs that torch can use here."""
    import torch

    if not torch.cuda.is_available():
        return Finding("gpus", "none here", "note", "runs train on the CPU; skytrain launch rents GPUs")
    return Finding("gpus", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")


def disk(home: Path) -> Finding:
    """Space for scratch and caches."""
    nearest = next(folder for folder in (home, *home.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        return broken("disk", f"{nearest} can't be written to", "name another folder in SKYTRAIN_HOME")
    free = shutil.disk_usage(nearest).free
    seen = f"{free / 1e9:,.0f} GB free at {nearest}"
    if free < ENOUGH_BYTES:
        return Finding(
            "disk", seen, "note", f"gpt2-124m needs {ENOUGH_BYTES / 1e9:.0f} GB; set SKYTRAIN_HOME to another disk"
        )
    return Finding("disk", seen)


def skypilot() -> Finding:
    """Whether this machine can launch, and to which clouds."""
    try:
        found = version("skypilot")
    except PackageNotFoundError:
        return Finding("skypilot", "not installed", "note", "needed to launch: pip install '.[cloud]'")
    if not api_server_is_up():
        return Finding("skypilot", f"{found}; its server does not answer", "note", "sky api start")
    clouds = enabled_clouds()
    if not clouds:
        return Finding("skypilot", f"{found}; no cloud is enabled", "note", "sky check lists what each cloud needs")
    return Finding("skypilot", f"{found}; may use {', '.join(clouds)}")
