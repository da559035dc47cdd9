"""`skytrain run`: one node of a run, which makes every artifact that is missing."""

from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.user.verbs.options import (
    BudgetUsd,
    Changes,
    Json,
    LastStage,
    RecipeName,
    StoreUri,
    check_home,
    store_uri,
)

if TYPE_CHECKING:
    from trainer.base.process import StopSignal


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
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run the recipe's own reward functions, with your rights.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the missing stages of a recipe; resume after an interruption."""
    from trainer.base.process import StopSignal

    start_early(stop := StopSignal(), stage)

    from pipelines.run.nodes.address import this_node
    from pipelines.store.s3_store import open_store
    from pipelines.store.stop_request import stop_requests, withdraw_stop
    from pipelines.user.show.console import TerminalScreen
    from pipelines.user.verbs import node

    address, screen = this_node(), TerminalScreen(quiet=as_json)
    opened = open_store(store_uri(store))  # a wrong URI fails before gigabytes of text are hashed
    stops = stop_requests(opened)  # to withdraw: one that comes from now on counts
    planned = node.plan_run(recipe, stage, set_ or [], opened)
    check_home()
    node.check_before_training(planned, allow_code, launched=address.rank > 0)
    node.explain_new_training(planned, screen)
    withdraw_stop(opened, planned.name, stops)
    if address.rank:
        node.work_for_node_0(planned, stop, screen)
    pipeline, mirror = node.pipeline_here(planned, price_per_hour, budget, screen, stop)
    pipeline.allow_code = allow_code
    node.warn_without_mlflow(planned, mirror, screen)
    node.execute(pipeline, mirror, planned, as_json)


def start_early(stop: "StopSignal", stage: str | None) -> None:
    """Let a request to stop end the waits for the store until an attempt begins. Start the launcher of the ranks, which
    imports torch while this process imports what it needs."""
    from pipelines.run.nodes.launcher_process import prepare_launcher
    from trainer.base.store import WAITING

    WAITING.check = stop.check
    if stage != "tokenize":
        prepare_launcher()
