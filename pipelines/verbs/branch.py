"""`skytrain branch`: a new run from a commit of another one."""

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from pipelines.verbs.options import Changes, Json, LastStage, RunName, StoreUri, one_of, store_uri


def branch(
    run: RunName,
    at: Annotated[
        int, typer.Option(min=0, metavar="STEP", help="The step of the commit that the new run begins with.")
    ],
    set_: Changes = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the new run [that of RUN]")] = None,
    stage: LastStage = "export",
    store: StoreUri = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0.0, metavar="USD", help="Price of one node of this machine for an hour.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.001, metavar="USD", help="As for `run`; the cost of RUN does not count.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the new recipe, for `launch` or `run`; the plan goes to stderr.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Run also what takes more than a day here.")] = False,
    as_json: Json = False,
) -> None:
    """Begin a new run with the whole state of a commit of RUN: another decay, length or text from there on."""
    import yaml

    from pipelines.artifacts.store import open_store
    from pipelines.branch import branched
    from pipelines.plan import plan_of
    from pipelines.show.console import say
    from pipelines.show.plan import print_plan
    from pipelines.stage import STAGES, run_name
    from pipelines.text.tokenizer import keep_tokenizer
    from pipelines.tracking.origins import pin_commits
    from pipelines.tracking.runs import record
    from pipelines.verbs.run import run as run_recipe

    one_of(stage, STAGES, "--stage")
    opened = open_store(store_uri(store))
    recipe, plans = branched(opened, run, at, set_ or [], name)
    with redirect_stdout(sys.stderr):
        print_plan(plan_of(recipe, opened, plans))
    if dry_run:
        say(yaml.safe_dump(recipe.model_dump(exclude_defaults=True), sort_keys=False, allow_unicode=True).rstrip())
        return
    new = run_name(plans)
    record(opened, new, recipe, plans, stage)
    pin_commits(opened, new, recipe)
    keep_tokenizer(recipe, plans["tokenize"], opened)
    run_recipe(f"run:{new}", stage, opened.uri, None, price_per_hour, budget, yes=yes, as_json=as_json)
