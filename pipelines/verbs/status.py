"""`skytrain status`: the state of runs, and SkyPilot's report of their jobs."""

import json
import time

from pipelines.verbs.options import Json, RunNames, StoreUri, store_uri

FIRST_ANSWER_SECONDS = 3.5  # with the start of Python, the state of the runs is there after four seconds


def status(
    runs: RunNames = None,
    store: StoreUri = None,
    as_json: Json = False,
) -> None:
    """The state of runs: step, speed, loss, attempts, recoveries, dollars so far and to come, SkyPilot's job."""
    from pipelines.artifacts.store import open_store
    from pipelines.cloud import control
    from pipelines.cloud.request import launched_runs
    from pipelines.cloud.skypilot import TaskStatus
    from pipelines.show.console import say
    from pipelines.show.findings import print_note_on_stderr
    from pipelines.show.status import print_jobs, print_status
    from pipelines.tracking.runs import usable_runs

    began, opened = time.monotonic(), open_store(store_uri(store))
    found = usable_runs(opened, runs or [], lambda run: control.status_of(run, None, time.time()), print_note_on_stderr)
    tasks: list[TaskStatus] = []
    failure, late = None, False
    if not launched_runs(opened).isdisjoint(run.name for run in found):
        report = control.JobsReport(print_note_on_stderr)
        early = [control.status_of(run, None, time.time()) for run in found]
        late = not report.arrived(began + FIRST_ANSWER_SECONDS - time.monotonic()) and not as_json
        if late:
            print_status(early, ["SkyPilot has not answered yet; its jobs follow"])
        tasks, failure = report.tasks()
    states = [control.status_of(run, control.tasks_of(run.name, tasks), time.time()) for run in found]
    notes = [f"SkyPilot does not answer: {failure}"] if failure else []
    if as_json:
        print(json.dumps([one.to_json() for one in states]), flush=True)
    elif not found:
        say(f"no runs in {opened.uri} yet; `skytrain run smoke` makes one")
    else:
        (print_jobs if late else print_status)(states, notes)
    if tasks:
        control.refresh_cluster_hours(opened, tasks)
