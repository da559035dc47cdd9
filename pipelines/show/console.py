"""What a person sees while a run works: bars on a terminal, a line now and then in a log. All on stderr."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0  # between two lines of the same bar where nothing can be redrawn


class TerminalScreen:
    """Notes and bars. `quiet` shows only what went wrong."""

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
        """A bar of `total` units (None: unknown) that is gone, or done, at the end of the block."""
        progress = Progress(
            TextColumn("  [bold]{task.description:9}[/]"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),  # the words leave no room for more in 80 columns
            console=self.console,
            disable=self.quiet or not self.console.is_terminal,
        )
        with progress:
            yield TerminalBar(self, progress, progress.add_task(title, total=total, note=""), title, total)


class TerminalBar:
    """One piece of work on the screen."""

    def __init__(
        self, screen: TerminalScreen, progress: Progress, task: TaskID, title: str, total: float | None
    ) -> None:
        self.screen, self.progress, self.task, self.title, self.total = screen, progress, task, title, total
        self._line_at = time.monotonic()

    def update(self, completed: float, note: str = "") -> None:
        """Show how far it is, with a word on how it goes."""
        self.progress.update(self.task, completed=completed, note=note)
        if self.progress.disable and time.monotonic() - self._line_at >= LINE_SECONDS:
            self._line_at = time.monotonic()
            share = f"{completed / self.total:4.0%}" if self.total else ""
            self.screen.note(f"  {self.title:9} {share}  {note}")
