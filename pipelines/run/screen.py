"""The contract of the screen that a run reports to. `pipelines/user/show/console.py` has the terminal's."""

from contextlib import AbstractContextManager
from typing import Protocol


class Bar(Protocol):
    """The progress of one piece of work."""

    def update(self, completed: float, note: str = "") -> None:
        """Show `completed` units of the bar's total, with a short note beside it."""


class Screen(Protocol):
    """Notes, warnings and progress bars for the person who watches a run. Text may hold rich's markup."""

    def note(self, text: str) -> None:
        """Show a line; a quiet screen leaves it out."""

    def warn(self, text: str) -> None:
        """Show a warning, on a quiet screen too."""

    def bar(self, title: str, total: float | None) -> AbstractContextManager[Bar]:
        """Show a bar of `total` units (None: unknown) until the block ends."""
