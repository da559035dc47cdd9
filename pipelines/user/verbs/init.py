"""`skytrain init`: from an empty folder to one that can launch."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelines.user.verbs.options import BudgetUsd, Image, Infra
from trainer.config.errors import UserError


def init(
    store: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Keep runs in s3://bucket/prefix or file://folder [SKYTRAIN_STORE]"),
    ] = None,
    tracking: Annotated[
        str | None,
        typer.Option(metavar="URL|off", help="Mirror runs to this MLflow server [MLFLOW_TRACKING_URI; a file here]"),
    ] = None,
    infra: Infra = None,
    budget: BudgetUsd = None,
    image: Image = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite an existing skytrain.yaml.")] = False,
) -> None:
    """Write skytrain.yaml, the defaults of this folder; then check store and machine as doctor does."""
    os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")
    from pipelines.extras.mlflow.settings import checked_uri
    from pipelines.recipe.project import FILE, Project
    from pipelines.store.s3_store import open_store
    from pipelines.store.secrets import redacted
    from pipelines.user.cloud.checks import check_image_name
    from pipelines.user.cloud.skypilot import check_places
    from pipelines.user.show.console import say
    from pipelines.user.verbs.doctor import print_examination
    from trainer.base.install import clone
    from trainer.base.store import replacing

    path, from_shell = Path(FILE), os.environ.get("SKYTRAIN_STORE")
    if os.path.lexists(path) and not replace:
        raise UserError(f"init: {FILE} exists; edit it, or add --replace to overwrite it")
    store = store or from_shell or (asked_store() if sys.stdin.isatty() else None)
    if not store:
        raise UserError("init: name a store: --store s3://BUCKET/PREFIX or file://FOLDER")
    if tracking is None and (server := os.environ.get("MLFLOW_TRACKING_URI", "")).startswith("http"):
        tracking = checked_uri(server)
    open_store(store)  # UserError for a malformed URI
    given = {"store": store, "tracking": tracking, "infra": infra, "budget": budget, "image": image}
    project = Project.of(given, "init")
    check_places(project.infra)
    if project.image:
        check_image_name(project.image)
    try:
        with replacing(path) as file:
            file.write(project.to_yaml().encode())
    except OSError as error:
        raise UserError(f"init: {path} cannot be written ({error.strerror}); check the folder's permissions") from error
    say(f"{FILE}: written")
    if from_shell and from_shell != project.store:
        say(f"note: SKYTRAIN_STORE={redacted(from_shell)} of this shell wins over the file")
    project.set_in(os.environ)
    works = print_examination(store)
    launches = store.startswith("s3://")
    if not works and launches:
        deploy = "aws cloudformation deploy --template-file infra/aws/stack.yaml`, see infra/README.md"
        say(f"to make a bucket: `{deploy if clone() else 'aws s3 mb s3://BUCKET`'}")
    if works:
        say(f"next: skytrain {'launch' if launches else 'run'} smoke")
    sys.exit(0 if works else 2)


def asked_store() -> str:
    """Ask on the terminal for a store, again after an answer that is not one."""
    from pipelines.store.s3_store import open_store

    def checked(answer: str) -> str:
        try:
            open_store(answer)
        except UserError as error:
            raise typer.BadParameter(str(error)) from error
        return answer

    answer: str = typer.prompt("store (s3://BUCKET/PREFIX or ./FOLDER)", value_proc=checked)
    return answer
