"""`skytrain logs`: the output of a launched run's job."""

import sys
from typing import Annotated

import typer

from pipelines.verbs.options import RunName, StoreUri, named_run


def logs(
    run: RunName,
    store: StoreUri = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue until the job ends.")] = False,
) -> None:
    """Print the log of a launched run's job."""
    from pipelines.cloud import control
    from pipelines.cloud.request import last_launch
    from pipelines.cloud.skypilot import managed_tasks, reach_api_server, tail_logs
    from pipelines.show.console import JobLog
    from pipelines.show.findings import print_note_on_stderr
    from trainer.errors import UserError

    record, opened = named_run(run, store)
    launched = last_launch(opened, record.run)
    if not (launched and launched.jobs):
        raise UserError(f"logs: {record.run} was not launched; its ranks' log is SKYTRAIN_HOME/work/**/train.log")
    reach_api_server(print_note_on_stderr)
    jobs = [task.job for task in managed_tasks(launched.request.job_name)]
    if not jobs:
        gone = f"SkyPilot has no record of job {launched.jobs[-1]} any more"
        raise UserError(f"logs: {control.on_another_server(launched) or gone}")
    sys.exit(tail_logs(max(jobs), follow, JobLog()))
