"""`skytrain status`: the state of runs, SkyPilot's report of their jobs, and machines that no run uses."""

import json
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from pipelines.user.verbs.options import Json, Last, RunNames, StoreUri, store_uri


def status(
    runs: RunNames = None,
    store: StoreUri = None,
    last: Last = 20,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="List machines that cost money without a live run; exit with 1 if any.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show step, speed, loss, attempts, recoveries, dollars so far and to come, and SkyPilot's job of runs."""
    from pipelines.run.runs import Run, usable_runs, without_failed_trials
    from pipelines.store.s3_store import open_store
    from pipelines.store.stop_request import requested_stops
    from pipelines.user.cloud import control
    from pipelines.user.cloud.request import LaunchRecord, last_launch, launched_runs
    from pipelines.user.show.console import say
    from pipelines.user.show.findings import print_note_on_stderr
    from pipelines.user.show.status import print_jobs, print_status
    from trainer.config.errors import UserError

    if orphans:
        print_orphans(store, as_json)
    opened, launches = open_store(store_uri(store)), dict[str, LaunchRecord]()
    try:
        names, stops = launched_runs(opened), requested_stops(opened)
    except (UserError, OSError):
        tasks, _ = control.reported_tasks(print_note_on_stderr) if opened.uri.startswith("s3:") else ([], None)
        print_jobs([task for task in tasks if task.name.startswith(tuple(runs or [""])) and not task.over])
        raise

    def read(run: Run) -> None:
        control.status_of(run, None, [], run.name in stops)
        if run.name in names and (launched := last_launch(opened, run.name)):
            launches[run.name] = launched

    found = usable_runs(opened, runs or [], read, print_note_on_stderr, last)
    found = found if runs else without_failed_trials(found, print_note_on_stderr)
    tasks, failure = control.reported_tasks(print_note_on_stderr) if launches else ([], None)
    if launches and not failure:
        found = control.record_releases(found, launches, print_note_on_stderr)
    states = [control.status_of(run, launches.get(run.name), tasks, run.name in stops) for run in found]
    if as_json:
        print(json.dumps([asdict(one) for one in states]), flush=True)
    elif not found:
        say(f"no runs in {opened.uri} yet; `skytrain run smoke` makes one")
    else:
        unseen = [launches[one.run] for one in states if one.run in launches and not one.tasks and one.state != "done"]
        elsewhere = [] if failure else filter(None, map(control.on_another_server, unseen))
        print_status(states, [f"SkyPilot does not answer: {failure}"] if failure else elsewhere)


def print_orphans(store: str | None, as_json: bool) -> None:
    """Print a line for each orphan and the command that removes it. Exits with 0 if there is none, else with 1."""
    from pipelines.store.s3_store import open_store
    from pipelines.user.cloud.control import find_orphans
    from pipelines.user.cloud.skypilot import reach_api_server
    from pipelines.user.show.console import say
    from pipelines.user.show.findings import print_note_on_stderr

    reach_api_server(print_note_on_stderr)
    found = list(find_orphans(open_store(store_uri(store)), time.time(), print_note_on_stderr))
    if as_json:
        print(json.dumps([asdict(orphan) for orphan in found]))
    for one in [] if as_json else found:
        say(f"{one.what}: {one.why}; {one.remedy} removes it")
    if not (found or as_json):
        say("none")
    sys.exit(bool(found))
