"""Waiting for something that other threads or processes do."""

import time
from collections.abc import Callable

LONG_SECONDS = 180.0  # for what an idle machine does at once: on two cores at a load of 20 it took more than 30 s


def until(reached: Callable[[], object], what: str, seconds: float = LONG_SECONDS, poll: float = 0.02) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain until {what}"
        time.sleep(poll)
