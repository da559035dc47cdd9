"""What many verbs take, and what it means when it is not given."""

import os
from pathlib import Path
from typing import Annotated, Optional

import typer

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A shipped recipe, a path to one, or run:NAME for a recorded run's.")
]
Changes = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads it
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change one field; can be repeated."),
]
StoreUri = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--store", metavar="URI", help="file://folder or s3://bucket/prefix [SKYTRAIN_STORE; .skytrain/store]"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def home() -> Path:
    """Where this machine keeps scratch, caches and, by default, the store: SKYTRAIN_HOME or ./.skytrain."""
    return Path(os.environ.get("SKYTRAIN_HOME", ".skytrain")).absolute()


def store_uri(asked: str | None) -> str:
    return asked or os.environ.get("SKYTRAIN_STORE") or f"file://{home() / 'store'}"


def default_tracking_uri() -> str:
    return f"sqlite:///{home() / 'mlflow.db'}"


def one_of(value: str, known: tuple[str, ...], option: str) -> None:
    from trainer.errors import UserError

    if value not in known:
        raise UserError(f"{option} {value}: unknown; it is one of {', '.join(known)}")
