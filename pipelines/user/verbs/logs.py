"""`skytrain logs`: the output of a launched run's job."""

import sys
from typing import Annotated

import typer

from pipelines.user.verbs.options import RunName, StoreUri, store_uri


def logs(
    run: RunName,
    store: StoreUri = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue until the job ends.")] = False,
) -> None:
    """Print the log of a launched run's job."""
    from pipelines.run.run_record import read_records
    from pipelines.store.s3_store import open_store
    from pipelines.user.cloud import control
    from pipelines.user.cloud.request import last_launch
    from pipelines.user.cloud.skypilot import managed_tasks, reach_api_server
    from pipelines.user.show.console import JobLog, say
    from pipelines.user.show.findings import print_note_on_stderr
    from trainer.config.errors import StoreUnavailable, UserError

    opened, launched = open_store(store_uri(store)), None
    try:
        (record,) = read_records(opened, [run])
        launched = last_launch(opened, record.run)
        if not (launched and launched.jobs):
            raise UserError(f"logs: {record.run} was not launched; its ranks' log is SKYTRAIN_HOME/work/**/train.log")
        names = [launched.request.job_name]
        reach_api_server(print_note_on_stderr)
    except StoreUnavailable as error:
        print_note_on_stderr(f"{error}; asking SkyPilot for jobs of {run}")
        reach_api_server(print_note_on_stderr)
        names = control.jobs_without_store(run, opened.uri)
    tasks = [task for name in names for task in managed_tasks(name)]
    tasks = control.tasks_of(launched, tasks) if launched else tasks
    if not tasks:
        elsewhere = control.on_another_server(launched) if launched else None
        raise UserError(f"logs: {elsewhere or control.no_job(run)}")
    if not follow and (waiting := control.waiting_task(tasks)):
        say(f"job {waiting.job} has no machine yet: {waiting.status}" + (f": {waiting.why}" if waiting.why else ""))
        sys.exit()
    sys.exit(control.print_log(tasks[0].name, follow, JobLog()))
