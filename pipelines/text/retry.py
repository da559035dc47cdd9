"""Requests to a server of texts, retried while it is busy or unreachable."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Errors of `datasets` and its libraries (httpx, aiohttp) without a connection, by name: some may not be installed.
TRANSIENT_ERRORS = {"ConnectionError", "TimeoutError", "TransportError", "ClientConnectionError"}
RETRY_SECONDS = 60.0
OFFLINE = "OfflineModeIsEnabled"  # a ConnectionError of huggingface_hub, by the wish of its user
LOOK_SECONDS = 5.0  # of a check while somebody waits
CLOSED = "client has been closed"  # huggingface_hub repeats a request on the connection that it has just closed


def with_retries(request: Callable[[], T], seconds: float | None = None) -> T:
    """The result of a request, retried for `seconds` (RETRY_SECONDS) while the server is busy or unreachable.

    A server may reject N nodes that start at the same time, and `datasets` retries only after it has opened a file.
    """
    import tenacity

    def send() -> T:
        try:
            return request()
        except RuntimeError as error:
            if CLOSED not in str(error):
                raise
            raise ConnectionError("the server cannot be reached") from error

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=10),
        stop=tenacity.stop_before_delay(RETRY_SECONDS if seconds is None else seconds),
        reraise=True,
    )
    return attempts(send)


def is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed: the error, or its cause, is a missing connection or a busy server."""
    if error is None or type(error).__name__ == OFFLINE:
        return False
    status = getattr(getattr(error, "response", error), "status_code", getattr(error, "status", None))
    return (
        not TRANSIENT_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        or status in (408, 429)
        or (isinstance(status, int) and status >= 500)
        or is_transient(error.__cause__)
    )
