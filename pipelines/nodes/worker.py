"""A worker: every node but the head. It starts its ranks, and leaves when released."""

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from queue import Empty, SimpleQueue

from pipelines.artifacts.manifest import ArtifactPlan, find, scratch
from pipelines.nodes.address import NodeAddress, processes_on_this_node
from pipelines.nodes.connection import CONNECTION_ERRORS, SILENT_SECONDS, NodeConnection, connect_to_head, receive
from pipelines.nodes.messages import (
    CommandDied,
    End,
    Hello,
    Message,
    StartRanks,
    StopNotice,
    Trained,
    WorkDone,
    message_to_json,
)
from pipelines.nodes.ranks import kill_ranks, result_of_ranks, start_torchrun, wait_for_orphans
from pipelines.recipe import Recipe
from pipelines.screen import Screen
from trainer.errors import Interrupted
from trainer.process import StopSignal
from trainer.store import Store

POLL_SECONDS = 0.2  # between two checks of messages, ranks and the stop signal
HEAD_SECONDS = 30.0  # for the head to end, beyond the time for saving


@dataclass(frozen=True)
class Ranks:
    """This node's ranks of one attempt."""

    round: int
    folder: Path
    torchrun: subprocess.Popen[bytes]


def run_worker(
    address: NodeAddress,
    run: str,
    until: str,
    recipe: Recipe,
    plans: dict[str, ArtifactPlan],
    store: Store,
    home: Path,
    stop: StopSignal,
    screen: Screen,
    standby: bool,
    head_recorded_death: Callable[[], bool] = lambda: False,
) -> int:
    """Work for the head until the run is trained.

    Returns this node's exit code. Raises Interrupted if the head does not answer, or is gone without an end. A
    `standby` machine has no GPUs and starts no ranks. `head_recorded_death` tells, once the head is gone,
    whether its machine lives and gives the exit code.
    """
    if until == "tokenize" or find(store, plans["train"]):  # the head tokenizes alone
        screen.note(f"node {address.rank}: nothing to do")
        return 0
    processes = 0 if standby else processes_on_this_node(recipe.runtime)
    head = f"{address.head}:{address.port}"
    screen.note(f"node {address.rank} of {address.count}: worker with {processes} process(es) for the head, {head}")
    socket = connect_to_head(address, stop)
    reason = f"the head, {head}, does not answer"
    if socket:
        messages: SimpleQueue[Message] = SimpleQueue()
        connection = NodeConnection(socket, messages.put)
        worker = Worker(address, recipe, plans, store, home, processes, stop, screen, connection, messages)
        if worker.serve(Hello(address.rank, run, processes)):
            return 0  # the head's exit code counts; an earlier exit with another code, and srun would kill the head
        reason = "the head is gone"
        if head_recorded_death():
            return 0  # as above: the head's machine has the exit code
    if not find(store, plans["train"]):
        raise Interrupted(reason)
    return 0


def report_death(address: NodeAddress, run: str, cause: str) -> bool:
    """Tell the head, which is about to leave, that a signal ended this node's command. Whether the head counts it."""
    with suppress(*CONNECTION_ERRORS):
        socket = Client((address.head, address.port))
        with closing(socket):
            socket.send_bytes(message_to_json(CommandDied(address.rank, run, cause)))
            return receive(socket, SILENT_SECONDS) is not None
    return False


@dataclass
class Worker:
    """A node that is connected to the head, with its ranks."""

    address: NodeAddress
    recipe: Recipe
    plans: dict[str, ArtifactPlan]
    store: Store
    home: Path
    processes: int
    stop: StopSignal
    screen: Screen
    connection: NodeConnection
    messages: SimpleQueue[Message]
    ranks: Ranks | None = None
    stop_sent_at: float | None = None  # by time.monotonic

    def serve(self, hello: Hello) -> bool:
        """Do the work that the head requests. True once the head releases this node, False if it is gone."""
        self.connection.send(hello)
        self.connection.start()
        try:
            while not self.connection.gone.is_set() or not self.messages.empty():
                if self._handle(self._next_message()):
                    return True
                self._report_ended_ranks()
                self._pass_on_stop()
            return False
        finally:
            if self.ranks:
                kill_ranks(self.ranks.torchrun)
            self.connection.close()

    def _next_message(self) -> Message | None:
        try:
            return self.messages.get(timeout=POLL_SECONDS)
        except Empty:
            return None

    def _handle(self, message: Message | None) -> bool:
        """Returns True if the head releases this node."""
        name = f"node {self.address.rank}"
        match message:
            case StartRanks():
                self.ranks = self._start_ranks(message)
            case Trained():
                self.screen.note(f"{name}: trained; the head continues alone")
                return True
            case End(exit_code, reason):
                log = self.screen.warn if exit_code else self.screen.note
                log(f"{name}: the head ends ({reason})")
                return True
        return False

    def _start_ranks(self, request: StartRanks) -> Ranks:
        folder = self._fresh_folder(self.plans["train"], request.spec.attempt)
        torchrun = start_torchrun(
            request.spec, folder, self.home, self.processes, self.stop.grace_seconds, self.address, request.port
        )
        return Ranks(request.round, folder, torchrun)

    def _fresh_folder(self, plan: ArtifactPlan, attempt: int) -> Path:
        """An empty folder. Its name has the node in it: nodes may share a home on a network disk."""
        folder = scratch(self.home, self.store, plan.prefix) / f"a{attempt:04d}-node{self.address.rank}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _report_ended_ranks(self) -> None:
        if self.ranks and (exit_code := self.ranks.torchrun.poll()) is not None:
            if exit_code < 0:
                wait_for_orphans(self.ranks.folder, self.stop.grace_seconds)
            result = result_of_ranks(self.address.rank, self.ranks.folder, exit_code)
            self.connection.send(WorkDone(self.ranks.round, result))
            self.ranks = None

    def _pass_on_stop(self) -> None:
        """Let the head stop all ranks on a commit. Raises Interrupted if it does not end in time."""
        if self.stop.asked and self.stop_sent_at is None:
            self.stop_sent_at = time.monotonic()
            self.connection.send(StopNotice(self.stop.reason or "asked to stop"))
        limit = self.stop.grace_seconds + HEAD_SECONDS
        if self.stop_sent_at and time.monotonic() - self.stop_sent_at > limit:
            raise Interrupted("the head does not stop")
