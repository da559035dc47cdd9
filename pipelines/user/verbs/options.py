"""Options that several verbs share, and their defaults."""

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainer.config.errors import UserError

if TYPE_CHECKING:
    from pipelines.run.run_record import RunRecord
    from pipelines.run.sample import TextModel
    from trainer.base.store import Store


RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A shipped recipe, a recipe file, or run:NAME for a recorded run.")
]
RunNames = Annotated[
    list[str] | None, typer.Argument(metavar="RUN", help="Names of runs, or their first letters [all]")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its first letters.")]
Last = Annotated[int, typer.Option("--last", metavar="N", min=1, help="Without RUN: only the newest N runs.")]
LastStage = Annotated[
    str | None,
    typer.Option(
        "--stage",
        help="Stop after this stage: tokenize, train, evaluate, export, tune (or tune.NAME) or custom.NAME [the last]",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change one field; can be repeated."),
]
StoreUri = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URI",
        help="file://folder or s3://bucket/prefix [SKYTRAIN_STORE; skytrain.yaml; .skytrain/store]",
    ),
]
Infra = Annotated[
    str | None,
    typer.Option(metavar="CLOUD[/REGION],…", help="Rent only there: aws, gcp/us-central1, slurm/NAME, kubernetes, …"),
]
Deadline = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Finish within 36h, 2d or 90m: on spot while there is slack, then on demand."),
]
BudgetUsd = Annotated[
    float | None,
    typer.Option(min=0.001, metavar="USD", help="Commit and stop before the whole run costs more than this."),
]
Image = Annotated[
    str | None,
    typer.Option(metavar="IMAGE|none", help="Run in REGISTRY/NAME@sha256:…; none: upload this work tree [none]"),
]
Step = Annotated[
    int | None,
    typer.Option("--at", metavar="STEP", min=0, help="Use the checkpoint of this step.", show_default=False),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="fp32|bf16|int8",
        help="Set the precision of the matrix products; int8: on CPUs only [bf16 where the machine has it]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def home() -> Path:
    """The folder of this machine for scratch, caches and the default store: SKYTRAIN_HOME or ./.skytrain."""
    return Path(os.environ.get("SKYTRAIN_HOME") or ".skytrain").absolute()


def check_home() -> None:
    """Make `home`. OSError, which names it, if nothing can be written there."""
    home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=home()):
        pass


def store_uri(option: str | None) -> str:
    """The store: the option, SKYTRAIN_STORE (which a project's skytrain.yaml sets), or a folder in `home`."""
    return option if option is not None else os.environ.get("SKYTRAIN_STORE") or f"file://{home() / 'store'}"


def named_run(run: str, store: str | None) -> "tuple[RunRecord, Store]":
    """The run with this name or beginning of a name, and its store. UserError if there is no such run, or several."""
    from pipelines.run.run_record import read_records
    from pipelines.store.s3_store import open_store

    opened = open_store(store_uri(store))
    (record,) = read_records(opened, [run])
    return record, opened


def open_text_model(
    uri: str, cache: Path, run: str, at: int | None, precision: str | None, tuned: bool = False
) -> "TextModel":
    """The model of a run, for verbs that generate text; a line on stderr names the commit of an unfinished run.
    UserError without weights."""
    from pipelines.run.sample import load_text_model
    from pipelines.store.s3_store import open_store
    from pipelines.user.show.console import say
    from trainer.models.decoder import PRECISIONS

    if precision and precision not in PRECISIONS:
        raise UserError(f"--precision {precision}: unknown; choose one of {', '.join(PRECISIONS)}")
    model = load_text_model(open_store(uri), cache, run, at, precision, tuned)
    if model.step is not None and at is None:
        say(f"{model.run}: not finished; these are the weights of step {model.step}", on_stderr=True)
    return model


def parse_hours(text: str) -> float:
    """36h, 2d, 90m, 1d12h as hours. UserError for other text."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhm])", text)
    hours = sum(float(number) * {"d": 24, "h": 1, "m": 1 / 60}[unit] for number, unit in parts)
    if not hours or "".join(map("".join, parts)) != text.strip():
        raise UserError(f"--deadline {text}: not a duration; write 36h, 2d, 90m or 1d12h")
    return hours
