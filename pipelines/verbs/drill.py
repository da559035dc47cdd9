"""`skytrain drill`: faults against a run, and the proof that its result stays the same."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelines.verbs.options import Changes, RecipeName, StoreUri, store_uri
from trainer.errors import EXIT_FAILED


def drill(
    recipe: RecipeName = "smoke",
    kills: Annotated[int, typer.Option(min=0, help="The number of faults.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal faults.")] = 0,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,…",
            help="By default kill, term, corrupt, rival, world, cut, mlflow. More: odd, twice, eio, gc, frozen, clock.",
        ),
    ] = None,
    store: StoreUri = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write the whole report as JSON."),
    ] = None,
    set_: Changes = None,
) -> None:
    """Interrupt a run in every phase and prove that its result is the same: exit 0 only then."""
    from pipelines.drill.drill import drill
    from pipelines.show.console import TerminalScreen
    from pipelines.show.drill import print_report

    chosen = kinds.split(",") if kinds else None
    done = drill(recipe, set_ or [], store_uri(store), kills, seed, chosen, TerminalScreen().note)
    if report:
        report.write_text(done.json())
    print_report(done)
    if not done.passed:
        sys.exit(EXIT_FAILED)
