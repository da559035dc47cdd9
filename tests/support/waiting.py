"""Waiting for something that other threads or processes do."""

import time
from collections.abc import Callable


def until(reached: Callable[[], object], what: str, seconds: float = 120, poll: float = 0.02) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain until {what}"
        time.sleep(poll)
