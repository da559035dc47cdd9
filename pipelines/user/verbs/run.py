"""`skytrain run`: one node of a run, which makes every artifact that is missing."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.user.verbs.options import (
    BudgetUsd,
    Changes,
    Json,
    LastStage,
    RecipeName,
    StoreUri,
    check_home,
    default_tracking_uri,
    home,
    store_uri,
)
from trainer.base.install import how_to_install
from trainer.config.errors import EXIT_DONE, Crashed, Interrupted, Stopped, StoreUnavailable, UserError

if TYPE_CHECKING:
    from pipelines.recipe.recipe import Recipe
    from pipelines.run.pipeline import Pipeline
    from pipelines.run.screen import Screen
    from pipelines.store.manifest import ArtifactPlan
    from trainer.base.process import StopSignal
    from trainer.base.store import Store

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # to stop, which is not a crash
RESULT = ("run", "state", "attempts", "usd", "billed_hours", "unpriced_hours", "val_loss")  # of the summary, in --json


def run(
    recipe: RecipeName,
    stage: LastStage = None,
    store: StoreUri = None,
    set_: Changes = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="USD", help="Set the price of this node an hour, for the bill."),
    ] = None,
    budget: BudgetUsd = None,
    unless_stopped: Annotated[
        bool,
        typer.Option("--unless-stopped", hidden=True, help="Internal: exit with 76 after `skytrain stop`."),
    ] = False,
    exited: Annotated[
        int | None,
        typer.Option(hidden=True, metavar="CODE", help="Internal: go on after this command was killed, with CODE."),
    ] = None,
    stopping: Annotated[
        bool, typer.Option("--stopping", hidden=True, help="Internal: with --exited, only record that it was killed.")
    ] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run the recipe's own reward functions, with your rights.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the missing stages of a recipe; resume after an interruption."""
    from pipelines.run.nodes.launcher_process import prepare_launcher
    from trainer.base.process import StopSignal
    from trainer.base.store import WAITING

    stop = StopSignal()
    if stopping:
        stop.ask("SIGTERM")
    WAITING.check = stop.check  # until an attempt begins
    if stage != "tokenize":
        prepare_launcher()  # before the imports below

    from pipelines.extras.tune.reward_code import check_code
    from pipelines.job.budget import Budget
    from pipelines.job.notice import watching
    from pipelines.run.nodes.address import let_workers_exit_first, this_node
    from pipelines.run.plan import stage_plan
    from pipelines.run.stage import TUNE, artifacts, planned, run_name, stages_until
    from pipelines.store.s3_store import open_store
    from pipelines.store.stop_request import stop_requests, withdraw_stop
    from pipelines.store.traffic import counted_together
    from pipelines.user.show.card import print_card
    from pipelines.user.show.console import TerminalScreen

    if exited is not None and not 128 < exited <= 192:
        sys.exit(exited)
    node, screen = this_node(), TerminalScreen(quiet=as_json)
    opened = open_store(store_uri(store))  # a wrong URI fails before gigabytes of text are hashed
    stops = [] if unless_stopped else stop_requests(opened)  # to withdraw: one that comes from now on counts
    try:
        loaded, plans = planned(recipe, set_ or [], opened)
    except StoreUnavailable as error:
        if unless_stopped and exited is None:  # otherwise the job would rent such a machine again and again
            raise UserError(f"{error}; this machine has never reached it") from error
        raise
    stage = stages_until(plans, stage or [*plans][-1])[-1]
    if exited and (
        ending := after_signal(exited - 128, opened, plans, stage, screen, stop, price_per_hour, unless_stopped)
    ):
        raise ending
    check_home()
    found = artifacts(opened, plans, stage)
    todo = [one for one, made in found.items() if not made]
    refuse_what_ends_late(loaded, opened, plans, todo, launched=unless_stopped or bool(node.rank))
    check_code([step for step in loaded.tune if f"{TUNE}.{step.name}" in todo], allow_code)
    if not unless_stopped and (training := stage_plan(opened, plans["train"])).other:
        screen.note(f"{run_name(plans)}: {training.why}")
    withdraw_stop(opened, run_name(plans), stops)
    if node.rank:
        from pipelines.run.nodes.worker import run_worker

        with counted_together(), watching(stop, screen):
            sys.exit(run_worker(node, stage, loaded, plans, opened, home(), stop, screen))
    pipeline = pipeline_here(loaded, plans, opened, price_per_hour, screen, stop)
    pipeline.allow_code = allow_code
    if todo and not unless_stopped and not pipeline.mirror.off:  # `launch` has checked it
        from pipelines.user.cloud.checks import mlflow_answers

        if (server := mlflow_answers(pipeline.mirror.uri, os.environ)).state == "broken":
            screen.warn(f"{server.what}: {server.seen}; {server.remedy}; the run goes on without it")
    try:
        with counted_together(), watching(stop, screen):
            if budget and todo:
                limit = Budget(budget, pipeline.billing, opened, pipeline.run, loaded.train.batch_tokens, stop)
                limit.begin()
                pipeline.watches.append(limit.watch)
            pipeline.execute(stage, found)
    except BaseException:
        let_workers_exit_first(node)
        raise
    finally:
        # A store that does not answer has no result, and another request would only wait as long again.
        if as_json and not isinstance(sys.exception(), UserError | StoreUnavailable):
            with reporting():
                print(json.dumps(result(pipeline)))
    if not as_json:
        with reporting():
            print_card(pipeline, next_commands(pipeline))


@contextmanager
def reporting() -> Iterator[None]:
    """Print an error of the report of a run. How the run ends never depends on it."""
    from pipelines.user.show.console import say

    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        say(f"the run has ended; its report failed: {type(error).__name__}: {error}", on_stderr=True)


def refuse_what_ends_late(
    recipe: "Recipe", store: "Store", plans: "dict[str, ArtifactPlan]", todo: list[str], launched: bool
) -> None:
    """UserError, before hours of training, for an input or a package that a stage `todo` would refuse after it.
    `launch` has checked the inputs of evaluate before it rented a machine."""
    from pipelines.extras.tune.tune import checked_rows
    from pipelines.run.stage import TUNE
    from pipelines.run.stages.evaluate import check_inputs
    from pipelines.run.stages.export import check_packages

    if "export" in todo:
        check_packages(recipe.export.other_formats)
    if not launched and {"train", "evaluate"} <= set(todo):
        check_inputs(recipe, home() / "cache")
    if any(one.startswith(TUNE) for one in todo):
        if not find_spec("trl"):
            raise UserError(f"tune: needs the package trl: {how_to_install('tune')}; then run again")
        checked_rows(recipe, store, plans["tokenize"])


def after_signal(
    number: int,
    store: "Store",
    plans: "dict[str, ArtifactPlan]",
    until: str,
    screen: "Screen",
    stop: "StopSignal",
    price_per_hour: float | None,
    unless_stopped: bool,
) -> BaseException | None:
    """Record that a signal has ended the command of a run on this node. Returns the exception that ends the run on it;
    None if it is a rented machine, and can go on: SkyPilot would take minutes longer."""
    from pipelines.job.prices import billing_here
    from pipelines.run.nodes import worker
    from pipelines.run.nodes.address import let_workers_exit_first, this_node
    from pipelines.run.nodes.results import signal_name
    from pipelines.run.pipeline import record_crash
    from pipelines.run.stage import run_name
    from pipelines.store.stop_request import read_stop_request

    node = this_node()
    whose = f"the command of node {node.rank}" if node.rank else "the run's command"
    cause = f"{whose} was killed by {signal_name(number)}"
    if number in REQUESTS:
        return Interrupted(cause)
    if node.rank:
        recorded = worker.record_crash(store, plans["train"].prefix, node, cause)
        return SystemExit(EXIT_DONE) if recorded else Interrupted(cause)  # the exit code of node 0 counts
    billing = billing_here(price_per_hour)
    ending = record_crash(store, plans, until, billing, cause)
    if billing.machine.cluster and node.count == 1 and isinstance(ending, Crashed) and not stop.asked:
        screen.warn(f"{ending}; starting again on this machine")
        return None
    let_workers_exit_first(node)
    if unless_stopped and (request := read_stop_request(store, run_name(plans))):
        return Stopped(str(request))
    return ending


def pipeline_here(
    recipe: "Recipe",
    plans: "dict[str, ArtifactPlan]",
    store: "Store",
    price_per_hour: float | None,
    screen: "Screen",
    stop: "StopSignal",
) -> "Pipeline":
    """The pipeline of a run on this machine, with its watches."""
    from pipelines.extras.mlflow.child import MirrorProcess
    from pipelines.job.deadline import DeadlineWatch, deadline_here, is_standby
    from pipelines.job.prices import billing_here
    from pipelines.run.pipeline import Pipeline
    from pipelines.run.stage import run_name
    from pipelines.store.process_id import process_began
    from pipelines.store.stop_request import watch_stop_request

    name, billing, deadline = run_name(plans), billing_here(price_per_hour), deadline_here()
    timed = DeadlineWatch(deadline, recipe, stop) if deadline and (billing.machine.spot or is_standby()) else None
    return Pipeline(
        recipe,
        store,
        home(),
        billing,
        MirrorProcess(store.uri, name, home(), default_uri=default_tracking_uri()),
        screen,
        stop,
        plans,
        watches=[watch_stop_request(store, name), *([timed.watch] if timed else [])],
        before_ranks=timed.before_ranks if timed else None,
        began=process_began(),
    )


def result(pipeline: "Pipeline") -> dict[str, Any]:
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


def next_commands(pipeline: "Pipeline") -> list[str]:
    """Commands for the artifacts that a run has made, as the user can type them in this folder.

    On a rented node, only those that work on the user's machine, too.
    """
    from pipelines.recipe.recipe import REWARD
    from pipelines.user.show.console import program

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
    if not pipeline.mirror.off and pipeline.mirror.uri.startswith("sqlite:"):
        commands.append(f"{program('mlflow')} ui --backend-store-uri {shlex.quote(pipeline.mirror.uri)}")
    if "export" not in pipeline.made:
        return [*commands, f"{skytrain} run run:{name}{option}"]
    commands.append(f"{skytrain} pull {name} {shlex.quote(pipeline.recipe.name)}{' --tuned' * tuned}{option}")
    if pipeline.recipe.tokens.source == "python-stdlib":  # a first try: then own text, and a rented machine
        commands.append(f"{skytrain} run laptop --set name=mine --set 'tokens.source=FOLDER/*.txt'{option}")
        commands.append(f"{skytrain} launch gpt2-124m --dry-run")
    return commands
