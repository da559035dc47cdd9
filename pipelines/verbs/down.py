"""`skytrain down`: remove a run's machines."""

import os

from pipelines.verbs.options import RunName, StoreUri, named_run


def down(run: RunName, store: StoreUri = None) -> None:
    """Cancel a run's job at once and remove its machines; its commits stay."""
    os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")  # SkyPilot's own record suffices
    from pipelines.cloud import control
    from pipelines.cloud.request import last_launch
    from pipelines.cloud.skypilot import reach_api_server
    from pipelines.show.console import say
    from pipelines.show.findings import print_note_on_stderr
    from trainer.errors import UserError

    failure = None
    try:
        record, opened = named_run(run, store)
        run = record.run
        if last_launch(opened, run) is None:
            raise UserError(f"down: {run} was never launched, so it has no machines to remove")
    except (UserError, OSError) as error:
        failure = error
        print_note_on_stderr(f"{error}; asking SkyPilot for machines of {run}")
    reach_api_server(print_note_on_stderr)
    if not control.down(run, say) and failure:
        raise UserError(f"down: SkyPilot has no job and no cluster of {run}; give the run's whole name")
    say(f"{run}: no job and no cluster of it is left")
