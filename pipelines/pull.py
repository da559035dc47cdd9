"""The export of a run on this machine, verified."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.artifacts.manifest import File, Manifest, download_verified, read_manifest
from pipelines.formats.hf import COMPONENTS
from pipelines.recipe import HF, OTHER_FORMATS
from pipelines.tracking.run_record import read_records
from pipelines.tracking.runs import tuned_model
from trainer.errors import UserError, cut, is_full
from trainer.store import Store, sha256_of


@dataclass(frozen=True)
class Pulled:
    """A file of an export on this machine."""

    path: Path
    size: int  # bytes
    was_there: bool  # from an earlier pull


def pull_run(store: Store, run: str, folder: Path, format: str | None, tuned: bool = False) -> Iterator[Pulled]:
    """Copy the files of one format (None: of all) of the export, or of the tuned model, into `folder`, and yield each
    once it is there.

    Complete files of an earlier pull stay, so a second pull continues the first. UserError, before anything is copied,
    if another file is in the place of one, or if the export does not exist or lacks the format.
    """
    (record,) = read_records(store, [run])
    prefix = record.prefixes.get("export")
    manifest = tuned_model(store, record) if tuned else read_manifest(store, prefix) if prefix else None
    if manifest is None and tuned:
        raise UserError(f"--tuned: {record.run} has no tuned model; leave it out for the export")
    if manifest is None:
        raise UserError(f"{record.run}: the run has no export yet; `skytrain run run:{record.run}` finishes it")
    files = files_of(manifest, format, record.run)
    present = {file.name for file in files if is_present(folder / file.name, file)}

    def pulled() -> Iterator[Pulled]:
        for file in files:
            path = folder / file.name
            if file.name not in present:
                fetch_to(store, manifest, file, path)
            yield Pulled(path, file.size, file.name in present)

    return pulled()


def files_of(manifest: Manifest, format: str | None, run: str) -> list[File]:
    """The files of one format of an export, or of all. UserError if it lacks the format."""
    by_format: dict[str, list[File]] = {}
    for file in manifest.files:
        top, slash, _ = file.name.partition("/")
        by_format.setdefault(top if slash and top != COMPONENTS else HF, []).append(file)
    if format is None:
        return list(manifest.files)
    if format not in by_format:
        more = (
            f"; `skytrain run RECIPE --set 'export.formats=[{format}]'` makes it too" if format in OTHER_FORMATS else ""
        )
        raise UserError(f"--format {cut(format)}: the export of {run} has {', '.join(by_format)}{more}")
    return by_format[format]


def is_present(path: Path, file: File) -> bool:
    """Whether a file is there from an earlier pull. UserError if something else is."""
    if not os.path.lexists(path):
        return False
    if path.is_file() and path.stat().st_size == file.size and sha256_of(path) == file.sha256:
        return True
    raise UserError(f"{path}: another file is there; choose an empty folder, or remove it")


def fetch_to(store: Store, manifest: Manifest, file: File, path: Path) -> None:
    """Download and verify a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        download_verified(store, f"{manifest.prefix}/{file.key}", file, path)
    except OSError as error:
        if is_full(error):
            error.filename = str(path.parent)
            raise
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
