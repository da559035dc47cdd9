"""The records of runs in the store, as literal JSON: a record that is read and written again has the same bytes."""

import json
from typing import Any

import pytest

from pipelines.artifacts.manifest import Manifest
from pipelines.cloud.request import LaunchRecord
from pipelines.text.parts import ShardReceipt
from pipelines.tracking.account import StoredHeartbeat, account
from pipelines.tracking.clusters import Interval
from pipelines.tracking.mlflow.journal import Metrics, Sample, record_from_json
from pipelines.tracking.records import Heartbeat, Machine, Progress
from pipelines.tracking.runs import RunRecord
from pipelines.tracking.stop_request import StopRequest
from trainer.errors import UserError

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
        "lowest_step": 0,
        "highest_step": 40,
        "steps_done": 40,
        "steps_redone": 3,
        "rollbacks": 1,
        "committed_step": 40,
        "checkpoint_failed": 30,
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
STANDBY = CLAIM | {"progress": {"waiting": True, "watch_failed": "ValueError()"}}
RUN = {"run": "a-1", "recipe": {"name": "a"}, "until": "train", "prefixes": {"train": "train/a-1"}, "updated": 1.5}
FILE = {"name": "train_000000.bin", "key": "a0001/train_000000.bin", "size": 4001024, "sha256": "3abd" * 16}
MANIFEST = {
    "attempt": 1,
    "created": 1795372663.5,
    "facts": {"rollbacks": [], "steps": 40},
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
}
LAUNCH = {
    "wish": REQUEST,
    "stages": ["train", "export"],
    "jobs": [3],
    "secrets": ["HF_TOKEN"],
    "time": 2.5,
    "earlier": [{"time": 1.5, "stages": ["train"], "jobs": [1, 2]}],
}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Heartbeat, CLAIM),
        (Heartbeat, HEARTBEAT),
        (Heartbeat, TOKENIZE),
        (Heartbeat, STANDBY),
        (RunRecord, RUN | {"earlier": {"train": ["train/a-0"]}}),
        (Manifest, MANIFEST),
        (LaunchRecord, LAUNCH),
    ],
)
def test_a_record_of_the_store_is_written_as_it_was_read(kind: Any, values: dict[str, Any]) -> None:
    body = json.dumps(values, indent=1).encode()
    assert kind.from_json(body).to_json() == body


def test_small_records_of_the_store_are_written_as_they_were_read() -> None:
    stop = b'{"time": 1.5, "by": "me@laptop", "reason": "enough"}'
    assert StopRequest.from_json(stop).to_json() == stop
    receipt = {"file": FILE, "tokens": 2_000_000, "document": 233, "offset": 28063}
    assert json.dumps(ShardReceipt.from_json(receipt).to_json()) == json.dumps(receipt)
    interval = {"cluster": "smoke-1", "nodes": 2, "started": 1.5, "ended": None, "seen": 2.5, "price_per_hour": None}
    assert json.dumps(Interval.from_json(interval).to_json()) == json.dumps(interval)
    old = {"cluster": "smoke-1", "nodes": 2, "started": 1.5, "ended": None}
    assert Interval.from_json(old).to_json() == interval | {"seen": None}


def test_a_record_of_a_newer_format_is_refused() -> None:
    for kind, values in ((Heartbeat, CLAIM), (RunRecord, RUN), (Manifest, MANIFEST)):
        with pytest.raises(UserError, match="format 2"):
            kind.from_json(json.dumps(values | {"format": 2}).encode())


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "session", "time": 1.5, "run": "a-1", "experiment": "skytrain"}',
        b'{"kind": "stage_started", "time": 1.5, "stage": null, "params": {"train.seed": "1"}, "tags": {}}',
        b'{"kind": "metrics", "time": 1.5, "stage": "train", "step": 4, "values": {"train/loss": 3.5}, "again": false}',
        b'{"kind": "dataset", "time": 1.5, "stage": "train", "name": "tokens/a", "digest": "9d", "source": "s3://b"}',
        b'{"kind": "tags", "time": 1.5, "stage": "train", "tags": {"device": "cpu"}}',
        b'{"kind": "table", "time": 1.5, "stage": null, "name": "account.json", "columns": {"usd": [1.5]}}',
        b'{"kind": "stage_ended", "time": 1.5, "stage": "train", "status": "FINISHED"}',
        b'{"kind": "close", "time": 1.5}',
    ],
)
def test_a_line_of_the_journal_is_written_as_it_was_read(line: bytes) -> None:
    record = record_from_json(line)
    assert record and record.to_json() == line


def test_a_sample_of_the_machine_has_no_field_that_repeats_points() -> None:
    line = b'{"kind": "metrics", "time": 1.5, "stage": "train", "step": 4, "values": {"system/cpu": 99.5}}'
    assert Sample(1.5, "train", 4, {"system/cpu": 99.5}).to_json() == line
    assert record_from_json(line) == Metrics(1.5, "train", 4, {"system/cpu": 99.5})


def test_a_report_shows_a_machine_as_its_heartbeat_has_it() -> None:
    for values in (CLAIM, HEARTBEAT):
        beat = Heartbeat.from_json(json.dumps(values).encode())
        (attempt,) = account("a-1", [StoredHeartbeat("train/a-1", beat)]).to_json()["attempts"]
        assert attempt["machine"] == values["machine"]


def test_fields_that_a_newer_version_adds_to_machine_and_progress_are_left_out() -> None:
    assert Machine.from_json({"cloud": "aws", "rack": 7}) == Machine(cloud="aws")
    assert Progress.from_json({"step": 3, "mood": "fine", "val/loss": 2.0}) == Progress(
        step=3, metrics={"val/loss": 2.0}
    )
