"""Whatever somebody writes into the records of a store, a command that reads them ends without a traceback."""

from dataclasses import replace
from pathlib import Path

import in_process
import pytest
from run_records import RUN, TRAIN, attempted, committed, done_run, finished, row, segment

from pipelines.store.manifest import File
from pipelines.store.records import Progress
from pipelines.store.runs import Run, store_summary
from pipelines.store.stop_request import request_stop
from pipelines.user.cloud.request import LaunchRecord, LaunchRequest, write_launch
from pipelines.user.verbs.node import reporting
from trainer.base.store import LocalStore
from trainer.config.errors import Interrupted
from trainer.data.shards import shard_bytes

COMMANDS = (
    ["report"],
    ["report", "--json"],
    ["report", RUN],
    ["report", RUN, "--series"],
    ["report", "--html", "page.html"],
    ["status"],
    ["status", RUN, "--json"],
    ["gc", "--dry-run"],
    ["plan", f"run:{RUN}"],
    ["pull", RUN, "pulled"],
)


@pytest.fixture(autouse=True)
def _skypilot_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise `status` starts its server, on a port that every test of the machine shares."""

    def reach_api_server(note: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr("pipelines.user.cloud.control.reach_api_server", reach_api_server)


@pytest.fixture
def records(store: LocalStore) -> dict[str, bytes]:
    """The records of a run that has trained, evaluated and exported, and whose second attempt has a commit."""
    shards = {"train_000000.bin": 300_000}
    files = tuple(File(name, f"a0001/{name}", shard_bytes(tokens), "0" * 64) for name, tokens in shards.items())
    finished(store, "tokenize", files, shards=shards)
    record = done_run(store)
    attempted(store, "train", 2, state="running", progress=Progress(step=200, metrics={"train/loss": 2.5}))
    committed(store, 200, attempt=2)
    segment(store, 2, 1, [row(1, 5.0), row(2, 4.0) | {"samples": ["a text"], "data/checksum": 12}])
    write_launch(store, LaunchRecord(LaunchRequest(RUN, store.uri), ["train"], [3], [], 1.0, "here"))
    request_stop(store, RUN, "enough")
    unfinished = replace(record, prefixes=record.prefixes | {"export": "export/other-12345678"})
    store_summary(Run(store, unfinished))
    return {entry.key: store.get(entry.key) or b"" for entry in store.entries("")}


def check(store: LocalStore, folder: Path, command: list[str], what: str) -> None:
    environment = {"SKYTRAIN_STORE": store.uri, "SKYTRAIN_HOME": str(folder / "home"), "SKYTRAIN_TRACKING": "off"}
    done = in_process.skytrain(folder, environment, *command)
    assert "Traceback" not in done.stderr and done.returncode in (0, 1, 2), f"{command} {what}: {done.stderr[-500:]}"


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        (f"{TRAIN}/metrics/step-00000002-a0001.jsonl", b'"time": 1.0, ', b""),
        (f"{TRAIN}/metrics/step-00000002-a0001.jsonl", b"5.0", b"1.7e308"),
        (f"{TRAIN}/attempts/0002/heartbeat.json", b'"step": 200', b'"step": -3'),
        (f"runs/{RUN}.json", b'"model": {', b'"model": 3, "other": {'),
        (f"runs/{RUN}.json", b'"formats": [', b'"formats": 3, "other": ['),
        (f"{TRAIN}/attempts/0002/heartbeat.json", b'"phases": {', b'"phases": {"a": [' + b"0," * (1 << 20) + b"0],"),
    ],
)
def test_a_damage_that_ended_a_command_with_a_traceback_once_does_not(
    store: LocalStore, tmp_path: Path, records: dict[str, bytes], key: str, old: bytes, new: bytes
) -> None:
    assert old in records[key]
    store.put(key, records[key].replace(old, new))
    for command in COMMANDS:
        check(store, tmp_path, command, key)


def test_an_error_of_the_report_of_a_run_changes_no_ending(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Interrupted):
        try:
            raise Interrupted("SIGTERM")
        finally:
            with reporting():
                raise KeyError("time")
    assert "its report failed: KeyError: 'time'" in capsys.readouterr().err
