"""`skytrain drill`: strike a run again and again while it works, and see whether anything came of it.

A recipe runs twice, each time as the command that a user gives: once undisturbed, once under blows drawn
from a seed. A blow has a kind and a place, which is a `moment` in the code: the first process that gets there
stops and waits to be struck, so a blow falls between receipts and commit when it says so. At the end, what
both runs have left is compared (verdict.py).
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.artifacts.manifest import find
from pipelines.artifacts.store import open_store
from pipelines.drill.command import Command, Standing
from pipelines.drill.faults import (
    AT_THE_START,
    KINDS,
    Blow,
    chosen,
    other_processes,
    s3_endpoint,
    schedule,
    unavailable,
)
from pipelines.drill.outages import MlflowServer, Proxy, wait_until
from pipelines.drill.verdict import Report, outcome, points_of, verdicts
from pipelines.nodes.head import processes_on_this_node
from pipelines.recipe import Recipe, load_recipe
from pipelines.stage import STAGES, plans_of, run_name
from pipelines.tracking.ledger import SILENT_SECONDS, attempts, latest_number
from trainer.store import Store

POLL_SECONDS = 0.03
STOP_SECONDS = 120.0  # what a command may take to end that was asked to stop; it has promised 30 to its ranks
TAKEOVER_SECONDS = SILENT_SECONDS + 100
OUTAGE_SECONDS = (1.0, 6.0)
# What a command gets that is part of a drill: no cloud's notices, and no proxy before what is on this machine.
ALONE = {"SKYTRAIN_NOTICE": "off", "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


@dataclass
class Drill:
    """The disturbed run: the command that works on it now, and what has befallen it so far."""

    recipe: Recipe
    words: Sequence[str]  # RECIPE and --set
    store: Store
    folder: Path  # homes, logs, moments
    blows: list[Blow]
    rng: random.Random
    environment: dict[str, str]
    processes: int
    proxy: Proxy | None = None
    mlflow: MlflowServer | None = None
    say: Callable[[Blow], None] = lambda blow: None
    machine: int = 1
    command: Command | None = None
    commands: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plans = plans_of(self.recipe)
        self.prefix = {stage: plan.prefix for stage, plan in self.plans.items()}

    def start(self) -> Command:
        """Give the command (again), on the machine where the run is now."""
        words = [*self.words, "--store", self.store.uri, "--set", f"runtime.processes={self.processes}"]
        environment = self.environment | {"SKYTRAIN_DRILL_MACHINE": f"drill-{self.machine}"}
        home, folder = self.folder / f"home-{self.machine}", self.folder / f"command-{len(self.commands):03d}"
        self.command = Command(words, environment, home, folder)
        self.commands.append(self.command)
        return self.command

    def run(self) -> None:
        """All blows, then to the end."""
        for number, blow in enumerate(self.blows):
            fresh = self.command is None
            command = self.command or self.start()
            if blow.place not in command.armed:
                self.aim(blow, fresh)
            if not self.wait_for(blow, command):
                blow.fault = "the run was over before it could fall"
                continue
            self.strike(blow, command, following=self.blows[number + 1 :])
            self.say(blow)
        self.finish()

    def aim(self, blow: Blow, fresh: bool) -> None:
        """Change a blow that could not fall as things are."""
        if blow.place in AT_THE_START and not fresh:
            blow.place = "mid-step"
        if blow.place == "download" and not self.commits():
            blow.place = "first-step"

    def expect(self, following: Sequence[Blow], command: Command, fresh: bool) -> None:
        """Arm the next blow while this one falls: meanwhile a small run could come to its end."""
        for blow in following[:1]:
            self.aim(blow, fresh)
            command.arm(blow.place)

    def wait_for(self, blow: Blow, command: Command) -> bool:
        """Until a process waits where the blow falls; False if none ever will."""
        while not command.waits_at(blow.place):
            standing = self.observe()
            if self.finished(blow.stage) and not command.waits_at(blow.place):  # its stage was over sooner
                if blow.stage == STAGES[-1]:
                    return False
                command.disarm(blow.place)
                blow.stage = STAGES[STAGES.index(blow.stage) + 1]
                blow.place, blow.step = f"manifest-{blow.stage}", 0
                blow.kind = blow.kind if blow.stage in KINDS[blow.kind] else "kill"
            steps = standing.step if standing and standing.step else 0
            if steps >= blow.step or blow.place in AT_THE_START or blow.place.startswith("manifest-"):
                command.arm(blow.place)
            self.must_live(command)
            time.sleep(POLL_SECONDS)
        return True

    def must_live(self, command: Command) -> None:
        if command.process.poll():
            raise RuntimeError(f"a command ended by itself with {command.process.returncode}:\n{command.told()}")

    def observe(self) -> Standing | None:
        """How far training is, and what that says about the blows that it has overcome."""
        standing = Standing.of(self.command.home) if self.command else None
        for blow in self.blows if standing else ():
            if standing and blow.fell and blow.stage == "train":
                later = standing.attempt > blow.attempt
                if later and blow.redone is None and standing.resumed_from is not None:
                    blow.redone = max(0, (blow.at_step or 0) - standing.resumed_from)
                    if blow.kind == "term" and blow.redone and standing.attempt == blow.attempt + 1:
                        blow.fault = f"{blow.redone} steps were redone after an announced stop"
                if blow.seconds is None and standing.time > blow.fell and (later or not blow.interrupted):
                    blow.seconds = standing.time - blow.fell
        return standing

    def strike(self, blow: Blow, command: Command, following: Sequence[Blow]) -> None:
        """Let the blow fall on the command, which waits for it."""
        blow.attempt = latest_number(self.store, self.prefix[blow.stage])
        if blow.kind == "corrupt" and not self.commits():
            blow.kind = "kill"  # there is nothing to damage yet
        if blow.kind in ("cut", "mlflow"):
            self.outage(blow, command, following)
        elif blow.kind == "rival":
            self.rival(blow, command, following)
        else:
            self.end(blow, command)
        blow.interrupted = blow.kind == "rival" or (self.command is None and not self.finished(blow.stage))

    def note_steps(self, blow: Blow, command: Command) -> None:
        """How many steps were done when it fell."""
        standing = Standing.of(command.home) if blow.stage == "train" else None
        if standing and standing.attempt == blow.attempt:
            blow.at_step = standing.step

    def end(self, blow: Blow, command: Command) -> None:
        """kill, term, corrupt, world: the command ends, and is to be given again."""
        if blow.kind == "term":
            command.process.terminate()
            command.release(blow.place)
            code = command.wait(STOP_SECONDS)
            if code != 75:
                blow.fault = f"it ended with {code} where 75 was promised"
        else:
            command.kill()
        self.note_steps(blow, command)
        blow.fell, self.command = time.time(), None
        if blow.kind == "corrupt":
            self.corrupt()
        elif blow.kind == "world":
            self.processes = other_processes(self.processes)

    def corrupt(self) -> None:
        """Flip a bit in the newest commit."""
        newest = self.commits()[-1].removesuffix("COMMIT.json")
        key = self.rng.choice([entry.key for entry in self.store.entries(newest) if "receipt" not in entry.key])
        body = bytearray(self.store.get(key) or b"")
        body[self.rng.randrange(len(body))] ^= 1
        self.store.put(key, bytes(body))

    def outage(self, blow: Blow, command: Command, following: Sequence[Blow]) -> None:
        """cut, mlflow: what the run needs is away for some seconds; it has to go on by itself."""
        self.note_steps(blow, command)
        seconds = self.rng.uniform(*OUTAGE_SECONDS)
        stop: Callable[[], None]
        start: Callable[[], None]
        if blow.kind == "cut":
            assert self.proxy
            stop, start = partial(self.proxy.cut, silent=self.rng.random() < 0.5), self.proxy.restore
        else:
            assert self.mlflow
            stop, start = self.mlflow.stop, self.mlflow.start
        self.expect(following, command, fresh=False)  # stopping a server takes seconds, and one thread alone waits
        stop()
        blow.fell = time.time()
        command.release(blow.place)
        self.expect(following, command, fresh=False)  # once more: it may fall at this very place
        while time.time() < blow.fell + seconds:
            self.observe()
            time.sleep(POLL_SECONDS)
        start()

    def rival(self, blow: Blow, first: Command, following: Sequence[Blow]) -> None:
        """Freeze the run until another machine takes it for dead; it has to notice when it wakes."""
        prefix, mine = self.prefix[blow.stage], f"-a{blow.attempt:04d}/COMMIT.json"
        first.freeze()
        self.note_steps(blow, first)
        blow.fell = time.time()
        self.machine += 1
        second = self.start()
        self.expect(following, second, fresh=True)

        def taken_over() -> bool:
            self.must_live(second)
            return latest_number(self.store, prefix) > blow.attempt

        wait_until(taken_over, "the takeover by another machine", TAKEOVER_SECONDS)
        before = {key for key in self.commits() if key.endswith(mine)}
        first.thaw()
        first.release(blow.place)

        def noticed() -> bool:
            states = {beat.attempt: beat.state for beat in attempts(self.store, prefix)}
            return states[blow.attempt] == "stale" or first.process.poll() is not None

        wait_until(noticed, "the end of an attempt that is stale", STOP_SECONDS)
        if first.process.poll() is None:
            first.process.terminate()  # it would wait for the other one, and go on with it
        code = first.wait(STOP_SECONDS)
        stale = next(beat for beat in attempts(self.store, prefix) if beat.attempt == blow.attempt)
        # -SIGTERM: it was leaving already, and Python's shutdown no longer hears signals.
        if stale.state != "stale" or code not in (0, 75, -signal.SIGTERM):
            blow.fault = f"the first ended with {code} and state '{stale.state}' after it was taken over"
        elif {key for key in self.commits() if key.endswith(mine)} - before:
            blow.fault = "the first has committed after it was taken over"

    def finish(self) -> None:
        """To the end of the run; then once more, which has nothing to do but to tell MLflow what it missed."""
        for _ in range(2 if self.mlflow else 1):
            command = self.command or self.start()
            if self.mlflow:
                self.mlflow.wait_until_it_answers()
            while command.process.poll() is None:
                self.observe()
                time.sleep(POLL_SECONDS)
            command.wait(STOP_SECONDS)
            self.must_live(command)
            self.command = None

    def commits(self) -> list[str]:
        """The committed checkpoints' markers, oldest step first."""
        keys = (entry.key for entry in self.store.entries(f"{self.prefix['train']}/checkpoints/"))
        return sorted(key for key in keys if key.endswith("/COMMIT.json"))

    def finished(self, stage: str) -> bool:
        return find(self.store, self.plans[stage]) is not None


def drill(
    name: str,
    changes: Sequence[str],
    store_uri: str,
    kills: int,
    seed: int,
    kinds: Sequence[str] | None,
    note: Callable[[str], None],
) -> Report:
    """Run a recipe undisturbed and under `kills` blows, in a folder of the store that goes again if all is well.

    `kinds` are those of KINDS to draw from, by default all that mean something here. UserError if one doesn't.
    """
    began, recipe = time.monotonic(), load_recipe(name, changes)
    processes = processes_on_this_node(recipe.runtime)
    left_out = unavailable(store_uri, recipe, processes)
    blows = schedule(kills, seed, chosen(kinds, left_out), recipe.train.max_steps)
    place = f"{store_uri.rstrip('/')}/drill-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="skytrain-drill-"))
    words = [name, *(word for change in changes for word in ("--set", change))]
    note(f"the same run undisturbed, and under {kills} blows drawn from seed {seed}")
    note(f"in {place}, logs in {folder}")
    for kind in KINDS:
        if kind in left_out and kinds is None:
            note(f"without {kind}: {left_out[kind]}")

    def say(blow: Blow) -> None:
        at = f", step {blow.at_step}" if blow.at_step is not None else ""
        note(f"  {blow.kind:8} at {blow.place} (attempt {blow.attempt} of {blow.stage}{at})")

    def run(which: str, blows: list[Blow], environment: dict[str, str], **servers: Any) -> Drill:
        store = open_store(f"{place}/{which}")
        made = Drill(
            recipe, words, store, folder / which, blows, random.Random(seed), environment, processes, **servers
        )
        try:
            made.run()
        finally:
            for command in made.commands:
                command.kill()
        return made

    calm = run("undisturbed", [], ALONE | {"SKYTRAIN_TRACKING": "off"})
    with ExitStack() as stack:
        proxy = None if "cut" in left_out else stack.enter_context(Proxy(s3_endpoint()))
        server = None if "mlflow" in left_out else stack.enter_context(MlflowServer(folder / "mlflow"))
        environment = ALONE | {"SKYTRAIN_TRACKING": "off"}
        if server:
            environment = ALONE | {"MLFLOW_TRACKING_URI": server.uri}
        if proxy:
            environment |= {"AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ENDPOINT_URL_S3": proxy.endpoint}
        struck = run("disturbed", blows, environment, proxy=proxy, mlflow=server, say=say)
        told = points_of(server.uri, run_name(struck.plans)) if server else None
    lives = [command.life for command in struck.commands if command.life]
    ends = [outcome(each.store, run_name(each.plans)) for each in (calm, struck)]
    for blow in (b for b in blows if b.fell and b.seconds is None):  # where no step tells: until the next attempt
        later = [b.started for b in ends[1].beats[blow.stage] if b.attempt > blow.attempt]
        blow.seconds = max(0.0, later[0] - (blow.fell or 0)) if later else None
    judged = verdicts(ends[0], ends[1], blows, lives, told)
    report = Report(name, seed, place, blows, judged, left_out, time.monotonic() - began)
    if report.passed:
        shutil.rmtree(folder)
        for each in (calm, struck):
            for entry in each.store.entries(""):
                each.store.delete(entry.key)
    return report
