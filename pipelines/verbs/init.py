"""`skytrain init`: from an empty folder to one that can launch."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.verbs.options import home
from trainer.errors import UserError

if TYPE_CHECKING:
    from pipelines.project import Project

# What a terminal is asked, for each value that no option gives.
QUESTIONS = {
    "store": "store: s3://BUCKET/PREFIX, or a folder",
    "tracking": "MLflow server: its URL, off, or nothing for a file on this machine",
    "infra": "clouds to rent on: aws, gcp, lambda, …, or nothing for all that are enabled",
    "budget": "dollars that a launched run may cost, or nothing for no limit",
    "image": "image of launches: REGISTRY/NAME@sha256:…, none, or nothing for the last pushed",
}


def init(
    store: Annotated[
        str | None, typer.Option(metavar="URI", help="s3://bucket/prefix or file://folder [SKYTRAIN_STORE]")
    ] = None,
    tracking: Annotated[
        str | None, typer.Option(metavar="URL|off", help="The MLflow server [MLFLOW_TRACKING_URI; a file here]")
    ] = None,
    infra: Annotated[
        str | None, typer.Option(metavar="CLOUD[/REGION],…", help="Where `launch` rents [all enabled clouds]")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.001, metavar="USD", help="What a launched run may cost [no limit]")
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE|none", help="The image of launches [the last pushed]")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite an existing skytrain.yaml.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; the defaults for what is not given.")] = False,
) -> None:
    """Write skytrain.yaml, the defaults of this folder; create or check the bucket; then check as doctor does."""
    os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")
    from pipelines.project import FILE, Project
    from pipelines.show.console import say
    from pipelines.verbs.doctor import print_examination
    from trainer.errors import StoreUnavailable

    path, asks = Path(FILE), sys.stdin.isatty() and not yes
    if os.path.lexists(path) and not replace:
        replace = asks and typer.confirm(f"{FILE} exists; replace it?")
        if not replace:
            raise UserError(f"init: {FILE} exists; edit it, or add --replace to overwrite it")
    given = {"store": store, "tracking": tracking, "infra": infra, "budget": budget, "image": image}
    project = Project.of(answers(given) if asks else given | defaults(given), "init")
    try:
        prepare(project)
    except StoreUnavailable as error:
        raise UserError(f"init: {error}") from error
    write(project, path, replace)
    say(f"{FILE}: {'replaced' if replace else 'written'}")
    if (other := os.environ.get("SKYTRAIN_STORE")) and other != project.store:
        say(f"note: SKYTRAIN_STORE={other} of this shell wins over the file")
    project.set_in(os.environ)
    works = print_examination(project.store or "")
    say(f"next: skytrain {'launch' if str(project.store).startswith('s3://') else 'run'} smoke")
    sys.exit(0 if works else 2)


def defaults(given: dict[str, Any]) -> dict[str, Any]:
    """The values of the environment that no option gives. UserError without a store."""
    from pipelines.tracking.mlflow.secrets import without_credentials

    tracking, _ = without_credentials(os.environ.get("MLFLOW_TRACKING_URI") or "")
    found = {"store": os.environ.get("SKYTRAIN_STORE"), "tracking": tracking if tracking.startswith("http") else None}
    left = {name: value for name, value in found.items() if value and given[name] is None}
    if not (given["store"] or left.get("store")):
        raise UserError("init: no terminal to ask on; give --store s3://BUCKET/PREFIX or file://FOLDER")
    return left


def answers(given: dict[str, Any]) -> dict[str, Any]:
    """The values that the options give, and those that the user types. Asks again for a wrong one."""
    from pipelines.project import Project
    from pipelines.show.console import say

    proposed = {"store": os.environ.get("SKYTRAIN_STORE") or f"file://{os.path.relpath(home() / 'store')}"}
    found = dict(given)
    for name, question in QUESTIONS.items():
        while found[name] is None and (typed := ask(question, proposed.get(name, ""))):
            try:
                value: Any = float(typed) if name == "budget" else typed
                found[name] = getattr(Project.of({name: value}, "init"), name)
            except (UserError, ValueError) as error:
                say(f"{error}")
    return found


def ask(question: str, proposed: str) -> str:
    return str(typer.prompt(question, proposed, show_default=bool(proposed))).strip()


def prepare(project: "Project") -> None:
    """Check the names, then create or check the bucket. UserError, or StoreUnavailable."""
    from pipelines.artifacts.store import S3Store, client_from_environment, open_store
    from pipelines.cloud.bucket import prepare_bucket
    from pipelines.cloud.checks import ANSWER_SECONDS, image_parts
    from pipelines.cloud.launch import check_places
    from pipelines.cloud.request import WORK_TREE
    from pipelines.show.findings import print_finding

    check_places(project.infra)
    if project.image and project.image != WORK_TREE:
        image_parts(project.image)
    store = open_store(project.store or "")
    if isinstance(store, S3Store):
        client = client_from_environment(store.uri, ANSWER_SECONDS)
        for finding in prepare_bucket(store.bucket, store.prefix, client):
            print_finding(finding)


def write(project: "Project", path: Path, replace: bool) -> None:
    """Write the file whole or not at all; a new one never over one that another process has made meanwhile."""
    from trainer.store import replacing

    try:
        if replace:
            with replacing(path) as file:
                file.write(project.to_yaml().encode())
        else:
            with path.open("x", encoding="utf8") as new:
                new.write(project.to_yaml())
    except FileExistsError as error:
        raise UserError(f"init: {path} exists; edit it, or add --replace to overwrite it") from error
    except OSError as error:
        raise UserError(f"init: {path} cannot be written ({error.strerror}); check the folder's permissions") from error
