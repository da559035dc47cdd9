"""`skytrain plan`: the artifacts of a recipe, and with --cloud the cost of the missing ones."""

import json
import math
from dataclasses import asdict
from typing import Annotated

import typer

from pipelines.user.verbs.options import (
    BudgetUsd,
    Changes,
    Deadline,
    Infra,
    Json,
    RecipeName,
    StoreUri,
    parse_hours,
    store_uri,
)
from trainer.config.errors import UserError


def plan(
    recipe: RecipeName,
    store: StoreUri = None,
    set_: Changes = None,
    cloud: Annotated[bool, typer.Option("--cloud", help="Compare hours and dollars on rented machines.")] = False,
    deadline: Deadline = None,
    budget: BudgetUsd = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="GPU:N,…", help="Compare nodes with these GPUs [H100:8,H200:8,A100-80GB:8; small: L4:1,A10:1]."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Train on this many nodes [the fewest with enough memory].")
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="GBIT", help="Assume this bandwidth between nodes, in Gbit/s [40: TCP]."),
    ] = None,
    infra: Infra = None,
    as_json: Json = False,
) -> None:
    """Show the artifacts of a recipe and why one is missing; with --cloud, what they cost within the other options."""
    from pipelines.extras.tune.tune import checked_rows
    from pipelines.run.plan import plan_of
    from pipelines.run.stage import planned
    from pipelines.store.s3_store import open_store
    from pipelines.store.unread_store import UnreadStore, readable
    from pipelines.user.show.console import say
    from pipelines.user.show.findings import print_note_on_stderr
    from pipelines.user.show.plan import print_plan

    opened = readable(open_store(store_uri(store)), recipe)
    if isinstance(opened, UnreadStore):
        print_note_on_stderr(f"{opened.why}; planned as if nothing were stored there")
    loaded, plans = planned(recipe, set_ or [], opened)
    found = plan_of(loaded, opened, plans)
    if not cloud:
        if deadline or budget or gpus or infra or nodes or network:
            options = "--deadline, --budget, --gpus, --nodes, --network and --infra"
            raise UserError(f"plan: {options} belong to --cloud; add it")
        print(json.dumps(asdict(found))) if as_json else print_plan(found)
        for name, rows in checked_rows(loaded, opened, plans["tokenize"]).items() if not as_json else ():
            say(f"tune.{name}: {rows}")
        return
    from pipelines.recipe.project import project
    from pipelines.user.cloud.catalog import CLOUDS
    from pipelines.user.cloud.planner import Limits, cloud_plan
    from pipelines.user.cloud.request import WORK_TREE
    from pipelines.user.show.cloud_plan import print_cloud_plan

    ours = project()
    budget, infra = ours.budget if budget is None else budget, infra or ours.infra
    limits = Limits(parse_hours(deadline) if deadline else math.inf, budget or math.inf)
    train_nodes = gpus.split(",") if gpus else ()
    places = [place.strip() for place in infra.split(",")] if infra else CLOUDS
    installs = (ours.image or WORK_TREE) == WORK_TREE  # as `launch` would
    rented = cloud_plan(loaded, opened, limits, train_nodes, nodes, places, plans, installs, network)
    if as_json:
        print(json.dumps(asdict(found) | {"cloud": rented.to_json()}))
    else:
        print_plan(found)
        print_cloud_plan(rented)
