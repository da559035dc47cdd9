"""The terminal: a screen for the progress of a run (on stderr), a console for results (on stdout), and formats.

All text passes through here on its way to a terminal. It loses control characters, because names and messages come from
a store that others can write to.
"""

import io
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

LINE_SECONDS = 10.0  # between two lines of the same bar in a log
COLOUR = re.compile(r"\x1b\[[0-9;:]{0,40}m")
CARD_COLUMNS = 100  # the width of text that has a choice


class CleanConsole(Console):
    """A console whose text can neither control a terminal nor leave blanks at the end of a table's lines."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(Trimmed(one) if isinstance(one, Table) else one for one in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        raise  # rich would exit with 1: the end of a command is the matter of pipelines/cli.py


class RunConsole(CleanConsole):
    """The console of a run, which goes on without a reader: a preemption may close the pipe before the last commit."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Trimmed:
    """A table without the blanks that fill its lines: in a narrow terminal they would wrap into blank lines."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(console.render(self.table, options)):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                *begin, (text, style, _) = line
                yield from (*begin, Segment(text.rstrip(), style))
            yield Segment.line()


class TerminalScreen:
    """The screen of a run: bars on a terminal, a line every ten seconds in a log. `quiet` shows warnings only."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = RunConsole(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text)

    def warn(self, text: str) -> None:
        self.console.print(f"[yellow]warning:[/] {text}")

    @contextmanager
    def bar(self, title: str, total: float | None) -> Iterator["TerminalBar"]:
        """A bar of `total` units (None: unknown), until the end of the block."""
        progress = Progress(
            TextColumn("  [bold]{task.description:9}[/]"),
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),  # the note leaves no room for more in 80 columns
            console=self.console,
            disable=self.quiet or not self.console.is_terminal,
        )
        with progress:
            yield TerminalBar(self, progress, progress.add_task(title, total=total, note=""), title, total)


class TerminalBar:
    """The progress of one piece of work."""

    def __init__(
        self, screen: TerminalScreen, progress: Progress, task: TaskID, title: str, total: float | None
    ) -> None:
        self.screen, self.progress, self.task, self.title, self.total = screen, progress, task, title, total
        self._began = self._line_at = time.monotonic()
        self._first: tuple[float, float] | None = None  # when the first units were done, and how many: a run may resume

    def update(self, completed: float, note: str = "") -> None:
        """Show `completed` units of the total, with a short note."""
        self.progress.update(self.task, completed=completed, note=note)
        self._first = self._first or ((time.monotonic(), completed) if completed else None)
        if self.progress.disable and time.monotonic() - self._line_at >= LINE_SECONDS:
            self._line_at = time.monotonic()
            share = f"{completed / self.total:4.0%}" if self.total else ""
            self.screen.note(f"  {self.title:9} {share}  {note}  {self._times(completed)}")

    def _times(self, completed: float) -> str:
        """ "1 min 12 s, 3 min 40 s to go, until Sat 14:52"; without a total or a speed the elapsed time alone."""
        now = time.monotonic()
        began, first = self._first or (now, completed)
        text = duration(now - self._began)
        if self.total and completed > first:
            left = (now - began) / (completed - first) * max(0.0, self.total - completed)
            text += f", {duration(left)} to go, until {time.strftime('%a %H:%M', time.localtime(time.time() + left))}"
        return text


def console() -> Console:
    """Standard output. Tables take the width that they need: a narrow terminal wraps lines, and no name is cut."""
    return CleanConsole(highlight=False, soft_wrap=True, width=240)


def say(text: str, on_stderr: bool = False) -> None:
    """Print plain text, in which brackets are no markup."""
    print(printable(text), file=sys.stderr if on_stderr else sys.stdout, flush=True)


def columns() -> int:
    """The width for text that has a choice: the terminal's, and at most 100; 100 without a terminal."""
    return min(CARD_COLUMNS, shutil.get_terminal_size((CARD_COLUMNS, 24)).columns)


def wrapped(text: str, indent: str = "  ") -> str:
    """Text at the terminal's width, at most 100, escaped as markup, its further lines indented."""
    return escape(broken(text, indent, CARD_COLUMNS))


def broken(text: str, indent: str, most: int = 10_000) -> str:
    """Plain text at the terminal's width, at most `most`, its further lines indented. No word is broken.

    In a pipe or a file the text stays one line, so that `grep` finds it.
    """
    if not (width := min(most, shutil.get_terminal_size((0, 0)).columns)):
        return text
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def program(name: str) -> str:
    """A program of this Python environment as a shell here can call it: its name if PATH finds it, else its path.

    The reader of a rented node's log types on another machine: there it is the name.
    """
    if "SKYPILOT_NODE_IPS" in os.environ:
        return name
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not beside.exists() or (found and Path(found) == beside):
        return name
    below = os.path.relpath(beside)
    return shlex.quote(str(beside) if below.startswith("..") else below if "/" in below else f"./{below}")


def money(usd: float, unpriced_hours: float) -> str:
    """1.23, or "1.23 + 0.4 h of unknown price"."""
    return f"{usd:.2f}" + (f" + {unpriced_hours:.2g} h of unknown price" if unpriced_hours else "")


def duration(seconds: float) -> str:
    """7.4 s, 3 min 12 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def several(number: object, unit: str) -> str:
    """ "1 attempt", "2 attempts"."""
    return f"{number} {unit}" + ("" if str(number) == "1" else "s")


def number(value: Any) -> str:
    """A float with four decimals, an integer with separators, nothing for None."""
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def cell(text: str) -> str:
    """Text from the store in a table: on one line, and without markup."""
    return escape(printable(text).replace("\n", "·"))


class JobLog(io.TextIOBase):
    """Standard output for the log of a job, without colours and other control sequences. The carriage return of
    progress bars passes."""

    def write(self, text: str) -> int:
        sys.stdout.write("\r".join(map(printable, COLOUR.sub("", text).split("\r"))))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def printable(text: str) -> str:
    """Text without control characters, which a terminal would obey. An untrained model generates them."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
