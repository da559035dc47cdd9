"""The Hugging Face Hub, and other servers of texts: requests that are retried, and their errors."""

import functools
import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from trainer.base.answers import answered_within
from trainer.config.errors import StoreUnavailable, UserError

T = TypeVar("T")

# Errors of `datasets` and its libraries (httpx, aiohttp) without a connection, by name: some may not be installed.
TRANSIENT_ERRORS = {"ConnectionError", "TimeoutError", "TransportError", "ClientConnectionError"}
OFFLINE = "OfflineModeIsEnabled"  # a ConnectionError of huggingface_hub that its user asked for
CLOSED = "client has been closed"  # huggingface_hub repeats a request on the connection that it has just closed
RETRY_SECONDS = 60.0  # the library itself waits as long as a 429 asks for
LONGEST_WAIT_SECONDS = 30.0
LOOK_SECONDS = 5.0  # of a check while somebody waits
ANSWER_SECONDS = 3600.0  # of a whole answer: 7 GB of weights at 2 MB/s
LOOK_ANSWER_SECONDS = 10.0  # of a check


def with_retries(request: Callable[[], T], seconds: float | None = None) -> T:
    """Send a request, and retry it for this many seconds while the server is busy or unreachable. An answer has
    ANSWER_SECONDS, or LOOK_ANSWER_SECONDS where `seconds` are given. ConnectionError for the error of huggingface_hub
    that names no missing connection, but what that did to its client."""
    import tenacity

    stop = tenacity.stop_before_delay(RETRY_SECONDS if seconds is None else seconds)
    wait = tenacity.wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT_SECONDS)
    attempts = tenacity.Retrying(retry=tenacity.retry_if_exception(is_transient), wait=wait, stop=stop, reraise=True)
    try:
        return attempts(answered_within, ANSWER_SECONDS if seconds is None else LOOK_ANSWER_SECONDS, request)
    except RuntimeError as error:
        if CLOSED in str(error):
            raise ConnectionError("the Hub cannot be reached") from error
        raise


def asked(where: str, request: Any, remedy: str = "check its name", seconds: float | None = None) -> Any:
    """An answer of the Hub. UserError, with a remedy, if it has none within this many seconds."""
    try:
        return with_retries(request, seconds)
    except UserError:
        raise
    except Exception as error:  # not found, gated, no network
        raise UserError(f"{where}: cannot be fetched from the Hub ({reason_of(error)}); {remedy}") from error


def is_transient(error: BaseException | None) -> bool:
    """Whether a retry may succeed: the error, or its cause, is a missing connection or a busy server."""
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        if OFFLINE in names:
            return False
        status = getattr(getattr(error, "response", error), "status_code", getattr(error, "status", None))
        busy = isinstance(status, int) and (status in (408, 429) or status >= 500)
        if busy or names & TRANSIENT_ERRORS or CLOSED in str(error):
            return True
        error = error.__cause__
    return False


@contextmanager
def reading(where: str) -> Iterator[None]:
    """UserError for a text that is truncated, damaged, removed or too large, or whose server does not answer."""
    try:
        yield
    except (UserError, StoreUnavailable):
        raise
    except MemoryError as error:
        raise UserError(
            f"tokens.source: a document of '{where}' needs more memory than is free ({reason_of(error)}); split it"
        ) from error
    except Exception as error:
        # pyarrow's by its name: texts other than parquet don't wait for its import.
        known = isinstance(error, OSError | ImportError | EOFError | zlib.error) or is_transient(error)
        if not (known or type(error).__name__ == "ArrowInvalid"):
            raise
        raise UserError(f"tokens.source: '{where}' cannot be read ({reason_of(error)})") from error


def reason_of(error: Exception) -> str:
    """The type and the first line of an error."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


@functools.cache
def datasets_library() -> Any:
    """The library `datasets`, without progress bars and without download counts on its server."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each retry in long lines
    datasets.config.TORCH_AVAILABLE = False  # else a stream imports torch, which takes 2 s and is not needed
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it waits 3 s without a network
    return datasets
