"""The terminal: a screen for the progress of a run (on stderr), a console for results (on stdout), and formats."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0  # between two lines of the same bar in a log


class TerminalScreen:
    """The screen of a run: bars on a terminal, a line every ten seconds in a log. `quiet` shows warnings only."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

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
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"),
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
        self._line_at = time.monotonic()

    def update(self, completed: float, note: str = "") -> None:
        """Show `completed` units of the total, with a short note."""
        self.progress.update(self.task, completed=completed, note=note)
        if self.progress.disable and time.monotonic() - self._line_at >= LINE_SECONDS:
            self._line_at = time.monotonic()
            share = f"{completed / self.total:4.0%}" if self.total else ""
            self.screen.note(f"  {self.title:9} {share}  {note}")


def console() -> Console:
    """Standard output. Tables take the width that they need: a narrow terminal wraps lines, and no name is cut."""
    return Console(highlight=False, soft_wrap=True, width=240)


def money(usd: float, unpriced_hours: float) -> str:
    """1.23, or "1.23 + 0.4 h of unknown price"."""
    return f"{usd:.2f}" + (f" + {unpriced_hours:.2g} h of unknown price" if unpriced_hours else "")


def duration(seconds: float) -> str:
    """7.4 s, 3 min 12 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def number(value: Any) -> str:
    """A float with four decimals, an integer with separators, nothing for None."""
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def printable(text: str) -> str:
    """Text without control characters, which a terminal would obey. An untrained model generates them."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
