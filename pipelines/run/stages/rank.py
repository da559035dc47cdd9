"""A rank of a stage: a process that pipelines/run/nodes/launcher.py forks.

FOLDER is the attempt's folder on this node, with the ranks' task; rank 0 leaves its events and what it makes there.
CACHE holds verified copies of files of the store, for all processes of this node.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.run.nodes.ranks import ALIVE_SECONDS, TASK_FILE, RankTask, leave_error_message, show_alive
from pipelines.run.stage import stage_named
from trainer.base.events import EVENTS_FILE, EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.process import Background, StopSignal
from trainer.config.errors import EXIT_DONE, EXIT_FAILED, Interrupted, StaleAttempt
from trainer.loop.watchdog import STARTED, Watchdog

if TYPE_CHECKING:
    from trainer.base.parallel import World


def run(folder: Path, cache: Path, stop: StopSignal) -> int:
    """Do the task of the folder as one rank. Returns the exit code of this process; leaves an error in the folder."""
    rank, ended = int(os.environ.get("RANK", "0")), threading.Event()
    try:
        stage = stage_named(json.loads((folder / TASK_FILE).read_bytes())["stage"])
        task = stage.task.read(folder)
        Background("alive", partial(stay_alive, folder, f"rank {rank}", ended)).start()
        with Watchdog(task.recipe.runtime, PhaseClock("imports"), rank) as watch:
            stage.rank(task, folder, cache, stop, watch.enter)
        return EXIT_DONE
    except StaleAttempt as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED  # the pipeline's process detects by itself that the attempt is stale
    except Exception as error:
        leave_error_message(error, folder)
        raise
    finally:
        ended.set()


def stay_alive(folder: Path, name: str, ended: threading.Event) -> None:
    """Show the command that this process runs and shares its interpreter, as long as it does."""
    show_alive(folder, name)
    while not ended.wait(ALIVE_SECONDS):
        show_alive(folder, name)


@dataclass(frozen=True)
class Joined:
    """A rank among the others of its node, as stages use it that do not train from shards."""

    world: "World"
    log: EventLog
    watchdog: Watchdog
    check: Callable[[], None]  # raises Interrupted if a rank was asked to stop; a collective call


@contextmanager
def joined(
    task: RankTask, folder: Path, stop: StopSignal, starting: Callable[[str], None], reached: int = 0
) -> Iterator[Joined]:
    """Join the ranks of this node, and leave at the end or after a stop. `reached`: see `SavingTask`."""
    from trainer.base.parallel import World

    world = World.join(task.recipe.runtime, starting)
    starting(STARTED)
    log = EventLog(folder / EVENTS_FILE if world.rank == 0 else None, PhaseClock(started=task.started), reached)
    with Watchdog(task.recipe.runtime, log.clock, world.rank) as watchdog, suppress(Interrupted):

        def check() -> None:
            watchdog.progress()
            if world.sum(stop.asked)[0]:
                raise Interrupted

        yield Joined(world, log, watchdog, check)
    world.close()
