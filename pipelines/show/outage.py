"""The line of a store that does not answer: on a terminal one that updates itself, in a log one every half minute."""

import logging
import time
from typing import TYPE_CHECKING

from pipelines.artifacts.outage import LOGGER, Outage

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

LINE_SECONDS = 30.0  # between two lines in a log
WORTH_A_LINE_SECONDS = 10.0  # of an outage, for a line about its end


def show_outages() -> None:
    """Show the outages of stores on stderr, from now on."""
    log = logging.getLogger(LOGGER)
    if not any(isinstance(handler, OutageLine) for handler in log.handlers):
        log.addHandler(OutageLine())
        log.setLevel(logging.INFO)
        log.propagate = False


class OutageLine(logging.Handler):
    """Shows the oldest outage of any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.outages: dict[int | None, Outage] = {}  # by thread
        self._live: Live | None = None
        self._line_at = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        from pipelines.show.console import error_console, say

        outage = getattr(record, "outage", None)
        if not isinstance(outage, Outage):
            return say(record.getMessage(), on_stderr=True)
        console, now = error_console(), time.monotonic()
        if outage.ended is not None:
            self.outages.pop(record.thread, None)
            if not self.outages:
                self._end_line()
            if outage.ended - outage.began > WORTH_A_LINE_SECONDS:
                say(outage.text(outage.ended), on_stderr=True)
            return
        self.outages[record.thread] = outage
        if console.is_terminal:
            self._begin_line()
        elif now - self._line_at >= LINE_SECONDS:
            self._line_at = now
            say(outage.text(now), on_stderr=True)

    def _begin_line(self) -> None:
        from rich.live import Live

        from pipelines.show.console import error_console

        if self._live is None:
            self._live = Live(console=error_console(), get_renderable=self._text, refresh_per_second=2, transient=True)
            self._live.start()

    def _end_line(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _text(self) -> "Text":
        from rich.text import Text

        oldest = min(list(self.outages.values()), key=lambda one: one.began, default=None)
        text = oldest.text(time.monotonic()) if oldest else ""
        return Text(text, style="yellow", no_wrap=True, overflow="ellipsis")

    def close(self) -> None:
        """At the end of the process: a line that still stands would keep the cursor hidden."""
        self._end_line()
        super().close()
