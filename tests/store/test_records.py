"""The records of runs in the store, as literal JSON: a record that is read and written again has the same bytes."""

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from run_records import places

from pipelines.run.run_record import RunRecord
from pipelines.run.text.receipts import ShardReceipt
from pipelines.store.manifest import Manifest
from pipelines.store.records import Heartbeat
from pipelines.store.stop_request import StopRequest
from pipelines.user.cloud.request import LaunchRecord
from trainer.base.record import DamagedRecord, NewerRecord, decoded, decoded_at, record_in
from trainer.base.store import Entry, LocalStore
from trainer.checkpoint.commits import FileReceipt

CLAIM: dict[str, Any] = {
    "run": "smoke-53b25487",
    "stage": "train",
    "attempt": 2,
    "state": "running",
    "started": 1795372566.5,
    "time": 1795372663.75,
    "price_per_hour": None,
    "process": {"machine": "vm/08195dac/pid:[4026531836]", "pid": 97, "started": "669643"},
    "phases": {},
    "progress": {},
    "price_source": "unknown: neither SKYTRAIN_PRICES nor --price-per-hour is given",
    "nodes": 1,
    "machine": {},
}
HEARTBEAT = CLAIM | {
    "price_per_hour": 3.0,
    "process": CLAIM["process"] | {"children": [{"pid": 98, "started": "669967"}]},
    "phases": {"setup": 7.5, "train": 52.25},
    "progress": {
        "step": 40,
        "time": 1795372662.425,
        "resumed_from": 0,
        "highest_step": 40,
        "steps_done": 40,
        "steps_redone": 3,
        "save_seconds": 0.125,
        "world_size": 8,
        "device": "NVIDIA H100",
        "precision": "bf16",
        "notice": "SIGTERM",
        "train/loss": 3.25,
        "data/digest": 36744963169,
    },
    "machine": {
        "cloud": "aws",
        "region": "us-east-1",
        "zone": "us-east-1a",
        "instance": "p5.48xlarge",
        "spot": False,
        "accelerators": "H100:8",
        "on_demand_per_hour": 98.5,
        "cluster": "smoke-1",
    },
}
TOKENIZE = CLAIM | {"stage": "tokenize", "progress": {"tokens": 0, "tokens_per_second": 0.0}}
STANDBY = CLAIM | {"progress": {"waiting": True}}
PREFIXES = {"tokenize": "tokens/t-0", "train": "train/a-1"}
RUN: dict[str, Any] = {"run": "a-1", "recipe": {"name": "a"}, "until": "train", "prefixes": PREFIXES, "updated": 1.5}
RUN |= {"earlier": {"train": ["train/a-0"]}, "experiment": "speed", "store_id": "9f8e7d6c"}
FILE = {"name": "train_000000.bin", "key": "a0001/train_000000.bin", "size": 4001024, "sha256": "3abd" * 16}
MANIFEST = {
    "attempt": 1,
    "created": 1795372663.5,
    "facts": {"sources": [], "steps": 40},
    "files": [{name: FILE[name] for name in sorted(FILE)}],
    "fingerprint": "53b2",
    "format": 1,
    "identity": {"stage": "train"},
    "inputs": {"tokenize": "9d11"},
    "label": "smoke",
    "provenance": {"git_dirty": False, "image": None},
    "run": "smoke-53b25487",
    "stage": "train",
}
STOP = {"time": 1.5, "by": "me@laptop", "reason": "enough"}
SHARD = {"file": FILE, "tokens": 2_000_000, "document": 233, "offset": 28063}
SHARD |= {"max_id": 255, "rows": None, "encoder": None, "invalid": 0}
CHECKPOINT_FILE = {"name": "rank-00000-of-00001.safetensors", "size": 9, "sha256": "ab" * 32}
CHECKPOINT_FILE |= {"chunk_bytes": 9, "chunks": ["cd" * 32]}
# Objects whose names are free: settings of a recipe, names of machines' phases, names of a user's variables.
OPEN = {"recipe", "identity", "facts", "provenance", "inputs"}
OPEN |= {"prefixes", "earlier", "tags", "phases", "variables", "child_paths"}
REQUEST = {
    "run": "a-1",
    "store": "s3://bucket/prefix",
    "until": "export",
    "infra": None,
    "spot": None,
    "nodes": 1,
    "gpus": None,
    "image": "none",
    "budget": None,
    "deadline": None,
    "variables": {"HF_HUB_OFFLINE": "1"},
    "store_id": "9f8e7d6c",
}
LAUNCH = {
    "request": REQUEST,
    "stages": ["train", "export"],
    "jobs": [3],
    "secrets": ["HF_TOKEN"],
    "time": 2.5,
    "server": "here/me",
}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Heartbeat, CLAIM),
        (Heartbeat, HEARTBEAT),
        (Heartbeat, TOKENIZE),
        (Heartbeat, STANDBY),
        (RunRecord, RUN),
        (Manifest, MANIFEST),
        (LaunchRecord, LAUNCH),
    ],
)
def test_a_record_of_the_store_is_written_as_it_was_read(kind: Any, values: dict[str, Any]) -> None:
    body = json.dumps(values, indent=1).encode()
    assert kind.from_json(body).to_json() == body


# Each record of the store by name: its reader, and a sound record.
RECORDS: dict[str, tuple[Callable[[bytes], Any], dict[str, Any]]] = {
    "heartbeat": (Heartbeat.from_json, HEARTBEAT),
    "run": (RunRecord.from_json, RUN),
    "manifest": (Manifest.from_json, MANIFEST),
    "launch": (LaunchRecord.from_json, LAUNCH),
    "stop request": (lambda body: record_in(StopRequest, body, "stop"), STOP),
    "receipt of a shard": (lambda body: ShardReceipt.from_json(decoded(body, "shard")), SHARD),
    "receipt of a checkpoint": (lambda body: record_in(FileReceipt, body, "receipt"), CHECKPOINT_FILE),
}


def with_value(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy of a record with another value at a path."""
    copied = json.loads(json.dumps(values))
    inside = copied
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    return copied


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_record_with_the_format_of_a_newer_skytrain_asks_for_an_upgrade(name: str) -> None:
    read, values = RECORDS[name]
    assert read(json.dumps(values).encode())
    with pytest.raises(NewerRecord, match="written by a newer skytrain .*; upgrade skytrain"):
        read(json.dumps(values | {"format": 2}).encode())


@pytest.mark.parametrize("name", RECORDS)
def test_a_field_that_this_version_does_not_know_is_ignored_anywhere_in_a_record(name: str) -> None:
    read, values = RECORDS[name]
    plain = read(json.dumps(values).encode())
    for place in [(), *places(values)]:
        inside = reduce(lambda one, part: one[part], place, values)
        if isinstance(inside, dict) and not (place and place[-1] in OPEN):
            body = with_value(values, place, inside | {"mood": "good"}) if place else values | {"mood": "good"}
            assert read(json.dumps(body).encode()) == plain


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("name", RECORDS)
def test_a_value_of_another_type_anywhere_in_a_record_is_damage_and_never_a_fault(name: str) -> None:
    read, values = RECORDS[name]
    whole = json.dumps(values).encode()
    hostile = [b"", b"3", b"\xff\xfe", b"null", whole[:-2], b"[" * 100_000, b'{"a":' * 100_000]
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    others: list[Any] = [int("9" * 400), 1 << 60, 1e999, deep, "../../x", True, [[]], {"a": {}}, -1, "\ud800"]
    for place in places(values):
        for value in others:
            hostile.append(json.dumps(with_value(values, place, value)).encode())
    hostile.append(whole.replace(b": 1", b": " + b"9" * 6000, 1))
    refused = 0
    for body in hostile:
        try:
            read(body)
        except (DamagedRecord, NewerRecord) as error:
            refused += 1
            assert len(str(error)) < 600 and "\n" not in str(error)
    assert refused > 0.5 * len(hostile)  # free texts may hold anything


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "a//b", "a\0b", "", ".", "x" * 300, "a/" * 600 + "a", "\ud800"]
)
def test_no_name_of_a_record_leads_outside_its_folder(name: str) -> None:
    for record, place in (
        ("manifest", ("files", 0, "name")),
        ("manifest", ("files", 0, "key")),
        ("receipt of a shard", ("file", "key")),
        ("receipt of a checkpoint", ("name",)),
        ("run", ("prefixes", "train")),
        ("run", ("earlier", "train", 0)),
        ("run", ("run",)),
        ("launch", ("request", "run")),
    ):
        read, values = RECORDS[record]
        with pytest.raises(DamagedRecord):
            read(json.dumps(with_value(values, place, name)).encode())


def test_sums_of_files_have_their_form() -> None:
    for digest in ("AB" * 32, "ab" * 31, "../" + "ab" * 31, "ab" * 32 + "\n"):
        with pytest.raises(DamagedRecord):
            Manifest.from_json(json.dumps(with_value(MANIFEST, ("files", 0, "sha256"), digest)).encode())


def test_a_record_that_is_created_between_a_read_and_a_listing_is_read(tmp_path: Path) -> None:
    class Racing(LocalStore):
        def entries(self, prefix: str) -> list[Entry]:
            self.put(prefix, b'{"made": "by another process"}')
            return super().entries(prefix)

    assert decoded_at(Racing(tmp_path), "record.json", decoded) == {"made": "by another process"}
