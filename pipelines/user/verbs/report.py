"""`skytrain report`: state, cost, series and page of runs, from the store alone."""

import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.user.verbs.options import Json, Last, RunNames, StoreUri, home, store_uri
from trainer.config.errors import UserError

if TYPE_CHECKING:
    from pipelines.run.runs import Run


def report(
    runs: RunNames = None,
    store: StoreUri = None,
    last: Last = 20,
    as_json: Json = False,
    series: Annotated[bool, typer.Option("--series", help="Print the metrics of runs as JSON, a line a step.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a page with curves, attempts and bill; without RUN: a table of links to one page a run.",
        ),
    ] = None,
    overlay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LOG[@TOKENS]",
            help="With --html: draw an llm.c main.log over the curves; @ sets the tokens of a step (524288).",
        ),
    ] = None,
    rebuild_mlflow: Annotated[
        bool, typer.Option("--rebuild-mlflow", help="Send all records of the runs to MLflow again.")
    ] = False,
) -> None:
    """Show state, attempts, tokens, val loss, hours and dollars of runs."""
    from pipelines.run.runs import usable_runs, without_failed_trials
    from pipelines.store.s3_store import open_store
    from pipelines.user.cloud.request import last_launch
    from pipelines.user.show.bill import print_bill
    from pipelines.user.show.console import say
    from pipelines.user.show.findings import print_note_on_stderr
    from pipelines.user.show.runs import print_runs, print_series

    if overlay and not html:
        raise UserError("--overlay: the page shows it; add --html FILE")
    opened = open_store(store_uri(store))
    asked = rebuild_mlflow or series or as_json

    def read(run: "Run") -> object:  # all that is shown, so that a record of another version is left out
        if not (asked or html or runs):
            return run.listed
        return run.summary, run.account, *([run.recipe, run.series] if html or series else [])

    found = usable_runs(opened, runs or [], read, print_note_on_stderr, last)
    if html:
        from pipelines.user.show.page import write_page

        write_page(html, opened, found, overlay or [], one_each=not runs, on_stderr=asked)
    if rebuild_mlflow:
        rebuild_tracking(found)
    elif series:
        for run in found:
            print_series(run.name, run.series)
    elif as_json:
        print(json.dumps([asdict(run.summary) | {"account": asdict(run.account)} for run in found]))
    elif not html:
        shown = found if runs else without_failed_trials(found, print_note_on_stderr)
        print_runs([run.summary if runs else run.listed for run in shown], opened.uri)
        if runs and len(found) == 1:
            (run,), launched = found, last_launch(opened, found[0].name)
            say("")
            print_bill(run, launched.request.budget if launched else None)


def rebuild_tracking(runs: "list[Run]") -> None:
    """Send the records of runs to MLflow. UserError without mlflow, or for a URI of another scheme."""
    from pipelines.extras.mlflow.mirror import rebuild
    from pipelines.extras.mlflow.settings import tracking_uri
    from pipelines.store.secrets import redacted
    from pipelines.user.show.console import say

    if not find_spec("mlflow"):
        raise UserError("report --rebuild-mlflow: needs mlflow; pip install mlflow")
    uri = tracking_uri(home())
    for run in runs:
        rebuild(run.store, run.name, uri)
        say(f"{run.name}: sent to {redacted(uri)}")
