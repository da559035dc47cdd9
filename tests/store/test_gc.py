"""Garbage collection removes what nothing needs, and nothing else."""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from run_records import (
    ELSEWHERE,
    GONE,
    PLANS,
    RUN,
    TRAIN,
    attempted,
    done_run,
    finished,
    recipe_with,
    recorded,
)
from servers import S3Account

from pipelines.run.gc import Leftover, collect
from pipelines.store.layout import FOLDERS
from pipelines.store.ledger import attempts, is_alive
from pipelines.store.manifest import File
from pipelines.store.process_id import this_process
from pipelines.store.records import ProcessId
from pipelines.store.s3_store import S3Store
from pipelines.store.stop_request import request_stop
from pipelines.store.traffic import counted_together, traffic_here
from pipelines.user.verbs.gc import gc as verb_gc
from trainer.base.store import PARTIAL, LocalStore
from trainer.config.errors import UserError

DAY = 86_400.0


def put(store: LocalStore, key: str, days_old: float = 0.0) -> str:
    store.put(key, b"12345")
    then = time.time() - days_old * DAY
    os.utime(store.path_of(key), (then, then))
    return key


def age_all(store: LocalStore, days: float) -> None:
    for entry in store.entries(""):
        put_back = time.time() - days * DAY
        os.utime(store.path_of(entry.key), (put_back, put_back))


def leftovers(
    store: LocalStore, days: float, on_damage: Callable[[str], None] = lambda message: None
) -> list[Leftover]:
    return list(collect(store, days, on_damage, dry_run=True))


def found(store: LocalStore, days: float = 7.0) -> list[str]:
    return [leftover.key for leftover in leftovers(store, days)]


def test_gc_deletes_files_that_a_finished_artifacts_manifest_does_not_name(store: LocalStore) -> None:
    kept = [put(store, f"{TRAIN}/a0002/model.safetensors")]
    kept += [put(store, f"{TRAIN}/metrics/step-00000004-a0001.jsonl")]
    gone = [put(store, f"{TRAIN}/checkpoints/step-00000004-a0001/{name}") for name in ("a.safetensors", "COMMIT.json")]
    gone += [put(store, f"{TRAIN}/a0001/model.safetensors"), put(store, f"{TRAIN}/shards/000000.json")]
    attempted(store, "train")
    finished(store, "train", (File("model.safetensors", "a0002/model.safetensors", 5, "0" * 64),))
    recorded(store)
    before = {entry.key for entry in store.entries("")}
    going = found(store)
    assert sorted(going) == sorted(gone)
    assert going[0].endswith("/COMMIT.json")  # the marker first: a half deleted checkpoint has no commit
    list(collect(store, 7.0))
    assert {entry.key for entry in store.entries("")} == before - set(gone)
    assert set(kept) < before - set(gone)
    assert found(store) == []


@pytest.mark.parametrize("is_finished", [True, False])
def test_gc_keeps_the_commits_that_keep_every_steps_keeps_for_good(store: LocalStore, is_finished: bool) -> None:
    def checkpoint(step: int, *names: str) -> list[str]:
        return [put(store, f"{TRAIN}/checkpoints/step-{step:08d}-a0001/{name}") for name in names]

    checkpoint(50, "COMMIT.json", "a.st")
    gone = [*checkpoint(60, "COMMIT.json", "a.st"), *checkpoint(100, "a.st")]  # the last one was never committed
    attempted(store, "train", state="done" if is_finished else "interrupted")
    if is_finished:
        finished(store, "train")
    recorded(store, recipe=recipe_with("runtime.keep_every_steps=50"))
    age_all(store, days=8.0)
    assert sorted(found(store)) == sorted(gone)


def test_gc_removes_no_commit_while_the_record_of_a_run_cannot_be_read(store: LocalStore) -> None:
    put(store, f"{TRAIN}/checkpoints/step-00000060-a0001/COMMIT.json")
    surplus = put(store, f"{TRAIN}/a0001/surplus")
    attempted(store, "train")
    finished(store, "train")
    recorded(store)
    store.put(f"runs/{RUN}.json", b"{")
    notes: list[str] = []
    assert [e.key for e in leftovers(store, 7.0, notes.append)] == [surplus]
    assert len(notes) == 1 and notes[0].startswith(
        f"the commits of all runs stay: {RUN}: left out: {store.uri}/runs/{RUN}.json"
    )


def test_an_interrupted_run_can_be_resumed_until_it_is_old(store: LocalStore) -> None:
    sound = [put(store, f"{TRAIN}/checkpoints/step-00000004-a0001/{name}") for name in ("COMMIT.json", "a.st")]
    torn = put(store, f"{TRAIN}/checkpoints/step-00000008-a0001/a.st")
    shard = put(store, f"{PLANS['tokenize'].prefix}/a0001/val_000000.bin")
    receipt = put(store, f"{PLANS['tokenize'].prefix}/shards/000000.json")
    series = put(store, f"{TRAIN}/metrics/step-00000004-a0001.jsonl")
    for stage in ("tokenize", "train"):
        attempted(store, stage, state="interrupted")
    assert found(store) == [torn]
    age_all(store, days=6.9)
    assert found(store) == [torn]
    age_all(store, days=7.1)
    assert set(found(store)) == {*sound, torn, shard, receipt}
    assert found(store, days=8.0) == [torn]
    assert series not in found(store, days=0.0)


@pytest.mark.parametrize("process", [this_process(), ELSEWHERE])
def test_gc_deletes_nothing_of_an_attempt_that_may_be_alive(store: LocalStore, process: ProcessId) -> None:
    put(store, f"{TRAIN}/checkpoints/step-00000008-a0001/a.st", days_old=30)
    attempted(store, "train", state="running", process=process)
    assert found(store, days=0.0) == []


def test_gc_asks_a_bucket_once_for_a_run_and_once_for_a_finished_artifact(
    fresh_s3_store: Callable[[S3Account], S3Store], moto_server: S3Account
) -> None:
    store = fresh_s3_store(moto_server)
    made = done_run(store)
    store.put("runs/other-12345678.json", replace(made, run="other-12345678").to_json())
    surplus = f"{TRAIN}/a0001/surplus"
    store.put(surplus, b"12345")
    with counted_together():
        assert [one.key for one in collect(store, 7.0, dry_run=True)] == [surplus]
        asked = traffic_here()
    assert (asked.reads, asked.writes) == (2 + 4, 1 + len(FOLDERS))  # records and manifests; listings


def test_a_dry_run_lists_everything_and_deletes_nothing(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = put(store, f"{TRAIN}/checkpoints/step-00000008-a0001/a.st")
    attempted(store, "train", state="failed")
    half = store.root / TRAIN / f"{PARTIAL}1"
    half.write_bytes(b"1")
    os.utime(half, (0, 0))
    before = sorted(path for path in tmp_path.rglob("*"))
    verb_gc(store=store.uri, dry_run=True)
    output = capsys.readouterr().out
    assert torn in output and str(half) in output and f"2 objects, 6 bytes would be removed in {store.uri}" in output
    assert sorted(path for path in tmp_path.rglob("*")) == before
    verb_gc(store=store.uri, dry_run=False)
    assert capsys.readouterr().out == output.replace("would be removed", "removed")
    assert store.get(torn) is None and not half.exists()
    verb_gc(store=store.uri)
    assert capsys.readouterr().out == f"0 objects, 0 bytes removed in {store.uri}\n"


def test_a_folder_that_vanishes_while_gc_looks_for_half_written_files_is_passed_over(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, f"{TRAIN}/a0001/model.safetensors")
    scandir = os.scandir

    def vanishing(path: object) -> object:
        if str(path).endswith("/a0001"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", vanishing)
    assert found(store) == []


def abandoned(store: LocalStore) -> dict[str, list[str]]:
    """Records of an unfinished artifact of each kind, 30 days old, with the files that they name."""
    tokens, checkpoint = PLANS["tokenize"].prefix, f"{TRAIN}/checkpoints/step-00000004-a0001"
    shards = [f"{tokens}/a0001/train_{n:06d}.bin" for n in range(2)]
    named = {f"{tokens}/shards/{n:06d}.json": [shard] for n, shard in enumerate(shards)}
    named |= {f"{tokens}/parts/00.json": shards, f"{checkpoint}/COMMIT.json": [f"{checkpoint}/a.st"]}
    for key in {*named, *(file for files in named.values() for file in files)}:
        put(store, key)
    for stage in ("tokenize", "train"):
        attempted(store, stage, state="running", process=GONE)
    age_all(store, days=30.0)
    return named


def test_no_record_names_a_file_that_gc_removed_wherever_it_is_killed(store: LocalStore) -> None:
    named = abandoned(store)
    removed = 0
    for _ in collect(store, 7.0):
        removed += 1
        keys = {entry.key for entry in store.entries("")}
        assert all(file in keys for record, files in named.items() if record in keys for file in files)
    assert removed == 7


def test_a_run_that_begins_waits_until_gc_is_done(store: LocalStore) -> None:
    abandoned(store)
    for leftover in collect(store, 7.0):
        prefix = "/".join(leftover.key.split("/")[:2])
        assert is_alive(attempts(store, prefix)[-1])
        others: list[str] = []
        assert not any(one.key.startswith(prefix) for one in leftovers(store, 7.0, others.append))
    assert [is_alive(attempts(store, PLANS[stage].prefix)[-1]) for stage in ("tokenize", "train")] == [False, False]
    assert list(leftovers(store, 0.0)) == []


def test_gc_of_everything_passes_over_records_of_a_newer_skytrain_and_names_them(store: LocalStore) -> None:
    named = abandoned(store)
    tokens = PLANS["tokenize"].prefix
    beat = json.loads(store.get(f"{tokens}/attempts/0001/heartbeat.json") or b"")
    store.put(f"{tokens}/attempts/0001/heartbeat.json", json.dumps(beat | {"format": 2}).encode())
    notes: list[str] = []
    going = {one.key for one in leftovers(store, 0.0, notes.append)}
    assert going == {key for record, files in named.items() for key in (record, *files) if key.startswith(TRAIN)}
    assert len(notes) == 1 and notes[0].startswith(f"{store.uri}/{tokens}") and "format 2" in notes[0]


def test_a_run_is_removed_with_all_that_no_other_run_names(store: LocalStore) -> None:
    made = done_run(store)
    put(store, f"{TRAIN}/a0001/model.safetensors")
    request_stop(store, RUN, "a test")
    other = replace(made, run="other-12345678", prefixes={"tokenize": made.prefixes["tokenize"]}, until="tokenize")
    store.put("runs/other-12345678.json", other.to_json())
    branch = made.recipe | {"train": made.recipe["train"] | {"branch_from": f"run:{RUN}@100@sha256:{'0' * 64}"}}
    begins = replace(other, recipe=branch, prefixes=other.prefixes | {"train": "train/other-12345678"}, until="train")
    store.put("runs/other-12345678.json", begins.to_json())
    with pytest.raises(UserError, match=f"{RUN}: other-12345678 begins with it and has not trained yet"):
        verb_gc(store.uri, run=RUN)
    store.put("runs/other-12345678.json", other.to_json())
    attempted(store, "train", 2, state="running", process=this_process())
    with pytest.raises(UserError, match=f"{RUN}: an attempt works on {TRAIN}; `skytrain stop {RUN}` stops it"):
        verb_gc(store.uri, run=RUN)
    attempted(store, "train", 2, state="stopped")
    before = [entry.key for entry in store.entries("")]
    verb_gc(store.uri, dry_run=True, run="smoke")
    assert [entry.key for entry in store.entries("")] == before
    verb_gc(store.uri, run="smoke")
    tokens, claims = f"{made.prefixes['tokenize']}/", re.compile(r".*/attempts/000[23]/(claim|heartbeat)\.json")
    left = [entry.key for entry in store.entries("") if not claims.fullmatch(entry.key)]
    assert left == [*(key for key in before if key.startswith(("runs/other", "store.json", tokens)))]
    verb_gc(store.uri)
    for gone in (RUN, ""):
        with pytest.raises(UserError, match=f"{gone or 'an empty name'}: no such run"):
            verb_gc(store.uri, run=gone)
