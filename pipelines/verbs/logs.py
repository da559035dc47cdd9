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
    from pipelines.cloud.request import last_launch
    from pipelines.cloud.skypilot import reach_api_server, tail_logs
    from pipelines.show.console import JobLog
    from pipelines.show.findings import print_note_on_stderr
    from trainer.errors import UserError

    record, opened = named_run(run, store)
    launched = last_launch(opened, record.run)
    if not (launched and launched.jobs):
        raise UserError(f"logs: {record.run} was not launched; its ranks' log is SKYTRAIN_HOME/work/**/train.log")
    reach_api_server(print_note_on_stderr)
    sys.exit(tail_logs(launched.jobs[-1], follow, JobLog()))
