"""CORE's bundle: a folder, or a dataset on the Hugging Face Hub at one commit.

The bundle is on this machine, and its tasks are verified, as soon as a recipe is planned: long before a GPU is rented.
A dataset's copy is in the cache of the Hub's library, so that a machine without network plans again.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.text.columns import reason_of
from pipelines.text.hub import HUB
from pipelines.text.retry import with_retries
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.core import Task

FORM = f"{HUB}ORG/NAME@COMMIT or {HUB}ORG/NAME/FOLDER@COMMIT, with the 40 hex digits of a commit"


def core_identity(source: str | None) -> str | None:
    """sha256 of the tasks, wherever the bundle lies; None for none. UserErrors as in `core_tasks`."""
    from trainer.core import bundle_digest

    return source and f"sha256:{bundle_digest(core_tasks(source))}"


def core_tasks(source: str) -> "list[Task]":
    """The tasks of a bundle, which is then on this machine. UserError if it cannot be had, or lacks one."""
    from trainer.core import read_bundle

    if not source.startswith(HUB):
        if not Path(source).is_dir():
            raise UserError(
                f"evaluate.core: {source}: no such folder; use the folder of a CORE bundle, {FORM}, or null"
            )
        return read_bundle(Path(source))
    repository, folder, commit = _parsed(source)
    try:
        return read_bundle(_copy(repository, commit, folder, local_files_only=True))
    except (OSError, ValueError):  # not here, or not all of it
        pass
    try:
        return read_bundle(with_retries(lambda: _copy(repository, commit, folder, local_files_only=False)))
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"evaluate.core: {source}: is not on this machine and cannot be fetched ({reason_of(error)}); "
            "name the folder of a CORE bundle, or null to leave CORE out"
        ) from error


def verify_items(source: str) -> int:
    """The number of items of all tasks. UserError for a damaged one."""
    from trainer.core import read_items

    return sum(len(read_items(task)) for task in core_tasks(source))


def _parsed(source: str) -> tuple[str, str, str]:
    """Repository, folder inside it, and commit."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/([\w./-]+))?@([0-9a-f]{40})", source.removeprefix(HUB))
    if not match or ".." in source:
        raise UserError(f"evaluate.core: {source}: use {FORM}")
    return match[1], match[2] or "", match[3]


def _copy(repository: str, commit: str, folder: str, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    patterns = [f"{folder}/*" if folder else "*"]
    path = snapshot_download(
        repository, repo_type="dataset", revision=commit, allow_patterns=patterns, local_files_only=local_files_only
    )
    return Path(path) / folder
