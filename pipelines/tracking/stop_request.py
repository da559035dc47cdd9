"""The wish that a run stops: one small object in the store, which every attempt looks for with every heartbeat.

Whoever has the store can wish it, from wherever and with no way to the machine. The attempt at work commits and
ends with exit code 76, which no launcher starts again; an attempt that would begin after it ends at once. The wish
stands until the run is resumed.
"""

import getpass
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from pipelines.tracking.records import Heartbeat
from trainer.store import Store


@dataclass(frozen=True)
class StopRequest:
    """Who wanted a run to stop, when (unix seconds), and why."""

    time: float
    by: str
    reason: str

    def __str__(self) -> str:
        return f"{self.by}: {self.reason}"


def read_stop_request(store: Store, run: str) -> StopRequest | None:
    body = store.get(key_of(run))
    return StopRequest(**json.loads(body)) if body else None


def request_stop(store: Store, run: str, reason: str) -> StopRequest:
    """Wish that a run stops; a wish that is there already stands."""
    wish = StopRequest(time.time(), f"{getpass.getuser()}@{platform.node()}", reason)
    store.create(key_of(run), json.dumps(asdict(wish)).encode())
    return read_stop_request(store, run) or wish


def watch_stop_request(store: Store, run: str) -> Callable[[Heartbeat], str | None]:
    """What an attempt looks at with every heartbeat: a reason to stop, once somebody wishes it."""

    def wished(_beat: Heartbeat) -> str | None:
        wish = read_stop_request(store, run)
        return str(wish) if wish else None

    return wished


def clear_stop_request(store: Store, run: str) -> None:
    store.delete(key_of(run))


def key_of(run: str) -> str:
    return f"control/{run}/stop.json"
