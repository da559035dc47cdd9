"""`skytrain stop`: ask a run to commit and exit."""

import sys
from typing import Annotated

import typer

from pipelines.user.verbs.options import RunName, StoreUri, named_run


def stop(
    run: RunName,
    store: StoreUri = None,
    reason: Annotated[str, typer.Option(help="Record this reason with the request.")] = "skytrain stop",
    wait: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="Wait at most this long for the run to stop; exit with 1 if it has not."
        ),
    ] = 300.0,
) -> None:
    """Stop a run on any machine: it commits and exits."""
    from pipelines.run.runs import Run
    from pipelines.user.cloud import control
    from pipelines.user.cloud.request import last_launch
    from pipelines.user.show.console import say
    from pipelines.user.show.status import print_stopped

    record, opened = named_run(run, store)
    before = control.running_attempt(Run(opened, record))
    after = control.stop(opened, record, reason, wait, say)
    print_stopped(record.run, before, after, last_launch(opened, record.run) is not None)
    sys.exit(bool(after and after.state == "running"))
