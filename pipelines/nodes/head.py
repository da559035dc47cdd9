"""The head of several nodes: node 0 runs the pipeline as if it were alone, and directs the others.

Every node runs the same command. Only the head claims attempts, sends heartbeats to the store and commits. Each other
node is a worker: it keeps a connection to the head, which asks it to start its ranks. Nodes share only the files in the
store. Once a node is gone, all nodes exit, and the same command resumes.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Listener

from pipelines.artifacts.traffic import Traffic, traffic_here
from pipelines.nodes.address import JOIN_SECONDS, NodeAddress, free_port
from pipelines.nodes.connection import CONNECTION_ERRORS, SILENT_SECONDS, NodeConnection, Socket, listen, receive
from pipelines.nodes.messages import (
    CommandDied,
    End,
    Hello,
    KeepAlive,
    Message,
    StartRanks,
    StopNotice,
    Trained,
    WorkDone,
)
from pipelines.nodes.ranks import RankSpec
from pipelines.nodes.results import NodeResult
from trainer.errors import EXIT_DONE, EXIT_MISTAKE, UserError
from trainer.process import Background, StopSignal

LEAVE_SECONDS = 10.0  # for the workers to receive the end
DEATH_SECONDS = 15.0  # for the shell of a worker to report the death of its command: a start of Python, and the store
EXIT_SECONDS = 20.0  # for their processes to end: on a loaded machine, 5 were too few


class Head:
    """Node 0's connections to all workers. Use as a context manager around the pipeline.

    A round is one request to all workers: to start ranks.
    """

    def __init__(
        self, address: NodeAddress, run: str, stop: StopSignal, exit_code: Callable[[BaseException], int]
    ) -> None:
        self.address, self.stop = address, stop
        self.connections: dict[int, NodeConnection] = {}  # by node
        self._run, self._exit_code = run, exit_code
        self._processes: dict[int, int] = {}  # by node
        self.hosts: dict[int, str] = {}  # by node: the names of the workers' machines
        self._round = 0
        self._results: dict[int, NodeResult] = {}  # of this round, by node
        self._traffic: dict[int, Traffic] = {}  # so far, by node
        self._deaths: dict[int, str] = {}  # of commands: the cause, by node
        self._trained = False
        self._listener: Listener | None = None

    def __enter__(self) -> "Head":
        self._listener = listen(self.address.port, self.stop)
        accept = partial(self._accept, self._listener)
        Background("nodes", accept, lambda thread: self.stop.ask(f"the head's thread died: {thread.error!r}")).start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self._send(End(EXIT_DONE, "done"))
        else:
            self._send(End(self._exit_code(error), str(error) or type(error).__name__))
        deadline = time.monotonic() + LEAVE_SECONDS
        while not all(one.gone.is_set() for one in self.connections.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self._listener
        self._listener.close()
        if error is not None:
            let_workers_exit_first(self.address)

    def wait_for_workers(self, own_processes: int) -> int:
        """Wait until every node is connected. Returns the number of ranks on all nodes."""
        deadline = time.monotonic() + JOIN_SECONDS
        while missing := [node for node in range(1, self.address.count) if node not in self.connections]:
            self.stop.check()
            if time.monotonic() > deadline:
                # A mistake, not an interruption: rented nodes would otherwise retry for ever.
                raise UserError(
                    f"node {missing[0]} of {self.address.count} did not connect within "
                    f"{JOIN_SECONDS:.0f} s; run this command on all nodes, and let them reach "
                    f"{self.address.head}:{self.address.port}"
                )
            time.sleep(0.1)
        return own_processes + sum(self._processes.values())

    def start_ranks(self, spec: RankSpec) -> int:
        """Let every worker start its ranks. Returns the port on this node at which torchrun's processes meet."""
        self._next_round()
        port = free_port()
        self._send(StartRanks(self._round, spec, port))
        return port

    def traffic(self) -> Traffic:
        """The bytes that all nodes have exchanged with buckets, as far as they have reported."""
        return sum(list(self._traffic.values()), traffic_here())

    def lost_nodes(self) -> list[int]:
        """The nodes that were connected and are gone."""
        return sorted(node for node, connection in list(self.connections.items()) if connection.gone.is_set())

    def death_of_command(self) -> str | None:
        """The cause, if a signal has ended the command of a worker that is gone. Waits for the report of its shell; a
        machine that was lost is silent, and reports nothing."""
        deadline = time.monotonic() + DEATH_SECONDS
        while not self._deaths and time.monotonic() < deadline:
            if not any(self.connections[node].broken for node in self.lost_nodes()):
                break
            time.sleep(0.05)
        return next(iter(self._deaths.values()), None)

    def has_failed(self) -> bool:
        """Whether the ranks of another node cannot continue."""
        return bool(self.lost_nodes()) or any(result.kind for result in self._results.values())

    def wait_for_results(self) -> list[NodeResult]:
        """The results of this round, once every worker reported one or is gone."""
        deadline = time.monotonic() + SILENT_SECONDS
        while len({*self._results, *self.lost_nodes()}) < self.address.count - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.results()

    def results(self) -> list[NodeResult]:
        """The results of this round so far."""
        return [self._results[node] for node in sorted(self._results)]

    def release_workers(self) -> None:
        """Let the workers leave: the stages after training need only the head."""
        self._trained = True
        self._send(Trained())

    def _next_round(self) -> None:
        self._round += 1
        self._results.clear()

    def _send(self, message: Message) -> None:
        for connection in list(self.connections.values()):
            connection.send(message)

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                socket = listener.accept()
            except OSError:
                return  # closed
            Background("admission", partial(self._admit, socket)).start()

    def _admit(self, socket: Socket) -> None:
        """Admit a worker, and watch it until it is gone."""
        try:
            hello = receive(socket, SILENT_SECONDS)
        except CONNECTION_ERRORS:
            hello = None
        if isinstance(hello, CommandDied) and hello.run == self._run:
            self._deaths[hello.node] = hello.cause
            NodeConnection(socket, lambda message: None).send(End(EXIT_DONE, "counted"))
        if not isinstance(hello, Hello):
            return socket.close()
        node = hello.node
        connection = NodeConnection(socket, lambda message: self._received(node, message))
        if reason := self._refusal(hello):
            connection.send(End(EXIT_MISTAKE, reason))
            return
        self._processes[node], self.hosts[node] = hello.processes, hello.host
        self.connections[node] = connection
        if self._trained:
            connection.send(Trained())
        connection.start()
        connection.gone.wait()
        if not self._trained:  # training needs every node
            self.stop.ask(f"node {node} is gone")

    def _refusal(self, hello: Hello) -> str | None:
        node, count = hello.node, self.address.count
        if hello.run != self._run:
            return f"node 0 works on {self._run} and node {node} on {hello.run}; run the same command on both"
        if not 0 < node < count:
            return f"node {node} is not one of 1 to {count - 1}; set SKYPILOT_NODE_RANK"
        if node in self.connections and not self.connections[node].gone.is_set():
            return f"another node {node} of {count} is connected already; set SKYPILOT_NODE_RANK"
        return None

    def _received(self, node: int, message: Message) -> None:
        match message:
            case StopNotice(reason):
                self.stop.ask(f"node {node}: {reason}")
            case WorkDone(round_, result) if round_ == self._round:
                self._results[node] = result
            case KeepAlive(traffic):
                self._traffic[node] = traffic


def let_workers_exit_first(address: NodeAddress) -> None:
    """Wait before the head of several nodes exits with an error in a Slurm job.

    srun kills the processes of the other nodes as soon as one exits with an error, and returns the highest code: 143,
    after which no managed job recovers, instead of 75.
    """
    if address.count > 1 and "SLURM_JOB_ID" in os.environ:
        time.sleep(EXIT_SECONDS)
