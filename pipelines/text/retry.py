"""Requests to a server of texts, retried while it is busy or unreachable."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Errors of `datasets` and its libraries (httpx, aiohttp) without a connection, by name: some may not be installed.
TRANSIENT_ERRORS = {"ConnectionError", "TimeoutError", "TransportError", "ClientConnectionError"}
RETRY_SECONDS = 60.0
OFFLINE = "OfflineModeIsEnabled"  # a ConnectionError of huggingface_hub, by the wish of its user
BUSY_SECONDS = 900.0  # after 429: the Hub counts requests over five minutes
LOOK_SECONDS = 5.0  # of a check while somebody waits
TOO_MANY_REQUESTS = 429
CLOSED = "client has been closed"  # huggingface_hub repeats a request on the connection that it has just closed


def with_retries(request: Callable[[], T], seconds: float | None = None) -> T:
    """The result of a request, retried for so many seconds (RETRY_SECONDS) while the server is busy or unreachable.

    A server that answers 429 has a say: the wait that it names, and BUSY_SECONDS in all unless `seconds` says less. N
    nodes that start at the same time may get it, and `datasets` retries only after it has opened a file.
    """
    import tenacity

    limit = RETRY_SECONDS if seconds is None else seconds
    busy_limit = BUSY_SECONDS if seconds is None else seconds

    def send() -> T:
        try:
            return request()
        except RuntimeError as error:
            if CLOSED not in str(error):
                raise
            raise ConnectionError("the server cannot be reached") from error

    def error_of(state: tenacity.RetryCallState) -> BaseException | None:
        return state.outcome.exception() if state.outcome else None

    backoff = tenacity.wait_random_exponential(multiplier=0.5, max=10)

    def wait(state: tenacity.RetryCallState) -> float:
        return max(backoff(state), requested_wait(error_of(state)))

    def stop(state: tenacity.RetryCallState) -> bool:
        busy = status_of(error_of(state)) == TOO_MANY_REQUESTS
        return (state.seconds_since_start or 0.0) + state.upcoming_sleep >= (busy_limit if busy else limit)

    attempts = tenacity.Retrying(retry=tenacity.retry_if_exception(is_transient), wait=wait, stop=stop, reraise=True)
    return attempts(send)


def is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed: the error, or its cause, is a missing connection or a busy server."""
    if error is None or type(error).__name__ == OFFLINE:
        return False
    status = _own_status(error)
    return (
        not TRANSIENT_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        or status in (408, TOO_MANY_REQUESTS)
        or (status is not None and status >= 500)
        or is_transient(error.__cause__)
    )


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status of an error or of its cause."""
    if error is None:
        return None
    status = _own_status(error)
    return status_of(error.__cause__) if status is None else status


def requested_wait(error: BaseException | None) -> float:
    """The seconds that a busy server asks for, by Retry-After or by the Hub's RateLimit (`…;t=55`)."""
    if error is None:
        return 0.0
    headers: Any = getattr(getattr(error, "response", error), "headers", None)
    if _own_status(error) != TOO_MANY_REQUESTS or headers is None:
        return requested_wait(error.__cause__)
    after, limit = str(headers.get("Retry-After", "")), re.search(r"\bt=(\d+)", str(headers.get("RateLimit", "")))
    return float(after if after.isdigit() else limit[1] if limit else 0)


def _own_status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", error), "status_code", getattr(error, "status", None))
    return status if isinstance(status, int) else None
