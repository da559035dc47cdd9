"""`skytrain job`: the command of a rented machine, which sky/*.yaml start. A supervisor (`pipelines/job/supervisor.py`)
does the work of `skytrain run` in a child process."""

from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.user.verbs.options import StoreUri, check_home, store_uri
from pipelines.user.verbs.run import (
    PlannedRun,
    execute,
    pipeline_here,
    plan_run,
    start_early,
    work_for_node_0,
)
from trainer.config.errors import Crashed, StoreUnavailable, UserError

if TYPE_CHECKING:
    from pipelines.run.screen import Screen
    from trainer.base.process import StopSignal


def job(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", envvar="SKYTRAIN_RECIPE", help="As of run, mostly run:NAME.")
    ],
    stage: Annotated[
        str | None, typer.Option("--stage", envvar="SKYTRAIN_STAGE", help="Stop after this stage, as run does.")
    ] = None,
    store: StoreUri = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="USD", envvar="SKYTRAIN_BUDGET", help="Stop before the run costs more."),
    ] = None,
) -> None:
    """Run a recipe on a rented machine, as sky/*.yaml do: again after a crash, and never after a stop."""
    from pipelines.job.supervisor import supervise

    def work(stop: "StopSignal", crash: int | None) -> None:
        work_of_job(recipe, stage, store, budget, stop, crash)

    supervise(work)


def work_of_job(
    recipe: str, stage: str | None, store: str | None, budget: float | None, stop: "StopSignal", crash: int | None
) -> None:
    """Do this machine's part of a run. `crash`: the signal that ended the process before, which is recorded first."""
    from pipelines.job.machine import begin_bill, set_environment

    set_environment()
    start_early(stop, stage)

    from pipelines.run.nodes.address import this_node
    from pipelines.run.stage import check_stages
    from pipelines.store.s3_store import open_store
    from pipelines.store.stop_request import check_not_stopped
    from pipelines.user.show.console import TerminalScreen

    node, screen, opened = this_node(), TerminalScreen(), open_store(store_uri(store))
    if not node.rank:
        begin_bill()
    try:
        run = plan_run(recipe, stage, [], opened)
    except StoreUnavailable as error:
        if crash is None:  # otherwise the job would rent such a machine again and again
            raise UserError(f"{error}; this machine has never reached it") from error
        raise
    if crash:
        go_on_after(crash, run, stop, screen)
    check_home()
    check_stages(run.start(allow_code=False, launched=True))
    check_not_stopped(opened, run.name)
    if node.rank:
        work_for_node_0(run, stop, screen)
    execute(*pipeline_here(run, None, budget, screen, stop), run)


def go_on_after(crash: int, run: PlannedRun, stop: "StopSignal", screen: "Screen") -> None:
    """Record that a signal ended the process before. Raises what ends this machine's part of the run, unless it goes
    on here: alone, and neither asked to stop nor after too many crashes."""
    from pipelines.job.crash import record_crash
    from pipelines.job.prices import billing_here
    from pipelines.run.nodes.address import let_workers_exit_first, this_node
    from pipelines.store.stop_request import check_not_stopped

    node = this_node()
    ending = record_crash(crash, node, run.store, run.plans, run.until, billing_here(None))
    if isinstance(ending, Crashed) and node.count == 1 and not stop.asked:
        screen.warn(f"{ending}; starting again on this machine")
        return
    let_workers_exit_first(node)
    if not node.rank:  # the exit code of node 0 counts
        check_not_stopped(run.store, run.name)
    raise ending
