"""Several nodes train as one: they find each other, hear of each other's end, and nobody is left behind."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import STEPS, TINY, Project, sums
from servers import LOOPBACK, free_ports

from pipelines.artifacts.manifest import ArtifactPlan, read_manifest
from pipelines.artifacts.store import S3Store
from pipelines.nodes import connection as connections
from pipelines.nodes import head as heads
from pipelines.nodes.address import NodeAddress, interface_to, this_node
from pipelines.nodes.connection import Socket, connect_to_head, receive
from pipelines.nodes.head import Head
from pipelines.nodes.messages import (
    Beat,
    End,
    Hello,
    MakeParts,
    Message,
    StartRanks,
    StopNotice,
    Trained,
    WorkDone,
    message_from_json,
    message_to_json,
)
from pipelines.nodes.ranks import RankSpec
from pipelines.nodes.results import NodeResult, kind_and_message
from pipelines.nodes.worker import run_worker
from pipelines.recipe import load_recipe
from pipelines.show.console import TerminalScreen
from pipelines.text.parts import PartsProgress
from trainer.errors import Interrupted, UserError
from trainer.process import DRILL, StopSignal
from trainer.shards import local_shards
from trainer.store import LocalStore

STRANGE = [b"GET / HTTP/1.1", b"[1]", b'{"node": 1}', b'{"node": "x", "run": "r", "processes": 1}', b"\xff"]


@pytest.fixture
def stop() -> StopSignal:
    return StopSignal.__new__(StopSignal)  # pytest keeps its signals


@pytest.fixture
def address() -> NodeAddress:
    return NodeAddress(0, 3, LOOPBACK, free_ports(1)[0])


@pytest.fixture
def head(address: NodeAddress, stop: StopSignal) -> Iterator[Head]:
    with Head(address, "tiny-0123", stop, lambda error: 75) as head:
        yield head


def call(head: Head, node: int, run: str = "tiny-0123") -> Socket:
    """A worker's end of its connection."""
    connection = Client((LOOPBACK, head.address.port))
    send(connection, Hello(node, run, 4))
    return connection


def send(connection: Socket, message: Message) -> None:
    connection.send_bytes(message_to_json(message))


def next_message(connection: Socket) -> Message | None:
    """The next message but heartbeats."""
    while isinstance(message := receive(connection, 10), Beat):
        pass
    return message


def spec(attempt: int) -> RankSpec:
    return RankSpec(1.0, 0, load_recipe("smoke"), "file:///store", "tokens/a-1", "train/a-1", attempt, 3600.0)


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, NodeAddress()),
        ({"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"}, NodeAddress()),
        (
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
            NodeAddress(1, 2, "10.0.0.1", 29400),
        ),
        (
            {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYTRAIN_PORT": "1234"},
            NodeAddress(0, 2, "10.0.0.1", 1234),
        ),
    ],
)
def test_the_environment_says_which_node_this_is(
    environment: dict[str, str], address: NodeAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    assert this_node() == address


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
        this_node()


def test_the_interface_is_the_one_that_leads_to_the_head() -> None:
    assert interface_to(LOOPBACK) == "lo"
    assert interface_to("no such host") is None


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (Beat(), {"beat": True}),
        (Hello(1, "tiny-0123", 4), {"node": 1, "run": "tiny-0123", "processes": 4}),
        (PartsProgress(500, 100), {"there": 500, "new": 100}),
        (WorkDone(2, NodeResult(1)), {"ended": 2, "node": 1, "kind": None, "words": ""}),
        (WorkDone(2, NodeResult(1, "mistake", "no")), {"ended": 2, "node": 1, "kind": "mistake", "words": "no"}),
        (StopNotice("SIGTERM"), {"stop": "SIGTERM"}),
        (MakeParts(1, 7), {"tokenize": 1, "attempt": 7}),
        (StartRanks(1, spec(7), 1234), {"train": 1, "spec": spec(7).to_json(), "port": 1234}),
        (Trained(), {"trained": True}),
        (End(75, "SIGTERM"), {"end": 75, "why": "SIGTERM"}),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Message, wire: dict[str, Any]) -> None:
    assert json.loads(message_to_json(message)) == wire
    assert message_from_json(message_to_json(message)) == message


def test_a_head_waits_for_all_nodes_and_tells_them_what_to_train(head: Head) -> None:
    one, two = call(head, 1), call(head, 2)
    assert head.wait_for_workers(4) == 12
    port = head.start_ranks(spec(7))
    for connection in (one, two):
        assert next_message(connection) == StartRanks(1, spec(7), port)
    send(one, WorkDone(1, NodeResult(1)))
    assert not head.has_failed()
    send(two, WorkDone(1, NodeResult(2, "mistake", "no GPU")))
    assert head.wait_for_results() == [NodeResult(1), NodeResult(2, "mistake", "no GPU")]
    assert head.has_failed()
    port = head.start_ranks(spec(8))
    assert not head.has_failed()  # the results were those of the round before
    head.release_workers()
    assert [next_message(one), next_message(one)] == [StartRanks(2, spec(8), port), Trained()]


def test_a_head_hears_how_far_the_others_are_with_their_parts_and_what_went_wrong(head: Head) -> None:
    one, two = call(head, 1), call(head, 2)
    head.wait_for_workers(0)
    head.make_parts(7)
    assert [next_message(node) for node in (one, two)] == [MakeParts(1, 7)] * 2
    assert (head.parts_progress(), head.results()) == ([], [])
    for node, stored in ((one, 500), (two, 300), (two, 400)):
        send(node, PartsProgress(stored, 100))
    wait_for(lambda: {progress.stored for progress in head.parts_progress()} == {400, 500})
    send(one, WorkDone(1, NodeResult(1, "mistake", "truncated")))
    wait_for(head.results)
    error = head.results()[0].error
    assert isinstance(error, UserError) and str(error) == "truncated"
    assert isinstance(NodeResult(2, *kind_and_message(KeyError("x"), Path("work"))).error, RuntimeError)
    full = NodeResult(2, *kind_and_message(OSError(errno.ENOSPC, "No space left on device"), Path("work"))).error
    assert isinstance(full, UserError) and str(full).startswith("work: no space left on the disk")


def test_a_node_that_is_gone_makes_the_head_leave(head: Head, stop: StopSignal) -> None:
    one, two = call(head, 1), call(head, 2)
    head.wait_for_workers(1)
    assert (head.lost_nodes(), stop.asked) == ([], False)
    one.close()
    send(two, WorkDone(0, NodeResult(2, "fault", "Connection closed by peer")))
    assert head.wait_for_results() == [NodeResult(2, "fault", "Connection closed by peer")]  # of all that are left
    assert head.lost_nodes() == [1]
    wait_for(lambda: stop.asked)
    assert (stop.reason, stop.ending) == ("node 1 is gone", Interrupted)
    two.close()


def test_a_node_that_falls_silent_is_gone(head: Head, stop: StopSignal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", 1.5)
    silent = call(head, 1)  # the connection stays
    wait_for(lambda: stop.asked)
    assert (stop.reason, head.lost_nodes()) == ("node 1 is gone", [1])
    silent.close()


def test_a_node_that_is_asked_to_stop_stops_all(head: Head, stop: StopSignal) -> None:
    one = call(head, 1)
    send(one, StopNotice("EC2 spot: terminate at once"))
    wait_for(lambda: stop.asked)
    assert stop.reason == "node 1: EC2 spot: terminate at once"
    one.close()


def test_a_head_that_ends_tells_the_others_with_which_code(address: NodeAddress, stop: StopSignal) -> None:
    ends: list[Message | None] = []

    def leave_at_the_end() -> None:
        with call(ending, 1) as connection:
            ends.append(next_message(connection))

    node = threading.Thread(target=leave_at_the_end)
    with pytest.raises(Interrupted), Head(address, "tiny-0123", stop, lambda error: 75) as ending:
        node.start()
        wait_for(lambda: ending.connections)
        raise Interrupted("SIGTERM")
    assert ends == [End(75, "SIGTERM")]  # it has waited for that


@pytest.mark.parametrize("message", STRANGE)
def test_strangers_at_the_port_change_nothing(message: bytes, head: Head, stop: StopSignal) -> None:
    with Client((LOOPBACK, head.address.port)) as stranger:
        stranger.send_bytes(message)
        with pytest.raises(EOFError):
            stranger.recv_bytes()
    assert (head.lost_nodes(), stop.asked) == ([], False)


def test_a_node_of_another_run_is_sent_away(head: Head) -> None:
    first = call(head, 1)
    wait_for(lambda: head.connections)
    for stranger, reason in (
        (call(head, 2, "other-4567"), "node 0 works on tiny-0123 and node 2 on other-4567; run the same"),
        (call(head, 1), "another node 1 of 3 is connected already"),
        (call(head, 3), "node 3 is not one of 1 to 2"),
    ):
        end = next_message(stranger)
        assert isinstance(end, End) and end.exit_code == 2 and end.reason.startswith(reason)
    assert head.lost_nodes() == []
    first.close()


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


PARTS = TINY | {"tokens": TINY["tokens"] | {"parts": 3}}
TOKENIZE = ("run", "tiny.yaml", "--stage", "tokenize")


@pytest.fixture(scope="module")
def three_parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one node makes of a text in three parts."""
    alone = Project(tmp_path_factory.mktemp("alone") / "project", PARTS)
    alone.run(*TOKENIZE)
    return sums(alone.artifact("tokenize"))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_however_many_nodes_tokenize_they_make_the_same_shards(
    count: int, tmp_path: Path, three_parts: dict[str, str]
) -> None:
    head, *others = several_nodes(tmp_path / "nodes", count, PARTS)
    with ExitStack() as stack:
        processes = [stack.enter_context(node.started(*TOKENIZE, "--price-per-hour", "36")) for node in (head, *others)]
        said = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, said
    made = head.artifact("tokenize")
    assert sums(made) == three_parts
    (beat,) = head.heartbeats()
    assert (beat["state"], beat["nodes"]) == ("done", count)
    assert beat["progress"]["tokens"] == made.facts["tokens"]  # of all nodes
    bill = json.loads(head.run("report", "--json").stdout)[0]["account"]["total"]
    assert bill["usd"] == pytest.approx(count * 36 * (beat["time"] - beat["started"]) / 3600)
    (other, *_) = others
    assert "nothing to do" in other.run(*TOKENIZE).stderr  # alone


@pytest.mark.slow
def test_nodes_that_tokenize_share_a_bucket_and_nothing_else(
    tmp_path: Path, three_parts: dict[str, str], s3_store: S3Store
) -> None:
    nodes = several_nodes(tmp_path / "all", 3, PARTS)
    for rank, node in enumerate(nodes):
        node.environment["SKYTRAIN_STORE"] = s3_store.uri
        node.folder = tmp_path / str(rank)
        shutil.copytree(tmp_path / "all", node.folder)
    shutil.rmtree(tmp_path / "all")
    with ExitStack() as stack:
        processes = [stack.enter_context(node.started(*TOKENIZE)) for node in reversed(nodes)]
        said = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    (key,) = (e.key for e in s3_store.entries("tokens/") if e.key.endswith("MANIFEST.json"))
    made = read_manifest(s3_store, key.removesuffix("/MANIFEST.json"))
    assert made and sums(made) == three_parts


@pytest.mark.slow
def test_a_node_that_is_killed_amid_its_part_loses_no_finished_shard(
    tmp_path: Path, three_parts: dict[str, str]
) -> None:
    head, other = several_nodes(tmp_path / "nodes", 2, PARTS)
    (tmp_path / "tokenize").touch()
    other.environment[DRILL] = str(tmp_path)  # it halts behind its first shard
    with other.started(*TOKENIZE) as second, head.started(*TOKENIZE) as first:
        head.wait_until(lambda: (tmp_path / "tokenize.here").exists() and head.found("tokens/*/parts/02.json"), second)
        other.kill_all(second)
        _, said = first.communicate(timeout=60)
    assert first.returncode == 75 and "node 1 is gone" in said, said
    assert [path.stem for path in head.found("tokens/*/parts/*")] == ["00", "02"]
    done = [json.loads(path.read_text())["file"]["name"] for path in head.found("tokens/*/shards/*")]
    assert [name for name in done if name.startswith("train_01")] == ["train_01_000000.bin"]

    with other.started(*TOKENIZE) as second, head.started(*TOKENIZE) as first:
        ended = [process.communicate(timeout=90) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), ended
    made = head.artifact("tokenize")
    assert sums(made) == three_parts
    assert sorted(path.name for path in head.found("tokens/*/a0002/*")) == sorted(
        {f.name for f in made.files} - {*done}
    )


@pytest.mark.slow
def test_a_node_whose_text_is_damaged_says_so_by_the_heads_mouth(tmp_path: Path) -> None:
    lines = PARTS | {"tokens": PARTS["tokens"] | {"source": "texts/*.jsonl", "parts": 2}}
    head, other = several_nodes(tmp_path / "nodes", 2, lines)
    for name, last in (("0", '{"text": "sound"}'), ("1", '{"text": "cut o')):
        body = "".join(f'{{"text": "line {n} of a file of lines"}}\n' for n in range(9000))
        (head.folder / "texts" / f"{name}.jsonl").write_text(body + last)
    with other.started(*TOKENIZE) as second, head.started(*TOKENIZE) as first:
        said = [process.communicate(timeout=90) for process in (first, second)]
    assert (first.returncode, second.returncode) == (2, 0), said
    where = "'texts/*.jsonl' (counted in its files 1, 3, 5, …)"
    assert f"error: tokens.source: document 9000 of {where} is not JSON" in said[0][1]


def test_two_nodes_train_on_the_parts_that_both_have_made(tmp_path: Path) -> None:
    head, other = several_nodes(tmp_path / "nodes", 2, TINY | {"tokens": TINY["tokens"] | {"parts": 2}})
    with other.started("run", "tiny.yaml") as second, head.started("run", "tiny.yaml") as first:
        said = [process.communicate(timeout=300) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    (folder,) = head.found("tokens/*/a0001")
    facts = head.artifact("tokenize").facts
    found = [shard for split in ("train", "val") for shard in local_shards(folder, split)]  # as llm.c globs for them
    assert {shard.name: shard.tokens for shard in found} == facts["shards"]
    assert [shard.name for shard in found if shard.name.startswith("val")][-1] == "val_00_000015.bin"
    (audit,) = json.loads(head.run("report", "--audit", "--json").stdout)
    assert (audit["steps"], audit["wrong_steps"], audit["missing_steps"]) == (STEPS, [], [])


def two_nodes(folder: Path) -> list[Project]:
    return several_nodes(folder, 2)


def several_nodes(folder: Path, count: int, recipe: dict[str, Any] | None = None) -> list[Project]:
    """Nodes that share a store and nothing else of what they write."""
    port = free_ports(1)[0]
    nodes = [Project(folder, recipe) for _ in range(count)]
    for rank, node in enumerate(nodes):
        node.environment |= {
            "SKYTRAIN_HOME": str(folder / f"home {rank}"),
            "SKYTRAIN_STORE": f"file://{node.home / 'store'}",
            "SKYTRAIN_PORT": str(port),
            "SKYPILOT_NUM_NODES": str(count),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": f"{LOOPBACK}\n{LOOPBACK}",
        }
        del node.environment["GLOO_SOCKET_IFNAME"]  # each finds its own
    return nodes


def test_nobody_waits_forever(
    address: NodeAddress, stop: StopSignal, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(connections, "JOIN_SECONDS", 0.3)
    with pytest.raises(UserError, match=r"node 1 of 3 did not connect within 0 s; .*let them reach"):
        head.wait_for_workers(1)
    assert connect_to_head(NodeAddress(1, 2, LOOPBACK, free_ports(1)[0]), stop) is None


@pytest.fixture
def working(tmp_path: Path, stop: StopSignal) -> Iterator[tuple[Socket, "Future[int]"]]:
    """The head's end of the connection to a worker, and the worker's exit code."""
    recipe = load_recipe("smoke", ["tokens.parts=3"])
    plans = {stage: ArtifactPlan(stage, "smoke", {"stage": stage}) for stage in ("tokenize", "train")}
    port = free_ports(1)[0]
    with Listener((LOOPBACK, port)) as listener, ThreadPoolExecutor(1) as threads:
        store, screen = LocalStore(tmp_path / "store"), TerminalScreen(quiet=True)
        node = NodeAddress(1, 2, LOOPBACK, port)
        result = threads.submit(
            run_worker, node, "tiny-0123", "train", recipe, plans, store, tmp_path, stop, screen, False
        )
        with listener.accept() as head:
            assert receive(head, 10) == Hello(1, "tiny-0123", 1)
            yield head, result


def test_a_node_leaves_resumable_when_the_head_is_gone(working: tuple[Any, "Future[int]"]) -> None:
    head, result = working
    head.close()
    with pytest.raises(Interrupted, match="the head is gone"):
        result.result(10)


def test_a_node_that_is_told_to_stop_leaves_it_to_the_head(
    working: tuple[Socket, "Future[int]"], stop: StopSignal
) -> None:
    head, result = working
    stop.ask("GCE: preempted")
    assert next_message(head) == StopNotice("GCE: preempted")
    assert not result.done()
    send(head, End(75, "node 1: GCE: preempted"))
    assert result.result(10) == 0  # whose exit code speaks for all


def test_a_node_makes_its_parts_and_tells_how_far_it_is(working: tuple[Socket, "Future[int]"], tmp_path: Path) -> None:
    head, result = working
    send(head, MakeParts(1, 4))
    received = [next_message(head) for _ in range(4)]  # part 1 is as large as a third of 8,000,000 tokens
    steps = [PartsProgress(tokens, tokens) for tokens in (0, 2_000_000, 2_666_667)]
    assert received == [*steps, WorkDone(1, NodeResult(1))]
    assert {path.name for path in tmp_path.glob("store/tokens/*/a0004/*")} == {
        "train_01_000000.bin",
        "train_01_000001.bin",
    }
    send(head, MakeParts(2, 5))  # it was stale, and the rival is gone
    assert [next_message(head), next_message(head)] == [PartsProgress(2_666_667, 0), WorkDone(2, NodeResult(1))]
    send(head, End(0, "done"))
    assert result.result(10) == 0 and not list(tmp_path.glob("work/*/tokens/*/*"))


def test_a_node_without_a_head_leaves_its_part_for_the_next_attempt(
    working: tuple[Socket, "Future[int]"], tmp_path: Path
) -> None:
    head, result = working
    send(head, MakeParts(1, 1))
    assert next_message(head) == PartsProgress(0, 0)
    head.close()
    with pytest.raises(Interrupted, match="the head is gone"):
        result.result(15)
    assert not [thread for thread in threading.enumerate() if thread.name == "parts"]


def test_a_node_is_free_once_the_run_is_trained(working: tuple[Socket, "Future[int]"]) -> None:
    head, result = working
    send(head, Trained())
    assert result.result(10) == 0


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
