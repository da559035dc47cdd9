"""Garbage collection: objects that no manifest and no living or resumable attempt needs.

The ledger (`attempts/`) stays: it is the cost of a run. So do the series (`metrics/`).
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipelines.artifacts.manifest import FOLDERS, DamagedArtifact, Manifest, read_manifest, scratch
from pipelines.tracking.ledger import attempt_entries, attempts, is_dead
from pipelines.tracking.runs import UNREADABLE, key_of, read_record
from trainer.commits import committed_folders, step_of
from trainer.store import PARTIAL, Entry, LocalStore, Store

# A writer changes its file all the time: a file without changes for so long is left from a kill.
PARTIAL_SECONDS = 3600.0


@dataclass(frozen=True)
class Leftover:
    """An object of the store to remove, or a file or folder of this machine, and the reason."""

    key: str
    size: int  # bytes
    why: str
    path: Path | None = None  # None: an object of the store


def leftovers(
    store: Store, home: Path, older_than_days: float, on_damage: Callable[[str], None] = lambda message: None
) -> Iterator[Leftover]:
    """Leftovers in deletion order: a checkpoint's COMMIT.json before its files.

    In a finished artifact: all files that its manifest does not name. In an unfinished artifact without a living
    attempt: checkpoints without a commit, and all files once they are older than `older_than_days`. On this machine:
    half-written files, and the scratch folders of finished attempts under `home`. The commits that `keep_every_steps`
    keeps for good stay in any case. An artifact with a damaged manifest stays as it is; `on_damage` gets the error.
    """
    kept_every = _kept_every(store, on_damage)
    for prefix in artifacts(store):
        try:
            found = list(_of_artifact(store, prefix, older_than_days))
        except DamagedArtifact as error:
            on_damage(str(error))
            continue
        kept = _kept_for_good(store, prefix, kept_every(prefix)) if found else ()
        yield from _commits_first(one for one in found if not one.key.startswith(kept))
    folders = [home / "cache", *([store.root] if isinstance(store, LocalStore) else [])]
    for folder in folders:
        yield from _half_written(folder)
    yield from _scratch(store, home)


def remove(store: Store, leftover: Leftover) -> None:
    """Remove a leftover; it is no error if it no longer exists."""
    if leftover.path is None:
        store.delete(leftover.key)
    elif leftover.path.is_dir():
        shutil.rmtree(leftover.path, ignore_errors=True)
    else:
        leftover.path.unlink(missing_ok=True)


def artifacts(store: Store) -> list[str]:
    """The prefixes of all artifacts, finished or not."""
    keys = (e.key.split("/") for folder in FOLDERS.values() for e in store.entries(f"{folder}/"))
    return sorted({"/".join(parts[:2]) for parts in keys if len(parts) > 2})


def _of_artifact(store: Store, prefix: str, older_than_days: float) -> Iterable[Leftover]:
    # In this order: of an attempt that commits meanwhile, either its heartbeat is alive or its manifest exists.
    everything = store.entries(f"{prefix}/")
    beats = attempts(store, prefix)
    manifest = read_manifest(store, prefix)
    entries = [e for e in everything if not e.key.startswith(f"{prefix}/attempts/")]
    if manifest:
        return _unnamed(manifest, entries)
    newest = max((e.modified for e in everything), default=0.0)
    if beats and not is_dead(store, beats[-1], newest):
        return []
    age_days = (store.clock() - newest) / 86_400
    if age_days >= older_than_days:
        why = f"unfinished, and no attempt has worked on it for {age_days:.1f} days"
        return [Leftover(e.key, e.size, why) for e in entries if not e.key.startswith(f"{prefix}/metrics/")]
    return _uncommitted(entries)


def _kept_every(store: Store, on_damage: Callable[[str], None]) -> Callable[[str], set[int]]:
    """By artifact: the intervals, in steps, at which its runs keep a commit for good (`runtime.keep_every_steps`).

    Where a run's record cannot be read, every commit stays.
    """
    found: dict[str, set[int]] = {}
    of_all: set[int] = set()
    for entry in store.entries("runs/"):
        run = entry.key.removeprefix("runs/").removesuffix(".json")
        try:
            record = read_record(store, run)
            every = record.recipe["runtime"].get("keep_every_steps") if record else None
            if record and every is not None and "train" in record.prefixes:
                for prefix in record.all_prefixes("train"):
                    found.setdefault(prefix, set()).add(int(every))
        except UNREADABLE as error:
            of_all = {1}
            on_damage(f"the commits of all runs, because {store.uri}/{key_of(run)} cannot be read: {error}")
    return lambda prefix: found.get(prefix, set()) | of_all


def _kept_for_good(store: Store, prefix: str, every: set[int]) -> tuple[str, ...]:
    """The folders of the commits at multiples of these steps."""
    folders = committed_folders(store, prefix) if every else []
    return tuple(f"{folder}/" for folder in folders if any(step_of(folder) % steps == 0 for steps in every))


def _unnamed(manifest: Manifest, entries: list[Entry]) -> Iterator[Leftover]:
    needed = {f"{manifest.prefix}/{file.key}" for file in manifest.files} | {f"{manifest.prefix}/MANIFEST.json"}
    for entry in entries:
        if entry.key not in needed and not entry.key.startswith(f"{manifest.prefix}/metrics/"):
            yield Leftover(entry.key, entry.size, "not in the manifest of its finished artifact")


def _uncommitted(entries: list[Entry]) -> Iterator[Leftover]:
    keys = {e.key for e in entries}
    for entry in entries:
        folder = re.match(r".*/checkpoints/[^/]+/", entry.key)
        if folder and f"{folder[0]}COMMIT.json" not in keys:
            yield Leftover(entry.key, entry.size, "part of a checkpoint without a commit")


def _commits_first(found: Iterable[Leftover]) -> list[Leftover]:
    return sorted(found, key=lambda leftover: not leftover.key.endswith("/COMMIT.json"))


def _half_written(root: Path) -> Iterator[Leftover]:
    """Half-written files of killed processes."""
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names if name.startswith(PARTIAL)):
            with suppress(FileNotFoundError):  # its writer has completed it meanwhile
                status = path.stat()
                if time.time() - status.st_mtime > PARTIAL_SECONDS:
                    key = path.relative_to(root).as_posix()
                    yield Leftover(key, status.st_size, "a half-written file", path)


def _scratch(store: Store, home: Path) -> Iterator[Leftover]:
    """Scratch folders of finished attempts on this machine."""
    top = scratch(home, store, "")
    for folder in sorted(top.glob("*/*/a[0-9]*")):
        prefix = folder.parent.relative_to(top).as_posix()
        beats = {f"a{beat.attempt:04d}": beat for beat in attempts(store, prefix)}
        stored = max((entry.modified for _, entry in attempt_entries(store, prefix)), default=0.0)
        attempt, _, _ = folder.name.partition("-node")  # a worker node has its own folder
        if attempt not in beats or is_dead(store, beats[attempt], stored):
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            yield Leftover(folder.relative_to(home).as_posix(), size, "scratch of a finished attempt", folder)
