"""The outages of a drill: a proxy that cuts the connection to S3 or changes its answers, a folder that cannot be read,
and a real MLflow server that stops and starts.
"""

import http.client
import http.server
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from pipelines.drill.forwarding import ForwardingHandler
from trainer.process import die_with_parent

LOOPBACK = "127.0.0.1"
MLFLOW_START_SECONDS = 120.0  # importing it takes 5 s of an idle core
MLFLOW_END_SECONDS = 10.0


class Proxy:
    """A TCP proxy on loopback in front of an http endpoint; it does not parse the traffic. A context manager.

    `cut` starts an outage. With `silent`, the proxy swallows all data, like a firewall that drops packets; otherwise it
    resets all connections, new ones too. `restore` ends the outage. `through` leads the traffic through another server.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        assert parts.scheme == "http" and parts.hostname, endpoint
        self.server = self._upstream = (parts.hostname, parts.port or 80)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.endpoint = f"http://{LOOPBACK}:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._outage: str | None = None  # "silent" or "reset"; None: no outage

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._reset_all()

    def cut(self, silent: bool) -> None:
        self._outage = "silent" if silent else "reset"
        if not silent:
            self._reset_all()

    def restore(self) -> None:
        """Forward new connections. Reset the open ones: a swallowed request would wait a minute for its answer."""
        self._outage, self._upstream = None, self.server
        self._reset_all()

    def through(self, server: tuple[str, int]) -> None:
        self._upstream = server
        self._reset_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._outage == "reset":
                reset(client)
                continue
            self._open.add(client)
            if self._outage is None:
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._upstream)
        except OSError:
            reset(client)
            return
        self._open.add(server)
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # reset by either side, or by us
            while data := source.recv(1 << 16):
                if self._outage is None:
                    target.sendall(data)
        if self._outage is None and source in self._open:  # otherwise it was reset, or the outage swallows its end
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
                self._open.discard(end)

    def _reset_all(self) -> None:
        while self._open:
            reset(self._open.pop())


def reset(connection: socket.socket) -> None:
    """Close a connection with a reset (RST) instead of an end (FIN)."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes a thread that reads from it
    connection.close()


class OddServer:
    """An HTTP server in front of S3 that changes every third request or its answer, at random. A context manager.

    With `twice`, a PUT reaches S3 twice, and the second answer counts. Otherwise the answer is one that no S3 server
    gives: an error without its body, a page of a proxy, or only the beginning of an answer.
    """

    SHARE = 1 / 3
    ANSWERS = ((404, b""), (409, b""), (400, b""), (200, b"<html>log in</html>"), (503, b"<html>busy</html>"))

    def __init__(self, upstream: tuple[str, int], twice: bool, seed: int) -> None:
        self.twice, self.rng = twice, random.Random(seed)
        handler = type("Handler", (_OddHandler,), {"odd": self, "upstream": upstream})
        self._server = http.server.ThreadingHTTPServer((LOOPBACK, 0), handler)
        self._server.daemon_threads = True
        self.address = (LOOPBACK, self._server.server_port)

    def __enter__(self) -> "OddServer":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="odd", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _OddHandler(ForwardingHandler):
    odd: OddServer

    def _serve(self) -> None:
        with suppress(OSError, http.client.HTTPException):  # of either side, whose other end then closes
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.odd.rng.random() > self.odd.SHARE:
                return self.answer(*self.asked(body))
            if self.odd.twice:
                if self.command == "PUT":
                    self.asked(body)
                return self.answer(*self.asked(body))
            if self.odd.rng.random() < 0.2:
                self.close_connection = True
                status, headers, content = self.asked(body)
                return self.answer(status, headers, content, sent=len(content) // 2)
            status, page = self.odd.rng.choice(self.odd.ANSWERS)
            return self.answer(status, [("Content-Type", "text/html")], page)
        self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve


class FailingFolder:
    """A folder whose every file and listing is an error. A link that leads to itself stands for a failing disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._aside = folder, folder.with_name(f"{folder.name}-aside")

    def fail(self) -> None:
        self.folder.rename(self._aside)
        self.folder.symlink_to(self.folder.name)

    def mend(self) -> None:
        self.folder.unlink()
        self._aside.rename(self.folder)


class MlflowServer:
    """MLflow's own server on SQLite in `folder`. Its data survives a stop. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server((LOOPBACK, 0)) as free:
            self._port = free.getsockname()[1]
        self.uri = f"http://{LOOPBACK}:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "MlflowServer":
        self.folder.mkdir(parents=True)
        self.start()
        self.wait_until_it_answers()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server; it answers some seconds later."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(self._port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        command += ["--allowed-hosts", f"localhost:*,{LOOPBACK}:*"]
        # Without its job workers it is 2 processes and 0.5 GB instead of 13 and 2.7 GB.
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")} | quiet,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def stop(self) -> None:
        """End the server and its workers: SIGTERM, then SIGKILL."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(MLFLOW_END_SECONDS)
        self._process = None

    def wait_until_it_answers(self) -> None:
        wait_until(self._answers, f"MLflow, see {self.folder}/server.log", MLFLOW_START_SECONDS)

    def _answers(self) -> bool:
        try:
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            direct.open(f"{self.uri}/health", timeout=2).close()
        except OSError:
            return False
        return True


def wait_until(condition: Callable[[], object], what: str, limit_seconds: float) -> None:
    """Check ten times a second; TimeoutError with `what` after the limit."""
    deadline = time.monotonic() + limit_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not reached within {limit_seconds:g} s")
        time.sleep(0.1)
