"""A worker does the head's requests and exits with it."""

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
from pipelines.nodes.messages import End, Hello, StopNotice, Trained
from pipelines.nodes.worker import run_worker
from pipelines.recipe import load_recipe
from pipelines.show.console import TerminalScreen
from pipelines.stage import plans_of
from trainer.errors import Interrupted
from trainer.process import StopSignal
from trainer.store import LocalStore


@pytest.fixture
def stop() -> StopSignal:
    return StopSignal.__new__(StopSignal)  # pytest keeps its signals


@pytest.fixture
def working(tmp_path: Path, stop: StopSignal) -> Iterator[tuple[Socket, "Future[int]"]]:
    """The head's end of the connection to a worker, and the worker's exit code."""
    recipe = load_recipe("smoke")
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


def test_a_worker_leaves_once_the_run_is_trained(working: tuple[Socket, "Future[int]"]) -> None:
    head, result = working
    send(head, Trained())
    assert result.result(60) == 0
