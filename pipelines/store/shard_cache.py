"""The shards of a store in a bucket, on the disk of this node: what is read, what comes next, and as much more as the
budget allows.

All processes of the node share one folder: the ranks, and other runs. `fetch` returns a shard open, with a shared lock
(flock) on its file: the lease. A map duplicates the file's descriptor, so the lease lasts as long as the map, and the
kernel ends it with the process. Each download first makes room: of the shards without a lease, those whose last fetch
is longest ago are removed. Training reads shard after shard, so these lie behind the read position. Files of a local
store are used in place and never removed.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from pipelines.store.layout import manifest_key
from pipelines.store.manifest import (
    DamagedArtifact,
    File,
    Manifest,
    download_verified,
    fetch,
    is_intact,
    place_of,
    seal,
)
from trainer.base.store import LocalStore, Store
from trainer.config.errors import DiskFull

if TYPE_CHECKING:
    from trainer.data.shards import Shard

SHARDS = "shards"  # the folder below the cache
COMPLETE, ARRIVING = ".bin", ".arriving"  # a shard; the folder of a download, with the file PART
PART = "shard"
REMOVING = "removing"  # a process that removes shards holds the lock of this file
SOURCE = re.compile(r"_s(\d{2,})_")  # of a mixture, in the name of a shard
LOCKS = 16  # against two downloads of one shard; a few shards share each


def shards_in(tokens: Manifest, split: str) -> list["Shard"]:
    """The shards of a split, in order. DamagedArtifact unless the manifest names the file of each."""
    from trainer.data.shards import Shard, form_of

    sizes, counts = {file.name: file.size for file in tokens.files}, tokens.facts.get("shards")
    max_ids, rows, shards = tokens.facts.get("max_ids", {}), tokens.facts.get("rows", {}), []
    for name, count in counts.items() if isinstance(counts, dict) else [("shards", counts)]:
        if not isinstance(count, int) or (form := form_of(sizes.get(name, 0), count)) is None:
            what = f"{name} has {count!r} tokens in its facts and {sizes.get(name, 'no')} bytes in its files"
            raise DamagedArtifact(manifest_key(tokens.prefix), f"damaged: {what}")
        if name.startswith(split):
            (token_bytes, header), source = form, SOURCE.search(name) if "sources" in tokens.facts else None
            number = int(source[1]) if source else 0
            shards.append(Shard(name, count, token_bytes, max_ids.get(name), rows.get(name), number, header))
    return shards


class ShardCache:
    """The shards of an artifact as local, verified files. `places`: the other stores that may hold some."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        cache: Path,
        budget_gb: float | Literal["auto"],
        places: Collection[str] = (),
    ) -> None:
        self.store, self.manifest, self.cache, self.budget_gb = store, manifest, cache, budget_gb
        self.places = places
        self.folder = cache / SHARDS
        self._removing = self.folder / REMOVING
        self._files = {file.name: file for file in manifest.files}  # of 100,000
        self._in_place: dict[str, Path] = {}  # verified files of a local store

    def fetch(self, name: str) -> Path | BinaryIO:
        """A shard: open and leased, or its path in a local store.

        DiskFull if there is no room although every shard without a lease is removed.
        """
        file = self._files.get(name) or self.manifest.file(name)
        store, key = place_of(self.store, self.manifest.prefix, file, self.places)
        if isinstance(store, LocalStore):
            if name not in self._in_place:
                self._in_place[name] = fetch(self.store, self.manifest.prefix, file, self.cache, self.places)
            return self._in_place[name]
        path = self.folder / f"{file.sha256}{COMPLETE}"
        with _locked(self._lock_of(path.name)):
            with _locked(self._removing):
                leased = _leased(path)
            if leased and is_intact(path, file):
                return leased
            return self._download(file, path, store, key)

    def _download(self, file: File, path: Path, store: Store, key: str) -> BinaryIO:
        arriving = path.with_suffix(ARRIVING)
        shutil.rmtree(arriving, ignore_errors=True)  # of a killed process: we hold the lock
        part = arriving / PART
        try:
            self._make_room(file, part)
            while True:
                try:
                    download_verified(store, key, file, part)
                    break
                except DiskFull:  # somebody else uses the space that was free
                    self._make_room(file, part, full=True)
            leased = _leased(part)
            assert leased
            seal(part, file.sha256)
            part.rename(path)
            return leased
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    def _make_room(self, file: File, part: Path, full: bool = False) -> None:
        """Remove shards until `file` fits into the budget and the disk, and keep its room until it is there.

        `full`: the disk is full although it seemed to have the room.
        """
        with _locked(self._removing):
            cached = [one for one in self._cached() if one[2] != part.parent.name]
            free = 0 if full else shutil.disk_usage(self.folder).free
            total = sum(size for _, size, _ in cached)
            over = total + file.size - self._budget_bytes(total + free)
            lacking, removed = file.size - free, False
            for _, size, name in sorted(cached):
                if over <= 0 and lacking <= 0:
                    break
                if self._remove(name):
                    over, lacking, removed = over - size, lacking - size, True
            if lacking > 0 and not (full and removed):
                raise DiskFull(
                    f"{self.folder}: no space left for {file.name} ({file.size / 1e6:,.1f} MB), and every other shard "
                    "there is being read; free some space, or set SKYTRAIN_HOME to a larger disk"
                )
            part.parent.mkdir(exist_ok=True)
            with part.open("wb") as reserved:
                reserved.truncate(file.size)  # sparse: other processes count it, the disk does not

    def _budget_bytes(self, available: int) -> float:
        """`available`: bytes that are free, or that the cache holds."""
        return available / 2 if self.budget_gb == "auto" else self.budget_gb * 1e9

    def _cached(self) -> Iterator[tuple[float, int, str]]:
        """The shards that the cache holds, and the room that it keeps for downloads: unix seconds of the last fetch,
        bytes and name."""
        for entry in os.scandir(self.folder):  # strings: a Path takes longer than the system calls
            with suppress(FileNotFoundError):  # arrived, or gone, meanwhile
                if entry.name.endswith(COMPLETE):
                    status = entry.stat()
                elif entry.name.endswith(ARRIVING):
                    status = os.stat(f"{entry.path}/{PART}")
                else:
                    continue
                yield status.st_atime, status.st_size, entry.name

    def _remove(self, name: str) -> bool:
        """Remove a shard that nobody leases, or a download whose process was killed. Whether it did."""
        path, arriving = self.folder / name, name.endswith(ARRIVING)
        try:
            with _locked(self._lock_of(name) if arriving else path, wait=False):
                shutil.rmtree(path, ignore_errors=True) if arriving else path.unlink(missing_ok=True)
                return True
        except BlockingIOError:
            return False

    def _lock_of(self, name: str) -> Path:
        return self.folder / f"lock-{int(name[:8], 16) % LOCKS:02d}"


def _leased(path: Path) -> BinaryIO | None:
    """The file, open and leased; None if it does not exist."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


@contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold the exclusive lock of a file. Without `wait`, BlockingIOError if another holder has one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
