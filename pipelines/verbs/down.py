"""`skytrain down`: remove a run's machines."""

import os

from pipelines.verbs.options import RunName, StoreUri
from pipelines.verbs.runs import named_run


def down(run: RunName, store: StoreUri = None) -> None:
    """Cancel a run's job at once and remove its machines; its commits stay."""
    os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")  # without a store, SkyPilot's own record names the run too
    from pipelines.cloud import control
    from pipelines.cloud.request import last_launch
    from pipelines.cloud.skypilot import reach_api_server
    from pipelines.show.console import say
    from pipelines.show.findings import print_note, print_note_on_stderr
    from trainer.errors import UserError

    try:
        record, opened = named_run(run, store)
        name, launched = record.run, last_launch(opened, record.run) is not None
    except (UserError, OSError) as error:
        reach_api_server(print_note_on_stderr)
        name, opened = control.run_on_skypilots_record(run, str(error)), None
        print_note_on_stderr(f"{error}; by SkyPilot's record, the run is {name}")
    else:
        if not launched:
            raise UserError(f"down: {name} was never launched, so it has no machines to remove")
        reach_api_server(print_note_on_stderr)
    clusters = control.down(name, print_note)
    if opened:
        control.record_cluster_hours(opened, [name], clusters)
    say(f"{name}: no job and no cluster of it is left")
