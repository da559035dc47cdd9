"""`skytrain down`: remove a run's machines."""

from pipelines.user.verbs.options import RunName, StoreUri, store_uri


def down(run: RunName, store: StoreUri = None) -> None:
    """Cancel a run's job at once and remove its machines; its commits stay."""
    from pipelines.run.run_record import read_records
    from pipelines.run.runs import Run
    from pipelines.store.s3_store import open_store
    from pipelines.user.cloud import control
    from pipelines.user.cloud.request import last_launch
    from pipelines.user.cloud.skypilot import reach_api_server, stop_api_server
    from pipelines.user.show.console import say
    from pipelines.user.show.findings import print_note_on_stderr
    from trainer.config.errors import UserError

    opened, launched, failure = open_store(store_uri(store)), None, None
    try:
        (record,) = read_records(opened, [run])
        run = record.run
        if (launched := last_launch(opened, run)) is None:
            raise UserError(f"{run} was never launched, so it has no machines to remove")
    except (UserError, OSError) as error:
        failure = error
        print_note_on_stderr(f"{error}; asking SkyPilot for machines of {run}")
    started = reach_api_server(print_note_on_stderr)
    names = [launched.request.job_name] if launched else control.jobs_without_store(run, opened.uri)
    removed = any([control.down(name, say) for name in names])
    if failure and not removed:
        if started and not control.managed_tasks(unfinished=True):  # whose controllers would end with the server
            stop_api_server()
        raise UserError(f"down: SkyPilot has no job of {run} in {opened.uri}; give the run's whole name")
    if launched:
        found = Run(opened, record)
        control.record_releases([found], {run: launched}, print_note_on_stderr)
        if message := control.on_another_server(launched):
            raise UserError(f"down: {message}")
        seen = removed or control.managed_tasks(launched.request.job_name)  # whose last heartbeat may be seconds old
        if not seen and (beat := control.running_attempt(found)):
            where = beat.machine.cluster or beat.process.host
            raise UserError(f"down: {beat.stage}, attempt {beat.attempt} runs on {where}, and {control.no_job(run)}")
    say(f"{run}: no job and no cluster left")
