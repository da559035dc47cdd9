"""The verbs for rented machines, added to those of pipelines/cli.py. Heavy imports wait inside them, as there."""

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated, Optional

import typer

from pipelines.options import Changes, Json, RecipeName, StoreUri, home, one_of, store_uri

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
        typer.Option(min=0.0, metavar="USD", help="The run stops on a commit before it has cost more."),
    ] = None,
    deadline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TIME", help="Only machines that are expected to be done in 36h, 2d or 90m."),
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, secrets masked.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Rent machines for what is missing of a recipe, after a look at what could go wrong and what it costs."""
    # One answer tells whether a bucket is there; the two minutes that a run would wait for it are for runs.
    os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")
    from pipelines.artifacts.store import open_store
    from pipelines.cloud import launch as launching
    from pipelines.cloud.plan import hours_of
    from pipelines.cloud.tasks import Wish
    from pipelines.stage import STAGES, planned, run_name
    from trainer.config import UserError
    from trainer.store import StoreUnavailable

    one_of(stage, STAGES, "--stage")
    opened = open_store(store_uri(store))
    hours = hours_of(deadline) if deadline else None
    variables, secrets = launching.variables_here(env or []), launching.secrets_here(secret or [])
    try:
        loaded, plans = planned(recipe, set_ or [], opened)
        wish = Wish(
            run_name(plans),
            opened.uri,
            stage,
            infra,
            spot,
            nodes,
            gpus,
            image or pushed_image(),
            budget,
            hours,
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


def pushed_image() -> str:
    """The image that `skytrain image push` pushed last."""
    from pipelines.image import remembered
    from trainer.config import UserError

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
