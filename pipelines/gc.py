"""Garbage collection: objects that no manifest and no living or resumable attempt needs.

The ledger (`attempts/`) stays: it is the cost of a run. So do the series (`metrics/`).

Removal is fenced as writing is. In an unfinished artifact gc first takes the next attempt number, and only then looks:
an older attempt that was frozen meanwhile either shows its commit, or announces its manifest, or is stale and commits
nothing. A new attempt waits until gc is done. In every artifact the records go first, the files last: no record ever
names a file that gc has removed.
"""

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from pipelines.artifacts.manifest import FOLDERS, Manifest, key_of, read_manifest, scratch
from pipelines.artifacts.shard_cache import COMPLETE, SHARDS, is_leased, remove_unleased
from pipelines.tracking.ledger import (
    GC,
    HEARTBEAT_SECONDS,
    Attempt,
    Meter,
    attempt_entries,
    attempts,
    claim,
    is_alive,
    is_over,
    latest_number,
    working_attempt,
)
from pipelines.tracking.records import Billing
from pipelines.tracking.run_record import full_names, read_record, read_records
from pipelines.tracking.run_record import key_of as run_key
from trainer.checkpoint.commits import committed_folders, step_of
from trainer.config import RUN_COMMIT
from trainer.errors import StaleAttempt, UserError
from trainer.record import reading
from trainer.store import PARTIAL, READERS, Entry, LocalStore, Store, side_by_side

# A writer changes its file all the time: a file without changes for so long is left from a kill.
PARTIAL_SECONDS = 3600.0
SHA256 = re.compile(r"[0-9a-f]{64}")
RECORDS = re.compile(r".*/(?:COMMIT\.json|(?:parts|shards)/[^/]+\.json)")  # each names files


@dataclass(frozen=True)
class Leftover:
    """An object of the store to remove, or a file or folder of this machine, and the reason."""

    key: str
    size: int  # bytes
    why: str
    path: Path | None = None  # None: an object of the store


def collect(
    store: Store,
    home: Path,
    older_than_days: float,
    on_damage: Callable[[str], None] = lambda message: None,
    dry_run: bool = False,
) -> Iterator[Leftover]:
    """Remove the leftovers of one artifact after the other, then those of this machine. Yields each one.

    In a finished artifact: all files that its manifest does not name. In an unfinished artifact without a living
    attempt: checkpoints without a commit, and all files once they are older than `older_than_days`. On this machine:
    half-written files, the scratch folders of finished attempts under `home`, and cached copies that nothing has used
    for `older_than_days`. The commits that `keep_every_steps` keeps for good, those that another run begins with, and
    shards that a process reads stay in any case. An artifact with an unreadable manifest or heartbeat, damaged or of a
    newer format, stays as it is; `on_damage` gets the error. A dry run removes nothing.
    """
    commits_to_keep, listed = _commits_to_keep(store, on_damage), artifacts(store)

    def look(prefix: str, entries: list[Entry], own: int | None = None) -> tuple[list[Leftover], int | None]:
        try:
            with reading(f"{store.uri}/{prefix}"):
                found, number = _of_artifact(store, prefix, older_than_days, entries, own)
        except UserError as error:
            on_damage(f"{store.uri}/{prefix}: {error}")
            return [], None
        keep = commits_to_keep(prefix) if found else ()
        left = (leftover for leftover in found if not leftover.key.startswith(keep))
        # The records go first, then the files that they name.
        return sorted(left, key=lambda leftover: not RECORDS.fullmatch(leftover.key)), number

    prefixes = list(listed)
    for some in (prefixes[first : first + READERS] for first in range(0, len(prefixes), READERS)):
        looks = side_by_side(lambda prefix: look(prefix, listed.pop(prefix)), some)
        for prefix, (found, number) in zip(some, looks, strict=True):
            try:
                yield from found if dry_run else _removed(store, prefix, found, number, look)
            except StaleAttempt as error:
                on_damage(f"{store.uri}/{prefix}: {error}")
    folders = [home / "cache", *([store.root] if isinstance(store, LocalStore) else [])]
    for leftover in (
        *(one for folder in folders for one in _half_written(folder)),
        *_cached(home / "cache", max(86_400 * older_than_days, PARTIAL_SECONDS)),
        *_scratch(store, home, on_damage),
    ):
        if not dry_run:
            remove(store, leftover)
        yield leftover


def _removed(
    store: Store,
    prefix: str,
    found: list[Leftover],
    number: int | None,
    look: Callable[[str, list[Entry], int], tuple[list[Leftover], int | None]],
) -> Iterator[Leftover]:
    """Remove the leftovers of an artifact; of an unfinished one as its attempt `number`, which looks at it once more.
    StaleAttempt once another process works on it."""
    with fence(store, prefix, number) if found and number is not None else nullcontext() as attempt:
        checked = -math.inf
        if attempt:
            found, _ = look(prefix, store.entries(f"{prefix}/"), attempt.number)
        for leftover in found:
            if attempt and time.monotonic() - checked > HEARTBEAT_SECONDS:  # so also after this process was frozen
                attempt.check()
                checked = time.monotonic()
            remove(store, leftover)
            yield leftover


def fence(store: Store, prefix: str, number: int) -> Attempt:
    """Take an attempt of an artifact, so that older ones are stale. StaleAttempt if another process has taken it."""
    attempt = claim(store, prefix, GC, GC, number, Billing(), meter=Meter(None))
    if attempt is None:
        raise StaleAttempt(f"another process has begun to work on {prefix}; run the same command again")
    return attempt


def remove_run(store: Store, name: str, dry_run: bool = False) -> Iterator[Leftover]:
    """Remove a run: its record, its bill, and the artifacts that no other run names. Yields each object.

    Of each artifact the claim of this removal stays, so that an attempt that was frozen meanwhile is stale. UserError
    if an attempt works on the run, or if another run still begins with it.
    """
    everything = read_records(store)
    (run,) = read_records(store, [name])
    others = [record for record in everything if record.run != run.run]
    for other in others:
        sources = [other.recipe["train"].get(field) or "" for field in ("branch_from", "init_from")]
        begins = any(source.startswith(f"run:{run.run}@") for source in sources)
        if begins and "train" in other.prefixes and read_manifest(store, other.prefixes["train"]) is None:
            raise UserError(f"{run.run}: {other.run} begins with it and has not trained yet; remove that run first")
    shared = {prefix for other in others for stage in other.stages for prefix in other.all_prefixes(stage)}
    own = {prefix for stage in run.stages for prefix in run.all_prefixes(stage)} - shared
    if working := [prefix for prefix in sorted(own) if working_attempt(store, prefix)]:
        raise UserError(f"{run.run}: an attempt works on {working[0]}; `skytrain stop {run.run}` stops it")
    for prefix in [
        *sorted(own),
        f"control/{run.run}",
        f"launches/{run.run}",
        f"summaries/{run.run}",
        f"runs/{run.run}",
    ]:
        number = latest_number(store, prefix) + 1
        with fence(store, prefix, number) if prefix in own and not dry_run else nullcontext():
            end = "/" if prefix in own or prefix.startswith("control/") else ".json"
            found = [e for e in store.entries(prefix + end) if not e.key.startswith(f"{prefix}/attempts/{number:04d}/")]
            for entry in sorted(
                found, key=lambda e: (not e.key.endswith("/MANIFEST.json"), not e.key.endswith(".json"))
            ):
                leftover = Leftover(entry.key, entry.size, f"of {run.run}")
                if not dry_run:
                    remove(store, leftover)
                yield leftover


def remove(store: Store, leftover: Leftover) -> None:
    """Remove a leftover; it is not an error if it no longer exists."""
    if leftover.path is None:
        store.delete(leftover.key)
    elif leftover.path.parent.name == SHARDS:
        remove_unleased(leftover.path)
    elif leftover.path.is_dir():
        shutil.rmtree(leftover.path, ignore_errors=True)
    else:
        leftover.path.unlink(missing_ok=True)


def artifacts(store: Store) -> dict[str, list[Entry]]:
    """The objects of all artifacts, finished or not, by their prefixes."""
    found: dict[str, list[Entry]] = {}
    for entry in (entry for folder in FOLDERS.values() for entry in store.entries(f"{folder}/")):
        parts = entry.key.split("/")
        if len(parts) > 2:
            found.setdefault("/".join(parts[:2]), []).append(entry)
    return found


def _of_artifact(
    store: Store, prefix: str, older_than_days: float, everything: list[Entry], own: int | None
) -> tuple[list[Leftover], int | None]:
    """The leftovers among the objects of an artifact, which were listed before, and the number of its next attempt;
    None for a finished one. `own`: the attempt of the caller, which does not count."""
    fence = f"{prefix}/attempts/{own or 0:04d}/"
    everything = [entry for entry in everything if not entry.key.startswith(fence)]
    entries = [e for e in everything if not e.key.startswith(f"{prefix}/attempts/")]
    if any(e.key == key_of(prefix) for e in entries) and (manifest := read_manifest(store, prefix)):
        return list(_unnamed(manifest, entries)), None
    # In this order: of an attempt that commits meanwhile, either its heartbeat is alive or its manifest exists.
    beats = [beat for beat in attempts(store, prefix) if beat.attempt != own]
    if manifest := read_manifest(store, prefix):
        return list(_unnamed(manifest, entries)), None
    number = beats[-1].attempt + 1 if beats else 1
    if beats and not is_over(store, beats[-1], max((e.modified for e in everything), default=0.0)):
        return [], number
    of_gc = tuple(f"{prefix}/attempts/{beat.attempt:04d}/" for beat in beats if beat.run == GC)
    worked = max((e.modified for e in everything if not e.key.startswith(of_gc)), default=0.0)
    age_days = (store.clock() - worked) / 86_400
    finishing = any(beat.progress.finishing and is_alive(beat) is not False for beat in beats)
    if age_days < older_than_days or finishing:
        return list(_uncommitted(entries)), number
    why = f"unfinished, and no attempt has worked on it for {age_days:.1f} days"
    return [Leftover(e.key, e.size, why) for e in entries if not e.key.startswith(f"{prefix}/metrics/")], number


def _commits_to_keep(store: Store, on_damage: Callable[[str], None]) -> Callable[[str], tuple[str, ...]]:
    """The folders, by artifact, of the commits that stay: those that its runs keep for good
    (`runtime.keep_every_steps`), and those that a run begins with which has not trained yet. Where a run's record
    cannot be read, every commit stays."""
    intervals: list[tuple[str, int]] = []  # artifact, and steps
    starts: list[tuple[str, int]] = []  # run, and step
    trainings: dict[str, str] = {}  # artifacts, by run

    def add(run: str) -> UserError | None:
        try:
            with reading(where := f"{store.uri}/{run_key(run)}"):
                record = read_record(store, run)
                if record is None or "train" not in record.prefixes:
                    return None
                trainings[run] = record.prefixes["train"]
                if steps := record.recipe["runtime"].get("keep_every_steps"):
                    intervals.extend((prefix, max(1, int(steps))) for prefix in record.all_prefixes("train"))
                sources = (record.recipe["train"].get(field) or "" for field in ("branch_from", "init_from"))
                named = [(found["run"], int(found["step"])) for found in map(RUN_COMMIT.fullmatch, sources) if found]
                if named and read_manifest(store, trainings[run]) is None:
                    starts.extend(named)
                return None
        except UserError as error:
            on_damage(f"the commits of all runs, because {where} cannot be read: {error}")
            return error

    keep_all = any(side_by_side(add, full_names(store)))

    def stays(prefix: str, step: int) -> bool:
        begins = any(step == first and trainings.get(run) == prefix for run, first in starts)
        return keep_all or begins or any(step % steps == 0 for of, steps in intervals if of == prefix)

    def folders(prefix: str) -> tuple[str, ...]:
        if not (keep_all or starts or any(of == prefix for of, _ in intervals)):
            return ()
        return tuple(f"{folder}/" for folder in committed_folders(store, prefix) if stays(prefix, step_of(folder)))

    return folders


def _unnamed(manifest: Manifest, entries: list[Entry]) -> Iterator[Leftover]:
    needed = {f"{manifest.prefix}/{file.key}" for file in manifest.files if file.at is None} | {
        f"{manifest.prefix}/MANIFEST.json"
    }
    for entry in entries:
        if entry.key not in needed and not entry.key.startswith(f"{manifest.prefix}/metrics/"):
            yield Leftover(entry.key, entry.size, "not in the manifest of its finished artifact")


def _uncommitted(entries: list[Entry]) -> Iterator[Leftover]:
    keys = {e.key for e in entries}
    for entry in entries:
        folder = re.match(r".*/checkpoints/[^/]+/", entry.key)
        if folder and f"{folder[0]}COMMIT.json" not in keys:
            yield Leftover(entry.key, entry.size, "part of a checkpoint without a commit")


def _half_written(root: Path) -> Iterator[Leftover]:
    """Half-written files of killed processes."""
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names if name.startswith(PARTIAL)):
            with suppress(FileNotFoundError):  # its writer has completed it meanwhile
                status = path.stat()
                if time.time() - status.st_mtime > PARTIAL_SECONDS:
                    key = path.relative_to(root).as_posix()
                    yield Leftover(key, status.st_size, "a half-written file", path)


def _cached(cache: Path, seconds: float) -> Iterator[Leftover]:
    """Copies of files of any store that nothing on this machine has fetched for so long: shards, and single files."""
    shards = (cache / SHARDS).glob(f"*{COMPLETE}")
    for path in sorted([*shards, *(folder for folder in cache.glob("*") if SHA256.fullmatch(folder.name))]):
        with suppress(FileNotFoundError):  # another process has removed it meanwhile
            files = [one.stat() for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path.stat()]
            unused = time.time() - max((status.st_atime for status in files), default=path.stat().st_atime)
            if unused > seconds and not (path.suffix == COMPLETE and is_leased(path)):
                why = f"a copy that nothing here has used for {unused / 86_400:.1f} days"
                yield Leftover(f"cache/{path.relative_to(cache)}", sum(one.st_size for one in files), why, path)


def _scratch(store: Store, home: Path, on_damage: Callable[[str], None]) -> Iterator[Leftover]:
    """Scratch folders of finished attempts on this machine."""
    top = scratch(home, store, "")
    for folder in sorted(top.glob("*/*/a[0-9]*")):
        prefix = folder.parent.relative_to(top).as_posix()
        try:
            beats = {f"a{beat.attempt:04d}": beat for beat in attempts(store, prefix)}
        except UserError as error:
            on_damage(f"{folder}, because of its attempts: {error}")
            continue
        stored = max((entry.modified for _, entry in attempt_entries(store, prefix)), default=0.0)
        attempt, _, _ = folder.name.partition("-node")  # a worker node has its own folder
        if attempt not in beats or is_over(store, beats[attempt], stored):
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            yield Leftover(folder.relative_to(home).as_posix(), size, "scratch of a finished attempt", folder)
