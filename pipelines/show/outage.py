"""Lines about a store that does not answer: at once, every half minute, and at the end of a long outage."""

import logging
import time

LINE_SECONDS = 30.0  # between two lines
WORTH_A_LINE_SECONDS = 10.0  # of an outage, for a line about its end


def show_outages() -> None:
    """Show the outages of stores on stderr, from now on, and warnings without control characters."""
    if logging.lastResort:  # the handler of all others
        logging.lastResort.setFormatter(PrintableFormatter())
    log = logging.getLogger("pipelines.artifacts.s3_store")
    if not any(isinstance(handler, OutageLines) for handler in log.handlers):
        log.addHandler(OutageLines())
        log.setLevel(logging.INFO)
        log.propagate = False


class PrintableFormatter(logging.Formatter):
    """Replaces control characters, which may come from names in a store."""

    def format(self, record: logging.LogRecord) -> str:
        from pipelines.show.console import printable

        return printable(super().format(record))


class OutageLines(logging.Handler):
    """Print the messages of stores, those about outages not more often than every LINE_SECONDS."""

    def __init__(self) -> None:
        super().__init__()
        self._line_at = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        from pipelines.artifacts.s3_store import Outage  # brings pydantic, which --help does not need
        from pipelines.show.console import say

        outage = getattr(record, "outage", None)
        if isinstance(outage, Outage) and outage.ended is not None:
            if outage.ended - outage.began <= WORTH_A_LINE_SECONDS:
                return
        elif isinstance(outage, Outage):
            if time.monotonic() - self._line_at < LINE_SECONDS:
                return
            self._line_at = time.monotonic()
        say(record.getMessage(), on_stderr=True)
