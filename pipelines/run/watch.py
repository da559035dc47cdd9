"""The watches of a run: observers that a pipeline calls at named moments.

Stop requests, budget, deadline, preemption notices, trackers and the summary are watches. Each is one class that
overrides the moments it needs. A pipeline starts its watches in their order, and ends them in the reverse order.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from pipelines.run.runs import Run, store_summary
from pipelines.run.screen import Screen
from pipelines.run.stage import Work
from pipelines.store.manifest import Manifest
from pipelines.store.records import Heartbeat
from pipelines.store.stop_request import read_stop_request
from trainer.base.process import StopSignal
from trainer.base.record import DamagedRecord, NewerRecord
from trainer.base.store import Store
from trainer.config.errors import Stopped


class Watch:
    """Looks on at one command's part of a run. To stop the run, it calls `ask` of the command's StopSignal."""

    def start(self) -> None:
        """Before the first missing artifact. An exception ends the command."""

    def before_build(self, work: Work) -> None:
        """Before an attempt builds its artifact. An exception ends the attempt, Interrupted in order."""

    def heartbeat(self, beat: Heartbeat) -> None:
        """With every heartbeat of an attempt, in its thread: every 5 s. An error stops neither the run nor another
        watch."""

    def commit(self, manifest: Manifest) -> None:
        """After an artifact was made. An exception ends the command."""

    def end(self, error: BaseException | None) -> str | None:
        """Before the command ends, with the exception that ends it. Returns a warning for the user."""
        return None


@contextmanager
def watching(watches: Iterable[Watch], screen: Screen) -> Iterator[None]:
    """Start watches; after the block, end all that were started, whatever one of them raises."""

    def end(watch: Watch, _kind: object, error: BaseException | None, _trace: object) -> None:
        if warning := watch.end(error):
            screen.warn(warning)

    with ExitStack() as ends:
        for watch in watches:
            watch.start()
            ends.push(partial(end, watch))
        yield


class StopRequests(Watch):
    """Stops the run for good once the store has a request to stop it, readable or not."""

    def __init__(self, store: Store, run: str, stop: StopSignal) -> None:
        self.store, self.run, self.stop = store, run, stop

    def heartbeat(self, beat: Heartbeat) -> None:
        try:
            request = read_stop_request(self.store, self.run)
        except (DamagedRecord, NewerRecord) as error:
            self.stop.ask(str(error), Stopped)
        else:
            if request:
                self.stop.ask(str(request), Stopped)


class Summary(Watch):
    """Stores the summary of a run that has ended, which lists of runs read."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def before_build(self, work: Work) -> None:
        self._work = work

    def end(self, error: BaseException | None) -> None:
        """A store that does not answer would only wait as long again; without a summary, lists read the records."""
        if self._work and (before := self._work.before) and not isinstance(error, OSError):
            with suppress(Exception):
                store_summary(Run(before.store, before.record))
