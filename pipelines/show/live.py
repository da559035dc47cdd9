"""`skytrain report --live`: the report page on this machine, which follows runs while they train.

A small server on the loopback address gives the page and its data. It reads the store when the page asks, and not so
often that reading takes more than a tenth of the time. It answers only requests that name it in their Host header: a
foreign page whose name resolves to 127.0.0.1 gets nothing.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pipelines.show.console import say
from pipelines.show.overlay import read_overlay
from pipelines.show.page import as_json, bind, page_data
from pipelines.tracking.records import Progress
from pipelines.tracking.runs import Run
from trainer.errors import UserError

LOOPBACK = "127.0.0.1"
REFRESH_SECONDS = 5.0
SHARE_OF_READING = 0.1  # of the time
EVERY_STEP = (
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "perf/tokens_per_second",
    "perf/mfu",
)  # not those of some steps
HTML, JSON = "text/html; charset=utf-8", "application/json"


class Recent:
    """Rows that no commit holds yet, one from each heartbeat that was read: so curves grow between commits."""

    def __init__(self) -> None:
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def rows(self, run: Run) -> list[dict[str, Any]]:
        committed = run.series[-1]["step"] if run.series else 0
        seen = self._rows.get(run.name, [])
        beats = run.attempts.get("train", [])
        if beats and beats[-1].state == "running" and (row := row_of(beats[-1].progress)):
            seen = [one for one in seen if one["step"] < row["step"]] + [row]  # a rollback leaves earlier steps only
        self._rows[run.name] = [row for row in seen if row["step"] > committed]
        return self._rows[run.name]


def row_of(progress: Progress) -> dict[str, Any] | None:
    """The last step of an attempt as a row of the series; None before its first step."""
    metrics = {name: progress.metrics[name] for name in EVERY_STEP if name in progress.metrics}
    if progress.step is None or progress.time is None or not metrics:
        return None
    return {"step": progress.step, "time": progress.time, **metrics}


class LiveData:
    """The data of the page, read again when it is asked for and old enough."""

    def __init__(self, read: Callable[[], Sequence[Run]], overlays: Iterable[str]) -> None:
        self.read, self.overlays = read, [read_overlay(log) for log in overlays]
        self._lock = threading.Lock()
        self._order: dict[str, int] = {}  # runs keep their places, and with them their colors
        self._recent = Recent()
        self._next = 0.0  # monotonic time of the next reading
        self._data = self._read()

    def current(self) -> dict[str, Any]:
        """The data, at most some seconds old. If the store does not answer: the data before, and the trouble."""
        with self._lock:
            if time.monotonic() >= self._next:
                try:
                    self._data = self._read()
                except (OSError, UserError) as error:
                    self._next = time.monotonic() + REFRESH_SECONDS
                    self._data = self._data | {"live": self._data["live"] | {"trouble": str(error)}}
            return self._data

    def _read(self) -> dict[str, Any]:
        began = time.monotonic()
        runs = self.read()
        for run in runs:
            self._order.setdefault(run.name, len(self._order))
        runs = sorted(runs, key=lambda run: self._order[run.name])
        data = page_data(runs, self.overlays, self._recent.rows)
        now = time.monotonic()
        self._next = now + max(REFRESH_SECONDS / 2, (now - began) / SHARE_OF_READING)
        return data | {"live": {"seconds": REFRESH_SECONDS}}


class Answers(BaseHTTPRequestHandler):
    """GET of the page and of its data, for requests to this server's own name."""

    server: "LiveServer"

    def do_GET(self) -> None:  # the name that http.server calls
        if self.headers.get("Host") not in self.server.names:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this server answers on its own address only\n")
        elif self.path == "/":
            self._send(HTTPStatus.OK, HTML, bind(self.server.data.current()))
        elif self.path == "/data":
            self._send(HTTPStatus.OK, JSON, as_json(self.server.data.current()))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "the page is at /\n")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """A request is no news."""


class LiveServer(ThreadingHTTPServer):
    """The server of one live page. UserError if its port is taken."""

    daemon_threads = True

    def __init__(self, data: LiveData, port: int = 0) -> None:
        self.data = data
        try:
            super().__init__((LOOPBACK, port), Answers)
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}; choose another one, or 0 for any free one") from error
        self.names = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # of a reader who closed the page before its answer
            super().handle_error(request, client_address)


def serve(read: Callable[[], Sequence[Run]], overlays: Iterable[str], port: int) -> None:
    """Serve the page until Ctrl-C. UserError without any run, and if the port is taken."""
    try:
        with LiveServer(LiveData(read, overlays), port) as server:
            say(f"http://{LOOPBACK}:{server.server_port}/  (on this machine only; Ctrl-C ends it)")
            server.serve_forever()
    except KeyboardInterrupt:
        say("")
