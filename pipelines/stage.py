"""The stage runner: finds what exists, builds what is missing, and keeps account of who built it.

A stage is a module in pipelines/stages with two functions: `plan(recipe, plans)` says what its artifact
is to be (its identity, hence its fingerprint) without doing anything; `build(work)` makes the files.
Everything around that is here: attempts, waiting for a rival that is already at it, commit, tracking.
"""

import importlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, cast

from pipelines.artifacts.manifest import (
    FOLDERS,
    ArtifactPlan,
    File,
    Manifest,
    commit,
    fetch,
    find,
    read_manifest,
    scratch,
    upload,
)
from pipelines.nodes.head import Head
from pipelines.recipe import Recipe, load_recipe
from pipelines.screen import Screen
from pipelines.tracking.account import Account, StoredHeartbeat, account, account_table, account_tags, costs
from pipelines.tracking.ledger import SILENT_SECONDS, Attempt, attempts, claim, is_alive
from pipelines.tracking.mlflow.tracker import Tracker
from pipelines.tracking.records import Billing, Heartbeat
from pipelines.tracking.runs import Run, read_records, read_run, record
from trainer.config import tokens_before
from trainer.errors import Interrupted, StaleAttempt, Stopped, UserError
from trainer.metrics import PhaseClock
from trainer.process import StopSignal, failpoint
from trainer.store import Store

STAGES = tuple(FOLDERS)
RUN = "run:"
LIVE_SECONDS = 30.0  # between two points of what a run has cost so far: 3,000 a day and metric
PACKAGES = ("skytrain", "torch", "numpy", "tiktoken", "datasets", "safetensors")


@dataclass
class Work:
    """What a stage gets to work with."""

    recipe: Recipe
    plan: ArtifactPlan
    inputs: dict[str, Manifest]  # by stage
    store: Store
    home: Path  # caches and scratch of this machine
    attempt: Attempt
    tracker: Tracker
    screen: Screen
    stop: StopSignal
    head: Head | None = None  # of several nodes
    clock: PhaseClock = field(default_factory=PhaseClock)
    before_ranks: "Callable[[Work], None] | None" = None  # called before train starts its ranks; may raise Interrupted
    # Of torchrun's processes: seconds by phase, and the phase since then.
    rank_phases: tuple[dict[str, float], str] = field(default_factory=lambda: ({}, "setup"))

    def __post_init__(self) -> None:
        self.attempt.clock = self.phases

    @property
    def folder(self) -> Path:
        """Scratch of this attempt alone."""
        path = scratch(self.home, self.store, self.plan.prefix) / f"a{self.attempt.number:04d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def fetch(self, stage: str, name: str) -> Path:
        """A verified local copy of an input's file."""
        manifest = self.inputs[stage]
        return fetch(self.store, manifest.prefix, manifest.file(name), self.home / "cache")

    def upload(self, path: Path, name: str | None = None) -> File:
        with self.clock.phase("upload"):
            return upload(self.store, self.plan.prefix, self.attempt.number, path, name)

    def report(self, metrics: Mapping[str, float] | None = None, **progress: Any) -> None:
        """Let the heartbeat carry how far the stage is: fields of Progress, and metrics by name."""
        self.attempt.report(metrics, **progress)

    def phases(self, now: float) -> dict[str, float]:
        """Seconds by phase so far, of this process and of the ranks that it waited for. From any thread."""
        seconds, current = self.rank_phases
        return self.clock.inside("ranks", seconds, current, now)

    def check(self) -> None:
        """Leave if asked to stop, or if a newer attempt has taken over."""
        self.stop.check()
        if self.attempt.lost:
            self.attempt.check()


@dataclass(frozen=True)
class Built:
    """What a stage made: files already in the store, and facts for people and later stages."""

    files: list[File]
    facts: dict[str, Any]


class Stage(Protocol):
    def plan(self, recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan: ...

    def build(self, work: Work) -> Built: ...


def stage_named(name: str) -> Stage:
    return cast(Stage, importlib.import_module(f"pipelines.stages.{name}"))


def plans_of(recipe: Recipe, known: Mapping[str, ArtifactPlan] | None = None) -> dict[str, ArtifactPlan]:
    """What every stage's artifact is to be, but for those that are known. Reads local text sources, changes nothing."""
    plans: dict[str, ArtifactPlan] = {}
    for name in STAGES:
        plans[name] = (known or {}).get(name) or stage_named(name).plan(recipe, plans)
    return plans


def planned(recipe: str, changes: Iterable[str], store: Store) -> tuple[Recipe, dict[str, ArtifactPlan]]:
    """A recipe and what its stages are to make.

    `run:NAME` is the recipe of a run that the store has on record: how a job on another machine is told what to do.
    Its tokens, once made, are known from their manifest: the text they came from need not be there. UserError if the
    stages would make something else here than what was recorded.
    """
    if not recipe.startswith(RUN):
        loaded = load_recipe(recipe, changes)
        return loaded, plans_of(loaded)
    if list(changes):
        raise UserError(f"{recipe} is a recorded run, and --set would make it another one; name its recipe instead")
    (recorded,) = read_records(store, [recipe.removeprefix(RUN)])
    loaded = Recipe.model_validate(recorded.recipe)
    tokens = read_manifest(store, recorded.prefixes["tokenize"])
    known = {"tokenize": ArtifactPlan(tokens.stage, tokens.label, tokens.identity)} if tokens else {}
    plans = plans_of(loaded, known)
    for stage, prefix in recorded.prefixes.items():
        if plans[stage].prefix != prefix:
            raise UserError(
                f"{recipe}: '{stage}' would make {plans[stage].prefix} here, and {prefix} is on record: "
                + (
                    "the text that tokens.source names is another one here; tokenize where the run was recorded: "
                    f"skytrain run {recipe} --stage tokenize"
                    if stage == "tokenize"
                    else "this is another version of skytrain than the one that recorded it"
                )
            )
    return loaded, plans


def missing(store: Store, plans: Mapping[str, ArtifactPlan], until: str) -> list[str]:
    """The stages up to `until` whose artifacts are not there."""
    return [stage for stage in STAGES[: STAGES.index(until) + 1] if not find(store, plans[stage])]


def run_name(plans: dict[str, ArtifactPlan]) -> str:
    """A run is its recipe's name and the fingerprint of what it trains: the same on every machine."""
    return plans["train"].name


@dataclass
class Pipeline:
    """One invocation: everything that its stages share."""

    recipe: Recipe
    store: Store
    home: Path
    billing: Billing
    tracker: Tracker
    screen: Screen
    stop: StopSignal
    plans: dict[str, ArtifactPlan]
    # Looked at with every heartbeat, in its thread; a reason that one returns stops the run for good.
    watches: list[Callable[[Heartbeat], str | None]] = field(default_factory=list)
    head: Head | None = None  # of several nodes
    before_ranks: Callable[[Work], None] | None = None  # called before train starts its ranks; may raise Interrupted
    made: dict[str, Manifest] = field(default_factory=dict)
    skipped: dict[str, bool] = field(default_factory=dict)
    _before: list[StoredHeartbeat] = field(default_factory=list)  # this run's other attempts, as the one at work began
    _told: float = 0.0  # unix seconds of the heartbeat whose costs MLflow was last told

    @property
    def run(self) -> str:
        return run_name(self.plans)

    def execute(self, until: str) -> None:
        """Make every stage's artifact up to `until`, skipping what exists, and account for it."""
        record(self.store, self.run, self.recipe, self.plans, until)
        if not missing(self.store, self.plans, until) and not self.tracker.unshipped():
            return self._make_all(until)  # there is nothing to do, and nothing to tell MLflow
        self.tracker.start()
        self.tracker.stage_started(None, {"recipe": self.recipe.name}, {"skytrain.store": self.store.uri})
        status = "FAILED"
        try:
            self._make_all(until)
            status = "FINISHED"
        except (Interrupted, KeyboardInterrupt):
            status = "KILLED"
            raise
        finally:
            with suppress(OSError, UserError):  # a store that is away: what ended the run is the news, not this
                self._track_totals()
            self.tracker.stage_ended(None, status)
            if notice := self.tracker.close():
                self.screen.warn(notice)
            with suppress(OSError, UserError):
                self.tracker.keep_journal(self.store)

    def _track_totals(self) -> None:
        """The final account: metrics, tags to search by, and a table of attempts."""
        run = self.snapshot()
        self._track_costs(None, run.heartbeats, time.time())
        self.tracker.tags(None, {f"skytrain.{name}": value for name, value in account_tags(run.account).items()})
        self.tracker.table(None, "account.json", account_table(run.account))
        if (loss := run.summary.val_loss) is not None:
            self.tracker.metrics(None, 0, time.time(), {"val/loss": loss})

    def _account(self, seen: Iterable[StoredHeartbeat]) -> Account:
        return account(self.run, seen, lambda step: tokens_before(step, self.recipe.train))

    def _track_costs(self, stage: str | None, seen: list[StoredHeartbeat], now: float) -> None:
        """Costs up to `now`, against the highest step that was ever reached: dollars are not undone with a step."""
        mine = [one for one in seen if stage in (None, one.beat.stage)]
        step = max((one.beat.progress.highest_step or 0 for one in mine), default=0)
        self.tracker.metrics(stage, step, now, costs(self._account(mine)))

    def snapshot(self) -> Run:
        """The run as the store has it now."""
        return read_run(self.store, self.run)

    def _make_all(self, last: str) -> None:
        for stage in STAGES[: STAGES.index(last) + 1]:
            self.stop.check()
            self.skipped[stage] = False
            self.made[stage] = self._existing(stage) or self._make(stage)
            if stage == "train" and self.head:
                self.head.release_workers()

    def _existing(self, stage: str) -> Manifest | None:
        manifest = find(self.store, self.plans[stage])
        if manifest:
            self.skipped[stage] = True
            self.screen.note(f"[green]✓[/] [bold]{stage}[/]  {manifest.prefix} is there already: skipped")
        return manifest

    def _make(self, stage: str) -> Manifest:
        """Build an artifact, or wait for whoever is building it."""
        plan = self.plans[stage]
        while True:
            looked = time.monotonic()
            rival = self._wait_for_rival(plan)
            waited = time.monotonic() - looked
            if manifest := self._existing(stage):
                return manifest
            number = rival.attempt + 1 if rival else 1
            self._before = self.snapshot().heartbeats
            earlier = (seen.beat for seen in self._before)
            attempt = claim(
                self.store, plan.prefix, self.run, stage, number, self.billing, self._watch, waited, earlier
            )
            if attempt is None:
                continue
            try:
                with attempt:
                    manifest = self._build(stage, attempt)
            except StaleAttempt:
                self.screen.warn(f"{stage}: a newer attempt has taken over; waiting for it")
                continue
            self._track_end(stage, attempt, manifest)
            return manifest

    def _watch(self, beat: Heartbeat) -> None:
        for watch in self.watches:
            if reason := watch(beat):
                self.stop.ask(reason, Stopped)
        if beat.time - self._told >= LIVE_SECONDS:
            self._told = beat.time
            seen = [*self._before, StoredHeartbeat(self.plans[beat.stage].prefix, beat)]
            for stage in (None, beat.stage):
                self._track_costs(stage, seen, beat.time)
            self.tracker.keep_journal(self.store)

    def _wait_for_rival(self, plan: ArtifactPlan) -> Heartbeat | None:
        """Return the newest attempt once it no longer works (None: there never was one)."""
        seen: Heartbeat | None = None
        silent_since = time.monotonic()
        while beats := attempts(self.store, plan.prefix):
            newest = beats[-1]
            if seen is None or (newest.attempt, newest.time) != (seen.attempt, seen.time):
                if seen is None and is_alive(newest) is not False:
                    where = newest.process.host
                    self.screen.note(
                        f"  {plan.stage}: attempt {newest.attempt} on {where} is at it; waiting "
                        f"(it is taken over after {SILENT_SECONDS:.0f} s of silence)"
                    )
                seen, silent_since = newest, time.monotonic()
            alive = is_alive(newest)
            if alive is False or (alive is None and time.monotonic() - silent_since > SILENT_SECONDS):
                return newest
            self.stop.check()
            time.sleep(1)
        return None

    def _build(self, stage: str, attempt: Attempt) -> Manifest:
        plan = self.plans[stage]
        work = Work(
            self.recipe,
            plan,
            self.made,
            self.store,
            self.home,
            attempt,
            self.tracker,
            self.screen,
            self.stop,
            self.head,
            before_ranks=self.before_ranks,
        )
        self.screen.note(f"[bold]{stage}[/]  → {plan.prefix}  (attempt {attempt.number})")
        self.tracker.stage_started(stage, self._params(stage), self._tags(stage, attempt))
        shutil.rmtree(work.folder)  # a store that was deleted and made anew counts its attempts from 1 again
        try:
            built = stage_named(stage).build(work)
            failpoint(f"manifest-{stage}")
            attempt.check()
            manifest = commit(self.store, self._manifest(plan, attempt, built))
        except BaseException as error:
            interrupted = isinstance(error, Interrupted | StaleAttempt | KeyboardInterrupt)
            if not isinstance(error, StaleAttempt):
                attempt.update(state=ended_as(error))
            if interrupted and self.stop.reason:
                attempt.report(notice=self.stop.reason)
            self.tracker.stage_ended(stage, "KILLED" if interrupted else "FAILED")
            raise
        attempt.update(state="done")
        # With what earlier attempts on this machine have left; what resists is nothing to fail a finished stage for.
        shutil.rmtree(work.folder.parent, ignore_errors=True)
        return manifest

    def _manifest(self, plan: ArtifactPlan, attempt: Attempt, built: Built) -> Manifest:
        return Manifest(
            stage=plan.stage,
            label=plan.label,
            fingerprint=plan.fingerprint,
            identity=plan.identity,
            inputs={stage: manifest.fingerprint for stage, manifest in self.made.items()},
            files=tuple(built.files),
            provenance=provenance(),
            facts=built.facts,
            run=self.run,
            attempt=attempt.number,
            created=time.time(),
        )

    def _params(self, stage: str) -> dict[str, Any]:
        sections = {"tokenize": ["tokens"], "train": ["model", "train"]}.get(stage, [stage])
        values = self.recipe.model_dump()
        return {f"{s}.{k}": v for s in sections for k, v in values[s].items()}

    def _tags(self, stage: str, attempt: Attempt) -> dict[str, Any]:
        plan = self.plans[stage]
        tags = {f"runtime.{k}": v for k, v in self.recipe.runtime.model_dump().items()}
        return tags | {
            "skytrain.artifact": f"{self.store.uri}/{plan.prefix}",
            "skytrain.fingerprint": plan.fingerprint,
            "skytrain.attempt": attempt.number,
        }

    def _track_end(self, stage: str, attempt: Attempt, manifest: Manifest) -> None:
        self._track_costs(stage, [*self._before, StoredHeartbeat(attempt.prefix, attempt.latest)], attempt.latest.time)
        if stage != "train":  # the last loss is the end of a series, and no point at step 0
            scores = {k: float(v) for k, v in manifest.facts.items() if "/" in k and isinstance(v, int | float)}
            self.tracker.metrics(stage, 0, time.time(), scores)
        self.tracker.stage_ended(stage, "FINISHED")


def ended_as(error: BaseException) -> str:
    """The state of an attempt that `error` has ended."""
    if isinstance(error, Stopped):
        return "stopped"
    return "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"


def provenance() -> dict[str, Any]:
    """Where an artifact comes from: code, versions, machine. For people; it enters no fingerprint."""
    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "image": os.environ.get("SKYTRAIN_IMAGE"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _git(*arguments: str) -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
