"""Options that several verbs share, and their defaults."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from pipelines.sample import TextModel

WHOLE = 1_000  # characters of a verb's description in --help


def shipped_names(start: str) -> list[str]:
    """The shipped recipes whose names start like this, for a shell's completion; without one it offers files."""
    from pipelines.recipe import shipped

    return [name for name in shipped() if name.startswith(start)]


def names_of_runs(start: str) -> list[str]:
    """The runs of a local store whose names start like this, for a shell's completion. A bucket would take seconds."""
    kind, _, folder = store_uri(None).rpartition("://")
    runs = Path(folder).glob("runs/*.json") if kind in ("", "file") else ()
    return sorted(path.stem for path in runs if path.stem.startswith(start))


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A shipped recipe, a recipe file, or run:NAME for a recorded run.",
        autocompletion=shipped_names,
    ),
]
RunNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Names of runs, or their first letters [all]", autocompletion=names_of_runs),
]
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, or its first letters.", autocompletion=names_of_runs)
]
LastStage = Annotated[str, typer.Option("--stage", help="Stop after this stage: tokenize, train, evaluate or export.")]
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
Experiment = Annotated[
    str | None,
    typer.Option(
        "--experiment", metavar="NAME", help="Use this experiment in MLflow [MLFLOW_EXPERIMENT_NAME; skytrain]"
    ),
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="NAME=VALUE", help="Add a tag in MLflow; can be repeated [SKYTRAIN_TAGS]"),
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


class WholeHelp(TyperGroup):
    """A group of verbs whose --help cuts no description."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            self.list_verbs(ctx, formatter, self.list_commands(ctx))

    def list_verbs(self, ctx: Any, formatter: Any, names: Iterable[str]) -> None:
        """Write verbs with their descriptions, wrapped at the terminal's width."""
        commands = [(name, self.get_command(ctx, name)) for name in names]
        formatter.write_dl([(name, command.get_short_help_str(WHOLE)) for name, command in commands if command])


def home() -> Path:
    """The folder of this machine for scratch, caches and the default store: SKYTRAIN_HOME or ./.skytrain.

    UserError for a path that nothing can have.
    """
    from trainer.errors import UserError

    folder = Path(os.environ.get("SKYTRAIN_HOME") or ".skytrain").absolute()
    try:
        folder.exists()
    except OSError as error:
        raise UserError(f"SKYTRAIN_HOME: {str(folder)[:80]}: not a usable path ({error.strerror})") from error
    return folder


def writable_home() -> Path:
    """`home`, which exists afterwards. UserError if nothing can be written there."""
    from trainer.errors import UserError, is_full

    folder = home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if is_full(error):
            raise
        raise UserError(
            f"SKYTRAIN_HOME: {str(folder)[:80]} is not writable ({error.strerror}); choose a writable folder"
        ) from error
    return folder


def store_uri(option: str | None) -> str:
    """The store: the option, SKYTRAIN_STORE (which a project's skytrain.yaml sets), or a folder in `home`."""
    return option or os.environ.get("SKYTRAIN_STORE") or f"file://{home() / 'store'}"


def default_tracking_uri() -> str:
    """The MLflow of runs without a tracking server: a SQLite file in `home`."""
    return f"sqlite:///{home() / 'mlflow.db'}"


def set_tracking_options(experiment: str | None, tags: list[str] | None) -> None:
    """Put the options of MLflow into the environment, where a run and a launched job read them. UserError for a
    tag of another form."""
    from pipelines.tracking.mlflow.settings import own_tags, parse_tags

    if experiment:
        os.environ["MLFLOW_EXPERIMENT_NAME"] = experiment
    both = own_tags() | parse_tags(tags or [], "--tag ")
    if both:
        os.environ["SKYTRAIN_TAGS"] = ",".join(f"{name}={value}" for name, value in both.items())


def open_text_model(uri: str, cache: Path, run: str, at: int | None, precision: str | None) -> "TextModel":
    """The model of a run, for verbs that generate text; a line on stderr names the commit of an unfinished run.
    UserError without weights."""
    from pipelines.artifacts.store import open_store
    from pipelines.sample import load_text_model
    from pipelines.show.console import say
    from trainer.models.decoder import PRECISIONS

    if precision:
        one_of(precision, PRECISIONS, "--precision")
    model = load_text_model(open_store(uri), cache, run, at, precision)
    if model.step is not None and at is None:
        say(f"{model.run}: not finished; these are the weights of step {model.step}", on_stderr=True)
    return model


def one_of(value: str, known: tuple[str, ...], option: str) -> None:
    """UserError if the value of an option is not a known one."""
    from trainer.errors import UserError

    if value not in known:
        raise UserError(f"{option} {value}: unknown; choose one of {', '.join(known)}")
