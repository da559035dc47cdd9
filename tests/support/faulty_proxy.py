"""An HTTP proxy in front of a server, with faults on demand."""

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from answers import Request, answering


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
    - drip_s: begin an answer of 1,000 bytes, and send one of them every so many seconds.
    """

    status: int | None = None
    code: str = "ServiceUnavailable"
    forward: bool = False
    body_bytes: int | None = None
    reset_at: int | None = None
    damage: bool = False
    silence_s: float = 0
    drip_s: float = 0
    body: bytes | None = None
    twice: bool = False


Answer = tuple[int, bytes, dict[str, str]]


@dataclass
class FaultyProxy:
    """An HTTP proxy in front of `upstream` ("http://host:port") with a queue of faults.

    `fail(fault, …, method="PUT")` adds faults; each matching request uses one. `requests` lists all requests as
    (method, path). The Host header stays unchanged, so signatures stay valid.
    """

    upstream: str
    # What becomes of every other answer: its status, body and headers.
    change: Callable[[Request, Answer], Answer] = lambda request, answer: answer
    requests: list[tuple[str, str]] = field(default_factory=list)
    _faults: list[tuple[str, Fault]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def fail(self, *faults: Fault, method: str = "") -> None:
        with self._lock:
            self._faults += [(method, fault) for fault in faults]

    def __enter__(self) -> "FaultyProxy":
        self._server = answering(self._answer)
        self.endpoint = self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.__exit__(None, None, None)

    def _next_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            for number, (wanted, fault) in enumerate(self._faults):
                if wanted in ("", method):
                    del self._faults[number]
                    return fault
        return None

    def _pass_on(self, request: Request, body: bytes) -> Answer:
        """Upstream's status, body and headers. The Host header stays as it is, for the signature."""
        connection = http.client.HTTPConnection(self.upstream.removeprefix("http://"), timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            ours = {"transfer-encoding", "connection", "date", "server", "content-length"}
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in ours}
            whole = answer.read()
            length = answer.getheader("Content-Length") if request.command == "HEAD" else None  # whose body is absent
            return answer.status, whole, headers | {"Content_Length": length or str(len(whole))}

    def _answer(self, request: Request) -> None:
        fault = self._next_fault(request.command, request.path)
        if fault is None:
            status, whole, headers = self.change(request, self._pass_on(request, request.body))
            return request.respond(status, whole, **headers)
        if fault.reset_at is not None:
            request.rfile.read(min(fault.reset_at, int(request.headers.get("Content-Length", 0))))
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.close_connection = True
            return None
        body, sent = request.body, fault.body_bytes
        if fault.silence_s:
            self._stopping.wait(fault.silence_s)
        if fault.drip_s:
            request.send_response_only(200)
            request.send_header("Content-Length", "1000")
            request.send_header("ETag", '"dripping"')
            request.end_headers()
            while not self._stopping.wait(fault.drip_s):
                request.wfile.write(b"x")
        if fault.status is not None:
            text = f"<Error><Code>{fault.code}</Code><Message>a fault of the test</Message></Error>".encode()
            kind = "application/xml" if fault.body is None else "text/html"
            return request.respond(fault.status, text if fault.body is None else fault.body, Content_Type=kind)
        if fault.twice or fault.forward:
            self._pass_on(request, body)
        if fault.damage:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault.twice or fault.damage or sent is not None:
            status, whole, headers = self._pass_on(request, body)
            request.respond(status, whole[:sent], **headers)
        request.close_connection |= not (fault.twice or fault.damage)
