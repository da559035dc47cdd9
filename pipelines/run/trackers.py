"""Trackers: watches that show a run elsewhere. The store has all that they show, so no error of theirs may reach it."""

import os
import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pipelines.run.stage import Work
from pipelines.run.watch import Watch
from pipelines.store.manifest import Manifest
from pipelines.store.records import Heartbeat
from trainer.base.process import Background
from trainer.config.extensions import TRACKERS, extension, names

VARIABLE = "SKYTRAIN_TRACKING"
ON, OFF = "on", "off"
ENDED = "ended"  # what the last moment returns


class Tracker(Watch):
    """The base of the classes in the group `skytrain.trackers`. A command makes one object for its run, and calls it
    in a thread of its own."""

    end_seconds = 30.0  # for `end`, after which the command goes on without it

    def __init__(self, store: str, run: str, home: Path) -> None:
        """`store`: its URI. `home`: the folder of this machine for scratch and logs. UserError for a wrong setting."""
        self.store, self.run, self.home = store, run, home


class Guarded(Watch):
    """A tracker whose errors and waits do not reach the run. It is disabled after its first error, and misses the
    heartbeats that come while it still works on another moment. The user gets a warning."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self._moments: queue.SimpleQueue[Callable[[], str | None]] = queue.SimpleQueue()
        self._thread = Background(f"tracker {name}", self._work, crashed=lambda thread: None)
        self._warning: str | None = None

    def start(self) -> None:
        self._thread.start()
        self._moments.put(self.tracker.start)

    def before_build(self, work: Work) -> None:
        self._moments.put(partial(self.tracker.before_build, work))

    def heartbeat(self, beat: Heartbeat) -> None:
        if self._moments.empty():
            self._moments.put(partial(self.tracker.heartbeat, beat))

    def commit(self, manifest: Manifest) -> None:
        self._moments.put(partial(self.tracker.commit, manifest))

    def end(self, error: BaseException | None) -> str | None:
        self._moments.put(partial(self._end, error))
        self._thread.join(self.tracker.end_seconds)
        if failure := self._thread.error:
            what = f"failed ({type(failure).__name__}: {failure})"
        elif self._thread.is_alive():
            what = f"did not end within {self.tracker.end_seconds:g} s"
        else:
            return self._warning
        return f"the tracker {self.name} {what}; the run went on without it"

    def _end(self, error: BaseException | None) -> str:
        self._warning = self.tracker.end(error)
        return ENDED

    def _work(self) -> None:
        while self._moments.get()() != ENDED:
            pass


def trackers_of(store: str, run: str, home: Path) -> list[Guarded]:
    """The trackers that SKYTRAIN_TRACKING names, with commas between them; `on`, the default: all that are installed;
    `off`: none. UserError for another name, and for a wrong setting of a tracker."""
    wanted = (os.environ.get(VARIABLE) or ON).lower()
    chosen = names(TRACKERS) if wanted == ON else [name.strip() for name in wanted.split(",") if wanted != OFF]
    return [Guarded(name, extension(TRACKERS, name, VARIABLE)(store, run, home)) for name in chosen]
