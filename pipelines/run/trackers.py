"""Trackers: what shows a run elsewhere. The store has all that they show, so no error of theirs may reach the run."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from trainer.config.extensions import TRACKERS, extension, names

VARIABLE = "SKYTRAIN_TRACKING"
ON, OFF = "on", "off"


class Tracker(Protocol):
    """An object of a class in the group `skytrain.trackers`, made for one run."""

    def __init__(self, store: str, run: str, home: Path) -> None:
        """`store`: its URI. `home`: the folder of this machine for scratch and logs. UserError for a wrong setting."""

    def start(self) -> None:
        """Begin to track, or go on: called at the start and with every heartbeat, from any thread."""

    def close(self) -> str | None:
        """End after the rest is sent. Returns a line for the user if something could not be sent."""


class Trackers:
    """The trackers of a run. One that raises is left out from then on."""

    def __init__(self, made: Mapping[str, Tracker]) -> None:
        self.made = dict(made)
        self._notices: list[str] = []

    def start(self) -> None:
        """Let each begin, or go on."""
        for name, tracker in list(self.made.items()):
            self._ask(name, tracker.start)

    def close(self) -> list[str]:
        """Let each end. Returns lines for the user: what could not be sent, and what failed."""
        for name, tracker in list(self.made.items()):
            if notice := self._ask(name, tracker.close):
                self._notices.append(notice)
        return self._notices

    def _ask(self, name: str, question: Callable[[], str | None]) -> str | None:
        try:
            return question()
        except Exception as error:
            self.made.pop(name, None)
            self._notices.append(
                f"the tracker {name} failed ({type(error).__name__}: {error}); the run went on without it"
            )
            return None


def trackers_of(store: str, run: str, home: Path) -> Trackers:
    """The trackers that SKYTRAIN_TRACKING names, with commas between them; `on`, the default: all that are installed;
    `off`: none. UserError for another name, and for a wrong setting of a tracker."""
    wanted = (os.environ.get(VARIABLE) or ON).lower()
    chosen = names(TRACKERS) if wanted == ON else [name.strip() for name in wanted.split(",") if wanted != OFF]
    return Trackers({name: extension(TRACKERS, name, VARIABLE)(store, run, home) for name in chosen})
