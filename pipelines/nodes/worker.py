"""What every node but the head does: make its parts of the text, lend its GPUs to the stage train, and leave when the
head needs it no more."""

import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from pipelines.artifacts.manifest import ArtifactPlan, find, scratch, upload
from pipelines.cloud.deadline import is_standby
from pipelines.nodes.head import Line, NodeAddress, NodeResult, call_head, kind_and_message, processes_on_this_node
from pipelines.recipe import Recipe
from pipelines.screen import Screen
from pipelines.stages.tokenize import Share, make, parts_of
from pipelines.stages.train import kill_ranks, part_of, start_torchrun
from trainer.errors import Interrupted
from trainer.process import StopSignal
from trainer.store import Store

LOOK_SECONDS = 0.2
PARTS_SECONDS = 10.0  # for a shard that is under way; its receipt is not lost with it
HEAD_SECONDS = 30.0  # beyond what saving takes: a head that was asked to stop and doesn't is not waited for


@dataclass
class Ranks:
    """This node's part of the ranks of one attempt."""

    number: int  # of the head's calls for ranks
    folder: Path
    torchrun: subprocess.Popen[bytes]


def run_worker(
    place: NodeAddress,
    run: str,
    until: str,
    recipe: Recipe,
    plans: Mapping[str, ArtifactPlan],
    store: Store,
    home: Path,
    stop: StopSignal,
    screen: Screen,
) -> int:
    """Take part in what several nodes do of a run up to the stage `until`; the exit code of this node.

    Raises Interrupted if the head does not come, or goes without a word.
    """
    shared = [plans["tokenize"]] if recipe.tokens.parts > 1 else []
    if until != "tokenize":
        shared.append(plans["train"])
    if all_there(store, shared):
        screen.note(f"node {place.rank}: nothing to do")
        return 0
    without_gpus = until == "tokenize" or is_standby()
    processes = 0 if without_gpus else processes_on_this_node(recipe.runtime)
    hands = "parts of the text" if until == "tokenize" else f"{processes} process(es)"
    screen.note(f"node {place.rank} of {place.count}: {hands} for the head, {place.head}:{place.port}")
    connection = call_head(place, stop)
    if connection is None:
        return without_head(store, shared, f"the head, {place.head}:{place.port}, does not answer")
    heard: SimpleQueue[dict[str, Any]] = SimpleQueue()
    line = Line(connection, heard.put)
    line.tell(node=place.rank, run=run, processes=processes)
    line.start()
    parts: Parts | None = None
    ranks: Ranks | None = None
    asked_at: float | None = None
    try:
        while not line.gone.is_set() or not heard.empty():
            message = next_of(heard)
            if parts and ("tokenize" in message or "train" in message):
                parts.leave()  # a rival has taken over the attempt that they were for
            if "tokenize" in message:
                folder = scratch(home, store, plans["tokenize"].prefix)
                parts = Parts(place, message, recipe, plans["tokenize"], store, folder, line, screen)
            elif "train" in message:
                ranks = start_ranks(place, message, scratch(home, store, plans["train"].prefix), home, processes, stop)
            elif "trained" in message:
                screen.note(f"node {place.rank}: trained; the head goes on alone")
                return 0
            elif "end" in message:
                say = screen.warn if message["end"] else screen.note
                say(f"node {place.rank}: the head leaves ({message['why']})")
                return 0  # the head's exit code speaks for all; another one of ours first, and srun would kill it
            if ranks and ranks.torchrun.poll() is not None:
                part = part_of(place.rank, ranks.folder, ranks.torchrun.returncode)
                line.tell(ended=ranks.number, **asdict(part))
                ranks = None
            if stop.asked and asked_at is None:
                asked_at = time.monotonic()
                line.tell(stop=stop.reason)  # the head makes all ranks commit and leave
            if asked_at and time.monotonic() - asked_at > stop.grace_seconds + HEAD_SECONDS:
                raise Interrupted("the head does not stop")
        return without_head(store, shared, "the head is gone")
    finally:
        if parts:
            parts.leave()
        if ranks:
            kill_ranks(ranks.torchrun)
        line.close()


class Parts:
    """This node's parts of the text, made by a thread, so that the line is heard meanwhile."""

    def __init__(
        self,
        place: NodeAddress,
        call: dict[str, Any],
        recipe: Recipe,
        plan: ArtifactPlan,
        store: Store,
        scratch: Path,
        line: Line,
        screen: Screen,
    ) -> None:
        self.node, self.number, self.line = place.rank, call["tokenize"], line
        self._leaving = threading.Event()
        folder = folder_of(place, call["attempt"], scratch)
        self.share = Share(
            recipe.tokens,
            plan,
            store,
            parts_of(place, recipe.tokens.parts),
            folder,
            partial(upload, store, plan.prefix, call["attempt"]),
            self._check,
            screen.note,
        )
        # A daemon: text that does not come must not keep a node that is to leave.
        self._thread = threading.Thread(target=self._make, daemon=True, name="parts")
        self._thread.start()

    def leave(self) -> None:
        """Leave off where the next attempt can go on."""
        self._leaving.set()
        self._thread.join(PARTS_SECONDS)
        shutil.rmtree(self.share.folder, ignore_errors=True)

    def _check(self) -> None:
        if self._leaving.is_set():
            raise Interrupted("the head is not waiting for these parts any more")

    def _make(self) -> None:
        part = NodeResult(self.node)
        try:
            for tally in make(self.share):
                self.line.tell(**asdict(tally))
        except Exception as error:  # whatever it is, the head has to hear of it
            part = NodeResult(self.node, *kind_and_message(error, self.share.folder))
        if not self._leaving.is_set():
            self.line.tell(ended=self.number, **asdict(part))


def start_ranks(
    place: NodeAddress, call: dict[str, Any], work: Path, home: Path, processes: int, stop: StopSignal
) -> Ranks:
    """Do what the head calls for."""
    folder = folder_of(place, call["spec"]["attempt"], work)
    torchrun = start_torchrun(call["spec"], folder, home, processes, stop.grace_seconds, place, call["port"])
    return Ranks(call["train"], folder, torchrun)


def folder_of(place: NodeAddress, attempt: int, scratch: Path) -> Path:
    """A fresh folder. Its name has the node in it: homes may be one, on a shared disk."""
    folder = scratch / f"a{attempt:04d}-node{place.rank}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def next_of(messages: "SimpleQueue[dict[str, Any]]") -> dict[str, Any]:
    try:
        return messages.get(timeout=LOOK_SECONDS)
    except Empty:
        return {}


def without_head(store: Store, shared: list[ArtifactPlan], why: str) -> int:
    """0 if there is nothing left to do."""
    if all_there(store, shared):
        return 0
    raise Interrupted(why)


def all_there(store: Store, plans: list[ArtifactPlan]) -> bool:
    return all(find(store, plan) for plan in plans)
