"""An artifact exists once its manifest does, and reads always follow the manifest."""

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import S3Account

from pipelines.store.manifest import (
    ArtifactPlan,
    DamagedArtifact,
    File,
    Manifest,
    commit,
    fetch,
    find,
    fingerprint_of,
    keep_copy,
    read_manifest,
    upload,
)
from trainer.base.store import LocalStore, Store
from trainer.config.errors import NotAFile, StoreUnavailable, UserError

REPOSITORY = Path(__file__).resolve().parents[2]
PLAN = ArtifactPlan("export", "tiny", {"stage": "export", "train": "f" * 64, "dtype": "float32"})
BODY = bytes(range(256)) * 4096 + b"the end"  # 1 MiB and a bit


@pytest.fixture(params=["local", "radosgw", "moto_fallback"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "store") if request.param == "local" else remote(request, request.param)


@pytest.fixture(params=["radosgw", "moto_fallback"])
def remote_store(request: pytest.FixtureRequest) -> Store:
    return remote(request, request.param)


def remote(request: pytest.FixtureRequest, server: str) -> Store:
    fresh: Callable[[S3Account], Store] = request.getfixturevalue("fresh_s3_store")
    return fresh(request.getfixturevalue("s3_server" if server == "radosgw" else "moto_server"))


def manifest_of(plan: ArtifactPlan, files: tuple[File, ...] = (), attempt: int = 1) -> Manifest:
    return Manifest(
        stage=plan.stage,
        label=plan.label,
        fingerprint=plan.fingerprint,
        identity=plan.identity,
        inputs={"train": "f" * 64},
        files=files,
        provenance={"git_commit": None},
        facts={"parameters": 7},
        run="tiny-ffffffff",
        attempt=attempt,
        created=1.0,
    )


def finished(store: Store, folder: Path) -> Manifest:
    """An artifact of one file."""
    path = folder / "weights.bin"
    path.write_bytes(BODY)
    return commit(store, manifest_of(PLAN, (upload(store, PLAN.prefix, 1, path),)))


# --- committing


def test_an_artifact_exists_only_after_its_manifest_and_equals_the_commit(store: Store, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(BODY)
    file = upload(store, PLAN.prefix, 3, tmp_path / "weights.bin", "model.bin")
    assert find(store, PLAN) is None
    assert file == File("model.bin", "a0003/model.bin", len(BODY), sha256(BODY).hexdigest())
    made = commit(store, manifest_of(PLAN, (file,), attempt=3))
    assert find(store, PLAN) == made == read_manifest(store, PLAN.prefix)
    assert store.get(f"{PLAN.prefix}/a0003/model.bin") == BODY


def test_one_of_many_simultaneous_commits_wins_and_all_return_its_manifest(store: Store) -> None:
    racers = 12
    start = threading.Barrier(racers)

    def race(attempt: int) -> Manifest:
        start.wait()
        return commit(store, manifest_of(PLAN, attempt=attempt))

    with ThreadPoolExecutor(racers) as pool:
        returned = list(pool.map(race, range(1, racers + 1)))
    assert {m.attempt for m in returned} == {find(store, PLAN).attempt}  # type: ignore[union-attr]


def test_no_manifest_names_a_file_that_the_store_lost(store: Store, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(BODY)
    file = upload(store, PLAN.prefix, 1, tmp_path / "weights.bin")
    store.delete(f"{PLAN.prefix}/{file.key}")
    with pytest.raises(StoreUnavailable, match=f"{PLAN.prefix}/{file.key}: removed before"):
        commit(store, manifest_of(PLAN, (file,)))
    assert find(store, PLAN) is None
    other = commit(store, manifest_of(PLAN, (upload(store, PLAN.prefix, 2, tmp_path / "weights.bin"),), attempt=2))
    assert commit(store, manifest_of(PLAN, (file,))) == other


# --- damage


def rotten(**changes: Any) -> bytes:
    return json.dumps(asdict(manifest_of(PLAN)) | changes).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        rotten()[:-40],
        rotten(identity={"stage": "export", "train": "f" * 64, "dtype": "bfloat16"}),
        rotten(identity={"loss": float("nan")}),
        rotten(fingerprint="0" * 64),
        rotten(label="other"),
        rotten(files=[{"name": "x"}]),
    ],
)
def test_a_damaged_manifest_is_named_and_refused(tmp_path: Path, body: bytes) -> None:
    store = LocalStore(tmp_path)
    store.put(f"{PLAN.prefix}/MANIFEST.json", body)
    with pytest.raises(DamagedArtifact) as refused:
        read_manifest(store, PLAN.prefix)
    message = str(refused.value)
    assert message.startswith(f"{store.uri}/{PLAN.prefix}/MANIFEST.json: ")
    assert message.endswith("remove it to build the artifact again") and "\n" not in message


def test_a_manifest_of_a_newer_skytrain_is_no_damaged_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    values = json.loads(manifest_of(PLAN).to_json()) | {"format": 2}
    store.put(f"{PLAN.prefix}/MANIFEST.json", json.dumps(values).encode())
    newer = f"{PLAN.prefix}/MANIFEST.json: written by a newer skytrain .*; upgrade skytrain"
    with pytest.raises(UserError, match=newer) as refused:
        find(store, PLAN)
    assert not isinstance(refused.value, DamagedArtifact)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (None, "it is missing"),
        (b"", f"it is 0 bytes long, but {len(BODY)} bytes in its manifest"),
        (BODY[:1000] + b"\x01" + BODY[1001:], "sha256 differs"),
    ],
)
def test_a_damaged_file_is_named_and_refused_until_it_is_whole_again(
    store: Store, tmp_path: Path, damage: bytes | None, fault: str
) -> None:
    manifest = finished(store, tmp_path)
    key = f"{PLAN.prefix}/a0001/weights.bin"
    store.delete(key) if damage is None else store.put(key, damage)
    for _ in range(2):  # the file of the first try stays damaged at the second
        with pytest.raises(DamagedArtifact) as refused:
            fetch(store, PLAN.prefix, manifest.file("weights.bin"), tmp_path / "cache")
        message = str(refused.value)
        assert message.startswith(f"{store.uri}/{key}: damaged: ") and fault in message
        assert message.endswith(f"remove {PLAN.prefix}/MANIFEST.json to build it again")
    store.put(key, BODY)
    assert fetch(store, PLAN.prefix, manifest.file("weights.bin"), tmp_path / "cache").read_bytes() == BODY


@pytest.mark.parametrize(
    "damage",
    [
        {"name": "../../../../victim/sitecustomize.py"},
        {"name": "/etc/passwd"},
        {"key": "../a0001/weights.bin"},
        {"sha256": "../" * 22},
        {"size": -1},
    ],
)
def test_a_manifest_whose_files_lead_elsewhere_is_refused_and_nothing_is_fetched(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    store = LocalStore(tmp_path / "store")
    manifest = finished(store, tmp_path)
    values = asdict(manifest)
    values["files"] = [values["files"][0] | damage]
    store.put(f"{PLAN.prefix}/MANIFEST.json", json.dumps(values).encode())
    with pytest.raises(DamagedArtifact, match="remove it to build the artifact again"):
        read_manifest(store, PLAN.prefix)


def test_a_manifest_leads_to_no_store_that_the_recipe_does_not_name(tmp_path: Path) -> None:
    store, file = LocalStore(tmp_path), File("val_000000.bin", "zero", 0, sha256(b"").hexdigest(), "file:///dev")
    with pytest.raises(DamagedArtifact, match="names 'val_000000.bin' in 'file:///dev', which tokens.source does not"):
        fetch(store, PLAN.prefix, file, tmp_path / "cache")
    with pytest.raises(NotAFile, match="/dev/zero: not a regular file"):
        fetch(store, PLAN.prefix, file, tmp_path / "cache", {"file:///dev"})


# --- fetching


def test_a_cached_copy_that_was_overwritten_is_fetched_again(
    fresh_s3_store: Callable[[S3Account], Store], moto_server: S3Account, tmp_path: Path
) -> None:
    store = fresh_s3_store(moto_server)
    file = finished(store, tmp_path).files[0]
    path = fetch(store, PLAN.prefix, file, tmp_path / "cache")
    path.write_bytes(bytes(len(BODY)))
    assert fetch(store, PLAN.prefix, file, tmp_path / "cache").read_bytes() == BODY


def test_final_weights_are_not_downloaded_to_the_machine_that_made_them(
    fresh_s3_store: Callable[[S3Account], Store], moto_server: S3Account, tmp_path: Path
) -> None:
    store = fresh_s3_store(moto_server)
    file = finished(store, tmp_path).files[0]
    keep_copy(tmp_path / file.name, file, tmp_path / "cache")
    (tmp_path / file.name).unlink()
    store.delete(f"{PLAN.prefix}/{file.key}")
    assert fetch(store, PLAN.prefix, file, tmp_path / "cache").read_bytes() == BODY


def test_a_file_that_was_half_downloaded_when_its_process_was_killed_is_never_used(
    remote_store: Store, tmp_path: Path
) -> None:
    manifest = finished(remote_store, tmp_path)
    cache = tmp_path / "cache"
    child = os.fork()
    if child == 0:  # killed in the middle, holding the lock

        def half(key: str, path: Path) -> NoReturn:
            path.write_bytes(BODY[: len(BODY) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        remote_store.download = half  # type: ignore[method-assign]
        fetch(remote_store, PLAN.prefix, manifest.files[0], cache)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size]
    assert [path.stat().st_size for path in left] == [len(BODY) // 2]
    path = fetch(remote_store, PLAN.prefix, manifest.files[0], cache)
    assert path.read_bytes() == BODY
    assert [p for p in cache.rglob("*") if p.is_file() and p.stat().st_size] == [path]


# --- identities

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.dictionaries(st.text(), inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=8,
)
IDENTITIES = st.dictionaries(st.text(), VALUES, max_size=5)


@given(IDENTITIES)
def test_a_fingerprint_depends_neither_on_order_nor_on_being_stored(identity: dict[str, Any]) -> None:
    fingerprint = fingerprint_of(identity)
    assert len(fingerprint) == 64 and int(fingerprint, 16) >= 0
    assert fingerprint_of(dict(reversed(identity.items()))) == fingerprint
    assert fingerprint_of(json.loads(json.dumps(identity))) == fingerprint
