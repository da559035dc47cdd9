"""The head: it admits its workers, collects their results, and leaves when one of them is gone."""

import errno
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from node_ends import call, next_message, send, spec, wait_for
from servers import LOOPBACK, free_ports

from pipelines.nodes import connection as connections
from pipelines.nodes import head as heads
from pipelines.nodes.address import NodeAddress
from pipelines.nodes.connection import connect_to_head
from pipelines.nodes.head import Head
from pipelines.nodes.messages import End, Message, StartRanks, StopNotice, Trained, WorkDone
from pipelines.nodes.results import NodeResult, kind_and_message
from pipelines.nodes.worker import report_death
from trainer.errors import Interrupted, UserError
from trainer.process import StopSignal

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


def test_a_head_waits_for_all_workers_and_sends_them_the_spec_of_their_ranks(head: Head) -> None:
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


def test_a_head_collects_the_errors_of_its_workers(head: Head) -> None:
    one, _two = call(head, 1), call(head, 2)
    head.wait_for_workers(0)
    head.start_ranks(spec(8))
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


def test_a_head_that_ends_sends_its_exit_code(address: NodeAddress, stop: StopSignal) -> None:
    ends: list[Message | None] = []

    def leave_at_the_end() -> None:
        with call(ending, 1) as connection:
            ends.append(next_message(connection))

    node = threading.Thread(target=leave_at_the_end)
    with pytest.raises(Interrupted), Head(address, "tiny-0123", stop, lambda error: 75) as ending:
        node.start()
        wait_for(lambda: ending.connections)
        raise Interrupted("SIGTERM")
    assert ends == [End(75, "SIGTERM")]  # it waited for this


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


def test_nobody_waits_forever(
    address: NodeAddress, stop: StopSignal, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(connections, "JOIN_SECONDS", 0.3)
    with pytest.raises(UserError, match=r"node 1 of 3 did not connect within 0 s; .*let them reach"):
        head.wait_for_workers(1)
    assert connect_to_head(NodeAddress(1, 2, LOOPBACK, free_ports(1)[0]), stop) is None


def test_the_death_of_a_workers_command_reaches_the_head_that_still_waits_for_its_cause(
    head: Head, address: NodeAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "DEATH_SECONDS", 0.2)
    one, two = call(head, 1), call(head, 2)
    head.wait_for_workers(4)
    assert head.death_of_command() is None  # nobody is gone
    one.close()
    wait_for(head.lost_nodes)
    assert head.death_of_command() is None  # its shell reports nothing
    shell = NodeAddress(1, 3, address.head, address.port)
    assert not report_death(shell, "another-run", "killed by SIGKILL")
    assert report_death(shell, "tiny-0123", "killed by SIGKILL")
    assert head.death_of_command() == "killed by SIGKILL"
    two.close()


def test_a_death_that_no_head_hears_of_is_not_counted(address: NodeAddress) -> None:
    assert not report_death(address, "tiny-0123", "killed by SIGKILL")
