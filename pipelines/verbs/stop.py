"""`skytrain stop`: ask a run to commit and exit."""

import sys
import time
from typing import Annotated

import typer

from pipelines.verbs.options import RunName, StoreUri
from pipelines.verbs.runs import named_run


def stop(
    run: RunName,
    store: StoreUri = None,
    reason: Annotated[str, typer.Option(help="Recorded with the request.")] = "skytrain stop",
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait until it has stopped.")
    ] = 300.0,
) -> None:
    """Ask a run on any machine to commit and exit, and wait for its machine's release: exit 0 once it has stopped."""
    from pipelines.cloud import control
    from pipelines.cloud.request import last_launch
    from pipelines.show.findings import print_note, print_note_on_stderr
    from pipelines.show.status import print_stopped
    from pipelines.tracking.runs import Run

    began = time.monotonic()
    record, opened = named_run(run, store)
    launched = last_launch(opened, record.run)
    before = control.running_attempt(Run(opened, record))
    after = control.stop(opened, record, reason, wait, print_note)
    left = None
    if after and after.state != "running" and launched and launched.jobs:
        seconds = max(0.0, wait - (time.monotonic() - began))
        left = control.wait_until_released(record.run, launched.jobs, seconds, print_note_on_stderr)
    print_stopped(record.run, before, after, launched is not None, left)
    sys.exit(bool(after and after.state == "running"))
