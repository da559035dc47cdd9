"""An HTTP proxy in front of a server, with faults on demand."""

import http.client
import http.server
import socket
import struct
import threading
from dataclasses import dataclass, field

from servers import LOOPBACK


@dataclass(frozen=True)
class Fault:
    """One kind of failure.

    - status: respond with this error; the server does not get the request. With `body`: respond with these bytes.
    - twice: pass the request to the server twice, and respond with its second answer.
    - forward: pass the request to the server, then close the connection without a response. Without `status` and
      `forward`, the connection closes before the server gets the request.
    - body_bytes: pass the response on, but cut its body after so many bytes.
    - reset_at: read so many bytes of the request's body, then reset the connection.
    - damage: flip a bit of the request's body.
    - silence_s: wait before anything else.
    """

    status: int | None = None
    code: str = "ServiceUnavailable"
    forward: bool = False
    body_bytes: int | None = None
    reset_at: int | None = None
    damage: bool = False
    silence_s: float = 0
    body: bytes | None = None
    twice: bool = False


@dataclass
class FaultyProxy:
    """An HTTP proxy in front of `upstream` ("http://host:port") with a queue of faults.

    `fail(fault, …, method="PUT")` adds faults; each matching request uses one. `requests` lists all requests as
    (method, path). The Host header stays unchanged, so signatures stay valid.
    """

    upstream: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    _faults: list[tuple[str, Fault]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)

    def fail(self, *faults: Fault, method: str = "") -> None:
        with self._lock:
            self._faults += [(method, fault) for fault in faults]

    def __enter__(self) -> "FaultyProxy":
        host, port = self.upstream.removeprefix("http://").split(":")
        handler = type("Handler", (_ProxyHandler,), {"proxy": self, "upstream": (host, int(port))})
        self._server = http.server.ThreadingHTTPServer((LOOPBACK, 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_port}"

    def next_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            for number, (wanted, fault) in enumerate(self._faults):
                if wanted in ("", method):
                    del self._faults[number]
                    return fault
        return None


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy
    upstream: tuple[str, int]

    def asked(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Upstream's status, headers and body. The Host header stays as it is, for the signature."""
        connection = http.client.HTTPConnection(*self.upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, sent: int | None = None) -> None:
        """Answer the client; with `sent`, only so many bytes of the body, under its whole length."""
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # of HEAD, whose body is absent
            elif name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def log_message(self, format: str, *args: object) -> None:
        """No log."""

    def _serve(self) -> None:
        fault = self.proxy.next_fault(self.command, self.path)
        if fault and fault.reset_at is not None:
            self.rfile.read(min(fault.reset_at, int(self.headers.get("Content-Length", 0))))
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault is None:
            self.answer(*self.asked(body))
            return
        if fault.silence_s:
            self.proxy.stopping.wait(fault.silence_s)
        if fault.status is not None:
            text = f"<Error><Code>{fault.code}</Code><Message>a fault of the test</Message></Error>".encode()
            kind = "application/xml" if fault.body is None else "text/html"
            self.answer(fault.status, [("Content-Type", kind)], text if fault.body is None else fault.body)
        elif fault.twice:
            self.asked(body)
            self.answer(*self.asked(body))
        elif fault.damage:
            self.answer(*self.asked(bytes([body[0] ^ 1]) + body[1:]))
        elif fault.body_bytes is not None:
            self.answer(*self.asked(body), sent=fault.body_bytes)
            self.close_connection = True
        else:
            if fault.forward:
                self.asked(body)
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve
