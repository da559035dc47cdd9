"""The line of a store that does not answer: on a terminal one that updates itself, in a log one every half minute."""

import logging
import shutil
import sys
import threading
import time
from contextlib import nullcontext

from pipelines.artifacts.store import Outage

DRAW_SECONDS = 0.5
ERASED = "\r\x1b[2K"  # the line of the cursor
LINE_SECONDS = 30.0  # between two lines in a log
WORTH_A_LINE_SECONDS = 10.0  # of an outage, for a line about its end


def show_outages() -> None:
    """Show the outages of stores on stderr, from now on."""
    log = logging.getLogger("pipelines.artifacts.store")
    if not any(isinstance(handler, OutageLine) for handler in log.handlers):
        log.addHandler(OutageLine())
        log.setLevel(logging.INFO)
        log.propagate = False


class OutageLine(logging.Handler):
    """Shows the oldest outage of any thread.

    On a terminal a thread draws the line again each half second; while a bar stands there, the bar draws it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outages: dict[int | None, Outage] = {}  # by thread
        self._drawn = False
        self._drawing: threading.Thread | None = None
        self._line_at = float("-inf")

    def text(self) -> str:
        """The line now; empty without an outage."""
        oldest = min(list(self.outages.values()), key=lambda one: one.began, default=None)
        return oldest.text(time.monotonic()) if oldest else ""

    def emit(self, record: logging.LogRecord) -> None:
        from pipelines.show.console import say, standing

        outage, now = getattr(record, "outage", None), time.monotonic()
        if not isinstance(outage, Outage):
            return say(record.getMessage(), on_stderr=True)
        if outage.ended is not None:
            self.outages.pop(record.thread, None)
            self._clear()
            if outage.ended - outage.began > WORTH_A_LINE_SECONDS:
                say(outage.text(outage.ended), on_stderr=True)
            return
        self.outages[record.thread] = outage
        if sys.stderr.isatty():
            standing.outage = self.text
            if self._drawing is None or not self._drawing.is_alive():
                self._drawing = threading.Thread(target=self._draw, daemon=True, name="outage")
                self._drawing.start()
        elif now - self._line_at >= LINE_SECONDS:
            self._line_at = now
            say(outage.text(now), on_stderr=True)

    def _draw(self) -> None:
        from pipelines.show.console import printable, standing

        while True:
            with self.lock or nullcontext():
                if not (text := self.text()):
                    return
                if standing.bars:
                    self._clear()
                else:
                    width = shutil.get_terminal_size().columns - 1
                    sys.stderr.write(f"{ERASED}{printable(text)[:width]}")
                    sys.stderr.flush()
                    self._drawn = True
            time.sleep(DRAW_SECONDS)

    def _clear(self) -> None:
        if self._drawn:
            sys.stderr.write(ERASED)
            sys.stderr.flush()
            self._drawn = False
