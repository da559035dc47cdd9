"""`skytrain`: the verbs, and the exit code of each exception.

Exit codes: 0 done; 2 the user's mistake; 75 interrupted, run the same command to resume; 76 stopped, nothing restarts
the run automatically; 141 the reader of the output has closed it (`| head`); 1 a bug, or a run that diverged.

The verbs import heavy modules inside their functions, so that `--help` answers at once.
"""

import io
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import IO, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from pipelines.user.show.warnings import make_warnings_printable
from pipelines.user.verbs.bench import bench
from pipelines.user.verbs.doctor import doctor
from pipelines.user.verbs.down import down
from pipelines.user.verbs.gc import gc
from pipelines.user.verbs.init import init
from pipelines.user.verbs.job import job
from pipelines.user.verbs.launch import launch
from pipelines.user.verbs.logs import logs
from pipelines.user.verbs.options import home
from pipelines.user.verbs.plan import plan
from pipelines.user.verbs.pull import pull
from pipelines.user.verbs.recipes import recipes
from pipelines.user.verbs.report import report
from pipelines.user.verbs.resume import resume
from pipelines.user.verbs.run import run
from pipelines.user.verbs.sample import sample
from pipelines.user.verbs.serve import serve
from pipelines.user.verbs.status import status
from pipelines.user.verbs.stop import stop
from pipelines.user.verbs.tokenizer import tokenizer_app
from trainer.config.errors import EXIT_MISTAKE, Ending, StoreUnavailable, UserError, ending_of, is_full

PROGRAM = "skytrain"
WHOLE = 1_000  # characters of a verb's description in --help
PROJECT_FILE = "skytrain.yaml"
EXIT_UNREAD = 128 + signal.SIGPIPE  # as the shell reports a program that SIGPIPE ended
# For every Python that a command starts, ranks too: it imports nothing from the working folder, whose files may be
# somebody else's, and writes UTF-8 into our files and pipes.
CHILDREN = {"PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
GROUPS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {  # as --help shows them
    "Run": (run, plan, recipes),
    "Look": (report, status, logs, sample, serve, pull),
    "Cloud": (launch, resume, stop, down, job),
    "Tools": (init, doctor, bench, tokenizer_app, gc),
}


# One answer shows whether a bucket exists. A run retries for two minutes; these commands do not.
SHORT_RETRIES = {verb.__name__ for verb in (report, status, logs, launch, resume, stop, down, plan)}


class Verb(TyperCommand):
    """Begins with the values of `skytrain.yaml`. No option takes `inf` or `nan`, which Python reads as numbers: a limit
    of `nan` would never be reached."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.info_name != init.__name__ and os.path.lexists(PROJECT_FILE):  # init may replace a wrong one
            from pipelines.recipe.project import project

            project().set_in(os.environ)
        if ctx.info_name not in SHORT_RETRIES:
            return super().invoke(ctx)
        os.environ.setdefault("SKYTRAIN_STORE_SECONDS", "10")
        try:
            return super().invoke(ctx)
        except StoreUnavailable as error:
            rest = (
                "" if ctx.info_name in ("down", "report", "plan") else "; `skytrain down RUN` works without the store"
            )
            raise UserError(f"{ctx.info_name}: {error}{rest}") from error

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        parameters: list[Any] = self.params
        for parameter in parameters:
            value = ctx.params.get(parameter.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value} is not a finite number.", ctx, parameter)
        return rest


# The class of click, or of typer's own copy of click.
UsageError: Any = typer.BadParameter.__base__


class Verbs(TyperGroup):
    """Shows the verbs in groups, with whole descriptions. Handles exceptions before typer does: Ctrl-C, at a question
    too, and a closed output have their own exit codes, EOFError keeps its traceback like any other bug, and a wrong
    option takes one line like any other mistake."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                names = (str(verb.info.name) if isinstance(verb, typer.Typer) else verb.__name__ for verb in verbs)
                formatter.write_dl([(name, self.commands[name].get_short_help_str(WHOLE)) for name in names])

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with quiet_if_unread(), usage_in_a_line(PROGRAM):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            with quiet_if_unread(), usage_in_a_line(PROGRAM, ctx):
                return super().invoke(ctx)
        except (KeyboardInterrupt, typer.Abort) as error:  # Abort: at a question
            if isinstance(error.__context__, EOFError):
                exit_with(Ending(EXIT_MISTAKE, "error: the input ends before an answer; answer by an option (--help)"))
            ending = ending_of(KeyboardInterrupt())
            assert ending
            exit_with(ending)
        except EOFError as error:
            raise RuntimeError("a file ended too early") from error


@contextmanager
def quiet_if_unread() -> Iterator[None]:
    """Exit with EXIT_UNREAD, without a word, once nobody reads stdout or stderr any longer."""
    outputs = [output for output in (sys.stdout, sys.stderr) if output]
    try:
        try:
            yield
        finally:
            for output in outputs:
                output.flush()
    except BrokenPipeError as error:
        if not (unread := [output for output in outputs if is_unread(output)]):
            raise RuntimeError("another pipe than the output was closed") from error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in unread:
            os.dup2(nowhere, output.fileno())  # Python flushes them at the end
        sys.exit(EXIT_UNREAD)


def is_unread(output: IO[str]) -> bool:
    """Whether the reader of a pipe has closed it."""
    poll = select.poll()
    poll.register(output, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


@contextmanager
def usage_in_a_line(command: str, ctx: Any = None) -> Iterator[None]:
    """Exit with 2 and one line about a wrong option or argument of a command, or of the verb that `ctx` invokes."""
    try:
        yield
    except UsageError as error:
        message = error.format_message()
        if "\n" in message:
            raise  # a group without a verb: typer prints its help
        if error.ctx:
            command = error.ctx.command_path
        elif ctx and ctx.invoked_subcommand:  # an option without its value: the parser does not know its command
            command = f"{command} {ctx.invoked_subcommand}"
        message = message[0].lower() + message[1:].removesuffix(".") + ("" if message.endswith("?") else ";")
        verb = command.removeprefix(PROGRAM).lstrip()
        exit_with(Ending(EXIT_MISTAKE, f"error: {f'{verb}: ' if verb else ''}{message} see {command} --help"))


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verbs in GROUPS.values():
    for verb in verbs:
        if isinstance(verb, typer.Typer):
            app.add_typer(verb)
        else:
            app.command(cls=Verb)(verb)


def print_version(asked: bool) -> None:
    from pipelines.user.show.console import say

    if asked:
        say(f"{PROGRAM} {metadata.version(PROGRAM)}, Python {sys.version.partition(' ')[0]}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train GPT-2 from one recipe: tokenize, train, evaluate, export. After an interruption at any point, the same
    command resumes."""


def main() -> None:
    os.environ.update(CHILDREN)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ascii, latin-1 and cp1252 lack what tables are drawn with
    make_warnings_printable()
    try:
        app(prog_name=PROGRAM)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and is_full(error) and not error.filename:
            error.filename = str(home())
        ending = sky_ending_of(error) or ending_of(error)
        if ending is None:
            raise
        exit_with(ending)


def sky_ending_of(error: BaseException) -> Ending | None:
    """The ending for SkyPilot's own error; None for every other error."""
    # sys.modules, because importing SkyPilot takes seconds, and without it there is no such error.
    sky = sys.modules.get("sky.exceptions")
    if sky is None or not isinstance(error, sky.ApiServerConnectionError):
        return None
    message = "error: SkyPilot's API server does not answer; start it with `sky api start`, or see `sky api info`"
    return Ending(EXIT_MISTAKE, message)


def exit_with(ending: Ending) -> NoReturn:
    """Print the message of an ending on stderr, without secrets, and exit with its code."""
    from pipelines.store.secrets import redacted
    from pipelines.user.show.console import say

    say(redacted(ending.message), on_stderr=True)
    sys.exit(ending.exit_code)


if __name__ == "__main__":
    main()
