"""Trackers: what shows a run elsewhere. The store has all that they show, so no error of theirs may reach the run."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pipelines.store.records import Heartbeat
from trainer.config.extensions import TRACKERS, extension, names

VARIABLE = "SKYTRAIN_TRACKING"
ON, OFF = "on", "off"


class Tracker:
    """Follows one run from the process of its command: the base of a class in the group `skytrain.trackers`. `store` is
    a URI, `home` the folder of this machine for scratch and logs. UserError for a wrong setting."""

    def __init__(self, store: str, run: str, home: Path) -> None:
        self.store, self.run, self.home = store, run, home

    def start(self) -> None:
        """Before the first missing artifact."""

    def heartbeat(self, beat: Heartbeat) -> None:
        """With every heartbeat of an attempt, in its thread: every 5 s."""

    def end(self, error: BaseException | None) -> str | None:
        """Before the command ends, with the exception that ends it. Returns a line for the user if something could not
        be sent."""
        return None


class Trackers:
    """The trackers of a run, by name. One that raises is left out from then on."""

    def __init__(self, made: Mapping[str, Tracker]) -> None:
        self.made = dict(made)
        self._notices: list[str] = []

    def start(self) -> None:
        self._each(lambda tracker: tracker.start())

    def heartbeat(self, beat: Heartbeat) -> None:
        self._each(lambda tracker: tracker.heartbeat(beat))

    def end(self, error: BaseException | None) -> str | None:
        """Let each end. Returns lines for the user: what could not be sent, and which failed."""
        self._each(lambda tracker: tracker.end(error))
        return "\n".join(self._notices) or None

    def _each(self, moment: Callable[[Tracker], str | None]) -> None:
        for name, tracker in list(self.made.items()):
            try:
                self._notices += filter(None, [moment(tracker)])
            except Exception as failure:
                del self.made[name]
                reason = f"{type(failure).__name__}: {failure}"
                self._notices.append(f"the tracker {name} failed ({reason}); the run went on without it")


def trackers_of(store: str, run: str, home: Path) -> Trackers:
    """The trackers that SKYTRAIN_TRACKING names, with commas between them; `on`, the default: all that are installed;
    `off`: none. UserError for another name, and for a wrong setting of a tracker."""
    wanted = (os.environ.get(VARIABLE) or ON).lower()
    chosen = names(TRACKERS) if wanted == ON else [name.strip() for name in wanted.split(",") if wanted != OFF]
    return Trackers({name: extension(TRACKERS, name, VARIABLE)(store, run, home) for name in chosen})
