"""Requests to a server of texts, retried while it is busy or unreachable."""

from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

# Errors of `datasets` and its libraries (httpx, aiohttp) without a connection, by name: some may not be installed.
TRANSIENT_ERRORS = {"ConnectionError", "TimeoutError", "TransportError", "ClientConnectionError"}
OFFLINE = "OfflineModeIsEnabled"  # a ConnectionError of huggingface_hub that its user asked for
CLOSED = "client has been closed"  # huggingface_hub repeats a request on the connection that it has just closed
TOO_MANY_REQUESTS = 429
RETRY_SECONDS = 60.0
BUSY_SECONDS = 900.0  # after 429: the Hub counts requests over five minutes
LONGEST_WAIT_SECONDS = 30.0
LOOK_SECONDS = 5.0  # of a check while somebody waits


def with_retries(request: Callable[[], T], seconds: float | None = None) -> T:
    """Send a request, and retry it for so many seconds while the server is busy or unreachable.

    The default is RETRY_SECONDS, and BUSY_SECONDS for a server that answers 429.
    """
    import tenacity

    def send() -> T:
        try:
            return request()
        except RuntimeError as error:
            if CLOSED not in str(error):
                raise
            raise ConnectionError("the server cannot be reached") from error

    def stop(state: tenacity.RetryCallState) -> bool:
        busy = TOO_MANY_REQUESTS in map(status_of, causes(state.outcome.exception() if state.outcome else None))
        limit = BUSY_SECONDS if busy else RETRY_SECONDS
        return (state.seconds_since_start or 0.0) + state.upcoming_sleep >= (limit if seconds is None else seconds)

    wait = tenacity.wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT_SECONDS)
    attempts = tenacity.Retrying(retry=tenacity.retry_if_exception(is_transient), wait=wait, stop=stop, reraise=True)
    return attempts(send)


def is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed: the error, or its cause, is a missing connection or a busy server."""
    for one in causes(error):
        names = {kind.__name__ for kind in type(one).__mro__}
        if OFFLINE in names:
            return False
        status = status_of(one) or 0
        if names & TRANSIENT_ERRORS or status in (408, TOO_MANY_REQUESTS) or status >= 500:
            return True
    return False


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an error."""
    status = getattr(getattr(error, "response", error), "status_code", getattr(error, "status", None))
    return status if isinstance(status, int) else None
