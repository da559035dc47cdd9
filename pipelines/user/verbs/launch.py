"""`skytrain launch`: rent machines for a recipe. `submit_after_checks` is also the end of `skytrain resume`."""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from pipelines.user.verbs.options import (
    BudgetUsd,
    Changes,
    Deadline,
    Image,
    Infra,
    LastStage,
    RecipeName,
    StoreUri,
    check_home,
    parse_hours,
    store_uri,
)
from trainer.config.errors import UserError

if TYPE_CHECKING:
    from pipelines.user.cloud.launch import Launch

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def launch(
    recipe: RecipeName,
    stage: LastStage = None,
    store: StoreUri = None,
    set_: Changes = None,
    infra: Infra = None,
    spot: Annotated[
        bool | None,
        typer.Option("--spot/--on-demand", help="Rent only on this market [the cheaper of both]"),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:COUNT", help="Train on nodes with these GPUs [H100:8; one L4 or A10 for an hour's work]"
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Train on this many nodes.")] = 1,
    budget: BudgetUsd = None,
    deadline: Deadline = None,
    image: Image = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME=VALUE",
            help="Set a variable of the job; can be repeated. SKYTRAIN_VENV=FOLDER: an environment on the nodes.",
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="NAME", help="Pass one more secret of this shell; can be repeated."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the job with masked secrets and what is wrong with it; submit nothing."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Rent machines for the missing stages of a recipe. Check, show the price and ask first."""
    from pipelines.recipe.project import project
    from pipelines.run.stage import planned, run_name, stages_until
    from pipelines.store.s3_store import open_store
    from pipelines.store.unread_store import readable
    from pipelines.user.cloud.launch import planned_launch
    from pipelines.user.cloud.request import WORK_TREE, LaunchRequest, secrets_from_shell, variables_from_shell
    from pipelines.user.show.console import say

    ours = project()
    opened = open_store(store_uri(store))
    if dry_run:
        opened = readable(opened, recipe)  # the checks of the job report it
    done_by = time.time() + 3600 * parse_hours(deadline) if deadline else None
    variables, secrets = variables_from_shell(env or []), secrets_from_shell(secret or [])
    out = sys.stdout
    with redirect_stdout(sys.stderr if dry_run else out):  # of SkyPilot, too: its log keeps the stdout of its import
        loaded, plans = planned(recipe, set_ or [], opened)
        request = LaunchRequest(
            run=run_name(plans),
            store=opened.uri,
            until=stages_until(plans, stage or [*plans][-1])[-1],
            infra=infra or ours.infra,
            spot=spot,
            nodes=nodes,
            gpus=gpus,
            image=image or ours.image or WORK_TREE,
            budget=ours.budget if budget is None else budget,
            deadline=done_by,
            variables=variables,
        )
        prepared = planned_launch(request, loaded, plans, opened, secrets)
        if prepared is None:
            say(f"{request.run}: every stage is in {opened.uri} already; nothing to launch")
        elif dry_run:
            print_dry_run(prepared, out)
        else:
            submit_after_checks(prepared, lambda question: yes or typer.confirm(question))


def print_dry_run(prepared: "Launch", out: TextIO) -> None:
    """Print the job to `out`, the findings and the plan to stdout. UserError at the end if it would fail."""
    from pipelines.user.cloud.launch import checked_job, nothing_launched
    from pipelines.user.show.cloud_plan import print_launch_report
    from pipelines.user.show.findings import print_note_on_stderr

    job, *_, wrong = checked_job(prepared, print_launch_report, print_note_on_stderr, dry_run=True)
    print(job.to_yaml(prepared.secrets), end="", flush=True, file=out)
    if wrong:
        raise UserError(nothing_launched(wrong))


def submit_after_checks(prepared: "Launch", agree: Callable[[str], bool]) -> None:
    """Print the findings and the plan, ask, submit, and print the next commands."""
    from pipelines.user.cloud.launch import checked_job, submit, write_store_id
    from pipelines.user.show.cloud_plan import print_launch_report
    from pipelines.user.show.console import say
    from pipelines.user.show.findings import print_note_on_stderr

    _, dag, usd, _ = checked_job(prepared, print_launch_report, print_note_on_stderr)
    assert dag, "only a dry run has none"
    if agree(prepared.question(usd)):
        write_store_id(prepared)
        for stage in prepared.here:
            run_here(prepared, stage)
        launched = submit(prepared, dag)
        run, jobs = launched.request.run, " and ".join(map(str, launched.jobs))
        say(f"launched {run} as managed job {jobs}; see `skytrain status {run}`, `logs`, `stop` and `down`")


def run_here(prepared: "Launch", until: str) -> None:
    """Run the stages up to `until` on this machine. Raises Interrupted after a signal; the next launch continues."""
    from pipelines.user.show.console import TerminalScreen
    from pipelines.user.verbs.node import PlannedRun, pipeline_here
    from trainer.base.process import StopSignal

    check_home()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        stop = StopSignal()
        run = PlannedRun(prepared.recipe, prepared.plans, prepared.store, until)
        pipeline, _ = pipeline_here(run, None, None, TerminalScreen(), stop)
        pipeline.execute(until, run.found)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
