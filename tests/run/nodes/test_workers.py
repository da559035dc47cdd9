"""Node 0 and its workers learn of each other through the store alone."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from servers import LOOPBACK
from stage_work import NoSignals

from pipelines.job.crash import record_for_node_0
from pipelines.recipe.loader import load_recipe
from pipelines.run.nodes import worker
from pipelines.run.nodes.address import NodeAddress, interface_to, nvidia_gpus, this_node
from pipelines.run.nodes.ranks import TrainTask
from pipelines.run.nodes.results import GONE, KILLED, NodeResult
from pipelines.run.nodes.worker import FirstNode
from pipelines.run.nodes.workers import WorkerRecord, Workers
from pipelines.store.layout import ranks_key
from pipelines.store.ledger import SILENT_SECONDS, Attempt, claim
from pipelines.store.manifest import ArtifactPlan
from pipelines.store.records import Billing, Progress
from pipelines.store.traffic import Traffic
from trainer.base.record import DamagedRecord
from trainer.base.store import LocalStore
from trainer.config.errors import Interrupted, StoreUnavailable, UserError

TOKENS, TRAIN = "tokens/tiny-0123", "train/tiny-0123"
TWO = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """time.monotonic of the code under test."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def attempt_of(store: LocalStore, prefix: str, number: int) -> Attempt:
    attempt = claim(store, prefix, "tiny-0123", prefix.partition("/")[0], number, Billing())
    assert attempt
    return attempt


def beat(attempt: Attempt, **changes: object) -> None:
    """Write the next heartbeat."""
    attempt.update(**changes)
    attempt._report()


@pytest.fixture
def attempt(store: LocalStore, clock: SimpleNamespace) -> Attempt:
    return attempt_of(store, TRAIN, 1)


@pytest.fixture
def of_node_0(attempt: Attempt) -> Workers:
    return Workers(NodeAddress(0, 3), attempt, NoSignals())


def reported(attempt: Attempt, node: int, seconds: float, **fields: object) -> None:
    replace(WorkerRecord(node, seconds), **fields).write(attempt.store, TRAIN, 1)  # type: ignore[arg-type]


def test_a_worker_that_stays_silent_is_lost_and_one_that_never_started_is_absent(
    of_node_0: Workers, attempt: Attempt, clock: SimpleNamespace
) -> None:
    reported(attempt, 1, 1.0)
    of_node_0.look()
    assert (of_node_0.lost, of_node_0.absent, of_node_0.have_failed) == ([], [2], False)
    clock.now += SILENT_SECONDS - 1
    beat(attempt)
    reported(attempt, 2, 1.0)
    of_node_0.look()
    clock.now += 2
    of_node_0.look()
    assert (of_node_0.lost, of_node_0.absent, of_node_0.have_failed) == ([1], [], True)


@pytest.mark.parametrize("away", ["writes", "all", "slow"])
def test_no_worker_is_lost_while_the_store_is_away(
    of_node_0: Workers, attempt: Attempt, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    """A store may refuse all requests, or only those that write; or answer after a long time."""

    def slowly(*_: object) -> None:
        clock.now += 5 * SILENT_SECONDS
        raise StoreUnavailable("away")

    reported(attempt, 1, 1.0)
    of_node_0.look()
    with monkeypatch.context() as outage:
        if away != "writes":
            outage.setattr(LocalStore, "get", slowly if away == "slow" else raising(StoreUnavailable("away")))
        for _ in range(9):
            clock.now += SILENT_SECONDS / 3
            of_node_0.look()
    beat(attempt)
    clock.now += SILENT_SECONDS / 3
    of_node_0.look()
    assert of_node_0.lost == []


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_node_0_learns_of_a_workers_stop_result_and_traffic(of_node_0: Workers, attempt: Attempt) -> None:
    failed = NodeResult(2, KILLED, "rank 3 was killed by SIGKILL")
    reported(attempt, 1, 1.0, stop="GCE: preempted", traffic=Traffic(10, 20, 1, 2))
    reported(attempt, 2, 1.0, result=failed, traffic=Traffic(1, 1, 1, 1))
    of_node_0.look()
    assert of_node_0._stop.asked and of_node_0._stop.reason == "node 1: GCE: preempted"
    assert of_node_0.have_failed and of_node_0.results() == [failed]
    assert of_node_0.traffic() == Traffic(11, 21, 2, 3)
    reported(attempt, 2, 1.0, result=NodeResult(2, "a kind of a stranger"))
    with pytest.raises(DamagedRecord, match="result.kind: String should match"):
        WorkerRecord.read(attempt.store, TRAIN, 1, 2)


def test_a_worker_waits_for_an_attempt_that_lives(store: LocalStore, clock: SimpleNamespace) -> None:
    killed = attempt_of(store, TRAIN, 1)
    first = FirstNode(store, [TOKENS, TRAIN])
    first.look()
    assert first.working is None  # it may be of an earlier command
    tokens = attempt_of(store, TOKENS, 1)
    first.look()
    assert (first.working, first.state) == ((TOKENS, 1), "running")
    beat(tokens, state="done")
    clock.now += SILENT_SECONDS + 1  # planning the training
    first.look()
    training = attempt_of(store, TRAIN, killed.number + 1)
    first.look()
    assert first.working == (TRAIN, 2)
    beat(training, state="interrupted", progress=Progress(restarting=True))  # after a crash of its ranks
    first.look()
    assert first.state not in worker.ENDED
    again = attempt_of(store, TRAIN, 3)
    first.look()
    assert (first.working, first.state) == ((TRAIN, 3), "running")
    beat(again, state="interrupted")
    first.look()
    assert first.state in worker.ENDED


NUMBERS = {"started": 1.0, "reached": 3, "between_failures": 9.0, "processes": 1, "port": 99, "cluster": "c"}
STRANGE = {"prefix": "/etc", "store": "file:///etc", "tokens": "../x", "recipe": {}, "attempt": 7, "allow_code": True}


@pytest.mark.parametrize(
    "wrong", [None, {"port": 65_536}, {"processes": -1}, {"between_failures": 0}, {"reached": "3"}]
)
def test_a_worker_takes_numbers_from_the_store_and_all_else_from_its_own_plan(
    store: LocalStore, tmp_path: Path, wrong: dict[str, object] | None
) -> None:
    recipe, plans = load_recipe("smoke"), {name: ArtifactPlan(name, "tiny", {}) for name in ("tokenize", "train")}
    prefix = plans["train"].prefix
    mine = worker.Worker(NodeAddress(1, 2, cluster="c"), recipe, plans, store, tmp_path, NoSignals())
    attempt_of(store, prefix, 1)
    mine.first.look()
    store.put(ranks_key(prefix, 1), json.dumps(NUMBERS | STRANGE | (wrong or {})).encode())
    if wrong:
        with pytest.raises(DamagedRecord, match=f"ranks.json: damaged .{[*wrong][0]}: "):
            mine._fresh_task()
    else:
        own: dict[str, Any] = {"recipe": recipe, "store": store.uri, "tokens": plans["tokenize"].prefix}
        own |= {name: value for name, value in NUMBERS.items() if name not in ("port", "cluster")}
        assert mine._fresh_task() == (TrainTask(**own, stage="train", prefix=prefix, attempt=1), NUMBERS["port"])


def test_a_worker_leaves_resumable_once_node_0_is_silent_or_never_came_but_not_while_the_store_is_away(
    store: LocalStore, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FirstNode(store, [TOKENS, TRAIN])
    attempt_of(store, TRAIN, 1)
    first.look()
    with monkeypatch.context() as outage:
        outage.setattr(LocalStore, "entries", raising(StoreUnavailable("away")))
        clock.now += 10 * SILENT_SECONDS
        first.look()
    clock.now += SILENT_SECONDS
    first.look()
    clock.now += worker.RECORD_SECONDS + 1
    with pytest.raises(Interrupted, match="node 0 is lost"):
        first.look()
    none = FirstNode(store, [TOKENS])
    clock.now += worker.JOIN_SECONDS + 1
    with pytest.raises(Interrupted, match="node 0 does not start the training"):
        none.look()


def test_a_crash_of_a_workers_command_is_counted_by_node_0(of_node_0: Workers, attempt: Attempt) -> None:
    cause = "the command of node 1 was killed by SIGKILL"
    assert not record_for_node_0(attempt.store, TRAIN, 1, cause)  # it had no ranks
    reported(attempt, 1, 1.0, traffic=Traffic(1, 0, 0, 0))
    assert record_for_node_0(attempt.store, TRAIN, 1, cause)
    of_node_0.look()
    assert [(one.kind, one.message) for one in of_node_0.results()] == [(GONE, cause)]
    beat(attempt, state="interrupted")
    assert not record_for_node_0(attempt.store, TRAIN, 1, cause)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, NodeAddress()),
        (TWO | {"SKYPILOT_NUM_NODES": "1"}, NodeAddress()),
        (TWO | {"SKYPILOT_TASK_ID": "sky-7"}, NodeAddress(1, 2, "10.0.0.1", "sky-7 10.0.0.1 10.0.0.2")),
        (TWO | {"SKYPILOT_NUM_NODES": "two"}, "SKYPILOT_NUM_NODES: 'two' is not a whole number"),
        (TWO | {"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK: 2 of SKYPILOT_NUM_NODES=2"),
        (TWO | {"SKYPILOT_NODE_IPS": ""}, "SKYPILOT_NODE_IPS: not set"),
    ],
)
def test_the_environment_names_this_node_or_is_a_mistake(
    environment: dict[str, str], found: NodeAddress | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", environment)
    if isinstance(found, NodeAddress):
        assert this_node() == found
    else:
        with pytest.raises(UserError, match=found):
            this_node()


def test_the_interface_is_the_one_that_leads_to_node_0() -> None:
    assert interface_to(LOOPBACK) == "lo"
    assert interface_to("no such host") is None


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("", 0), ("0,2", 2), ("1", 1), ("0,7,1", 1), ("-1", 0), ("GPU-4711,MIG-0815", 2), ("none", 0)],
)
def test_gpus_are_counted_as_cuda_does_and_without_torch(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: map(Path, ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2")))
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(os, "environ", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert nvidia_gpus() == count
