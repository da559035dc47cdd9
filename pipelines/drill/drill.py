"""`skytrain drill`: inject faults into a run while it works, and check that its results stay the same.

A recipe runs twice, both times by the command of a user: once undisturbed, once with faults drawn from a seed. A fault
has a kind and a failpoint in the code. The first process that reaches the failpoint waits there for the fault, so the
drill can inject it, for example, exactly between receipts and commit. At the end, verdict.py compares the results.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipelines.artifacts.manifest import find
from pipelines.artifacts.store import open_store
from pipelines.drill.command import COMMAND, Command, TrainingProgress
from pipelines.drill.faults import (
    AT_THE_START,
    KINDS,
    ON_S3,
    OUTAGES,
    TAKEOVERS,
    USUAL,
    Fault,
    chosen,
    other_processes,
    s3_endpoint,
    schedule,
    unavailable,
)
from pipelines.drill.outages import FailingFolder, MlflowServer, OddServer, Proxy, wait_until
from pipelines.drill.verdict import DrillReport, outcome, points_of, verdicts
from pipelines.nodes.address import processes_on_this_node
from pipelines.recipe import Recipe, load_recipe
from pipelines.stage import STAGES, plans_of, run_name
from pipelines.tracking.ledger import HEARTBEAT_SECONDS, SILENT_SECONDS, attempts, latest_number
from trainer.errors import EXIT_DONE, EXIT_INTERRUPTED
from trainer.process import die_with_parent
from trainer.store import LocalStore, Store

POLL_SECONDS = 0.03
STOP_SECONDS = 120.0  # limit for a command that was asked to stop; it gives its ranks 30
TAKEOVER_SECONDS = SILENT_SECONDS + 100
OUTAGE_SECONDS = (1.0, 6.0)
SKEW_SECONDS = (-30 * 3600.0, -2 * 3600.0, 3 * 3600.0, 8 * 86_400.0)
# The environment of a drill's commands: no cloud notices, and no HTTP proxy for this machine's own servers.
ISOLATED = {"SKYTRAIN_NOTICE": "off", "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


@dataclass
class Drill:
    """A run under faults: its current command, and all commands so far."""

    recipe: Recipe
    arguments: Sequence[str]  # RECIPE and --set
    store: Store
    folder: Path  # homes, logs, failpoints
    faults: list[Fault]
    rng: random.Random
    environment: dict[str, str]
    processes: int
    proxy: Proxy | None = None
    mlflow: MlflowServer | None = None
    report: Callable[[Fault], None] = lambda fault: None
    machine: int = 1
    skew: float = 0.0  # seconds that its clock is fast
    command: Command | None = None
    commands: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plans = plans_of(self.recipe)
        self.prefix = {stage: plan.prefix for stage, plan in self.plans.items()}

    def start(self) -> Command:
        """Start the command (again) on the current machine."""
        arguments = [*self.arguments, "--store", self.store.uri, "--set", f"runtime.processes={self.processes}"]
        environment = self.environment | {"SKYTRAIN_DRILL_MACHINE": f"drill-{self.machine}"}
        home, folder = self.folder / f"home-{self.machine}", self.folder / f"command-{len(self.commands):03d}"
        self.command = Command(arguments, environment, home, folder, self.skew)
        self.commands.append(self.command)
        return self.command

    def run(self) -> None:
        """Inject all faults, then let the run finish."""
        for number, fault in enumerate(self.faults):
            fresh = self.command is None
            command = self.command or self.start()
            if fault.failpoint not in command.armed:
                self.adjust(fault, fresh)
            if not self.wait_for(fault, command):
                fault.violation = "the run ended before the drill could inject it"
                continue
            self.inject(fault, command, following=self.faults[number + 1 :])
            self.report(fault)
        self.finish()

    def adjust(self, fault: Fault, fresh: bool) -> None:
        """Change a fault that is not possible at this point of the run."""
        if fault.failpoint in AT_THE_START and not fresh:
            fault.failpoint = "mid-step"
        if fault.failpoint == "download" and not self.commits():
            fault.failpoint = "first-step"

    def arm_next(self, following: Sequence[Fault], command: Command, fresh: bool) -> None:
        """Arm the next fault during this one; otherwise a small run could end in between."""
        for fault in following[:1]:
            self.adjust(fault, fresh)
            command.arm(fault.failpoint)

    def wait_for(self, fault: Fault, command: Command) -> bool:
        """Wait until a process waits at the failpoint; False if none can reach it any more."""
        while not command.waits_at(fault.failpoint):
            progress = self.observe()
            if self.finished(fault.stage) and not command.waits_at(fault.failpoint):  # its stage has ended
                if fault.stage == STAGES[-1]:
                    return False
                command.disarm(fault.failpoint)
                fault.stage = STAGES[STAGES.index(fault.stage) + 1]
                fault.failpoint, fault.step = f"manifest-{fault.stage}", 0
                fault.kind = fault.kind if fault.stage in KINDS[fault.kind] else "kill"
            steps = progress.step if progress and progress.step else 0
            if steps >= fault.step or fault.failpoint in AT_THE_START or fault.failpoint.startswith("manifest-"):
                command.arm(fault.failpoint)
            self.check_alive(command)
            time.sleep(POLL_SECONDS)
        return True

    def check_alive(self, command: Command) -> None:
        if command.process.poll():
            raise RuntimeError(
                f"a command ended by itself with exit code {command.process.returncode}:\n{command.log_tail()}"
            )

    def observe(self) -> TrainingProgress | None:
        """The progress of training. Fills in the cost of the faults that the run has recovered from."""
        progress = TrainingProgress.of(self.command.home) if self.command else None
        for fault in self.faults if progress else ():
            if progress and fault.injected_at and fault.stage == "train":
                later = progress.attempt > fault.attempt
                if later and fault.redone is None and progress.resumed_from is not None:
                    fault.redone = max(0, (fault.at_step or 0) - progress.resumed_from)
                    if fault.kind == "term" and fault.redone and progress.attempt == fault.attempt + 1:
                        fault.violation = f"{fault.redone} steps were redone after an announced stop"
                at = progress.time - (self.command.skew if self.command else 0.0)
                if fault.seconds is None and at > fault.injected_at and (later or not fault.interrupted):
                    fault.seconds = at - fault.injected_at
        return progress

    def inject(self, fault: Fault, command: Command, following: Sequence[Fault]) -> None:
        """Inject the fault into the command, which waits for it."""
        fault.attempt = latest_number(self.store, self.prefix[fault.stage])
        if fault.kind == "corrupt" and not self.commits():
            fault.kind = "kill"  # no commit to damage yet
        if fault.kind in OUTAGES:
            self.outage(fault, command, following)
        elif fault.kind in TAKEOVERS:
            self.rival(fault, command, following)
        else:
            self.end(fault, command)
        fault.interrupted = fault.kind in TAKEOVERS or (self.command is None and not self.finished(fault.stage))

    def record_step(self, fault: Fault, command: Command) -> None:
        """Record the step of the injection."""
        progress = TrainingProgress.of(command.home) if fault.stage == "train" else None
        if progress and progress.attempt == fault.attempt:
            fault.at_step = progress.step

    def end(self, fault: Fault, command: Command) -> None:
        """kill, term, corrupt, world, clock: the command ends, and the next fault starts it again."""
        if fault.kind == "term":
            command.process.terminate()
            command.release(fault.failpoint)
            code = command.wait(STOP_SECONDS)
            if code != EXIT_INTERRUPTED:
                fault.violation = f"exit code {code} instead of {EXIT_INTERRUPTED}"
        else:
            command.kill()
        self.record_step(fault, command)
        fault.injected_at, self.command = time.time(), None
        if fault.kind == "corrupt":
            self.corrupt()
        elif fault.kind == "world":
            self.processes = other_processes(self.processes)
        elif fault.kind == "clock":
            self.machine, self.skew = self.machine + 1, self.rng.choice(SKEW_SECONDS)

    def corrupt(self) -> None:
        """Flip a bit in the newest commit."""
        newest = self.commits()[-1].removesuffix("COMMIT.json")
        key = self.rng.choice([entry.key for entry in self.store.entries(newest) if "receipt" not in entry.key])
        body = bytearray(self.store.get(key) or b"")
        body[self.rng.randrange(len(body))] ^= 1
        self.store.put(key, bytes(body))

    def outage(self, fault: Fault, command: Command, following: Sequence[Fault]) -> None:
        """cut, mlflow, odd, twice, eio, gc: for some seconds something is wrong. The run has to continue by itself, or,
        where the folder of its store fails, to end with 75."""
        self.record_step(fault, command)
        seconds = self.rng.uniform(*OUTAGE_SECONDS)
        with ExitStack() as stack:
            stop, start = self.disturbance(fault.kind, stack)
            self.arm_next(following, command, fresh=False)  # stopping a server takes seconds, and only one thread waits
            stop()
            fault.injected_at = time.time()
            command.release(fault.failpoint)
            self.arm_next(following, command, fresh=False)  # again: the next fault may have the same failpoint
            while time.time() < fault.injected_at + seconds:
                self.observe()
                time.sleep(POLL_SECONDS)
            start()
        if fault.kind == "eio":
            self.settle(fault, command)

    def disturbance(self, kind: str, stack: ExitStack) -> tuple[Callable[[], None], Callable[[], None]]:
        """The beginning and the end of an outage."""
        if kind == "mlflow":
            assert self.mlflow
            return self.mlflow.stop, self.mlflow.start
        if kind == "gc":
            return lambda: None, self.gc(stack)
        if kind == "eio":
            assert isinstance(self.store, LocalStore)
            folder = FailingFolder(self.store.root)
            return folder.fail, folder.mend
        assert self.proxy
        if kind == "cut":
            return partial(self.proxy.cut, silent=self.rng.random() < 0.5), self.proxy.restore
        odd = stack.enter_context(OddServer(self.proxy.server, kind == "twice", self.rng.randrange(1 << 30)))
        return partial(self.proxy.through, odd.address), self.proxy.restore

    def gc(self, stack: ExitStack) -> Callable[[], None]:
        """Start `skytrain gc` of everything, on another machine. Returns a call that waits for its end."""
        environment = os.environ | self.environment | {"SKYTRAIN_DRILL_MACHINE": "drill-gc"}
        environment["SKYTRAIN_HOME"] = str(self.folder / "home-gc")
        arguments = ["gc", "--store", self.store.uri, "--older-than-days", "0"]
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        stack.callback(process.kill)

        def wait() -> None:
            _, said = process.communicate(timeout=STOP_SECONDS)
            if process.returncode:
                raise RuntimeError(f"gc ended with exit code {process.returncode}:\n{said.decode(errors='replace')}")

        return wait

    def settle(self, fault: Fault, command: Command) -> None:
        """Wait until the command has ended after an outage, or goes on: it has sent heartbeats for a while."""
        mended = time.time() + command.skew

        def settled() -> bool:
            if command.process.poll() is not None:
                return True
            beats = attempts(self.store, self.prefix[fault.stage])
            return max((beat.time for beat in beats), default=0.0) > mended + HEARTBEAT_SECONDS

        wait_until(settled, "heartbeats or the end after an outage of the store", STOP_SECONDS)
        if command.process.poll():
            if (code := command.wait(STOP_SECONDS)) != EXIT_INTERRUPTED:
                fault.violation = f"exit code {code} instead of {EXIT_INTERRUPTED}"
            self.command = None

    def rival(self, fault: Fault, first: Command, following: Sequence[Fault]) -> None:
        """Freeze the run until another machine takes over. The run has to notice that when it wakes.

        frozen: it wakes after the other machine has committed, and while gc works.
        """
        prefix, suffix = self.prefix[fault.stage], f"-a{fault.attempt:04d}/COMMIT.json"
        first.freeze()
        self.record_step(fault, first)
        fault.injected_at = time.time()
        self.machine, self.skew = self.machine + 1, 0.0
        second = self.start()
        after_commit = fault.kind == "frozen" and not fault.failpoint.startswith("manifest-")
        if after_commit:
            second.arm("committed")
        else:
            self.arm_next(following, second, fresh=True)

        def taken_over() -> bool:
            self.check_alive(second)
            return latest_number(self.store, prefix) > fault.attempt

        wait_until(taken_over, "the takeover by another machine", TAKEOVER_SECONDS)
        if after_commit:
            wait_until(lambda: second.waits_at("committed"), "a commit of another machine", STOP_SECONDS)
            with ExitStack() as stack:
                self.gc(stack)()
            self.arm_next(following, second, fresh=False)
        before = {key for key in self.commits() if key.endswith(suffix)}
        first.thaw()
        first.release(fault.failpoint)

        def noticed() -> bool:
            states = {beat.attempt: beat.state for beat in attempts(self.store, prefix)}
            return states[fault.attempt] == "stale" or first.process.poll() is not None

        wait_until(noticed, "the end of a stale attempt", STOP_SECONDS)
        if first.process.poll() is None:
            first.process.terminate()  # it would wait for the other attempt, then continue from it
        code = first.wait(STOP_SECONDS)
        stale = next(beat for beat in attempts(self.store, prefix) if beat.attempt == fault.attempt)
        # -SIGTERM: it was ending already, and Python's shutdown no longer handles signals.
        if stale.state != "stale" or code not in (EXIT_DONE, EXIT_INTERRUPTED, -signal.SIGTERM):
            fault.violation = (
                f"the first command ended with exit code {code} and state '{stale.state}' after the takeover"
            )
        elif {key for key in self.commits() if key.endswith(suffix)} - before:
            fault.violation = "the first command committed after the takeover"
        if after_commit and not any(f.failpoint == "committed" for f in following[:1]):
            second.release("committed")

    def finish(self) -> None:
        """Let the run finish. With MLflow, run it once more: that ships the records that MLflow missed."""
        for _ in range(2 if self.mlflow else 1):
            command = self.command or self.start()
            if self.mlflow:
                self.mlflow.wait_until_it_answers()
            while command.process.poll() is None:
                self.observe()
                time.sleep(POLL_SECONDS)
            command.wait(STOP_SECONDS)
            self.check_alive(command)
            self.command = None

    def commits(self) -> list[str]:
        """Keys of the committed checkpoints' COMMIT.json, oldest step first."""
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
) -> DrillReport:
    """Run a recipe undisturbed and with `kills` faults, in a folder of the store; remove it after success.

    `kinds` are the kinds to draw from, by default all that are possible here. UserError for any other.
    """
    began, recipe = time.monotonic(), load_recipe(name, changes)
    processes = processes_on_this_node(recipe.runtime)
    left_out = unavailable(store_uri, recipe, processes)
    evaluates = recipe.evaluate.every is not None
    faults = schedule(kills, seed, chosen(kinds, left_out), recipe.train.max_steps, evaluates)
    location = f"{store_uri.rstrip('/')}/drill-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="skytrain-drill-"))
    arguments = [name, *(word for change in changes for word in ("--set", change))]
    note(f"the same run twice: undisturbed, and with {kills} faults drawn from seed {seed}")
    note(f"in {location}, logs in {folder}")
    for kind in KINDS:
        if kind in left_out and kinds is None and kind in USUAL:
            note(f"without {kind}: {left_out[kind]}")

    def report_fault(fault: Fault) -> None:
        at = f", step {fault.at_step}" if fault.at_step is not None else ""
        note(f"  {fault.kind:8} at {fault.failpoint} (attempt {fault.attempt} of {fault.stage}{at})")

    def run(
        which: str,
        faults: list[Fault],
        environment: dict[str, str],
        proxy: Proxy | None = None,
        mlflow: MlflowServer | None = None,
    ) -> Drill:
        store = open_store(f"{location}/{which}")
        made = Drill(
            recipe,
            arguments,
            store,
            folder / which,
            faults,
            random.Random(seed),
            environment,
            processes,
            proxy,
            mlflow,
            report_fault,
        )
        try:
            made.run()
        finally:
            for command in made.commands:
                command.kill()
        return made

    undisturbed = run("undisturbed", [], ISOLATED | {"SKYTRAIN_TRACKING": "off"})
    with ExitStack() as stack:
        proxy = None if left_out.keys() >= set(ON_S3) else stack.enter_context(Proxy(s3_endpoint()))
        server = None if "mlflow" in left_out else stack.enter_context(MlflowServer(folder / "mlflow"))
        environment = ISOLATED | {"SKYTRAIN_TRACKING": "off"}
        if server:
            environment = ISOLATED | {"MLFLOW_TRACKING_URI": server.uri}
        if proxy:
            environment |= {"AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ENDPOINT_URL_S3": proxy.endpoint}
        disturbed = run("disturbed", faults, environment, proxy, server)
        points = points_of(server.uri, run_name(disturbed.plans)) if server else None
    command_runs = [command.finished_run for command in disturbed.commands if command.finished_run]
    ends = [outcome(each.store, run_name(each.plans)) for each in (undisturbed, disturbed)]
    # No step followed in the same attempt: count until the start of the next attempt.
    skews = {run.pid: run.skew for run in command_runs}
    for fault in (f for f in faults if f.injected_at and f.seconds is None):
        later = [
            b.started - skews.get(b.process.pid or 0, 0.0)
            for b in ends[1].beats[fault.stage]
            if b.attempt > fault.attempt
        ]
        fault.seconds = max(0.0, later[0] - (fault.injected_at or 0)) if later else None
    judged = verdicts(ends[0], ends[1], faults, command_runs, points)
    report = DrillReport(name, seed, location, faults, judged, left_out, time.monotonic() - began)
    if report.passed:
        shutil.rmtree(folder)
        for each in (undisturbed, disturbed):
            for entry in each.store.entries(""):
                each.store.delete(entry.key)
    return report
