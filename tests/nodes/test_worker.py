"""A worker does the head's requests and exits with it."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
from node_ends import next_message, send
from servers import LOOPBACK, free_ports

from pipelines.nodes.address import NodeAddress
from pipelines.nodes.connection import Socket, receive
from pipelines.nodes.messages import End, Hello, MakeParts, StopNotice, Trained, WorkDone
from pipelines.nodes.results import NodeResult
from pipelines.nodes.worker import run_worker
from pipelines.recipe import load_recipe
from pipelines.show.console import TerminalScreen
from pipelines.stage import plans_of
from pipelines.text.parts import PartsProgress
from trainer.errors import Interrupted
from trainer.process import StopSignal
from trainer.store import LocalStore


@pytest.fixture
def stop() -> StopSignal:
    return StopSignal.__new__(StopSignal)  # pytest keeps its signals


@pytest.fixture
def working(tmp_path: Path, stop: StopSignal) -> Iterator[tuple[Socket, "Future[int]"]]:
    """The head's end of the connection to a worker, and the worker's exit code."""
    recipe = load_recipe("smoke", ["tokens.parts=3"])
    plans = plans_of(recipe)
    port = free_ports(1)[0]
    with Listener((LOOPBACK, port)) as listener, ThreadPoolExecutor(1) as threads:
        store, screen = LocalStore(tmp_path / "store"), TerminalScreen(quiet=True)
        node = NodeAddress(1, 2, LOOPBACK, port)
        result = threads.submit(
            run_worker, node, "tiny-0123", "train", recipe, plans, store, tmp_path, stop, screen, False
        )
        with listener.accept() as head:
            assert receive(head, 60) == Hello(1, "tiny-0123", 1)
            yield head, result


def test_a_worker_leaves_resumable_when_the_head_is_gone(working: tuple[Any, "Future[int]"]) -> None:
    head, result = working
    head.close()
    with pytest.raises(Interrupted, match="the head is gone"):
        result.result(60)


def test_a_worker_that_is_asked_to_stop_leaves_the_stop_to_the_head(
    working: tuple[Socket, "Future[int]"], stop: StopSignal
) -> None:
    head, result = working
    stop.ask("GCE: preempted")
    assert next_message(head) == StopNotice("GCE: preempted")
    assert not result.done()
    send(head, End(75, "node 1: GCE: preempted"))
    assert result.result(60) == 0  # its exit code counts for all


def test_a_worker_makes_the_parts_that_nobody_makes_and_reports_its_progress(
    working: tuple[Socket, "Future[int]"], tmp_path: Path
) -> None:
    head, result = working
    send(head, MakeParts(1, 4))
    received = [next_message(head) for _ in range(8)]  # a part is a third of 8,000,000 tokens; its own comes first
    made = [0, 2_000_000, 2_666_667, 4_666_667, 5_333_334, 7_333_334, 8_000_000]
    assert received == [*(PartsProgress(tokens, tokens) for tokens in made), WorkDone(1, NodeResult(1))]
    assert len(list(tmp_path.glob("store/tokens/*/a0004/*"))) == 6
    send(head, MakeParts(2, 5))  # it was stale, and the rival is gone
    assert [next_message(head), next_message(head)] == [PartsProgress(0, 0), WorkDone(2, NodeResult(1))]
    send(head, End(0, "done"))
    assert result.result(60) == 0 and not list(tmp_path.glob("work/*/tokens/*/*"))


def test_a_worker_without_a_head_leaves_its_part_for_the_next_attempt(
    working: tuple[Socket, "Future[int]"], tmp_path: Path
) -> None:
    head, result = working
    send(head, MakeParts(1, 1))
    assert next_message(head) == PartsProgress(0, 0)
    head.close()
    with pytest.raises(Interrupted, match="the head is gone"):
        result.result(60)
    assert not [thread for thread in threading.enumerate() if thread.name == "parts"]


def test_a_worker_leaves_once_the_run_is_trained(working: tuple[Socket, "Future[int]"]) -> None:
    head, result = working
    send(head, Trained())
    assert result.result(60) == 0
