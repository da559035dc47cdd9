"""`skytrain down`: remove a run's machines."""

from pipelines.verbs.options import RunName, StoreUri
from pipelines.verbs.runs import named_run


def down(run: RunName, store: StoreUri = None) -> None:
    """Cancel a run's job at once and remove its machines; its commits stay."""
    from pipelines.cloud import control
    from pipelines.cloud.request import last_launch
    from pipelines.cloud.skypilot import reach_api_server
    from pipelines.show.console import say
    from pipelines.show.findings import print_note, print_note_on_stderr
    from trainer.errors import UserError

    record, opened = named_run(run, store)
    if last_launch(opened, record.run) is None:
        raise UserError(f"down: {record.run} was never launched, so it has no machines to remove")
    reach_api_server(print_note_on_stderr)
    control.down(record.run, print_note)
    control.record_cluster_hours(opened, record.run)
    say(f"{record.run}: no job and no cluster of it is left")
