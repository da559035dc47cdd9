"""The outages of a drill: a proxy that cuts the connection to S3, and a real MLflow server that stops and starts."""

import os
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

from trainer.process import die_with_parent

LOOPBACK = "127.0.0.1"
MLFLOW_START_SECONDS = 120.0  # importing it takes 5 s of an idle core
MLFLOW_END_SECONDS = 10.0


class Proxy:
    """A TCP proxy on loopback in front of an http endpoint; it does not parse the traffic. A context manager.

    `cut` starts an outage. With `silent`, the proxy swallows all data, like a firewall that drops packets; otherwise it
    resets all connections, new ones too. `restore` ends the outage.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        assert parts.scheme == "http" and parts.hostname, endpoint
        self._upstream = (parts.hostname, parts.port or 80)
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
        self._outage = None
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
