"""A worker: every node but node 0. It starts its ranks for each attempt of node 0 at the training.

It learns from the store: an attempt's numbers, its heartbeats and its end. Another attempt replaces its ranks. Once
node 0 is gone, the worker ends resumable.
"""

import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.recipe.recipe import Recipe
from pipelines.run.nodes.address import JOIN_SECONDS, NodeAddress, processes_on_this_node
from pipelines.run.nodes.ranks import Ranks, TrainTask, result_of_ranks, start_ranks
from pipelines.run.nodes.workers import POLL_SECONDS, WorkerRecord, read_numbers
from pipelines.run.screen import Screen
from pipelines.store.layout import file_folder
from pipelines.store.ledger import SILENT_SECONDS, newest_attempt
from pipelines.store.manifest import ArtifactPlan, find, scratch
from pipelines.store.records import HEARTBEAT_SECONDS
from pipelines.store.traffic import traffic_here
from trainer.base.process import StopSignal
from trainer.base.store import Store
from trainer.config.errors import Interrupted, UserError

END_SECONDS = 30.0  # for node 0 to end after a stop, beyond the time for saving
RECORD_SECONDS = 15.0  # for the supervisor of node 0 to record a crash: its imports, and the store
ENDED = ("interrupted", "stopped", "failed")  # states of an attempt after which node 0 exits


def run_worker(
    address: NodeAddress,
    until: str,
    recipe: Recipe,
    plans: dict[str, ArtifactPlan],
    store: Store,
    home: Path,
    stop: StopSignal,
    screen: Screen,
) -> int:
    """Work until the run is trained, or node 0 has ended. Returns this node's exit code: 0, because node 0's
    counts, and srun would kill node 0 after another one. Raises Interrupted once node 0 is gone."""
    name = f"node {address.rank}"
    if until == "tokenize" or find(store, plans["train"]):
        screen.note(f"{name}: nothing to do")
        return 0
    screen.note(f"{name} of {address.count}: worker; waiting for node 0, {address.first}, to start the training")
    ended = Worker(address, recipe, plans, store, home, stop).serve()
    screen.note(f"{name}: {ended}")
    return 0


class FirstNode:
    """Node 0, as its attempts in the store show it."""

    def __init__(self, store: Store, prefixes: list[str]) -> None:
        self.store, self.prefixes = store, prefixes
        self.working: tuple[str, int] | None = None  # artifact and number of the attempt that has worked since
        self.state = ""  # of that attempt
        self._known = {prefix: newest_attempt(store, prefix) for prefix in prefixes}
        self._changed = time.monotonic()

    def look(self) -> None:
        """Read the newest attempts. Raises Interrupted if none changes for too long while the store answers."""
        began = time.monotonic()
        try:
            for prefix in self.prefixes:
                beat, before = newest_attempt(self.store, prefix), self._known[prefix]
                if beat is None or beat == before:
                    continue
                self._known[prefix] = beat
                is_new = before is None or beat.attempt > before.attempt
                if is_new or beat.state == "running" or self.working == (prefix, beat.attempt):
                    self.working = (prefix, beat.attempt)
                    self.state = "restarting" if beat.progress.restarting else beat.state
                self.reset()
        except (OSError, UserError):
            self.reset()
        if time.monotonic() - began > HEARTBEAT_SECONDS:  # a store that is so slow is as good as away
            self.reset()
        if time.monotonic() - self._changed > (
            SILENT_SECONDS + RECORD_SECONDS if self.state == "running" else JOIN_SECONDS
        ):
            raise Interrupted("node 0 is lost" if self.working else "node 0 does not start the training")

    def reset(self) -> None:
        """Count the silence from now on: node 0 has reported, or the store is away, and then silence means nothing."""
        self._changed = time.monotonic()


class Worker:
    """A worker with its ranks of one attempt."""

    def __init__(
        self,
        address: NodeAddress,
        recipe: Recipe,
        plans: dict[str, ArtifactPlan],
        store: Store,
        home: Path,
        stop: StopSignal,
    ) -> None:
        self.address, self.plan, self.store, self.home, self.stop = address, plans["train"], store, home, stop
        tokens, prefix = plans["tokenize"].prefix, self.plan.prefix
        # Of the task of its ranks: no record leads them elsewhere.
        self.own: dict[str, Any] = {"recipe": recipe, "store": store.uri, "tokens": tokens, "prefix": prefix}
        self.own |= {"stage": self.plan.stage}
        self.first = FirstNode(store, [tokens, prefix])
        self.ranks: Ranks | None = None
        self.attempt = 0  # that the ranks are of
        self.record = WorkerRecord(address.rank, time.time())
        self._stopped_at: float | None = None  # by time.monotonic

    def serve(self) -> str:
        """Start the ranks of one attempt after the other. Returns how node 0 has ended."""
        try:
            while True:
                self.first.look()
                if self.first.state in ENDED:
                    return f"node 0 has ended ({self.first.state})"
                if self.first.state != "running" and find(self.store, self.plan):
                    return "trained; node 0 continues alone"
                if fresh := self._fresh_task():
                    self._start_ranks(*fresh)
                elif self.ranks is None:
                    self.stop.check()
                self._report()
                self._wait()
        finally:
            self._kill_ranks()

    def _fresh_task(self) -> tuple[TrainTask, int] | None:
        """The task of an attempt of this job whose ranks this node has not started, and the port where they meet."""
        if self.first.working is None or self.first.state != "running":
            return None
        prefix, attempt = self.first.working
        if prefix != self.plan.prefix or attempt <= self.attempt:
            return None
        with suppress(OSError):
            numbers = read_numbers(self.store, prefix, attempt)
            if numbers and numbers.cluster == self.address.cluster:
                given = {name: value for name, value in vars(numbers).items() if name not in vars(self.address)}
                return TrainTask(**given, **self.own, attempt=attempt), numbers.port
        return None

    def _start_ranks(self, task: TrainTask, port: int) -> None:
        self._kill_ranks()
        self.attempt = task.attempt
        self.record = WorkerRecord(self.address.rank, time.time())
        self._traffic_before = traffic_here()
        # Its name has the node in it: nodes may share a home on a network disk.
        self.folder = scratch(self.home, self.store, task.prefix).joinpath(
            f"{file_folder(task.attempt)}-node{self.address.rank}"
        )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        processes = processes_on_this_node(task.recipe.runtime)
        if processes != task.processes:
            raise UserError(
                f"runtime.processes: this node would have {processes} ranks, and node 0 has {task.processes}; "
                "set it to the smaller number"
            )
        self.ranks = start_ranks(
            task, self.folder, self.home, self.stop.grace_seconds, replace(self.address, port=port)
        )

    def _kill_ranks(self) -> None:
        if self.ranks and self.ranks.launcher.poll() is None:
            self.ranks.kill()

    def _wait(self) -> None:
        """Sleep until the next report: until the ranks end, or this node is asked to stop, if that is earlier."""
        deadline = time.monotonic() + (HEARTBEAT_SECONDS if self.ranks else POLL_SECONDS)
        while time.monotonic() < deadline:
            ended = self.ranks is not None and self.ranks.launcher.poll() is not None and not self.record.result
            if ended or (self.stop.asked and not self.record.stop):
                return
            time.sleep(0.1)

    def _report(self) -> None:
        """Tell node 0 that this node lives, how its ranks ended, and whether it must stop: then all ranks leave on a
        commit. Raises Interrupted if node 0 does not end in time."""
        if self.ranks is None:
            return
        if (exit_code := self.ranks.launcher.poll()) is not None and not self.record.result:
            if exit_code < 0:
                self.ranks.wait_for_orphans()
            self.record = replace(self.record, result=result_of_ranks(self.address.rank, self.folder, exit_code))
        if self.stop.asked and self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self.record = replace(self.record, stop=self.stop.reason or "asked to stop")
        traffic = traffic_here() - self._traffic_before
        self.record = replace(self.record, time=time.time(), traffic=traffic)
        try:
            self.record.write(self.store, self.plan.prefix, self.attempt)
        except (OSError, UserError):
            self.first.reset()
        if self._stopped_at and time.monotonic() - self._stopped_at > self.stop.grace_seconds + END_SECONDS:
            raise Interrupted("node 0 does not stop")
