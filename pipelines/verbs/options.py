"""Options that several verbs share, and their defaults."""

import os
from pathlib import Path
from typing import Annotated

import typer

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A shipped recipe, a recipe file, or run:NAME for a recorded run.")
]
RunNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Runs, by name or the beginning of it; all by default."),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run, by name or the beginning of it.")]
LastStage = Annotated[str, typer.Option("--stage", help="The last stage to run: tokenize, train, evaluate or export.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change one field; can be repeated."),
]
StoreUri = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URI", help="file://folder or s3://bucket/prefix [SKYTRAIN_STORE; .skytrain/store]"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def home() -> Path:
    """The folder of this machine for scratch, caches and the default store: SKYTRAIN_HOME or ./.skytrain."""
    return Path(os.environ.get("SKYTRAIN_HOME", ".skytrain")).absolute()


def store_uri(option: str | None) -> str:
    """The store: the option, SKYTRAIN_STORE, or a folder in `home`."""
    return option or os.environ.get("SKYTRAIN_STORE") or f"file://{home() / 'store'}"


def default_tracking_uri() -> str:
    """The MLflow of runs without a tracking server: a SQLite file in `home`."""
    return f"sqlite:///{home() / 'mlflow.db'}"


def one_of(value: str, known: tuple[str, ...], option: str) -> None:
    """UserError if the value of an option is not a known one."""
    from trainer.errors import UserError

    if value not in known:
        raise UserError(f"{option} {value}: unknown; it is one of {', '.join(known)}")
