"""Artifacts, the data between stages: a directory of files that exists once its manifest does.

An artifact lies under `<folder>/<label>-<fingerprint>/` of a store. Each attempt writes its files into its own folder
(`a0001/`). So nothing overwrites a file, not even a node that seemed dead. MANIFEST.json is *created* last and names
every file with key, size and sha256. The fingerprint is the sha256 of the canonical identity: all values that decide
the bytes, and no others.
"""

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from trainer.errors import StoreUnavailable, UserError, refuse_newer
from trainer.store import LocalStore, Store, checked_key, sha256_of

FORMAT = 1
FOLDERS = {"tokenize": "tokens", "train": "train", "evaluate": "evaluate", "export": "export"}
MAX_BYTES = 5 << 40  # of a file: the most that an object in S3 holds
SHORT = 8  # hex digits of a fingerprint in names; the manifest holds all 64


class DamagedArtifact(UserError):
    """A manifest is unreadable, or a file differs from its manifest."""


@dataclass(frozen=True)
class File:
    """A file of an artifact: its name for users, its key below the artifact, its size in bytes and its sha256."""

    name: str
    key: str
    size: int
    sha256: str

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """A file as a record of the store names it; readers may join its parts to paths. ValueError, TypeError or
        AttributeError for a name or a key that is no plain relative path, or for another damage."""
        file = cls(**values)
        checked_key(file.name)
        checked_key(file.key)
        if not (isinstance(file.size, int) and 0 <= file.size <= MAX_BYTES):
            raise ValueError(f"no size of a file: {file.size!r}")
        if not re.fullmatch("[0-9a-f]{64}", file.sha256):
            raise ValueError(f"no sha256: {file.sha256!r}")
        return file


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
        return prefix_of(self.stage, self.label, self.fingerprint)


@dataclass(frozen=True)
class Manifest:
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
    attempt: int
    created: float  # unix seconds
    format: int = FORMAT

    @property
    def prefix(self) -> str:
        return prefix_of(self.stage, self.label, self.fingerprint)

    def file(self, name: str) -> File:
        for file in self.files:
            if file.name == name:
                return file
        raise DamagedArtifact(
            f"{key_of(self.prefix)}: damaged: it names no {name}; remove it to build the artifact again"
        )

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """ValueError, TypeError, KeyError or AttributeError for a damaged manifest; UserError for a newer format."""
        values = json.loads(body)
        refuse_newer("a manifest", values, cls, FORMAT)
        return cls(**values | {"files": tuple(File.from_json(file) for file in values["files"])})


def prefix_of(stage: str, label: str, fingerprint: str) -> str:
    """The prefix of an artifact in the store, such as train/gpt2-124m-0f3a9c21."""
    return f"{FOLDERS[stage]}/{label}-{fingerprint[:SHORT]}"


def key_of(prefix: str) -> str:
    """The key of the manifest of the artifact under `prefix`."""
    return f"{prefix}/MANIFEST.json"


def fingerprint_of(identity: Mapping[str, Any]) -> str:
    """sha256 of the identity as canonical JSON: sorted keys, no spaces, no NaN."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return sha256(text.encode()).hexdigest()


def read_manifest(store: Store, prefix: str) -> Manifest | None:
    """The manifest under `prefix`, or None if the artifact does not exist (yet)."""
    key = key_of(prefix)
    body = store.get(key)
    if body is None:
        return None
    try:
        manifest = Manifest.from_json(body)
        matches = fingerprint_of(manifest.identity) == manifest.fingerprint and manifest.prefix == prefix
    except UserError as error:
        raise UserError(f"{store.uri}/{key}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedArtifact(
            f"{store.uri}/{key}: damaged ({error!r}); remove it to build the artifact again"
        ) from error
    if not matches:
        raise DamagedArtifact(
            f"{store.uri}/{key}: its identity and its fingerprint do not match; remove it to build the artifact again"
        )
    return manifest


def find(store: Store, plan: ArtifactPlan) -> Manifest | None:
    """The finished artifact of a plan; None if it does not exist (yet)."""
    manifest = read_manifest(store, plan.prefix)
    assert manifest is None or manifest.fingerprint == plan.fingerprint, f"two artifacts share {plan.prefix}"
    return manifest


def commit(store: Store, manifest: Manifest) -> Manifest:
    """Make the artifact exist. If another process has committed it first, return that manifest.

    StoreUnavailable if the store lost a file of it meanwhile: the next attempt makes that again.
    """
    stored = {entry.key: entry.size for entry in store.entries(f"{manifest.prefix}/")}
    lost = [key for file in manifest.files if stored.get(key := f"{manifest.prefix}/{file.key}") != file.size]
    if not lost and store.create(key_of(manifest.prefix), manifest.to_json()):
        return manifest
    winner = read_manifest(store, manifest.prefix)
    if winner is None:
        assert lost, f"{key_of(manifest.prefix)} was removed"
        raise StoreUnavailable(f"{store.uri}/{lost[0]}: removed before {key_of(manifest.prefix)} was written")
    return winner


def upload(store: Store, prefix: str, attempt: int, path: Path, name: str | None = None) -> File:
    """Store a local file as part of an artifact, in the folder of this attempt."""
    name = name or path.name
    file = File(name, f"a{attempt:04d}/{name}", path.stat().st_size, sha256_of(path))
    store.upload(path, f"{prefix}/{file.key}")
    return file


def scratch(home: Path, store: Store, prefix: str) -> Path:
    """This machine's scratch for an artifact of `store`, with a folder for each attempt. Each store has its own."""
    return home / "work" / sha256(store.uri.encode()).hexdigest()[:SHORT] / prefix


def fetch(store: Store, prefix: str, file: File, cache: Path) -> Path:
    """A local, verified copy of an artifact's file; in a local store the file itself.

    Several processes may fetch the same file: one downloads it, the others wait.
    """
    key = f"{prefix}/{file.key}"
    if isinstance(store, LocalStore):
        path = store.path_of(key)
        verify(store, key, file, path)
        return path
    path = cache / file.sha256 / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            arriving = path.with_suffix(path.suffix + ".arriving")
            try:
                store.download(key, arriving)
            except FileNotFoundError:
                arriving.unlink(missing_ok=True)
            verify(store, key, file, arriving)
            arriving.rename(path)
        os.utime(path)  # the use: gc removes what nobody has used for long
    return path


def verify(store: Store, key: str, file: File, path: Path) -> None:
    """DamagedArtifact if the file at `path` is not the one that the manifest names, stored under `key`."""
    damage = None
    if not path.exists():
        damage = "missing"
    elif path.stat().st_size != file.size:
        damage = f"{path.stat().st_size} bytes long, but {file.size} bytes in its manifest"
    elif sha256_of(path) != file.sha256:
        damage = "different from its manifest (sha256 differs)"
    if damage:
        artifact = key.removesuffix(f"/{file.key}")
        raise DamagedArtifact(
            f"{store.uri}/{key}: damaged: it is {damage}; remove {key_of(artifact)} to build it again"
        )


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields (dotted) in which two identities differ, with both values."""
    flat_a, flat_b = _flat(a), _flat(b)
    keys = dict.fromkeys([*flat_a, *flat_b])
    return {k: (flat_a.get(k), flat_b.get(k)) for k in keys if flat_a.get(k) != flat_b.get(k)}


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return flat
