"""`skytrain status`: the state of runs, and SkyPilot's report of their jobs."""

import json
import time

from pipelines.verbs.options import Json, RunNames, StoreUri, store_uri


def status(
    runs: RunNames = None,
    store: StoreUri = None,
    as_json: Json = False,
) -> None:
    """The state of runs: step, speed, loss, attempts, recoveries, dollars so far and to come, SkyPilot's job."""
    from pipelines.artifacts.store import open_store
    from pipelines.cloud import control
    from pipelines.cloud.request import last_launch
    from pipelines.cloud.skypilot import TaskStatus
    from pipelines.show.console import say
    from pipelines.show.findings import print_note_on_stderr
    from pipelines.show.status import print_status
    from pipelines.tracking.runs import read_runs

    opened = open_store(store_uri(store))
    found, failure = [], None
    for run in read_runs(opened, runs or []):
        tasks: list[TaskStatus] = []
        if (launched := last_launch(opened, run.name)) and failure is None:
            tasks, failure = control.report_of_skypilot(opened, run.record, launched, print_note_on_stderr)
        found.append(control.status_of(run, tasks, time.time()))
    if as_json:
        print(json.dumps([one.to_json() for one in found]))
    elif not found:
        say(f"no runs in {opened.uri} yet; `skytrain run smoke` makes one")
    else:
        print_status(found, [f"SkyPilot does not answer: {failure}"] if failure else [])
