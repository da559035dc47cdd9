"""What damages the answers of a bucket for a while damages no object: nothing is deleted, nothing starts over."""

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import Request
from faulty_proxy import Answer, Fault, FaultyProxy
from pipeline_runs import FOLDER_NAME, Project
from run_records import ELSEWHERE, PLANS, RUN, TRAIN, attempted, done_run, recipe_with, recorded
from servers import S3Account
from trainer_runs import ALONE

from pipelines.run.gc import collect, needed_by_runs
from pipelines.run.run_record import read_record
from pipelines.store.layout import manifest_key, run_key
from pipelines.store.ledger import attempts
from pipelines.store.s3_store import S3Store
from trainer.base.events import EventLog, Warned
from trainer.base.metrics import PhaseClock
from trainer.base.store import LocalStore, Store
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState, committed_folders, committed_state, series
from trainer.checkpoint.layout import step_of
from trainer.checkpoint.pieces import Piece
from trainer.config.errors import StoreUnavailable, UserError

PASSES_AFTER = 2.0  # seconds


@pytest.fixture
def direct(fresh_s3_store: Callable[[S3Account], S3Store], moto_server: S3Account) -> S3Store:
    return fresh_s3_store(moto_server)


@pytest.fixture
def proxy(moto_server: S3Account) -> Iterator[FaultyProxy]:
    with FaultyProxy(moto_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def behind(direct: S3Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return S3Store(direct.bucket, "some/prefix", time_limit_s=30)


def flipped(body: bytes) -> bytes:
    at = len(body) // 2
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def flips(answer: Answer) -> Answer:
    return answer[0], flipped(answer[1]), answer[2]


def garbles(answer: Answer) -> Answer:
    return answer[0], b"#" * len(answer[1]), answer[2]


def is_absent(answer: Answer) -> Answer:
    return 404, b"<Error><Code>NoSuchKey</Code><Message>not here</Message></Error>", {}


def damaging(how: Callable[[Answer], Answer], keys: str, seconds: float = PASSES_AFTER) -> Any:
    """Damages the answers to reads of the objects whose keys match, from the first one on, for so many seconds."""
    until: list[float] = []

    def change(request: Request, answer: Answer) -> Answer:
        if request.command != "GET" or answer[0] >= 300 or not re.search(keys, request.path.partition("?")[0]):
            return answer
        until.append(time.monotonic() + seconds)
        return how(answer) if time.monotonic() < until[0] else answer

    return change


def pieces(value: float) -> dict[str, Piece]:
    return {"model.a": Piece.whole(torch.full((3000,), float(value)))}


def commit(store: Store, *steps: int, **options: Any) -> Checkpointer:
    log, one, live = EventLog(None, PhaseClock()), Checkpointer(store, TRAIN, ALONE, 1, **options), pieces(0)
    for step in steps:
        log.row(step, {"train/loss": 1.0})
        live["model.a"].live.fill_(step)
        one.save(TrainState(step=step), live, log)
    one.finish(log)
    return one


@pytest.mark.parametrize(
    ("how", "keys"),
    [
        (flips, "/checkpoints/"),
        (is_absent, "/checkpoints/"),
        pytest.param(flips, r"\.safetensors$", marks=pytest.mark.slow),
        pytest.param(garbles, r"COMMIT\.json$", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_arrives_damaged_for_two_seconds_is_loaded_and_nothing_is_deleted(
    direct: S3Store, behind: S3Store, proxy: FaultyProxy, how: Callable[[Answer], Answer], keys: str
) -> None:
    commit(direct, 1, 2)
    proxy.change = damaging(how, keys)
    events: list[Any] = []
    resumed, found = Checkpointer(behind, TRAIN, ALONE, 2), pieces(-1)
    state = resumed.load_latest(found, log := EventLog(None, PhaseClock(), watch=events.append))
    assert state and state.step == 2 and bool((found["model.a"].live == 2).all())
    assert not [event for event in events if isinstance(event, Warned)]
    resumed.save(TrainState(step=3), pieces(3), log)
    resumed.finish(log)
    assert [step_of(folder) for folder in committed_folders(direct, TRAIN)] == [3, 2]


@pytest.mark.parametrize("how", [garbles, is_absent])
def test_records_that_arrive_damaged_for_two_seconds_are_read_as_they_are(
    direct: S3Store, behind: S3Store, proxy: FaultyProxy, how: Callable[[Answer], Answer]
) -> None:
    commit(direct, 1, 2)
    attempted(direct, "train", state="interrupted")
    recorded(direct)
    reads: list[Callable[[Store], Any]] = [
        lambda store: attempts(store, TRAIN),
        lambda store: committed_state(store, TRAIN),
        lambda store: series(store, TRAIN),
        lambda store: read_record(store, RUN),
    ]
    for read in reads:
        proxy.change = damaging(how, r"\.jsonl?$")
        assert read(behind) == read(direct)


def test_gc_deletes_nothing_of_an_artifact_whose_records_do_not_arrive(
    direct: S3Store, behind: S3Store, proxy: FaultyProxy
) -> None:
    behind = S3Store(behind.bucket, "some/prefix", time_limit_s=2)
    done_run(direct)
    keys = [entry.key for entry in direct.entries("")] + [f"{TRAIN}/a0001/surplus"]
    direct.put(keys[-1], b"12345")
    notes: list[str] = []
    proxy.change = damaging(is_absent, "MANIFEST.json$", seconds=600)
    assert not list(collect(behind, 0.0, notes.append)) and any(TRAIN in note for note in notes)
    proxy.change = damaging(garbles, "MANIFEST.json$", seconds=600)
    with pytest.raises(StoreUnavailable):
        list(collect(behind, 0.0, notes.append))
    assert sorted(keys) == [entry.key for entry in direct.entries("")]
    proxy.change = damaging(is_absent, run_key(RUN), seconds=600)
    commit(direct, 3)
    notes = []
    gone = {one.key for one in collect(behind, 0.0, notes.append)}
    assert keys[-1] in gone and not any("/checkpoints/" in key for key in gone)
    assert notes[0].startswith("the commits of all runs stay")
    assert direct.get(manifest_key(TRAIN))


@pytest.mark.parametrize(("seconds", "whose"), [(9 * 86_400, "its answers"), (-90, "its answers"), (30, None)])
def test_no_date_of_an_answer_decides_what_gc_deletes(
    direct: S3Store, behind: S3Store, proxy: FaultyProxy, seconds: float, whose: str | None
) -> None:
    def change(request: Request, answer: Answer) -> Answer:
        return *answer[:2], answer[2] | {"Date": request.date_time_string(time.time() + seconds)}

    commit(direct, 1)
    attempted(direct, "train", state="running", process=ELSEWHERE)
    proxy.change = change
    if whose:
        with pytest.raises(UserError, match=rf"the clock of {whose} differs by [+-]\d.* s from the date"):
            list(collect(behind, 7.0))
    else:
        assert list(collect(behind, 7.0)) == []
    assert committed_folders(direct, TRAIN) and not direct.entries("control/")


def test_a_run_keeps_the_commit_with_which_a_recorded_branch_begins(store: LocalStore) -> None:
    recorded(store)
    needed = needed_by_runs(store, print)
    commit(store, 1, 2, keep_last=1, needed=needed)
    source = f"run:{RUN}@2@sha256:{'0' * 64}"
    parent, branch = recipe_with(), recipe_with()
    branch = branch.model_copy(update={"train": parent.train.model_copy(update={"branch_from": source})})
    made = replace(recorded(store), run="branch-12345678", recipe=branch.model_dump())
    made = replace(made, prefixes=made.prefixes | {"train": "train/branch-12345678"})
    store.put(run_key(made.run), made.to_json())
    one = commit(store, 3, 4, keep_last=1, needed=needed)
    assert [step_of(folder) for folder in committed_folders(store, TRAIN)] == [4, 2]
    assert not one.damaged and PLANS["train"].prefix == TRAIN


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_run_that_waits_for_a_dripping_store_ends_when_it_is_asked_to(
    direct: S3Store, proxy: FaultyProxy, tmp_path: Path, number: int
) -> None:
    project = Project(tmp_path / FOLDER_NAME)
    project.environment |= {"SKYTRAIN_STORE": direct.uri, "AWS_ENDPOINT_URL": proxy.endpoint}
    proxy.fail(*[Fault(endless_s=3)] * 1000)
    with project.started("run", "tiny.yaml") as process:
        project.wait_until(lambda: proxy.requests, process)
        threading.Event().wait(2)
        process.send_signal(number)
        asked = time.monotonic()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and time.monotonic() - asked < 20, err
    assert err.splitlines()[-1] == "interrupted: run the same command to resume" and "Traceback" not in err
