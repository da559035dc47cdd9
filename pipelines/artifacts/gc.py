"""What no manifest and no living or resumable attempt needs any more.

The ledger (`attempts/`) stays: it is what a run cost. So do the series (`metrics/`).
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pipelines.artifacts.manifest import FOLDERS, Manifest, read_manifest
from pipelines.tracking.ledger import attempts, is_alive
from trainer.store import Entry, Store


@dataclass(frozen=True)
class Leftover:
    """An object that can go, and why."""

    key: str
    size: int
    why: str


def leftovers(store: Store, older_than_days: float) -> Iterator[Leftover]:
    """Leftovers in deletion order: a checkpoint's COMMIT.json before its files.

    In a finished artifact: whatever its manifest doesn't name. In an unfinished one that nobody works
    on: checkpoints without a commit, and everything once it is older than `older_than_days`.
    """
    for prefix in artifacts(store):
        manifest = read_manifest(store, prefix)
        entries = [e for e in store.entries(f"{prefix}/") if not e.key.startswith(f"{prefix}/attempts/")]
        if manifest:
            yield from _ordered(_beside(manifest, entries))
            continue
        beats = attempts(store, prefix)
        if beats and is_alive(beats[-1]) is not False:
            continue
        age_days = (time.time() - max((e.modified for e in entries), default=0.0)) / 86_400
        if age_days >= older_than_days:
            why = f"unfinished, and nobody has worked on it for {age_days:.1f} days"
            yield from _ordered(Leftover(e.key, e.size, why) for e in entries)
        else:
            yield from _uncommitted(entries)


def artifacts(store: Store) -> list[str]:
    """The prefixes of all artifacts, finished or not."""
    keys = (e.key.split("/") for folder in FOLDERS.values() for e in store.entries(f"{folder}/"))
    return sorted({"/".join(parts[:2]) for parts in keys if len(parts) > 2})


def _beside(manifest: Manifest, entries: list[Entry]) -> Iterator[Leftover]:
    kept = {f"{manifest.prefix}/{file.key}" for file in manifest.files} | {f"{manifest.prefix}/MANIFEST.json"}
    for entry in entries:
        if entry.key not in kept and not entry.key.startswith(f"{manifest.prefix}/metrics/"):
            yield Leftover(entry.key, entry.size, "its artifact is finished without it")


def _uncommitted(entries: list[Entry]) -> Iterator[Leftover]:
    keys = {e.key for e in entries}
    for entry in entries:
        folder = re.match(r".*/checkpoints/[^/]+/", entry.key)
        if folder and f"{folder[0]}COMMIT.json" not in keys:
            yield Leftover(entry.key, entry.size, "a checkpoint that was never committed")


def _ordered(found: Iterator[Leftover]) -> list[Leftover]:
    return sorted(found, key=lambda leftover: not leftover.key.endswith("/COMMIT.json"))
