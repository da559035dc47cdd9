"""The verbs for rented machines, added to those of pipelines/cli.py. Heavy imports wait inside them, as there."""

import json
import os
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from pipelines.verbs.options import Changes, Json, RecipeName, StoreUri, home, one_of, store_uri

if TYPE_CHECKING:
    from pipelines.tracking.runs import RunRecord
    from trainer.store import Store

cloud_app = typer.Typer()


@cloud_app.command()
def launch(
    recipe: RecipeName,
    stage: Annotated[str, typer.Option(help="The last stage to run: tokenize, train, evaluate or export.")] = "export",
    store: StoreUri = None,
    set_: Changes = None,
    infra: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="CLOUD[/REGION],…", help="aws, gcp/us-central1, lambda, slurm/NAME, kubernetes, …"),
    ] = None,
    spot: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--spot/--on-demand", help="Only machines of this market; by default the cheapest of both."),
    ] = None,
    gpus: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME:COUNT", help="GPUs of a training node [H100:8]"),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to train on.")] = 1,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.001, metavar="USD", help="The run stops on a commit before it has cost more."),
    ] = None,
    deadline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="Be done in 36h, 2d or 90m: on spot while there is slack, then on demand."),
    ] = None,
    image: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="IMAGE|none", help="REGISTRY/NAME@sha256:… [the last pushed], or none: this work tree"),
    ] = None,
    env: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--env", metavar="NAME=VALUE", help="A variable of the job; can be repeated."),
    ] = None,
    secret: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--secret", metavar="NAME", help="One more secret to take from this shell; can be repeated."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be submitted, secrets masked, and what would be refused."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Rent machines for what is missing of a recipe, after a look at what could go wrong and what it costs."""
    # One answer tells whether a bucket is there; the two minutes that a run would wait for it are for runs.
    os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")
    from pipelines.artifacts.store import open_store
    from pipelines.cloud import launch as launching
    from pipelines.cloud.plan import hours_of
    from pipelines.cloud.tasks import LaunchRequest
    from pipelines.stage import STAGES, planned, run_name
    from trainer.errors import StoreUnavailable, UserError

    one_of(stage, STAGES, "--stage")
    opened = open_store(store_uri(store))
    done_by = time.time() + 3600 * hours_of(deadline) if deadline else None
    variables, secrets = launching.variables_here(env or []), launching.secrets_here(secret or [])
    try:
        loaded, plans = planned(recipe, set_ or [], opened)
        wish = LaunchRequest(
            run_name(plans),
            opened.uri,
            stage,
            infra,
            spot,
            nodes,
            gpus,
            image or pushed_image(),
            budget,
            done_by,
            variables,
        )
        launched = launching.launch(wish, loaded, plans, opened, secrets, lambda q: yes or typer.confirm(q), dry_run)
    except StoreUnavailable as error:  # for a run time may cure it; nobody waits for that with a launch
        raise UserError(f"launch: {error}") from error
    if launched:
        print_next(launched.wish.run, launched.jobs)


@cloud_app.command()
def doctor(store: StoreUri = None, as_json: Json = False) -> None:
    """Look at what is installed and what it leads to: exit 0 fine, 2 if something that runs need is broken."""
    os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")
    from pipelines.cloud.doctor import examine

    findings = list(examine(home(), store_uri(store), dict(os.environ)))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        print(*findings, sep="\n")
    sys.exit(2 if any(finding.state == "broken" for finding in findings) else 0)


RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run, or the beginning of its name.")]


@cloud_app.command()
def status(
    runs: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[RUN]...", help="Runs, or the beginnings of their names; all by default."),
    ] = None,
    store: StoreUri = None,
    as_json: Json = False,
) -> None:
    """How runs stand: step, speed, loss, attempts, recoveries, dollars so far and to come, and SkyPilot's word."""
    from pipelines.artifacts.store import open_store
    from pipelines.cloud import control
    from pipelines.cloud.launch import last_launch
    from pipelines.show.tables import print_status
    from pipelines.tracking.runs import read_runs

    opened = open_store(store_uri(store))
    found, silent = [], None
    for run in read_runs(opened, runs or []):
        tasks: list[control.Task] = []
        if (launched := last_launch(opened, run.name)) and silent is None:
            tasks, silent = control.told_by_sky(opened, run.record, launched)
        found.append(control.status_of(run, tasks, time.time()))
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
    elif not found:
        print(f"no runs in {opened.uri} yet; `skytrain run smoke` makes one")
    else:
        print_status(found, [f"SkyPilot does not answer: {silent}"] if silent else [])


@cloud_app.command()
def logs(
    run: RunName,
    store: StoreUri = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
) -> None:
    """What a launched run's job prints."""
    from pipelines.cloud.checks import reach_api_server

    record, _ = named(run, store)
    job = launched_job(record, store)
    reach_api_server()
    from sky import jobs

    sys.exit(jobs.tail_logs(job_id=job, follow=follow) or 0)


@cloud_app.command()
def stop(
    run: RunName,
    store: StoreUri = None,
    reason: Annotated[str, typer.Option(help="For whoever wonders later.")] = "skytrain stop",
    wait: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long to watch it stop.")] = 300.0,
) -> None:
    """Let a run commit and leave, wherever it is: exit 0 once it has, 1 if it has not yet."""
    from pipelines.cloud import control
    from pipelines.cloud.launch import last_launch
    from pipelines.show.tables import print_stopped
    from pipelines.tracking.runs import Run

    record, opened = named(run, store)
    before = control.working(Run(opened, record))
    after = control.stop(opened, record, reason, wait, lambda text: print(text, flush=True))
    print_stopped(record.run, before, after, launched=last_launch(opened, record.run) is not None)
    sys.exit(bool(after and after.state == "running"))


@cloud_app.command()
def resume(
    run: RunName,
    store: StoreUri = None,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.001, metavar="USD", help="Another limit than before, for all of the run."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Launch a run that was stopped, or ended, as it was launched before; it goes on from its last commit."""
    from pipelines.cloud import launch as launching
    from pipelines.stage import planned
    from pipelines.tracking.stop_request import clear_stop_request, read_stop_request
    from trainer.errors import UserError

    record, opened = named(run, store)
    before = launching.last_launch(opened, record.run)
    if before is None:
        raise UserError(f"resume: {record.run} was never launched; skytrain run run:{record.run} goes on here")
    wish = replace(before.wish, budget=budget) if budget is not None else before.wish
    secrets = launching.secrets_here(name for name in before.secrets if name != "AWS_SESSION_TOKEN")
    loaded, plans = planned(f"run:{record.run}", [], opened)
    stopped = read_stop_request(opened, record.run)

    def agreed(question: str) -> bool:
        if not (yes or typer.confirm(question)):
            return False
        clear_stop_request(opened, record.run)  # before the job is there, which would end at once
        return True

    if stopped:
        print(f"{record.run} was stopped by {stopped}")
    if launched := launching.launch(wish, loaded, plans, opened, secrets, agreed):
        print_next(launched.wish.run, launched.jobs)


@cloud_app.command()
def down(run: RunName, store: StoreUri = None) -> None:
    """Cancel a run's job at once and remove its machines; what is committed stays."""
    from pipelines.cloud import control
    from pipelines.cloud.launch import last_launch
    from trainer.errors import UserError

    record, opened = named(run, store)
    if last_launch(opened, record.run) is None:
        raise UserError(f"down: {record.run} was never launched, so it has no machines to remove")
    control.down(record.run, lambda text: print(text, flush=True))
    control.keep_intervals(opened, record.run)
    print(f"{record.run}: no job and no cluster of it is left")


@cloud_app.command()
def orphans(store: StoreUri = None, as_json: Json = False) -> None:
    """Machines that still cost money and belong to no live run: exit 0 if there are none, 1 if there are."""
    from pipelines.artifacts.store import open_store
    from pipelines.cloud import control
    from pipelines.cloud.checks import reach_api_server

    opened = open_store(store_uri(store))
    reach_api_server()
    found = list(control.orphans(opened, time.time()))
    if as_json:
        print(json.dumps([asdict(orphan) for orphan in found]))
    for orphan in () if as_json else found:
        print(f"{orphan.what}: {orphan.why}; {orphan.remedy} removes it")
    sys.exit(bool(found))


def named(run: str, store: str | None) -> "tuple[RunRecord, Store]":
    """The run that was meant, and the store it is in."""
    from pipelines.artifacts.store import open_store
    from pipelines.tracking.runs import read_records

    opened = open_store(store_uri(store))
    (record,) = read_records(opened, [run])
    return record, opened


def launched_job(record: "RunRecord", store: str | None) -> int:
    """The last managed job of a run."""
    from pipelines.artifacts.store import open_store
    from pipelines.cloud.launch import last_launch
    from trainer.errors import UserError

    launched = last_launch(open_store(store_uri(store)), record.run)
    if not (launched and launched.jobs):
        raise UserError(
            f"logs: {record.run} was not launched; what its ranks print is in SKYTRAIN_HOME/work/**/train.log"
        )
    return launched.jobs[-1]


def pushed_image() -> str:
    """The image that `skytrain image push` pushed last."""
    from pipelines.cloud.image import remembered
    from trainer.errors import UserError

    last = remembered(home()).get("skypilot")
    if not (last and last.pushed):
        raise UserError(
            "--image: none was pushed from here (skytrain image build --target skypilot; skytrain image push …); "
            "name one, or --image none to run this work tree without a container"
        )
    return last.pushed


def print_next(run: str, jobs: list[int]) -> None:
    """What one may do with a run that was just launched."""
    print(f"{run} is launched as managed job {', '.join(map(str, jobs))}")
    print(f"  skytrain status {run}     how far it is, and what it has cost")
    print(f"  skytrain logs {run} --follow")
    print(f"  skytrain stop {run}       commit and leave; skytrain resume {run} goes on")
    print(f"  skytrain down {run}       remove its machines")
