"""What every node but the head does: lend its GPUs to the stage train, and leave when the head needs them no more."""

import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from pipelines.artifacts.manifest import Plan, find, scratch
from pipelines.cloud.handover import waits_here
from pipelines.nodes import Line, Place, call_head, processes_on_this_node
from pipelines.progress import Screen
from pipelines.recipe import Recipe
from pipelines.stages.train import kill_ranks, part_of, start_torchrun
from trainer.process import Interrupted, StopSignal
from trainer.store import Store

LOOK_SECONDS = 0.2
HEAD_SECONDS = 30.0  # beyond what saving takes: a head that was asked to stop and doesn't is not waited for


@dataclass
class Ranks:
    """This node's part of the ranks of one attempt."""

    number: int  # of the head's calls for ranks
    folder: Path
    torchrun: subprocess.Popen[bytes]


def lend(
    place: Place,
    run: str,
    until: str,
    recipe: Recipe,
    plan: Plan,
    store: Store,
    home: Path,
    stop: StopSignal,
    screen: Screen,
) -> int:
    """Take part in the training of `plan` until it is done; the exit code of this node.

    Raises Interrupted if the head does not come, or goes without a word.
    """
    if until == "tokenize" or find(store, plan):
        screen.note(f"node {place.rank}: nothing to train")
        return 0
    processes = 0 if waits_here() else processes_on_this_node(recipe.runtime)  # where there are no GPUs to count
    screen.note(f"node {place.rank} of {place.count}: {processes} process(es) for the head, {place.head}:{place.port}")
    connection = call_head(place, stop)
    if connection is None:
        return without_head(store, plan, f"the head, {place.head}:{place.port}, does not answer")
    heard: SimpleQueue[dict[str, Any]] = SimpleQueue()
    line = Line(connection, heard.put)
    line.tell(node=place.rank, run=run, processes=processes)
    line.start()
    ranks: Ranks | None = None
    asked_at: float | None = None
    try:
        while not line.gone.is_set() or not heard.empty():
            message = next_of(heard)
            if "train" in message:
                ranks = start_ranks(place, message, scratch(home, store, plan.prefix), home, processes, stop)
            elif "trained" in message:
                screen.note(f"node {place.rank}: trained; the head goes on alone")
                return 0
            elif "end" in message:
                screen.warn(f"node {place.rank}: the head leaves ({message['why']})")
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
        return without_head(store, plan, "the head is gone")
    finally:
        if ranks:
            kill_ranks(ranks.torchrun)
        line.close()


def start_ranks(place: Place, call: dict[str, Any], work: Path, home: Path, processes: int, stop: StopSignal) -> Ranks:
    """Do what the head calls for. The folder's name has the node in it: homes may be one, on a shared disk."""
    folder = work / f"a{call['spec']['attempt']:04d}-node{place.rank}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torchrun = start_torchrun(call["spec"], folder, home, processes, stop.grace_seconds, place, call["port"])
    return Ranks(call["train"], folder, torchrun)


def next_of(messages: "SimpleQueue[dict[str, Any]]") -> dict[str, Any]:
    try:
        return messages.get(timeout=LOOK_SECONDS)
    except Empty:
        return {}


def without_head(store: Store, plan: Plan, why: str) -> int:
    """0 if there is nothing left to train."""
    if find(store, plan):
        return 0
    raise Interrupted(why)
