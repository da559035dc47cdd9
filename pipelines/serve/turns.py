"""One generation at a time, and a short line of requests that wait for it.

A generation runs in a thread of its own, a step at a time, so the event loop answers meanwhile. When its request is
given up, the step that runs ends, and no other begins.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from pipelines.serve.requests import Refused

WAITING = 8  # requests at most, besides the one that is served
WAIT_SECONDS = 120.0  # then a waiting request is refused
GENERATION_SECONDS = 600.0  # of one request, with the time that its client takes to read

T = TypeVar("T")


class Turns:
    """The line of one endpoint."""

    def __init__(
        self, waiting: int = WAITING, wait_seconds: float = WAIT_SECONDS, seconds: float = GENERATION_SECONDS
    ) -> None:
        self.limit, self.wait_seconds, self.seconds = waiting, wait_seconds, seconds
        self.waiting = 0
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")

    @property
    def busy(self) -> bool:
        return self._turn.locked()

    def check(self) -> None:
        """Refused if too many requests wait."""
        if self.busy and self.waiting >= self.limit:
            raise Refused(429, f"{self.waiting} requests wait already; try again later", code="queue_full")

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn, and have it. Refused if too many wait, after a long wait, and after a long turn."""
        self.check()
        self.waiting += 1
        try:
            async with asyncio.timeout(self.wait_seconds):
                await self._turn.acquire()
        except TimeoutError as error:
            message = f"no turn within {self.wait_seconds:g} s, because other requests take long; try again later"
            raise Refused(503, message, code="queue_timeout") from error
        finally:
            self.waiting -= 1
        try:
            async with asyncio.timeout(self.seconds):
                yield
        except TimeoutError as error:
            raise Refused(503, f"the generation took more than {self.seconds:g} s", code="timeout") from error
        finally:
            self._turn.release()

    async def steps(self, iterator: Iterator[T]) -> AsyncIterator[T]:
        """The steps of a generator, each made in the thread."""
        loop = asyncio.get_running_loop()
        try:
            while (step := await loop.run_in_executor(self._thread, next, iterator, None)) is not None:
                yield step
        finally:
            # In the thread, after a step that still runs; the next request's steps come after that.
            with suppress(RuntimeError):  # closed
                self._thread.submit(getattr(iterator, "close", lambda: None))

    def close(self) -> None:
        """Begin no further step."""
        self._thread.shutdown(wait=False, cancel_futures=True)
