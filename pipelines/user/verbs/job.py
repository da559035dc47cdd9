"""`skytrain job`: the command of a rented machine, which sky/*.yaml start. A supervisor (`pipelines/job/supervisor.py`)
does the work of `skytrain run` in a child process."""

from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.user.verbs.options import StoreUri, check_home, store_uri
from pipelines.user.verbs.run import start_early
from trainer.config.errors import Crashed, StoreUnavailable, UserError

if TYPE_CHECKING:
    from trainer.base.process import StopSignal


def job(
    recipe: Annotated[
        str,
        typer.Argument(envvar="SKYTRAIN_RECIPE", metavar="RECIPE", help="A recipe, as for run; a launch: run:NAME."),
    ],
    stage: Annotated[str | None, typer.Option(envvar="SKYTRAIN_STAGE", help="Stop after this stage.")] = None,
    store: StoreUri = None,
    budget: Annotated[
        float | None,
        typer.Option(envvar="SKYTRAIN_BUDGET", min=0.001, metavar="USD", help="Stop before the run costs more."),
    ] = None,
) -> None:
    """Run a recipe on a rented machine, as sky/*.yaml do; start again after a crash."""
    from pipelines.job.supervisor import supervise

    supervise(lambda stop, crash: work_of_job(recipe, stage, store, budget, stop, crash))


def work_of_job(
    recipe: str, stage: str | None, store: str | None, budget: float | None, stop: "StopSignal", crash: int | None
) -> None:
    """Do this machine's part of a run. `crash`: the signal that ended the process before, which is recorded first."""
    from pipelines.job.machine import begin_bill, set_environment

    set_environment()
    start_early(stop, stage)

    from pipelines.job.crash import record_crash
    from pipelines.run.nodes.address import let_workers_exit_first, this_node
    from pipelines.store.s3_store import open_store
    from pipelines.store.stop_request import check_not_stopped
    from pipelines.user.show.console import TerminalScreen
    from pipelines.user.verbs import node

    address, screen, opened = this_node(), TerminalScreen(), open_store(store_uri(store))
    if not address.rank:
        begin_bill()
    try:
        run = node.plan_run(recipe, stage, [], opened)
    except StoreUnavailable as error:
        if crash is None:  # otherwise the job would rent such a machine again and again
            raise UserError(f"{error}; this machine has never reached it") from error
        raise
    if crash:
        ending = record_crash(crash, address, opened, run.plans, run.until)
        if not isinstance(ending, Crashed) or address.count > 1 or stop.asked:  # several nodes start again together
            let_workers_exit_first(address)
            if not address.rank:  # whose exit code counts
                check_not_stopped(opened, run.name)
            raise ending
        screen.warn(f"{ending}; starting again on this machine")
    check_home()
    node.check_before_training(run, allow_code=False, launched=True)
    check_not_stopped(opened, run.name)
    if address.rank:
        node.work_for_node_0(run, stop, screen)
    node.execute(*node.pipeline_here(run, None, budget, screen, stop), run)
