"""The stages: their order, the plans of their artifacts, and one attempt at an artifact.

A stage is two functions: `plan(recipe, plans)` returns the identity of its artifact, and thus its fingerprint, without
side effects; `build(work)` makes the files. pipelines/run/pipeline.py does the rest. A stage of a package is
`custom.NAME`, and comes after all others.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.run.nodes.ranks import RankTask
from pipelines.run.runs import Run, read_run
from pipelines.run.screen import Screen
from pipelines.run.text.tokenizer import check_tokenizer
from pipelines.run.weight_sources import check_sources, pinned
from pipelines.store.layout import CUSTOM, FOLDERS, STAGES, file_folder
from pipelines.store.ledger import Attempt
from pipelines.store.manifest import (
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
from pipelines.store.records import Heartbeat
from trainer.base.metrics import PhaseClock
from trainer.base.process import StopSignal
from trainer.base.store import Store, side_by_side
from trainer.config import extensions
from trainer.config.errors import UserError, cut
from trainer.config.extensions import extension
from trainer.config.source import RUN

TUNE = "tune"


@dataclass
class Work:
    """One attempt at a stage's artifact, or at a source of a mixture: its plan, its inputs and its tools."""

    recipe: Recipe
    plan: ArtifactPlan
    inputs: dict[str, Manifest]  # by stage
    store: Store
    home: Path  # caches and scratch of this machine
    attempt: Attempt
    screen: Screen
    stop: StopSignal
    clock: PhaseClock = field(default_factory=PhaseClock)
    before: Run | None = None  # the run without this attempt
    allow_code: bool = False  # whether the recipe's own code may run, which its user alone decides
    # Of the ranks: seconds by phase, and the phase since then.
    rank_phases: tuple[dict[str, float], str] = field(default_factory=lambda: ({}, "setup"))

    def __post_init__(self) -> None:
        self.attempt.clock = self.phases

    @property
    def earlier(self) -> list[Heartbeat]:
        """The attempts at this artifact before this one."""
        found = self.before.heartbeats if self.before else ()
        return [one.beat for one in found if one.prefix == self.plan.prefix]

    @property
    def folder(self) -> Path:
        """Scratch folder of this attempt alone."""
        path = scratch(self.home, self.store, self.attempt.prefix) / file_folder(self.attempt.number)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def fetch(self, stage: str, name: str) -> Path:
        """A verified local copy of an input's file."""
        manifest = self.inputs[stage]
        return fetch(self.store, manifest.prefix, manifest.file(name), self.home / "cache")

    def upload(self, path: Path, name: str | None = None, until_stopped: bool = False) -> File:
        """Store a file of the artifact; with `until_stopped`, a stop ends the upload."""
        check = self.check if until_stopped else None
        with self.clock.phase("upload"):
            return upload(self.store, self.plan.prefix, self.attempt.number, path, name, check=check)

    def report(self, metrics: Mapping[str, float] | None = None, **progress: Any) -> None:
        """Put progress into the next heartbeat: fields of Progress, and metrics by name."""
        self.attempt.report(metrics, **progress)

    def phases(self, now: float) -> dict[str, float]:
        """Seconds by phase so far, of this process and of the ranks that it waited for. From any thread."""
        seconds, current = self.rank_phases
        return self.clock.inside("ranks", seconds, current, now)

    def check(self) -> None:
        """Raise Interrupted if asked to stop, and StaleAttempt if a newer attempt has taken over."""
        self.stop.check()
        if self.attempt.lost:
            self.attempt.check()


@dataclass(frozen=True)
class Built:
    """The result of a stage: files that are already in the store, and facts for people and later stages."""

    files: list[File]
    facts: dict[str, Any]
    scratch: tuple[str, ...] = ()  # keys in the artifact's folder that nothing needs once the artifact exists

    def commit(
        self, work: "Work", plan: ArtifactPlan, inputs: Mapping[str, str], provenance: Mapping[str, Any]
    ) -> Manifest:
        """Make the artifact exist; of several processes that build it, the first one's manifest."""
        run, attempt, files = work.attempt.latest.run, work.attempt.number, tuple(self.files)
        about = dict(inputs), files, dict(provenance), self.facts, run, attempt, time.time()
        made = Manifest(plan.stage, plan.label, plan.fingerprint, plan.identity, *about)
        return commit(work.store, made, self.scratch)


@dataclass(frozen=True)
class Start:
    """A run before its first stage: what its command knows."""

    recipe: Recipe
    store: Store
    plans: Mapping[str, ArtifactPlan]
    todo: list[str]  # the stages that are missing
    cache: Path
    launched: bool  # whether `launch` has checked the inputs of evaluate before it rented a machine
    allow_code: bool  # see `Work`


@dataclass(frozen=True)
class Stage:
    """What a package declares in the group `skytrain.stages` under a name: `plan` and `build`, and what else it needs.

    `pinned` returns the recipe with what identifies its inputs, which a run records. `check` raises UserError, before
    hours of training, for what `build` would refuse after it. `rank` is what each rank does that `build` has started
    with a `task`; it gets the task, the attempt's folder on this node, the cache, the stop signal, and a function for
    the watchdog.
    """

    plan: Callable[[Recipe, dict[str, ArtifactPlan]], ArtifactPlan]
    build: Callable[[Work], Built]
    pinned: Callable[[Recipe], Recipe] = lambda recipe: recipe
    check: Callable[[Start], None] = lambda start: None
    task: type[RankTask] = RankTask
    rank: Callable[..., None] = lambda *_: None


def stage_named(name: str) -> Stage:
    """The stage of a name in a run: train, tune.NAME or custom.NAME. UserError for one that no package declares."""
    kind, _, own = name.partition(".")
    found: Stage = extension(extensions.STAGES, own if kind == CUSTOM else kind, CUSTOM)
    return found


def stages_of(recipe: Recipe) -> list[str]:
    """The names of all stages of a run, in order."""
    last = recipe.model_before()
    evaluated = [last.replace(TUNE, "evaluate", 1)] if last.startswith(TUNE) else []
    return [
        *STAGES,
        *(f"{TUNE}.{step.name}" for step in recipe.tune),
        *evaluated,
        *(f"{CUSTOM}.{name}" for name in recipe.custom),
    ]


def plans_of(recipe: Recipe, known: Mapping[str, ArtifactPlan] | None = None) -> dict[str, ArtifactPlan]:
    """The plan of every stage, except for known ones. Reads local text, changes nothing."""
    if ours := sorted(FOLDERS.keys() & recipe.custom.keys()):
        raise UserError(f"custom: {ours[0]} is a stage of skytrain itself; name a stage of another package")
    plans: dict[str, ArtifactPlan] = {}
    for name in stages_of(recipe):
        plans[name] = (known or {}).get(name) or stage_named(name).plan(recipe, plans)
    return plans


def check_stages(start: Start) -> None:
    """UserError, before hours of training, for an input or a package that a missing stage would refuse after it."""
    for name in {name.removeprefix(f"{CUSTOM}.").partition(".")[0]: name for name in start.todo}.values():
        stage_named(name).check(start)


def planned(recipe: str, changes: Iterable[str], store: Store) -> tuple[Recipe, dict[str, ArtifactPlan]]:
    """A recipe and the plans of its stages. Its sources of weights are pinned, and fit.

    `run:NAME` is the recipe of a run on record in the store, with which a job on another machine starts. If its tokens
    exist, their manifest is the plan, and the text need not be on this machine. UserError if a stage has another plan
    here than on record.
    """
    if not recipe.startswith(RUN):
        loaded = pinned(load_recipe(recipe, changes), store)
        for name in stages_of(loaded):
            loaded = stage_named(name).pinned(loaded)
        plans = plans_of(loaded)
        check_tokenizer(loaded, plans["tokenize"], store)
        check_sources(loaded, plans, store)
        return loaded, plans
    if list(changes):
        raise UserError(f"{recipe}: --set would make it another run; name the recipe instead of the run")
    run = read_run(store, recipe.removeprefix(RUN))
    recorded, loaded = run.record, run.recipe
    tokens = read_manifest(store, recorded.prefixes["tokenize"])
    known = {"tokenize": ArtifactPlan(tokens.stage, tokens.label, tokens.identity)} if tokens else {}
    plans = plans_of(loaded, known)
    for stage, prefix in recorded.prefixes.items():
        if plans[stage].prefix != prefix:
            moved = (
                f"tokens.source names another text here: `skytrain run {recipe} --stage tokenize` where it was recorded"
            )
            other = "another version of skytrain recorded it: finish it with that one, or run its recipe anew"
            why = moved if stage == "tokenize" else other
            raise UserError(f"{recipe}: '{stage}' would make {plans[stage].prefix}, and {prefix} is on record; {why}")
    return loaded, plans


def missing(store: Store, plans: Mapping[str, ArtifactPlan], until: str) -> list[str]:
    """The stages up to `until` whose artifacts do not exist."""
    return [stage for stage, made in artifacts(store, plans, until).items() if not made]


def artifacts(store: Store, plans: Mapping[str, ArtifactPlan], until: str) -> dict[str, Manifest | None]:
    """The artifact of each stage up to `until`; None if it does not exist."""
    stages = stages_until(plans, until)
    return dict(zip(stages, side_by_side(lambda stage: find(store, plans[stage]), stages), strict=True))


def stages_until(plans: Mapping[str, ArtifactPlan], until: str) -> list[str]:
    """The stages of a run up to `until`; "tune" means all its steps. UserError if the run has no such stage."""
    stages = list(plans)
    steps = [stage for stage in stages if stage.startswith(f"{TUNE}.")]
    last = steps[-1] if until == TUNE and steps else until
    if last not in stages:
        raise UserError(f"--stage {cut(until)}: the recipe has no such stage; choose one of {', '.join(stages)}")
    return stages[: stages.index(last) + 1]


def run_name(plans: dict[str, ArtifactPlan]) -> str:
    """A run has the name of its recipe and the fingerprint of its training: the same on every machine."""
    return plans["train"].name
