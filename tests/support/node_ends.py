"""One end of the connection between nodes, for a test that plays a worker or the head."""

import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

from servers import LOOPBACK

from pipelines.nodes.connection import Socket, receive
from pipelines.nodes.head import Head
from pipelines.nodes.messages import Hello, KeepAlive, Message, message_to_json
from pipelines.nodes.ranks import RankSpec
from pipelines.recipe import load_recipe


def call(head: Head, node: int, run: str = "tiny-0123") -> Socket:
    """A worker's end of its connection."""
    connection = Client((LOOPBACK, head.address.port))
    send(connection, Hello(node, run, 4))
    return connection


def send(connection: Socket, message: Message) -> None:
    connection.send_bytes(message_to_json(message))


def next_message(connection: Socket) -> Message | None:
    """The next message but heartbeats."""
    while isinstance(message := receive(connection, 60), KeepAlive):
        pass
    return message


def spec(attempt: int) -> RankSpec:
    return RankSpec(1.0, 0, load_recipe("smoke"), "file:///store", "tokens/a-1", "train/a-1", attempt, 3600.0)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
