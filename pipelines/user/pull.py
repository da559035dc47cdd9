"""The export of a run on this machine, verified.

All that could end a pull is looked for before the first byte: the names and sizes of the files, and what lies in their
places. Files arrive in a folder of their own below DIR, so the next pull removes what a killed one left.
"""

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipelines.recipe.recipe import HF
from pipelines.run.formats.hf import COMPONENTS
from pipelines.run.run_record import read_records
from pipelines.run.runs import tuned_model
from pipelines.store.layout import manifest_key
from pipelines.store.manifest import DamagedArtifact, File, Manifest, download_verified, read_manifest
from trainer.base.store import PARTIAL, Store, sha256_of
from trainer.config import extensions
from trainer.config.errors import StoreUnavailable, UserError, cut, is_full, shown

ARRIVING = f"{PARTIAL}pull"  # the folder


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
    if anything else is in the place of one, or if the export does not exist, is damaged, or lacks the format.
    """
    (record,) = read_records(store, [run])
    prefix = record.prefixes.get("export")
    manifest = tuned_model(store, record) if tuned else read_manifest(store, prefix) if prefix else None
    if manifest is None and tuned:
        raise UserError(f"--tuned: {record.run} has no tuned model; leave it out for the export")
    if manifest is None:
        raise UserError(f"{record.run}: the run has no export yet; `skytrain run run:{record.run}` finishes it")
    files = files_of(manifest, format, record.run)
    check_names_and_sizes(store, manifest)
    present = {file.name for file in files if is_present(folder, file)}

    def pulled() -> Iterator[Pulled]:
        with arriving_in(folder) as arriving:
            for file in files:
                path = folder / file.name
                if file.name not in present:
                    download_verified(store, f"{manifest.prefix}/{file.key}", file, arriving / file.sha256)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    (arriving / file.sha256).rename(path)
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
        known = format in extensions.names(extensions.FORMATS)
        more = f"; `skytrain run RECIPE --set 'export.formats=[{format}]'` makes it too" if known else ""
        raise UserError(f"--format {cut(format)}: the export of {run} has {', '.join(by_format)}{more}")
    return by_format[format]


def check_names_and_sizes(store: Store, manifest: Manifest) -> None:
    """DamagedArtifact for a name that stands for two files, or for an object of another size than in the manifest."""
    names = Counter(file.name for file in manifest.files)
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents}
    if twice := next((name for name, count in names.items() if count > 1 or name in folders), None):
        raise DamagedArtifact(f"{store.uri}/{manifest_key(manifest.prefix)}", f"damaged: it names {shown(twice)} twice")
    stored = {entry.key: entry.size for entry in store.entries(f"{manifest.prefix}/")}
    for file in manifest.files:
        key = f"{manifest.prefix}/{file.key}"
        if (size := stored.get(key)) != file.size:
            found = "missing" if size is None else f"{size:,} bytes long, but {file.size:,} bytes in its manifest"
            raise DamagedArtifact(
                f"{store.uri}/{key}", f"damaged: it is {found}", f"remove {manifest_key(manifest.prefix)}"
            )


def is_present(folder: Path, file: File) -> bool:
    """Whether a file is there from an earlier pull. UserError if something else is, or stands where its folder must be;
    a link might lead out of `folder`."""
    path = folder / file.name
    for above in [*path.parents][: file.name.count("/")]:
        if os.path.lexists(above) and (above.is_symlink() or not above.is_dir()):
            raise UserError(f"{above}: not a folder, but a file or a link; choose an empty folder, or remove it")
    if not os.path.lexists(path):
        return False
    if path.is_file() and not path.is_symlink() and path.stat().st_size == file.size and sha256_of(path) == file.sha256:
        return True
    raise UserError(f"{path}: another file is there; choose an empty folder, or remove it")


@contextmanager
def arriving_in(folder: Path) -> Iterator[Path]:
    """A new folder inside of `folder`, for files that are not complete, removed at the end. UserError while another
    pull has one there, and for a folder that cannot be written."""
    path = folder / ARRIVING
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            shutil.rmtree(path, ignore_errors=True)
            try:
                path.mkdir()
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        if isinstance(error, StoreUnavailable) or is_full(error):
            raise
        where = error.filename or folder
        raise UserError(f"{where}: cannot be written ({error.strerror}); choose another folder") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which ends with the process. UserError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UserError(f"{folder}: another pull is at work there; wait for its end") from error
    finally:
        os.close(descriptor)
