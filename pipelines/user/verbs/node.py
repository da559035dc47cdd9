"""One node's part of a run, as `skytrain run` and `skytrain job` do it."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipelines.extras.mlflow.child import MirrorProcess
from pipelines.job.budget import Budget
from pipelines.job.deadline import Deadline, deadline_here, is_standby
from pipelines.job.notice import Notices
from pipelines.job.prices import billing_here
from pipelines.recipe.recipe import REWARD, Recipe
from pipelines.run.nodes.address import let_workers_exit_first, this_node
from pipelines.run.nodes.worker import run_worker
from pipelines.run.pipeline import Pipeline
from pipelines.run.plan import stage_plan
from pipelines.run.screen import Screen
from pipelines.run.stage import Start, artifacts, check_stages, planned, run_name, stages_until
from pipelines.run.trackers import trackers_of
from pipelines.run.watch import StopRequests, Summary, Watch, watching
from pipelines.store.manifest import ArtifactPlan, Manifest
from pipelines.store.process_id import process_began
from pipelines.store.traffic import counted_together
from pipelines.user.show.card import print_card
from pipelines.user.show.console import program, say
from pipelines.user.verbs.options import home
from trainer.base.process import StopSignal
from trainer.base.store import Store
from trainer.config.errors import StoreUnavailable, UserError

RESULT = ("run", "state", "attempts", "usd", "billed_hours", "unpriced_hours", "val_loss")  # of the summary, in --json


@dataclass(frozen=True)
class PlannedRun:
    """A run as this command finds it: its plans up to the stage `until`, and what exists of them."""

    recipe: Recipe
    plans: dict[str, ArtifactPlan]
    store: Store
    until: str

    @property
    def name(self) -> str:
        return run_name(self.plans)

    @cached_property
    def found(self) -> dict[str, Manifest | None]:
        return artifacts(self.store, self.plans, self.until)

    @property
    def todo(self) -> list[str]:
        return [stage for stage, made in self.found.items() if not made]


def plan_run(recipe: str, stage: str | None, changes: list[str], store: Store) -> PlannedRun:
    """Read a recipe and plan its stages, up to `stage` or the last one."""
    loaded, plans = planned(recipe, changes, store)
    return PlannedRun(loaded, plans, store, stages_until(plans, stage or [*plans][-1])[-1])


def check_before_training(run: PlannedRun, allow_code: bool, launched: bool) -> None:
    """UserError, before hours of training, for an input or a package that a missing stage would refuse after it.
    `launch` has checked the inputs of evaluate before it rented a machine."""
    check_stages(Start(run.recipe, run.store, run.plans, run.todo, home() / "cache", launched, allow_code))


def explain_new_training(run: PlannedRun, screen: Screen) -> None:
    """Show why this recipe trains anew where the store has another training of its name."""
    if (training := stage_plan(run.store, run.plans["train"])).other:
        screen.note(f"{run.name}: {training.why}")


def work_for_node_0(run: PlannedRun, stop: StopSignal, screen: Screen) -> None:
    """Be a worker until node 0 ends, and exit."""
    with counted_together(), watching([Notices(stop, screen)], screen):
        sys.exit(run_worker(this_node(), run.until, run.recipe, run.plans, run.store, home(), stop, screen))


def pipeline_here(
    run: PlannedRun, price_per_hour: float | None, budget: float | None, screen: Screen, stop: StopSignal
) -> tuple[Pipeline, MirrorProcess | None]:
    """The pipeline of a run on this machine with its watches, and of them MLflow's mirror, if there is one."""
    recipe, store, name, billing = run.recipe, run.store, run.name, billing_here(price_per_hour)
    watches: list[Watch] = [Notices(stop, screen), StopRequests(store, name, stop)]
    if (deadline := deadline_here()) and (billing.machine.spot or is_standby()):
        watches.append(Deadline(deadline, recipe, stop))
    if budget:
        watches.append(Budget(budget, billing, store, name, recipe.train.batch_tokens, stop))
    trackers = trackers_of(store.uri, name, home())
    watches += [*trackers, Summary()]
    made = Pipeline(recipe, store, home(), billing, screen, stop, run.plans, watches, began=process_began())
    return made, next((one.tracker for one in trackers if isinstance(one.tracker, MirrorProcess)), None)


def warn_without_mlflow(run: PlannedRun, mirror: MirrorProcess | None, screen: Screen) -> None:
    """Warn if MLflow does not answer: the run goes on without it."""
    if run.todo and mirror:
        from pipelines.user.cloud.checks import mlflow_answers

        if (server := mlflow_answers(mirror.uri, os.environ)).state == "broken":
            screen.warn(f"{server.what}: {server.seen}; {server.remedy}; the run goes on without it")


def execute(pipeline: Pipeline, mirror: MirrorProcess | None, run: PlannedRun, as_json: bool = False) -> None:
    """Make the missing artifacts, and print the card, or JSON even after an interruption."""
    try:
        with counted_together():
            pipeline.execute(run.until, run.found)
    except BaseException:
        let_workers_exit_first(this_node())
        raise
    finally:
        # A store that does not answer has no result, and another request would only wait as long again.
        if as_json and not isinstance(sys.exception(), UserError | StoreUnavailable):
            with reporting():
                print(json.dumps(result(pipeline)))
    if not as_json:
        with reporting():
            print_card(pipeline, next_commands(pipeline, mirror.uri if mirror else ""))


@contextmanager
def reporting() -> Iterator[None]:
    """Print an error of the report of a run. How the run ends never depends on it."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        say(f"the run has ended; its report failed: {type(error).__name__}: {error}", on_stderr=True)


def result(pipeline: Pipeline) -> dict[str, Any]:
    """The object that `run --json` prints, after success and after an interruption."""
    summary = pipeline.snapshot().summary
    artifacts = {
        stage: {
            "uri": f"{pipeline.store.uri}/{manifest.prefix}",
            "fingerprint": manifest.fingerprint,
            "skipped": pipeline.skipped[stage],
        }
        for stage, manifest in pipeline.made.items()
    }
    return {field: getattr(summary, field) for field in RESULT} | {"artifacts": artifacts}


def next_commands(pipeline: Pipeline, mlflow: str = "") -> list[str]:
    """Commands for the artifacts that a run has made, as the user can type them in this folder. `mlflow`: the URI of
    the MLflow that mirrors it.

    On a rented node, only those that work on the user's machine, too.
    """
    skytrain, name = program("skytrain"), pipeline.run
    is_default = pipeline.store.uri == f"file://{pipeline.home / 'store'}"
    option = "" if is_default else f" --store {shlex.quote(pipeline.store.uri)}"
    commands = [f"{skytrain} report {name}{option}"]
    methods = [one.facts.get("method") for stage, one in pipeline.made.items() if stage.startswith("tune.")]
    tuned = any(method != REWARD for method in methods)
    if "train" in pipeline.made:
        commands.append(f"{skytrain} report {name} --html report.html{option}")
        prompt = '--chat --prompt "3+4"' if tuned else '--prompt "def "'
        commands += [f"{skytrain} sample {name} {prompt}{option}", f"{skytrain} serve {name}{option}"]
    if pipeline.billing.machine.cluster:
        return commands
    # The URI of a server may hold a password.
    if mlflow.startswith("sqlite:"):
        commands.append(f"{program('mlflow')} ui --backend-store-uri {shlex.quote(mlflow)}")
    if "export" not in pipeline.made:
        return [*commands, f"{skytrain} run run:{name}{option}"]
    commands.append(f"{skytrain} pull {name} {shlex.quote(pipeline.recipe.name)}{' --tuned' * tuned}{option}")
    if pipeline.recipe.tokens.source == "python-stdlib":  # a first try: then own text, and a rented machine
        commands.append(f"{skytrain} run laptop --set name=mine --set 'tokens.source=FOLDER/*.txt'{option}")
        commands.append(f"{skytrain} launch gpt2-124m --dry-run")
    return commands
