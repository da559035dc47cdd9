"""Artifacts, the data between stages: a directory of files that exists once its manifest does.

An artifact lies under `<folder>/<label>-<fingerprint>/` of a store. Each attempt writes its files into its own folder
(`a0001/`). So nothing overwrites a file, not even a node that seemed dead. MANIFEST.json is *created* last and names
every file with key, size and sha256. The fingerprint is the sha256 of the canonical identity: all values that decide
the bytes, and no others.
"""

import fcntl
import json
import os
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from pipelines.store.layout import FOLDERS, SHORT, artifact_of, artifact_prefix, file_folder, manifest_key
from pipelines.store.s3_store import open_store
from trainer.base.record import (
    LARGE_BYTES,
    Count,
    DamagedRecord,
    Key,
    Number,
    Sha256,
    Size,
    StoredRecord,
    UnixSeconds,
    decoded_at,
    record_in,
    typed,
)
from trainer.base.store import (
    ABSENT,
    PARTIAL,
    Check,
    LocalStore,
    Store,
    read_again,
    sha256_of,
    side_by_side,
    unavailable_if_failing,
)
from trainer.config.errors import StoreUnavailable, UserError, shown

FORMAT = 1
HERE = "."  # the place of a file that belongs to another artifact of the same store
SMALL = 16 << 20  # bytes of a cached file that is hashed at every start: 10 ms


class DamagedArtifact(UserError):
    """A manifest is unreadable, or a file differs from its manifest."""

    def __init__(self, where: str, what: str, remedy: str = "remove it to build the artifact again") -> None:
        super().__init__(f"{where}: {what}; {remedy}")


@dataclass(frozen=True)
class File(StoredRecord):
    """A file of an artifact: its name for users, its key below the artifact, its size in bytes and its sha256.
    Readers join the name and the key to paths.

    `at` is the URI of another store: the file was there before, its key is this store's, and it is not ours to
    remove. HERE: the key is in the artifact's own store, and the file belongs to another artifact."""

    name: Key
    key: Key
    size: Size
    sha256: Sha256
    at: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class ArtifactPlan:
    """The identity of an artifact, known before the artifact exists."""

    stage: str
    label: str
    identity: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.identity)

    @property
    def name(self) -> str:
        return f"{self.label}-{self.fingerprint[:SHORT]}"

    @property
    def prefix(self) -> str:
        return artifact_prefix(self.stage, self.label, self.fingerprint)


@dataclass(frozen=True)
class Manifest(StoredRecord):
    """A finished artifact."""

    stage: str
    label: str
    fingerprint: str
    identity: dict[str, Any]
    inputs: dict[str, str]  # fingerprints by stage
    files: tuple[File, ...]
    provenance: dict[str, Any]
    facts: dict[str, Any]
    run: str  # the run and the attempt that made it
    attempt: Count
    created: UnixSeconds
    format: int = FORMAT

    @property
    def prefix(self) -> str:
        return artifact_prefix(self.stage, self.label, self.fingerprint)

    @property
    def versions(self) -> str:
        """The packages that made it, for people."""
        found = self.provenance.get("versions")
        named = found.items() if isinstance(found, dict) else ()
        return ", ".join(f"{name} {version}" for name, version in named if version)

    def file(self, name: str) -> File:
        for file in self.files:
            if file.name == name:
                return file
        raise DamagedArtifact(manifest_key(self.prefix), f"damaged: it names no {name}")

    def fact(self, name: str) -> Any:
        """A fact that every artifact of the stage has."""
        if name in self.facts:
            return self.facts[name]
        raise DamagedArtifact(manifest_key(self.prefix), f"damaged: its facts lack {name}")

    def to_json(self) -> bytes:
        values = asdict(self) | {"files": [file.to_json() for file in self.files]}
        return json.dumps(values, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, body: bytes, where: str = "a manifest") -> Self:
        """DamagedRecord, or NewerRecord."""
        return record_in(cls, body, where, FORMAT, LARGE_BYTES)


@dataclass(frozen=True)
class TokensFacts(StoredRecord):
    """Of the facts of tokens, those that other stages and reports compute with."""

    tokens: Count = 0
    train_tokens: Count = 0
    val_tokens: Count = 0
    shards: dict[Key, Count] = field(default_factory=dict)  # tokens by name
    max_ids: dict[Key, Count] = field(default_factory=dict)  # the largest id by name
    rows: dict[Key, Count] = field(default_factory=dict)  # of packed shards, by name
    eot: Count | None = None  # begins their documents
    cropped_tokens: Count = 0  # of the training split, in no row


@dataclass(frozen=True)
class TrainFacts(StoredRecord):
    """Of the facts of a training, those that other stages and reports compute with."""

    steps: Count = 0


FACTS: dict[str, type[Any]] = {"tokenize": TokensFacts, "train": TrainFacts}


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """sha256 of the identity as canonical JSON: sorted keys, no spaces, no NaN."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return sha256(text.encode()).hexdigest()


def read_manifest(store: Store, prefix: str) -> Manifest | None:
    """The manifest under `prefix`, or None if the artifact does not exist (yet)."""

    def decode(body: bytes, where: str) -> Manifest:
        manifest = Manifest.from_json(body, where)
        check_facts(manifest, f"{where}: facts")
        matches = manifest.stage in FOLDERS and fingerprint_of(manifest.identity) == manifest.fingerprint
        if not (matches and manifest.prefix == prefix):
            raise DamagedRecord(where, "its identity and its fingerprint do not match")
        return manifest

    try:
        return decoded_at(store, manifest_key(prefix), decode)
    except DamagedRecord as error:
        where = f"{store.uri}/{manifest_key(prefix)}"
        raise DamagedArtifact(where, str(error).removeprefix(f"{where}: ")) from error


def check_facts(manifest: Manifest, where: str) -> None:
    """DamagedRecord unless the facts have the types that readers compute with. A name with a slash is a metric."""
    if kind := FACTS.get(manifest.stage):
        typed(kind, {name: manifest.facts[name] for name in kind.__dataclass_fields__ if name in manifest.facts}, where)
    typed(dict[str, Number | None], {name: fact for name, fact in manifest.facts.items() if "/" in name}, where)


def find(store: Store, plan: ArtifactPlan) -> Manifest | None:
    """The finished artifact of a plan; None if it does not exist (yet)."""
    manifest = read_manifest(store, plan.prefix)
    assert manifest is None or manifest.fingerprint == plan.fingerprint, f"two artifacts share {plan.prefix}"
    return manifest


def commit(store: Store, manifest: Manifest, scratch: Iterable[str] = ()) -> Manifest:
    """Make the artifact exist, and delete the keys of its `scratch`. If another process has committed it first, return
    that manifest.

    StoreUnavailable if the store lost a file of it meanwhile: the next attempt makes that again.
    """
    stored = {entry.key: entry.size for entry in store.entries(f"{manifest.prefix}/")}
    own = [file for file in manifest.files if file.at is None]
    lost = [key for file in own if stored.get(key := f"{manifest.prefix}/{file.key}") != file.size]
    if not lost and store.create(manifest_key(manifest.prefix), manifest.to_json()):
        with suppress(StoreUnavailable):  # then gc deletes them
            side_by_side(lambda key: store.delete(f"{manifest.prefix}/{key}"), scratch)
        return manifest
    winner, where = read_manifest(store, manifest.prefix), f"{store.uri}/{manifest_key(manifest.prefix)}"
    if winner is None:
        if not lost:
            raise DamagedArtifact(where, "exists but is not a manifest", "delete it and run again")
        raise StoreUnavailable(f"{store.uri}/{lost[0]}: removed before {manifest_key(manifest.prefix)} was written")
    return winner


def upload(
    store: Store,
    prefix: str,
    attempt: int,
    path: Path,
    name: str | None = None,
    check: Check | None = None,
) -> File:
    """Store a local file as part of an artifact, in the folder of this attempt. An exception of `check` ends
    the work."""
    name = name or path.name
    key, size = f"{file_folder(attempt)}/{name}", path.stat().st_size
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as beside:
        digest = beside.submit(sha256_of, path, check)
        store.upload(path, f"{prefix}/{key}", check)
    return File(name, key, size, digest.result())


def scratch(home: Path, store: Store, prefix: str) -> Path:
    """This machine's scratch for an artifact of `store`, with a folder for each attempt. Each store has its own."""
    return home / "work" / sha256(store.uri.encode()).hexdigest()[:SHORT] / prefix


def place_of(store: Store, prefix: str, file: File, places: Collection[str] = ()) -> tuple[Store, str]:
    """The store that holds a file of the artifact `prefix` of `store`, and its key there.

    DamagedArtifact for another store than `places`, those that the recipe names: a manifest alone leads nowhere else.
    """
    if file.at is None:
        return store, f"{prefix}/{file.key}"
    if file.at != HERE and file.at not in places:
        what = f"names {shown(file.name)} in {shown(file.at)}, which tokens.source does not name"
        raise DamagedArtifact(f"{store.uri}/{manifest_key(prefix)}", what)
    return (store if file.at == HERE else _other_store(file.at)), file.key


@lru_cache(maxsize=16)
def _other_store(uri: str) -> Store:
    return open_store(uri)


def fetch(store: Store, prefix: str, file: File, cache: Path, places: Collection[str] = ()) -> Path:
    """A local, verified copy of an artifact's file; in a local store the file itself. `places`: see `place_of`.

    Several processes may fetch the same file: one downloads it, the others wait.
    """
    store, key = place_of(store, prefix, file, places)
    if isinstance(store, LocalStore):
        path = store.path_of(key)
        verify(store, key, file, path)
        return path
    path = cache / file.sha256 / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with (cache / f"lock-{file.sha256[0]}").open("w") as lock:  # sixteen, which stay: a few files share each
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_intact(path, file):
            download_verified(store, key, file, path)
            seal(path, file.sha256)
    return path


def fetch_folder(store: Store, manifest: Manifest, cache: Path, folder: Path) -> Path:
    """`folder`, made, with links to verified local copies of the files at the top of an artifact."""
    folder.mkdir(parents=True)
    for file in manifest.files:
        if "/" not in file.name:
            (folder / file.name).symlink_to(fetch(store, manifest.prefix, file, cache).absolute())
    return folder


def download_verified(store: Store, key: str, file: File, path: Path) -> None:
    """Download the file that a manifest names, stored under `key`, to `path`, where it appears once it is verified. See
    `verify`."""
    arriving = path.with_name(f"{PARTIAL}{path.name[:40]}-{file.sha256[:16]}")

    def download() -> None:
        digest = None
        with suppress(FileNotFoundError):  # `verify` names the missing object
            digest = store.download(key, arriving)
        verify(store, key, file, arriving, digest)

    try:
        read_again(store, download, DamagedArtifact)
        arriving.rename(path)
    finally:
        arriving.unlink(missing_ok=True)


def keep_copy(path: Path, file: File, cache: Path) -> None:
    """Link an uploaded file into the cache, so that the next stage on this machine does not download it."""
    with suppress(OSError):  # another file system, or a second attempt
        (copy := cache / file.sha256 / file.name).parent.mkdir(parents=True, exist_ok=True)
        os.link(path, copy)
        seal(copy, file.sha256)


def seal(path: Path, sha256: str) -> None:
    """Date a cached file by the sha256 of its verified bytes, so that any later write shows in its date. The access
    time is that of its last use: a cache of shards removes the oldest first."""
    with suppress(PermissionError):  # another user's file, which is hashed again and again
        os.utime(path, ns=(time.time_ns(), _date_of(sha256)))


def is_intact(path: Path, file: File) -> bool:
    """Whether a cached copy has the bytes that the manifest names: by its size and its seal. A small file, and one
    without a seal, is hashed, and sealed if it is right."""
    try:
        status = os.stat(path)
        if status.st_size != file.size or not stat.S_ISREG(status.st_mode):
            return False
        sealed = file.size > SMALL and status.st_mtime_ns == _date_of(file.sha256)
        if not sealed and sha256_of(path) != file.sha256:
            return False
        seal(path, file.sha256)
        return True
    except ABSENT:
        return False


def _date_of(sha256: str) -> int:
    return int(sha256[:7], 16) * 10**9  # nanoseconds: a second of the years 1970 to 1978


def verify(store: Store, key: str, file: File, path: Path, digest: str | None = None) -> None:
    """DamagedArtifact if the file at `path` is not the one that the manifest names, stored under `key`. `digest`: its
    sha256, if that is known."""
    damage = None
    with unavailable_if_failing(path):
        try:
            if (size := os.stat(path).st_size) != file.size:
                damage = f"{size} bytes long, but {file.size} bytes in its manifest"
            elif (digest or sha256_of(path)) != file.sha256:
                damage = "different from its manifest (sha256 differs)"
        except ABSENT:
            damage = "missing"
    if damage and file.at not in (None, HERE):
        what = f"changed after it was adopted: it is {damage}"
        raise DamagedArtifact(f"{store.uri}/{key}", what, "run again to adopt it anew")
    if damage:
        manifests = manifest_key(artifact_of(key)) + " and that of the mixture" * (file.at == HERE)
        raise DamagedArtifact(f"{store.uri}/{key}", f"damaged: it is {damage}", f"remove {manifests} to build it again")


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields (dotted) in which two identities differ, with both values."""
    flat_a, flat_b = flat(a), flat(b)
    keys = dict.fromkeys([*flat_a, *flat_b])
    return {k: (flat_a.get(k), flat_b.get(k)) for k in keys if flat_a.get(k) != flat_b.get(k)}


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The fields (dotted) with their values."""
    fields: dict[str, Any] = {}
    for key, value in values.items():
        fields |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return fields
