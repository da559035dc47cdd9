"""One end of the connection between a worker and the head: messages and keep-alives over TCP.

A connection that breaks, or is silent for SILENT_SECONDS, means that the other end is gone.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, TypeAlias

from pipelines.artifacts.traffic import traffic_here
from pipelines.nodes.address import JOIN_SECONDS, NodeAddress
from pipelines.nodes.messages import KeepAlive, Message, message_from_json, message_to_json
from trainer.errors import UserError
from trainer.process import StopSignal

KEEP_ALIVE_SECONDS = 2.0
SILENT_SECONDS = 20.0  # ten keep-alives: following a file or waiting for tiktoken never blocks a process so long
MAX_MESSAGE_BYTES = 1 << 20  # a spec has a few thousand
# A broken connection, or bytes that are not a message between nodes.
CONNECTION_ERRORS = (OSError, EOFError, ValueError, TypeError, KeyError)

# Subscripted for mypy only: at run time the class takes no parameters.
Socket: TypeAlias = "Connection[Any, Any]"


class NodeConnection:
    """One end. A thread sends keep-alives, receives messages, and detects that the other end is gone."""

    def __init__(self, socket: Socket, received: Callable[[Message], None]) -> None:
        self.gone = threading.Event()
        self.broken = False  # the other end has closed it, or is no node; else it was silent
        self._socket, self._received = socket, received
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._receive, daemon=True, name="connection")

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send; the thread detects a broken connection."""
        with self._sending, suppress(*CONNECTION_ERRORS):
            self._socket.send_bytes(message_to_json(message))

    def close(self) -> None:
        """End the connection; messages that were sent before still arrive."""
        self.gone.set()
        self._thread.join(2 * KEEP_ALIVE_SECONDS)
        self._socket.close()

    def _receive(self) -> None:
        last_received = last_sent = time.monotonic()
        try:
            while not self.gone.is_set() and time.monotonic() - last_received < SILENT_SECONDS:
                if message := receive(self._socket, KEEP_ALIVE_SECONDS / 2):
                    last_received = time.monotonic()
                    self._received(message)
                if time.monotonic() - last_sent >= KEEP_ALIVE_SECONDS:
                    last_sent = time.monotonic()
                    self.send(KeepAlive(traffic_here()))
        except CONNECTION_ERRORS:
            self.broken = True
        finally:
            self.gone.set()


def receive(socket: Socket, wait_seconds: float) -> Message | None:
    """The next message; None if none arrives in time. Raises one of CONNECTION_ERRORS."""
    return message_from_json(socket.recv_bytes(MAX_MESSAGE_BYTES)) if socket.poll(wait_seconds) else None


def listen(port: int, stop: StopSignal) -> Listener:
    """The head's listener. An earlier attempt that still holds the port frees it soon."""
    deadline = time.monotonic() + SILENT_SECONDS
    while True:
        try:
            return Listener(("0.0.0.0", port), backlog=64)
        except OSError as error:
            stop.check()
            if time.monotonic() > deadline:
                raise UserError(f"SKYTRAIN_PORT: cannot listen on {port} ({error}); choose another port") from error
            time.sleep(0.5)


def connect_to_head(address: NodeAddress, stop: StopSignal) -> "Socket | None":
    """A connection to the head; None if it does not answer within JOIN_SECONDS."""
    deadline = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            return Client((address.head, address.port))
        stop.check()
        time.sleep(0.5)
    return None
