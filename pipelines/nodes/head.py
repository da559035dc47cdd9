"""The nodes of a run: which of them this is, and the line between the head and the others.

Every node runs the same command. Node 0, the head, runs the pipeline as if it were alone: it claims, beats,
commits. The others only lend a hand: each keeps a line (a TCP connection) to the head, and hears of it when parts
of the text are to be made into shards, or when the ranks of train are to start and with what. No file is shared.
A line that breaks, or is silent for SILENT_SECONDS, means that the other end is gone: then all leave, resumable.

Which node this is, the environment says. SkyPilot sets these; elsewhere set them by hand (under srun:
SKYPILOT_NODE_RANK=$SLURM_NODEID):
SKYPILOT_NUM_NODES: how many there are.
SKYPILOT_NODE_RANK: this one's number, from 0.
SKYPILOT_NODE_IPS: their addresses, a line each; only the first, the head's, is used.
SKYTRAIN_PORT: where the head listens, 29400 by default. The ranks use other ports, as free.
GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: the network interface between the nodes. Without the first, it is the one
that leads to the head; NCCL finds its own (InfiniBand first, never loopback).
"""

import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from trainer.config import RuntimeConfig
from trainer.errors import FULL, Diverged, StoreUnavailable, UserError, is_full
from trainer.process import StopSignal

PORT = 29400
BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0  # ten beats: a process that follows a file, or lets tiktoken work, is never so busy
# From the first node that is there to the last one: SkyPilot starts them within seconds, once all are set up.
COME_SECONDS = 300.0
LEAVE_SECONDS = 10.0  # for the others to hear how it ended
MOST_BYTES = 1 << 20  # of a message; a spec has a few thousand
FAULTS = (OSError, EOFError, ValueError)
# What ends the work of a node or of a rank, and is raised again by the head as what it was.
RERAISED: dict[str, type[Exception]] = {
    "mistake": UserError,
    "unavailable": StoreUnavailable,
    "diverged": Diverged,
}


@dataclass(frozen=True)
class NodeAddress:
    """This node among `count`."""

    rank: int = 0
    count: int = 1
    head: str = "127.0.0.1"
    port: int = PORT


def this_node() -> NodeAddress:
    """From the environment. UserError for what can't be meant."""
    count = number_from("SKYPILOT_NUM_NODES", 1)
    rank = number_from("SKYPILOT_NODE_RANK", 0)
    addresses = os.environ.get("SKYPILOT_NODE_IPS", "").split()
    if count <= 1:
        return NodeAddress()
    if rank >= count:
        raise UserError(f"SKYPILOT_NODE_RANK: {rank} of SKYPILOT_NUM_NODES={count}; it counts from 0")
    if not addresses:
        raise UserError("SKYPILOT_NODE_IPS: not set; its first line is the address of node 0")
    return NodeAddress(rank, count, addresses[0], number_from("SKYTRAIN_PORT", PORT))


def processes_on_this_node(runtime: RuntimeConfig) -> int:
    """Ranks to start here: as asked, or one a GPU, or one on a CPU. UserError if the device asked for isn't there."""
    if runtime.processes != "auto":
        return runtime.processes
    import torch

    from trainer.parallel import device_kind

    return torch.cuda.device_count() if device_kind(runtime) == "cuda" else 1


def number_from(name: str, default: int) -> int:
    said = os.environ.get(name) or str(default)
    if not (said.isdecimal() and len(said) <= 5):
        raise UserError(f"{name}: {said!r} is not a whole number")
    return int(said)


class Line:
    """One end of a connection. A thread beats, hears the other end, and notices when it is gone."""

    def __init__(self, connection: "Connection[Any, Any]", heard: Callable[[dict[str, Any]], None]) -> None:
        self.gone = threading.Event()
        self._connection, self._heard = connection, heard
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="line")

    def start(self) -> None:
        self._thread.start()

    def tell(self, **message: Any) -> None:
        """Send; a line that is broken is noticed by the thread."""
        with self._sending, suppress(*FAULTS):
            self._connection.send_bytes(json.dumps(message).encode())

    def close(self) -> None:
        """End the line; what was told before still arrives."""
        self.gone.set()
        self._thread.join(2 * BEAT_SECONDS)
        self._connection.close()

    def _listen(self) -> None:
        last_heard = last_beat = time.monotonic()
        try:
            while not self.gone.is_set() and time.monotonic() - last_heard < SILENT_SECONDS:
                if message := hear(self._connection, BEAT_SECONDS / 2):
                    last_heard = time.monotonic()
                    self._heard(message)
                if time.monotonic() - last_beat >= BEAT_SECONDS:
                    last_beat = time.monotonic()
                    self.tell(beat=True)
        except (*FAULTS, KeyError, TypeError):
            pass  # broken, or nothing of ours
        finally:
            self.gone.set()


def hear(connection: "Connection[Any, Any]", wait_seconds: float) -> dict[str, Any] | None:
    """The next message if one comes in time. Raises one of FAULTS for a broken line or a senseless message."""
    if not connection.poll(wait_seconds):
        return None
    message = json.loads(connection.recv_bytes(MOST_BYTES))
    if not isinstance(message, dict):
        raise ValueError("no message of ours")
    return message


@dataclass(frozen=True)
class NodeResult:
    """How a node's part of the work has ended: its ranks, or its parts of the text."""

    node: int
    kind: str | None = None  # of what went wrong: one of RERAISED, "stuck", or "fault"
    words: str = ""


def kind_and_message(error: Exception, folder: Path) -> tuple[str, str]:
    """What is to be told elsewhere of an error in work that writes into `folder`."""
    for kind, known in RERAISED.items():
        if isinstance(error, known):
            return kind, str(error)
    if isinstance(error, OSError) and is_full(error):
        return "mistake", f"{error.filename or folder}: {FULL}"
    return "fault", "".join(traceback.format_exception(error))


def failure(part: NodeResult) -> Exception:
    """What the head is to raise for a part that has failed."""
    assert part.kind, part
    return RERAISED[part.kind](part.words) if part.kind in RERAISED else RuntimeError(part.words)


class Head:
    """Node 0's end of all lines. Use as a context manager around the pipeline."""

    def __init__(
        self, place: NodeAddress, run: str, stop: StopSignal, exit_code: Callable[[BaseException], int]
    ) -> None:
        self.place, self.stop = place, stop
        self.lines: dict[int, Line] = {}  # by node
        self._run, self._exit_code = run, exit_code
        self._processes: dict[int, int] = {}
        self._round = 0
        self._parts: dict[int, NodeResult] = {}  # of this round
        self._tallies: dict[int, tuple[int, int]] = {}
        self._trained = False
        self._listener: Listener | None = None

    def __enter__(self) -> "Head":
        self._listener = listening(self.place.port, self.stop)
        threading.Thread(target=self._receive, args=[self._listener], daemon=True, name="nodes").start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        why = str(error) or type(error).__name__
        self._tell(end=0 if error is None else self._exit_code(error), why=why if error else "done")
        deadline = time.monotonic() + LEAVE_SECONDS
        while not all(line.gone.is_set() for line in self.lines.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self._listener
        self._listener.close()

    def gathered(self, here: int) -> int:
        """Wait until every node is there; how many ranks they make with the `here` of this one."""
        deadline = time.monotonic() + COME_SECONDS
        while missing := self._missing():
            self.stop.check()
            if time.monotonic() > deadline:
                raise UserError(  # not resumable: where it is no accident, rented nodes would try for ever
                    f"node {missing[0]} of {self.place.count} did not come in {COME_SECONDS:.0f} s; do all nodes give "
                    f"this command, and may they reach {self.place.head}:{self.place.port}?"
                )
            time.sleep(0.1)
        return here + sum(self._processes.values())

    def begin(self, spec: dict[str, Any]) -> int:
        """Let every node start its ranks; the port at which torchrun's parts meet on this node."""
        self._next_round()
        port = free_port()
        self._tell(train=self._round, spec=spec, port=port)
        return port

    def begin_parts(self, attempt: int) -> None:
        """Let every node make its parts of the text, as part of this attempt."""
        self._next_round()
        self._tell(tokenize=self._round, attempt=attempt)

    def told(self) -> list[tuple[int, int]]:
        """How far each of the other nodes has told to be with its parts, in tokens: there, and new."""
        return list(self._tallies.values())

    def lost(self) -> list[int]:
        """The nodes that were there and are gone."""
        return sorted(node for node, line in list(self.lines.items()) if line.gone.is_set())

    def failed(self) -> bool:
        """Whether the ranks of another node can't go on."""
        return bool(self.lost()) or any(part.kind for part in self._parts.values())

    def parts(self) -> list[NodeResult]:
        """How the other nodes' ranks ended, once all have told or are gone; `lost` says which are."""
        deadline = time.monotonic() + SILENT_SECONDS
        while len({*self._parts, *self.lost()}) < self.place.count - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.ended()

    def ended(self) -> list[NodeResult]:
        """How the parts that have ended so far did."""
        return [self._parts[node] for node in sorted(self._parts)]

    def trained(self) -> None:
        """The other nodes may leave: what follows is for the head alone."""
        self._trained = True
        self._tell(trained=True)

    def _next_round(self) -> None:
        self._round += 1
        self._parts.clear()
        self._tallies.clear()

    def _missing(self) -> list[int]:
        return [node for node in range(1, self.place.count) if node not in self.lines]

    def _tell(self, **message: Any) -> None:
        for line in list(self.lines.values()):
            line.tell(**message)

    def _receive(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=[connection], daemon=True, name="greeting").start()

    def _greet(self, connection: "Connection[Any, Any]") -> None:
        try:
            hello = hear(connection, SILENT_SECONDS) or {}
            node, processes = int(hello["node"]), int(hello["processes"])
            wrong = self._wrong(node, str(hello["run"]))
        except (*FAULTS, KeyError, TypeError):
            return connection.close()  # whoever that was
        line = Line(connection, lambda message: self._heard(node, message))
        if wrong:
            line.tell(end=2, why=wrong)
            return
        self._processes[node], self.lines[node] = processes, line
        if self._trained:
            line.tell(trained=True)
        line.start()
        line.gone.wait()
        if not self._trained:  # nothing can be trained without it, so it is no use to go on
            self.stop.ask(f"node {node} is gone")

    def _wrong(self, node: int, run: str) -> str | None:
        if run != self._run:
            return f"node 0 works on {self._run}, node {node} was told to work on {run}; give both the same command"
        if node in self.lines or not 0 < node < self.place.count:
            return f"node 0 has no place for another node {node} of {self.place.count}"
        return None

    def _heard(self, node: int, message: dict[str, Any]) -> None:
        if "stop" in message:
            self.stop.ask(f"node {node}: {message['stop']}")
        if message.get("ended") == self._round:
            self._parts[node] = NodeResult(node, message["kind"], message["words"])
        if "there" in message:
            self._tallies[node] = (message["there"], message["new"])


def listening(port: int, stop: StopSignal) -> Listener:
    """The head's listener. A port that an attempt before this one still holds is free again soon."""
    deadline = time.monotonic() + SILENT_SECONDS
    while True:
        try:
            return Listener(("0.0.0.0", port), backlog=64)
        except OSError as error:
            stop.check()
            if time.monotonic() > deadline:
                raise UserError(f"SKYTRAIN_PORT: {port} can't be listened on ({error}); choose another") from error
            time.sleep(0.5)


def call_head(place: NodeAddress, stop: StopSignal) -> "Connection[Any, Any] | None":
    """A connection to the head, None if it didn't answer in time."""
    deadline = time.monotonic() + COME_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            return Client((place.head, place.port))
        stop.check()
        time.sleep(0.5)
    return None


def rendezvous(place: NodeAddress, port: int) -> list[str]:
    """torchrun's options for the part of this node.

    Static rendezvous, not c10d: ranks keep their nodes, so that rank 0 is where its event file is read, and
    that a resumed run adds up in the same order.
    """
    return [
        f"--nnodes={place.count}",
        f"--node-rank={place.rank}",
        "--rdzv-backend=static",
        f"--master-addr={place.head}",
        f"--master-port={port}",
        f"--rdzv-conf=timeout={COME_SECONDS:.0f}",
    ]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def interface_to(address: str) -> str | None:
    """The network interface that leads from here to `address`; None if that can't be told."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, PORT))  # sends nothing
        except OSError:
            return None
        mine = probe.getsockname()[0]
    return next((name for name, all_ in psutil.net_if_addrs().items() if mine in [a.address for a in all_]), None)
