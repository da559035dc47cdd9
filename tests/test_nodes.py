"""Several nodes train as one: they find each other, hear of each other's end, and nobody is left behind."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import Project
from servers import LOOPBACK, free_ports

from pipelines import nodes
from pipelines.artifacts.manifest import Plan
from pipelines.lend import lend
from pipelines.nodes import Head, Part, Place, hear, interface_to, place_of_this_node
from pipelines.progress import Screen
from pipelines.recipe import load_recipe
from trainer.config import UserError
from trainer.process import Interrupted, StopSignal
from trainer.store import LocalStore

STRANGE = [b"GET / HTTP/1.1", b"[1]", b'{"node": 1}', b'{"node": "x", "run": "r", "processes": 1}', b"\xff"]


@pytest.fixture
def stop() -> StopSignal:
    return StopSignal.__new__(StopSignal)  # pytest keeps its signals


@pytest.fixture
def place() -> Place:
    return Place(0, 3, LOOPBACK, free_ports(1)[0])


@pytest.fixture
def head(place: Place, stop: StopSignal) -> Iterator[Head]:
    with Head(place, "tiny-0123", stop, lambda error: 75) as head:
        yield head


def call(head: Head, node: int, run: str = "tiny-0123") -> "Connection[Any, Any]":
    """A node's end of its line, in the hands of a test."""
    connection = Client((LOOPBACK, head.place.port))
    connection.send_bytes(b'{"node": %d, "run": "%s", "processes": 4}' % (node, run.encode()))
    return connection


def next_told(connection: "Connection[Any, Any]") -> dict[str, Any]:
    """What the head says next, its beats apart."""
    while "beat" in (told := hear(connection, 10) or {}):
        pass
    return told


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place()),
        ({"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"}, Place()),
        (
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
            Place(1, 2, "10.0.0.1", 29400),
        ),
        (
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYTRAIN_PORT": "1234"},
            Place(0, 2, "10.0.0.1", 1234),
        ),
    ],
)
def test_the_environment_says_which_node_this_is(
    environment: dict[str, str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    assert place_of_this_node() == place


@pytest.mark.parametrize(
    ("environment", "wrong"),
    [
        ({"SKYPILOT_NUM_NODES": "two"}, "SKYPILOT_NUM_NODES: 'two' is not a whole number"),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK: 2 of SKYPILOT_NUM_NODES=2"),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}, "SKYPILOT_NODE_IPS: not set"),
    ],
)
def test_what_the_environment_cannot_mean_is_a_mistake(
    environment: dict[str, str], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(UserError, match=wrong):
        place_of_this_node()


def test_the_interface_is_the_one_that_leads_to_the_head() -> None:
    assert interface_to(LOOPBACK) == "lo"
    assert interface_to("no such host") is None


def test_a_head_waits_for_all_nodes_and_tells_them_what_to_train(head: Head) -> None:
    one, two = call(head, 1), call(head, 2)
    assert head.gathered(4) == 12
    port = head.begin({"attempt": 7})
    for connection in (one, two):
        assert next_told(connection) == {"train": 1, "spec": {"attempt": 7}, "port": port}
    one.send_bytes(b'{"ended": 1, "node": 1, "kind": null, "words": ""}')
    assert not head.failed()
    two.send_bytes(b'{"ended": 1, "node": 2, "kind": "mistake", "words": "no GPU"}')
    assert head.parts() == [Part(1), Part(2, "mistake", "no GPU")]
    assert head.failed()
    head.begin({"attempt": 8})
    assert not head.failed()  # what has ended was the round before
    head.trained()
    assert [next_told(one)["train"], next_told(one)] == [2, {"trained": True}]


def test_a_node_that_is_gone_makes_the_head_leave(head: Head, stop: StopSignal) -> None:
    one, two = call(head, 1), call(head, 2)
    head.gathered(1)
    assert (head.lost(), stop.asked) == ([], False)
    one.close()
    two.send_bytes(b'{"ended": 0, "node": 2, "kind": "fault", "words": "Connection closed by peer"}')
    assert head.parts() == [Part(2, "fault", "Connection closed by peer")]  # of all that are left
    assert head.lost() == [1]
    wait_for(lambda: stop.asked)
    assert (stop.reason, stop.ending) == ("node 1 is gone", Interrupted)
    two.close()


def test_a_node_that_falls_silent_is_gone(head: Head, stop: StopSignal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SILENT_SECONDS", 1.5)
    silent = call(head, 1)  # the connection stays
    wait_for(lambda: stop.asked)
    assert (stop.reason, head.lost()) == ("node 1 is gone", [1])
    silent.close()


def test_a_node_that_is_asked_to_stop_stops_all(head: Head, stop: StopSignal) -> None:
    one = call(head, 1)
    one.send_bytes(b'{"stop": "EC2 spot: terminate at once"}')
    wait_for(lambda: stop.asked)
    assert stop.reason == "node 1: EC2 spot: terminate at once"
    one.close()


def test_a_head_that_ends_tells_the_others_with_which_code(place: Place, stop: StopSignal) -> None:
    told = []

    def leave_when_told() -> None:
        with call(head, 1) as connection:
            told.append(next_told(connection))

    node = threading.Thread(target=leave_when_told)
    with pytest.raises(Interrupted), Head(place, "tiny-0123", stop, lambda error: 75) as head:
        node.start()
        wait_for(lambda: head.lines)
        raise Interrupted("SIGTERM")
    assert told == [{"end": 75, "why": "SIGTERM"}]  # it has waited for that


@pytest.mark.parametrize("said", STRANGE)
def test_strangers_at_the_port_change_nothing(said: bytes, head: Head, stop: StopSignal) -> None:
    with Client((LOOPBACK, head.place.port)) as stranger:
        stranger.send_bytes(said)
        with pytest.raises(EOFError):
            stranger.recv_bytes()
    assert (head.lost(), stop.asked) == ([], False)


def test_a_node_of_another_run_is_sent_away(head: Head) -> None:
    assert next_told(call(head, 1, "other-4567"))["why"].startswith("node 0 works on tiny-0123")
    assert next_told(call(head, 3))["why"] == "node 0 has no place for another node 3 of 3"
    assert head.lost() == []


@pytest.mark.slow
def test_whichever_node_dies_all_leave_resumable_and_the_losses_stay_equal(
    tmp_path: Path, undisturbed: Callable[[int], Project]
) -> None:
    head, other = two_nodes(tmp_path / "two nodes")
    command = ("run", "tiny.yaml", "--stage", "train", "--price-per-hour", "36")

    for dying, left in ((other, head), (head, other)):
        before = head.rows_committed()
        with other.started(*command) as second, head.started(*command) as first:
            processes = {id(head): first, id(other): second}
            head.wait_until(lambda: head.rows_committed() > before + 5, first)  # noqa: B023
            dying.kill_all(processes[id(dying)])
            _, said = processes[id(left)].communicate(timeout=60)
            assert processes[id(left)].returncode == 75, said
            assert "node 1 is gone" in said or "the head is gone" in said
            assert not left.alive()

    with other.started(*command) as second, head.started(*command) as first:
        assert [process.wait(120) for process in (first, second)] == [0, 0]
    assert head.series() == undisturbed(2).series()
    beats = [beat for beat in head.heartbeats() if beat["stage"] == "train"]
    assert [(beat["nodes"], beat["state"]) for beat in beats] == [
        (2, "interrupted"),
        (2, "running"),  # it died without a word
        (2, "done"),
    ]
    other.run(*command)  # alone: there is nothing left to train


def two_nodes(folder: Path) -> tuple[Project, Project]:
    """Two nodes that share a store and nothing else of what they write."""
    port = free_ports(1)[0]
    nodes = Project(folder), Project(folder)
    for rank, node in enumerate(nodes):
        node.environment |= {
            "SKYTRAIN_HOME": str(folder / f"home {rank}"),
            "SKYTRAIN_STORE": f"file://{node.home / 'store'}",
            "SKYTRAIN_PORT": str(port),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": f"{LOOPBACK}\n{LOOPBACK}",
        }
        del node.environment["GLOO_SOCKET_IFNAME"]  # each finds its own
    return nodes


def test_nobody_waits_forever(place: Place, stop: StopSignal, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "COME_SECONDS", 0.3)
    with pytest.raises(UserError, match=r"node 1 of 3 did not come in 0 s; .*may they reach"):
        head.gathered(1)
    assert nodes.call_head(Place(1, 2, LOOPBACK, free_ports(1)[0]), stop) is None


@pytest.fixture
def lending(tmp_path: Path, stop: StopSignal) -> Iterator[tuple["Connection[Any, Any]", "Future[int]"]]:
    """The head's end of the line to a node that lends its GPUs, and what that returns."""
    recipe = load_recipe("smoke", [])
    plan = Plan("train", "smoke", {"stage": "train"})
    port = free_ports(1)[0]
    with Listener((LOOPBACK, port)) as listener, ThreadPoolExecutor(1) as threads:
        store, screen = LocalStore(tmp_path / "store"), Screen(quiet=True)
        node = Place(1, 2, LOOPBACK, port)
        result = threads.submit(lend, node, "tiny-0123", "train", recipe, plan, store, tmp_path, stop, screen)
        with listener.accept() as head:
            assert hear(head, 10) == {"node": 1, "run": "tiny-0123", "processes": 1}
            yield head, result


def test_a_node_leaves_resumable_when_the_head_is_gone(lending: tuple[Any, "Future[int]"]) -> None:
    head, result = lending
    head.close()
    with pytest.raises(Interrupted, match="the head is gone"):
        result.result(10)


def test_a_node_that_is_told_to_stop_leaves_it_to_the_head(
    lending: tuple["Connection[Any, Any]", "Future[int]"], stop: StopSignal
) -> None:
    head, result = lending
    stop.ask("GCE: preempted")
    assert next_told(head) == {"stop": "GCE: preempted"}
    assert not result.done()
    head.send_bytes(b'{"end": 75, "why": "node 1: GCE: preempted"}')
    assert result.result(10) == 0  # whose exit code speaks for all


def test_a_node_is_free_once_the_run_is_trained(lending: tuple["Connection[Any, Any]", "Future[int]"]) -> None:
    head, result = lending
    head.send_bytes(b'{"trained": true}')
    assert result.result(10) == 0


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
