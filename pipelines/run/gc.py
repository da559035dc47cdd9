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
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipelines.run.runs import Run, read_run, read_runs, usable_runs
from pipelines.store.layout import (
    FOLDERS,
    RUNS,
    artifact_of,
    attempt_folder,
    attempts_of,
    manifest_key,
    records_of,
)
from pipelines.store.ledger import (
    GC,
    Attempt,
    agreed_clock,
    attempts,
    claim,
    is_alive,
    is_over,
    latest_number,
    working_attempt,
)
from pipelines.store.manifest import Manifest, read_manifest
from pipelines.store.meter import Meter
from pipelines.store.records import HEARTBEAT_SECONDS, Billing
from trainer.base.store import PARTIAL, Entry, LocalStore, Store, side_by_side
from trainer.checkpoint.layout import CHECKPOINT_FOLDER, COMMIT_FILE, COMMIT_KEY, commit_key, metrics_of, step_of
from trainer.config.errors import StaleAttempt, UserError
from trainer.config.source import Source

# A writer changes its file all the time: a file without changes for this long is left from a kill.
PARTIAL_SECONDS = 3600.0
RECORDS = re.compile(r".*/(?:COMMIT\.json|(?:parts|shards)/[^/]+\.json)")  # each names files


@dataclass(frozen=True)
class Leftover:
    """An object of the store to remove, or a half-written file, and the reason."""

    key: str
    size: int  # bytes
    why: str
    path: Path | None = None  # None: an object of the store


def collect(
    store: Store,
    older_than_days: float,
    on_damage: Callable[[str], None] = lambda message: None,
    dry_run: bool = False,
) -> Iterator[Leftover]:
    """Remove the leftovers of one artifact after the other. Yields each one.

    In a finished artifact: all files that its manifest does not name. In an unfinished artifact without a living
    attempt: checkpoints without a commit, and all files once they are older than `older_than_days`. In a local store:
    half-written files. The commits that `keep_every_steps` keeps for good, and those that another run begins with, stay
    in any case. An artifact with an unreadable manifest or heartbeat, damaged or of a newer format, stays as it is;
    `on_damage` gets the error. A dry run removes nothing.
    """
    keep, listed = commits_to_keep(store, on_damage), artifacts(store)
    unfinished = any(manifest_key(prefix) not in {e.key for e in entries} for prefix, entries in listed.items())
    now = agreed_clock(store) if unfinished else 0.0  # once, and early: no age is too large

    def look(prefix: str, own: int | None = None) -> tuple[list[Leftover], int | None]:
        entries = store.entries(f"{prefix}/") if own else listed[prefix]
        try:
            return _leftovers(store, prefix, entries, older_than_days, now, keep, own)
        except UserError as error:
            on_damage(f"{store.uri}/{prefix}: {error}")
            return [], None

    for prefix, (found, number) in zip(listed, side_by_side(look, listed), strict=True):
        try:
            yield from found if dry_run else _removed(store, prefix, found, number, look)
        except StaleAttempt as error:
            on_damage(f"{store.uri}/{prefix}: {error}")
    for leftover in _half_written(store):
        if not dry_run:
            remove(store, leftover)
        yield leftover


def _removed(
    store: Store,
    prefix: str,
    found: list[Leftover],
    number: int | None,
    look: Callable[[str, int], tuple[list[Leftover], int | None]],
) -> Iterator[Leftover]:
    """Remove the leftovers of an artifact; of an unfinished one as its attempt `number`, which looks at it once more.
    StaleAttempt once another process works on it."""
    with fence(store, prefix, number) if found and number is not None else nullcontext() as attempt:
        checked = -math.inf
        for leftover in look(prefix, attempt.number)[0] if attempt else found:
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
    run = read_run(store, name).record
    runs = [one for one in read_runs(store) if one.name != run.run]
    for other in runs:
        if (begins := _source_of(other)) and begins.name == run.run:
            raise UserError(f"{run.run}: {other.name} begins with it and has not trained yet; remove that run first")
    shared = {prefix for other in runs for stage in other.record.stages for prefix in other.record.all_prefixes(stage)}
    own = {prefix for stage in run.stages for prefix in run.all_prefixes(stage)} - shared
    if working := [prefix for prefix in sorted(own) if working_attempt(store, prefix, lambda: agreed_clock(store))]:
        raise UserError(f"{run.run}: an attempt works on {working[0]}; `skytrain stop {run.run}` stops it")
    for prefix in [*sorted(own), *records_of(run.run)]:
        number = latest_number(store, prefix) + 1 if prefix in own else 0
        with fence(store, prefix, number) if prefix in own and not dry_run else nullcontext():
            found = store.entries(f"{prefix}/" if prefix in own else prefix)
            found = [entry for entry in found if not entry.key.startswith(attempt_folder(prefix, number))]
            for entry in sorted(found, key=lambda e: (e.key != manifest_key(prefix), not e.key.endswith(".json"))):
                leftover = Leftover(entry.key, entry.size, f"of {run.run}")
                if not dry_run:
                    remove(store, leftover)
                yield leftover


def remove(store: Store, leftover: Leftover) -> None:
    """Remove a leftover; it is not an error if it no longer exists."""
    if leftover.path is None:
        store.delete(leftover.key)
    else:
        leftover.path.unlink(missing_ok=True)


def artifacts(store: Store) -> dict[str, list[Entry]]:
    """The objects of all artifacts, finished or not, by their prefixes."""
    found: dict[str, list[Entry]] = {}
    for entry in (entry for folder in FOLDERS.values() for entry in store.entries(f"{folder}/")):
        if entry.key.count("/") > 1:
            found.setdefault(artifact_of(entry.key), []).append(entry)
    return found


def _leftovers(
    store: Store,
    prefix: str,
    everything: list[Entry],
    older_than_days: float,
    now: float,
    keep: Callable[[str], bool],
    own: int | None = None,
) -> tuple[list[Leftover], int | None]:
    """The leftovers among the objects of an artifact, records before the files that they name, and the number of its
    next attempt; None for a finished one. `now`: by the store's clock. `own`: the attempt of the caller, which does
    not count."""
    fence = attempt_folder(prefix, own or 0)
    everything = [entry for entry in everything if not entry.key.startswith(fence)]
    kept = tuple(entry.key.removesuffix(COMMIT_FILE) for entry in everything if keep(entry.key))
    entries = [e for e in everything if not e.key.startswith((attempts_of(prefix), *kept))]
    manifest = read_manifest(store, prefix) if any(e.key == manifest_key(prefix) for e in entries) else None
    # In this order: of an attempt that commits meanwhile, either its heartbeat is alive or its manifest exists.
    beats = [beat for beat in attempts(store, prefix) if beat.attempt != own] if manifest is None else []
    manifest = manifest or read_manifest(store, prefix)
    number = None if manifest else beats[-1].attempt + 1 if beats else 1
    found: Iterator[Leftover]
    if manifest:
        found = _unnamed(manifest, entries)
    elif beats and not is_over(beats[-1], max((e.modified for e in everything), default=0.0), lambda: now):
        found = iter(())
    else:
        of_gc = tuple(attempt_folder(prefix, beat.attempt) for beat in beats if beat.run == GC)
        worked = max((e.modified for e in everything if not e.key.startswith(of_gc)), default=0.0)
        age_days = (now - worked) / 86_400
        finishing = any(beat.progress.finishing and is_alive(beat) is not False for beat in beats)
        if age_days < older_than_days or finishing:
            found = _uncommitted(store, entries)
        else:
            why = f"unfinished, and no attempt has worked on it for {age_days:.1f} days"
            found = (Leftover(e.key, e.size, why) for e in entries if not e.key.startswith(metrics_of(prefix)))
    return sorted(found, key=lambda leftover: not RECORDS.fullmatch(leftover.key)), number


def commits_to_keep(store: Store, on_damage: Callable[[str], None]) -> Callable[[str], bool]:
    """Whether an object is the COMMIT.json of a commit that stays: one that its run keeps for good
    (`runtime.keep_every_steps`), or one that a run begins with which has not trained yet. Where a run cannot be read,
    every commit stays."""
    damaged: list[str] = []
    runs = usable_runs(store, [], _source_of, damaged.append)
    for message in damaged:
        on_damage(f"the commits of all runs stay: {message}")
    trainings = {run.name: run.record.prefixes.get("train") for run in runs}
    sources = [source for run in runs if (source := _source_of(run)) and source.step is not None]
    starts = {(trainings.get(source.name), source.step) for source in sources}
    every = [
        (prefix, steps)
        for run in runs
        if (steps := run.recipe.runtime.keep_every_steps)
        for prefix in run.record.all_prefixes("train")
    ]

    def keep(key: str) -> bool:
        if not (commit := COMMIT_KEY.fullmatch(key)):
            return False
        prefix, step = commit["artifact"], step_of(key)
        return bool(damaged) or (prefix, step) in starts or any(of == prefix and step % n == 0 for of, n in every)

    return keep


def needed_by_runs(store: Store, on_damage: Callable[[str], None]) -> Callable[[str], bool]:
    """Whether the commit in a folder stays although newer ones exist, see `commits_to_keep`. The runs are read again
    once their list has changed."""

    @lru_cache(maxsize=1)
    def keep(runs: tuple[Entry, ...]) -> Callable[[str], bool]:
        return commits_to_keep(store, on_damage)

    return lambda folder: keep(tuple(store.entries(RUNS)))(commit_key(folder))


def _source_of(run: Run) -> Source | None:
    """The run and the step that a run begins with, as long as it has not trained. UserError if that cannot be read."""
    train, prefix = run.recipe.train, run.record.prefixes.get("train")
    begins = train.branch_from or train.init_from
    source = Source.of(begins, "train") if begins and prefix else None
    if source is None or source.kind != "run" or read_manifest(run.store, str(prefix)) is not None:
        return None
    return source


def _unnamed(manifest: Manifest, entries: list[Entry]) -> Iterator[Leftover]:
    needed = {f"{manifest.prefix}/{file.key}" for file in manifest.files if file.at is None}
    needed.add(manifest_key(manifest.prefix))
    if lost := min(needed - {entry.key for entry in entries}, default=None):
        raise UserError(f"{lost}: named by the manifest, and not in the store, so nothing of this artifact is removed")
    for entry in entries:
        if entry.key not in needed and not entry.key.startswith(metrics_of(manifest.prefix)):
            yield Leftover(entry.key, entry.size, "not in the manifest of its finished artifact")


def _uncommitted(store: Store, entries: list[Entry]) -> Iterator[Leftover]:
    folders = [CHECKPOINT_FOLDER.match(entry.key) for entry in entries]
    commits = {commit_key(folder[0]) for folder in folders if folder}
    missing = {key for key in commits - {e.key for e in entries} if store.get(key) is None}  # a listing may be wrong
    for folder, entry in zip(folders, entries, strict=True):
        if folder and commit_key(folder[0]) in missing:
            yield Leftover(entry.key, entry.size, "part of a checkpoint without a commit")


def _half_written(store: Store) -> Iterator[Leftover]:
    """Half-written files that killed processes left in a local store."""
    for folder, _, names in os.walk(store.root) if isinstance(store, LocalStore) else ():  # rglob fails if one vanishes
        for path in (Path(folder, name) for name in names if name.startswith(PARTIAL)):
            with suppress(FileNotFoundError):  # its writer has completed it meanwhile
                status = path.stat()
                if time.time() - status.st_mtime > PARTIAL_SECONDS:
                    yield Leftover(path.name, status.st_size, "a half-written file", path)
