"""A worker: every node but the head. It makes its parts of the text, starts its ranks, and leaves when released."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from queue import Empty, SimpleQueue

from pipelines.artifacts.manifest import ArtifactPlan, find, scratch, upload
from pipelines.nodes.address import NodeAddress, processes_on_this_node
from pipelines.nodes.connection import CONNECTION_ERRORS, SILENT_SECONDS, NodeConnection, connect_to_head, receive
from pipelines.nodes.messages import (
    CommandDied,
    End,
    Hello,
    MakeParts,
    Message,
    StartRanks,
    StopNotice,
    Trained,
    WorkDone,
    message_to_json,
)
from pipelines.nodes.ranks import kill_ranks, result_of_ranks, start_torchrun, wait_for_orphans
from pipelines.nodes.results import NodeResult, kind_and_message
from pipelines.recipe import Recipe
from pipelines.screen import Screen
from pipelines.text.mixture import texts_of
from pipelines.text.parts import PartsJob, PartsProgress, make_parts, parts_in_order
from trainer.errors import Interrupted
from trainer.process import StopSignal
from trainer.store import Store

POLL_SECONDS = 0.2  # between two checks of messages, ranks and the stop signal
PARTS_SECONDS = 10.0  # to finish the current shard; its receipt then survives
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
    """Work for the head until the run is trained, or tokenized if that is its last stage.

    Returns this node's exit code. Raises Interrupted if the head does not answer, or is gone without an end. A
    `standby` machine has no GPUs and starts no ranks. `head_recorded_death` tells, once the head is gone,
    whether its machine lives and gives the exit code.
    """
    shared = [plans["tokenize"]] if recipe.tokens.streams > 1 else []
    if until != "tokenize":
        shared.append(plans["train"])

    def all_made() -> bool:
        return all(find(store, plan) for plan in shared)

    if all_made():
        screen.note(f"node {address.rank}: nothing to do")
        return 0
    tokenizes_only = until == "tokenize"
    processes = 0 if tokenizes_only or standby else processes_on_this_node(recipe.runtime)
    task = "parts of the text" if tokenizes_only else f"{processes} process(es)"
    head = f"{address.head}:{address.port}"
    screen.note(f"node {address.rank} of {address.count}: worker with {task} for the head, {head}")
    socket = connect_to_head(address, stop)
    reason = f"the head, {head}, does not answer"
    if socket:
        messages: SimpleQueue[Message] = SimpleQueue()
        connection = NodeConnection(socket, messages.put)
        worker = Worker(address, recipe, plans, store, home, processes, stop, screen, connection, messages)
        worker.leaves_after_parts = tokenizes_only
        if worker.serve(Hello(address.rank, run, processes)):
            return 0  # the head's exit code counts; an earlier exit with another code, and srun would kill the head
        reason = "the head is gone"
        if head_recorded_death():
            return 0  # as above: the head's machine has the exit code
    if not all_made():
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
    """A node that is connected to the head, with its parts of the text and its ranks."""

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
    parts: "Parts | None" = None
    ranks: Ranks | None = None
    stop_sent_at: float | None = None  # by time.monotonic
    leaves_after_parts: bool = False  # the run ends with its tokens

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
                if self.leaves_after_parts and self.parts and self.parts.made.is_set():
                    self.screen.note(f"node {self.address.rank}: no part of the text is left for this node; it leaves")
                    return True
            return False
        finally:
            if self.parts:
                self.parts.leave()
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
            case MakeParts():
                self._leave_parts()
                self.parts = self._make_parts(message)
            case StartRanks():
                self._leave_parts()
                self.ranks = self._start_ranks(message)
            case Trained():
                self.screen.note(f"{name}: trained; the head continues alone")
                return True
            case End(exit_code, reason):
                log = self.screen.warn if exit_code else self.screen.note
                log(f"{name}: the head ends ({reason})")
                return True
        return False

    def _leave_parts(self) -> None:
        """Stop making parts: a newer attempt has replaced the attempt that needed them."""
        if self.parts:
            self.parts.leave()

    def _make_parts(self, request: MakeParts) -> "Parts":
        rank, nodes = self.address.rank, self.address.count
        folder = self._fresh_folder(self.plans["tokenize"], request.attempt)

        def make(check: Callable[[], None]) -> Iterator[PartsProgress]:
            texts = texts_of(self.recipe, self.plans["tokenize"])
            first = rank % len(texts)
            for recipe, plan in [*texts[first:], *texts[:first]]:
                if recipe.tokens.adopts or find(self.store, plan):
                    continue
                (folder / plan.name).mkdir(exist_ok=True)
                job = PartsJob(
                    recipe.tokens,
                    plan,
                    self.store,
                    parts_in_order(rank, nodes, recipe.tokens.parts),
                    folder / plan.name,
                    partial(upload, self.store, plan.prefix, request.attempt),
                    check,
                    self.screen.note,
                    row_tokens=recipe.row_tokens,
                    attempt=request.attempt,
                    waits=False,
                    shared=True,
                )
                yield from make_parts(job)

        return Parts(rank, request.round, folder, make, self.connection)

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


class Parts:
    """This node's parts of the text, or of each text of a mixture. A thread makes them, so that the node handles
    messages of the head meanwhile."""

    def __init__(
        self,
        node: int,
        round_: int,
        folder: Path,
        make: Callable[[Callable[[], None]], Iterator[PartsProgress]],
        connection: NodeConnection,
    ) -> None:
        self.node, self.round, self.folder, self.connection = node, round_, folder, connection
        self.made = threading.Event()  # as far as this node can make them
        self._leaving = threading.Event()
        self._make_all = make
        # A daemon thread: a slow source of text must not delay the exit of the node.
        self._thread = threading.Thread(target=self._make, daemon=True, name="parts")
        self._thread.start()

    def leave(self) -> None:
        """Stop where the next attempt can resume."""
        self._leaving.set()
        self._thread.join(PARTS_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check(self) -> None:
        if self._leaving.is_set():
            raise Interrupted("the head no longer waits for these parts")

    def _make(self) -> None:
        result = NodeResult(self.node)
        try:
            for progress in self._make_all(self._check):
                self.connection.send(progress)
        except Exception as error:  # the head must learn of any error
            result = NodeResult(self.node, *kind_and_message(error, self.folder))
        if not self._leaving.is_set():
            self.connection.send(WorkDone(self.round, result))
        if result.kind is None:
            self.made.set()
