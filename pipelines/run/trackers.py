"""Trackers: watches that show a run elsewhere. The store has all that they show, so no error of theirs may reach it."""

import os
from collections.abc import Callable
from pathlib import Path

from pipelines.run.stage import Work
from pipelines.run.watch import Watch
from pipelines.store.manifest import Manifest
from pipelines.store.records import Heartbeat
from trainer.config.extensions import TRACKERS, extension, names

VARIABLE = "SKYTRAIN_TRACKING"
ON, OFF = "on", "off"


class Tracker(Watch):
    """The base of the classes in the group `skytrain.trackers`. A command makes one object for its run."""

    def __init__(self, store: str, run: str, home: Path) -> None:
        """`store`: its URI. `home`: the folder of this machine for scratch and logs. UserError for a wrong setting."""
        self.store, self.run, self.home = store, run, home


class Guarded(Watch):
    """A tracker whose errors do not reach the run: after the first one it is called no more, and the user is told."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self._failed: str | None = None

    def start(self) -> None:
        self._ask(self.tracker.start)

    def before_build(self, work: Work) -> None:
        self._ask(lambda: self.tracker.before_build(work))

    def heartbeat(self, beat: Heartbeat) -> None:
        self._ask(lambda: self.tracker.heartbeat(beat))

    def commit(self, manifest: Manifest) -> None:
        self._ask(lambda: self.tracker.commit(manifest))

    def end(self, error: BaseException | None) -> str | None:
        warning = self._ask(lambda: self.tracker.end(error))
        return self._failed or warning

    def _ask(self, moment: Callable[[], str | None]) -> str | None:
        try:
            return None if self._failed else moment()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self._failed = f"the tracker {self.name} failed ({what}); the run went on without it"
            return None


def trackers_of(store: str, run: str, home: Path) -> list[Guarded]:
    """The trackers that SKYTRAIN_TRACKING names, with commas between them; `on`, the default: all that are installed;
    `off`: none. UserError for another name, and for a wrong setting of a tracker."""
    wanted = (os.environ.get(VARIABLE) or ON).lower()
    chosen = names(TRACKERS) if wanted == ON else [name.strip() for name in wanted.split(",") if wanted != OFF]
    return [Guarded(name, extension(TRACKERS, name, VARIABLE)(store, run, home)) for name in chosen]
