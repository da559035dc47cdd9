"""Several processes in one: the real store, ledger, checkpoints, manifests and gc, one store operation at a time.

Each process is a `skytrain run` or a `skytrain gc` on a machine with a clock of its own. Its threads stop before every
operation of the store, and `World.step` lets one of them go on to its next operation. So a test decides about every
interleaving, every crash and every lost answer; a process that gets no step is frozen. Time is simulated, too.

The world checks after every change of the store that no promise is broken; `broken` keeps the first that is.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stage_work import NoSignals

import pipelines.run.run_record
import pipelines.run.runs
import pipelines.run.stages.follow  # before a patch of what it imports
import trainer.base.store
import trainer.checkpoint.checkpointer
from pipelines.recipe.recipe import Recipe
from pipelines.run import gc, pipeline
from pipelines.run.pipeline import Pipeline
from pipelines.run.run_record import record
from pipelines.run.stage import Built, Work, artifacts, plans_of, run_name, stage_named
from pipelines.run.stages import tokenize
from pipelines.run.watch import Summary
from pipelines.store import ledger, meter, process_id
from pipelines.store.manifest import read_manifest
from pipelines.store.records import Billing, ProcessId
from pipelines.user.show.console import TerminalScreen
from trainer.base.events import EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World as Ranks
from trainer.base.store import LocalStore
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import Commit, TrainState, committed_state
from trainer.checkpoint.pieces import Piece
from trainer.config.errors import Interrupted, NoSoundCommit, StaleAttempt, StoreUnavailable, UserError

DAY = 86_400.0
STEPS = 4  # of training, with a commit after each
OPERATION_SECONDS = 0.3


class Crashed(BaseException):
    """The process of this thread was killed. Nothing that it does on its way out reaches the store."""


@dataclass(eq=False)
class Process:
    """A command on a machine, whose clock is wrong by `skew` seconds."""

    world: "World"
    name: str
    machine: str
    skew: float
    pid: int
    threads: "list[Thread]" = field(default_factory=list)
    dead: bool = False
    error: BaseException | None = None  # that ended it
    late: list[str] = field(default_factory=list)  # commits that it made after a commit of its successor

    @property
    def main(self) -> "Thread":
        return self.threads[0]

    @property
    def alive(self) -> bool:
        return not self.dead and not self.main.done

    def crash(self) -> None:
        """End all its threads; also after its main thread has ended."""
        self.dead = True
        for thread in self.threads:
            while not thread.done:
                self.world.resume(thread)


class Thread:
    """A thread of a process. It has the interface of `Background`, and runs only when the world lets it."""

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        crashed: Callable[[Any], None] = lambda thread: None,
        daemon: bool = True,
        process: Process | None = None,
    ) -> None:
        self.process: Process = process or the_world().current.process
        self.error: BaseException | None = None
        self.done = False
        self.at = ""  # the operation that comes next
        self.ready: Callable[[], bool] = lambda: True
        self.wakes = 0.0
        self.fault: str | None = None  # of the operation that comes next
        self.unsure = ("", 0)  # its last commit, and its operations since then
        self.go = threading.Lock()
        self.go.acquire()
        self._work, self._crashed, self.name = work, crashed, name

    def start(self) -> None:
        self.process.threads.append(self)
        self.os_thread = threading.Thread(target=self._run, daemon=True)
        self.os_thread.start()

    def is_alive(self) -> bool:
        return not self.done

    def join(self, timeout: float | None = None) -> None:
        the_world().wait(lambda: self.done, timeout)

    def _run(self) -> None:
        self.go.acquire()
        with suppress(Crashed):
            try:
                if not self.process.dead:
                    self._work()
            except Crashed:
                raise
            except BaseException as error:
                self.error = error
                self._crashed(self)
        self.done = True
        self.process.world.stopped.release()


class Event:
    """threading.Event, by the world's time."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        the_world().wait(self.is_set, timeout)
        return self._set


class Lock:
    """threading.Lock, for the world's threads."""

    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        the_world().wait(lambda: not self._held)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False


class SteppedStore(LocalStore):
    """A local store whose operations wait for the world, and answer with its faults."""

    def __init__(self, root: Path, world: "World") -> None:
        super().__init__(root)
        self.world = world

    def _do(self, what: str, key: str, act: Callable[[], Any]) -> Any:
        thread = self.world.pause(f"{what} {key}")
        if thread is None:
            return act()
        fault, thread.fault = thread.fault, None
        thread.unsure = (thread.unsure[0], thread.unsure[1] + 1)
        if fault == "refused":
            self.world.excuse(thread)
            raise StoreUnavailable(f"{key}: refused")
        before = self.world.newest_sound() if what == "delete" else None
        done = act()
        changes = what in ("create", "put", "write", "upload", "delete")
        if changes:
            self.world.changed(thread, what, key, done, before)
        if fault == "lost":
            self.world.excuse(thread)
            raise StoreUnavailable(f"{key}: its answer was lost")
        if fault == "twice" and changes:  # the second delivery decides about the answer
            self.world.pause(f"again {what} {key}")
            again = act()
            self.world.changed(thread, what, key, again, before)
            return again or LocalStore.get(self, key) if what == "create" else again
        return done

    def create(self, key: str, body: bytes) -> bool:
        # As S3Store does: a refused create was ours if the object has our body.
        def act() -> bool:
            return LocalStore.create(self, key, body)

        done = self._do("create", key, act)
        return done if isinstance(done, bool) else done == body

    def _operation(name: str) -> Any:  # type: ignore[misc]
        method = getattr(LocalStore, name)

        def operation(self: "SteppedStore", *arguments: Any) -> Any:
            key = next(one for one in arguments if isinstance(one, str))
            return self._do(name, key, lambda: method(self, *arguments))

        return operation

    put, get, upload, write, download, entries, delete = map(
        _operation, ("put", "get", "upload", "write", "download", "entries", "delete")
    )

    def clock(self) -> float:
        return self.world.now


class World:
    """The store, the machines and their processes."""

    def __init__(self, folder: Path, recipe: Recipe, keep_last: int = 1) -> None:
        global _world
        _world = self
        self.folder, self.recipe, self.keep_last = folder, recipe, keep_last
        self.plans = plans_of(recipe)
        self.prefixes = {name: plan.prefix for name, plan in self.plans.items()}
        self.plain, self.store = LocalStore(folder / "store"), SteppedStore(folder / "store", self)
        self.now = 1.9e9
        self.old = False  # whether nobody has worked for more than a week
        self.processes: list[Process] = []
        self.stopped = threading.Semaphore(0)
        self._current: Thread | None = None
        self._ident = 0
        self.claimed: dict[str, list[int]] = {prefix: [] for prefix in self.prefixes.values()}
        self.broken: str | None = None  # the first promise that was broken
        self.damaged: set[str] = set()  # files of commits with a flipped bit
        self.trace: list[str] = []

    # --- processes

    def run(self, machine: str, skew: float = 0.0) -> Process:
        """Start `skytrain run`, which makes tokens and trains."""
        return self._start(f"run@{machine}", machine, skew, lambda: self._run(machine))

    def gc(self, machine: str, skew: float = 0.0, older_than_days: float = 7.0) -> Process:
        """Start `skytrain gc`. With 0 days it may remove every commit that nobody works on."""

        def collect() -> None:
            try:
                for _ in gc.collect(self.store, older_than_days):
                    pass
            except UserError as error:
                if "ages decide here" not in str(error):  # its clock is wrong, or it was frozen between two looks
                    raise

        name = "gc" if older_than_days else "gc of all"
        return self._start(f"{name}@{machine}", machine, skew, collect)

    def _run(self, machine: str) -> None:
        home, run = self.folder / machine, run_name(self.plans)
        screen = TerminalScreen(quiet=True)
        made = Pipeline(self.recipe, self.store, home, Billing(), screen, NoSignals(), self.plans, [Summary()])
        record(self.store, run, self.recipe, self.plans, "train")
        try:
            made._make_all(artifacts(self.store, self.plans, "train"))
        except NoSoundCommit:
            if self.newest_sound() is None:  # the user does as the message says
                shutil.rmtree(self.plain.path_of(f"{self.prefixes['train']}/checkpoints"), ignore_errors=True)
            raise

    def _start(self, name: str, machine: str, skew: float, work: Callable[[], object]) -> Process:
        number = len(self.processes) + 1
        process = Process(self, f"{number}:{name}", machine, skew, number)
        self.processes.append(process)
        Thread("main", work, process=process).start()
        return process

    def living(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    # --- one step at a time

    @property
    def current(self) -> Thread:
        assert self._current
        return self._current

    def resume(self, thread: Thread) -> None:
        """Let a thread run to its next operation, or to its end."""
        self._current = thread
        thread.go.release()
        self.stopped.acquire()
        self._current = None

    def pause(self, at: str) -> Thread | None:
        """Called by a thread: wait for the next step. None on a thread that is not of this world."""
        thread = self._current
        if thread is None or threading.current_thread() is not thread.os_thread:
            return None
        if thread.process.dead:
            raise Crashed
        thread.at = at
        self.stopped.release()
        thread.go.acquire()
        if thread.process.dead:
            raise Crashed
        return thread

    def wait(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Called by a thread: wait for a condition, at most so many seconds."""
        thread = self.current
        if condition():
            return
        thread.wakes = self.now + (1e12 if timeout is None else timeout)
        thread.ready = lambda: condition() or self.now >= thread.wakes
        self.pause("wait")
        thread.ready = lambda: True

    def step(self, process: Process) -> bool:
        """One operation of a process, of the thread that is due. If all of them wait, time passes. False at its end."""
        if not process.alive:
            return False
        due = [thread for thread in process.threads if not thread.done and thread.ready()]
        if not due:
            self.now = min(thread.wakes for thread in process.threads if not thread.done)
            return True
        thread = due[-1] if len(due) > 1 and int(self.now * 10) % 2 else due[0]
        self.trace.append(f"{process.name} {thread.name}: {thread.at}{f' ({thread.fault})' if thread.fault else ''}")
        self.now += OPERATION_SECONDS
        self.resume(thread)
        if process.main.done:
            process.error = process.main.error
            process.crash()
            self._ended(process)
        assert self.broken is None, f"{self.broken}\n" + "\n".join(self.trace[-60:])
        return process.alive

    def _ended(self, process: Process) -> None:
        allowed = (type(None), StoreUnavailable, Interrupted, StaleAttempt, TimeoutError)
        if not isinstance(process.error, allowed):
            self._break(f"{process.name} ended with {process.error!r}")
        kept = [key for key in process.late if LocalStore.get(self.plain, key)]
        if kept:
            self._break(f"{process.name} left {kept}, made after a commit of its successor")

    def until(self, process: Process, what: str, limit: int = 400) -> bool:
        """Steps of a process until its next operation matches `what`."""
        for _ in range(limit):
            if any(not thread.done and re.match(what, thread.at) for thread in process.threads):
                return True
            if not self.step(process):
                return False
        return False

    def finish(self, processes: Sequence[Process], limit: int = 20_000) -> None:
        """Let processes run side by side until all have ended."""
        for _ in range(limit):
            alive = [process for process in processes if process.alive]
            if not alive:
                return
            for process in alive:
                self.step(process)
        raise AssertionError("waits forever: " + ", ".join(f"{p.name} at {p.main.at}" for p in processes if p.alive))

    def close(self) -> None:
        for process in self.processes:
            process.crash()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- promises

    def _break(self, promise: str) -> None:
        self.broken = self.broken or promise

    def changed(self, thread: Thread, what: str, key: str, done: Any, before: int | None) -> None:
        """After every change of the store."""
        path = self.plain.path_of(key)
        if what != "delete" and done is not False and path.exists():
            os.utime(path, (self.now, self.now))
        prefix = "/".join(key.split("/")[:2])
        if what == "create" and done and key.endswith("/claim.json"):
            number = int(key.split("/")[-2])
            if number in self.claimed[prefix]:
                self._break(f"attempt {number} of {prefix} was given twice")
            self.claimed[prefix].append(number)
        if what == "create" and done and key.endswith("/COMMIT.json"):
            number, newer = int(key.rpartition("-a")[2][:4]), self._commits()
            thread.unsure = (key, 0)
            if any(commit.attempt > number for commit in newer):
                thread.process.late.append(key)
        taken_back = thread.unsure[0] == key and thread.unsure[1] <= 2  # it looked again, and is superseded
        less = before is not None and (self.newest_sound() or 0) < before
        if less and not taken_back and not self._may_go(thread, prefix):
            self._break(f"{thread.process.name} removed the newest sound commit (step {before}) by {key}")
        if what == "delete" or key.endswith("/MANIFEST.json"):
            self.check_manifests()

    def excuse(self, thread: Thread) -> None:
        """An outage between a commit and the look after it has the effect of a crash there."""
        key, since = thread.unsure
        if since <= 2 and key in thread.process.late:
            thread.process.late.remove(key)

    def _may_go(self, thread: Thread, prefix: str) -> bool:
        """Whether all commits may go: their training is finished, or gc removes what is old."""
        finished = self.plain.path_of(f"{prefix}/MANIFEST.json").exists()
        return finished or "gc of all" in thread.process.name or ("gc" in thread.process.name and self.old)

    def check_manifests(self) -> None:
        for prefix in self.prefixes.values():
            if lost := self.lost(prefix):
                self._break(f"{prefix}/MANIFEST.json names {lost}, which is missing")

    def lost(self, prefix: str) -> str | None:
        """A file that the manifest names and the store lacks."""
        manifest = read_manifest(self.plain, prefix)
        keys = (f"{prefix}/{file.key}" for file in manifest.files) if manifest else ()
        return next((key for key in keys if not self.plain.path_of(key).exists()), None)

    def _commits(self) -> Iterator[Commit]:
        for entry in self.plain.entries(f"{self.prefixes['train']}/checkpoints/"):
            folder, _, name = entry.key.rpartition("/")
            if name == "COMMIT.json":
                yield Commit.decode(self.plain.get(entry.key) or b"", folder)

    def sound_commits(self) -> list[Commit]:
        """The commits whose files exist and are undamaged, oldest first."""
        sound = [
            commit
            for commit in self._commits()
            if not self.damaged & {path.as_posix() for path in self.files_of(commit)}
            and all(path.exists() for path in self.files_of(commit))
        ]
        return sorted(sound, key=lambda commit: (commit.step, commit.attempt))

    def files_of(self, commit: Commit) -> list[Path]:
        folder = f"{self.prefixes['train']}/checkpoints/step-{commit.step:08d}-a{commit.attempt:04d}"
        return [self.plain.path_of(f"{folder}/{file.name}") for file in commit.files]

    def newest_sound(self) -> int | None:
        """The step of the newest commit that a run can resume from."""
        return max((commit.step for commit in self.sound_commits()), default=None)

    def corrupt(self) -> None:
        """Flip a bit in a file of the newest sound commit, if there is one."""
        for commit in self.sound_commits()[-1:]:
            path = self.files_of(commit)[0]
            body = bytearray(path.read_bytes())
            body[-1] ^= 1
            path.write_bytes(body)
            self.damaged.add(path.as_posix())


_world: World | None = None


def the_world() -> World:
    assert _world
    return _world


class Clock:
    """The module `time` on the machine of the running process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        thread = the_world()._current
        return the_world().now + (thread.process.skew if thread else 0.0)

    def monotonic(self) -> float:
        return the_world().now

    def sleep(self, seconds: float) -> None:
        the_world().wait(lambda: False, seconds)


def this_process() -> ProcessId:
    process = the_world().current.process
    return ProcessId(process.machine, process.pid, str(process.pid))


def process_started(pid: int) -> str | None:
    return str(pid) if the_world().processes[pid - 1].alive else None


class SmallTraining:
    """The stage train with weights that are a function of the step: real checkpoints, commits and attempts."""

    def __init__(self) -> None:
        self.plan = stage_named("train").plan

    def build(self, work: Work) -> Built:
        for file in work.inputs["tokenize"].files:
            work.fetch("tokenize", file.name)
        weights, state, log = torch.zeros(6), TrainState(), EventLog(None, PhaseClock())
        with Checkpointer(
            work.store,
            work.plan.prefix,
            Ranks(0, 0, 1, torch.device("cpu")),
            work.attempt.number,
            keep_last=the_world().keep_last,
            superseded=work.attempt.superseded,
        ) as checkpoints:
            pieces = {"model.w": Piece.whole(weights)}
            state = checkpoints.load_latest(pieces, log) or state
            while state.step < STEPS:
                work.check()
                weights.copy_(weights_after(state.step + 1, weights))
                state = replace(state, step=state.step + 1)
                log.row(state.step, {"train/loss": 1.0 / state.step})
                checkpoints.settle(log)
                checkpoints.save(state, pieces, log)
            checkpoints.finish(log)
        found = committed_state(work.store, work.plan.prefix)
        if found is None or found.step < STEPS:
            raise Interrupted("no commit of the last step")
        path = work.folder / "model.safetensors"
        path.write_bytes(weights.numpy().tobytes())
        return Built([work.upload(path)], {})


def weights_after(step: int, before: torch.Tensor) -> torch.Tensor:
    return before * 0.5 + step


def final_weights() -> bytes:
    weights = torch.zeros(6)
    for step in range(1, STEPS + 1):
        weights = weights_after(step, weights)
    return weights.numpy().tobytes()


def simulate(patch: pytest.MonkeyPatch) -> None:
    """Give this process the clocks, threads and stages of the simulated ones."""
    patch.delenv("SKYTRAIN_METER", raising=False)
    for module in (ledger, gc, pipeline, trainer.checkpoint.checkpointer, pipelines.run.run_record):
        patch.setattr(module, "time", Clock())
    for module in (ledger, trainer.checkpoint.checkpointer):
        patch.setattr(module, "Background", Thread)
    patch.setattr(trainer.base.store, "READERS", 1)
    patch.setattr(ledger, "threading", SimpleNamespace(Event=Event, Lock=Lock))
    for module in (ledger, process_id):
        patch.setattr(module, "this_process", this_process)
    patch.setattr(process_id, "process_started", process_started)
    patch.setattr(meter, "process_began", lambda: the_world().now)
    for module in (ledger, meter):
        patch.setattr(module, "steady_time", Clock().time)
        patch.setattr(module, "since_boot", Clock().monotonic)
    for name, value in vars(pipelines.run.runs.Run).items():
        if isinstance(value, cached_property) and hasattr(value, "lock"):  # Python 3.11: one for all processes here
            patch.setattr(vars(pipelines.run.runs.Run)[name], "lock", nullcontext())
    patch.setattr(pipeline, "provenance", dict)
    stages = {"tokenize": tokenize, "train": SmallTraining()}
    patch.setattr(pipeline, "stage_named", lambda name: stages.get(name) or stage_named(name))
