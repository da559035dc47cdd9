"""An HTTP proxy in front of a server, with faults on demand."""

import contextlib
import http.client
import math
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate

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
    - flip: pass the response on, with one bit of an object flipped.
    - drip_s: pass the response on with so many seconds before each byte of its body.
    - date_s: pass the response on with a Date that is wrong by so much.
    - endless_s: begin an answer of 1,000 bytes, and send one of them every so many seconds.
    """

    status: int | None = None
    code: str = "ServiceUnavailable"
    forward: bool = False
    body_bytes: int | None = None
    reset_at: int | None = None
    damage: bool = False
    silence_s: float = 0
    endless_s: float = 0
    body: bytes | None = None
    twice: bool = False
    flip: bool = False
    drip_s: float = 0
    date_s: float = 0


@dataclass
class Window:
    """A fault of every request that `matches`, from the first one on, for `seconds`."""

    fault: Fault
    matches: Callable[[Request], bool]
    seconds: float
    ends: float = math.inf  # by time.monotonic

    def hit(self, request: Request) -> bool:
        if not self.matches(request) or time.monotonic() > self.ends:
            return False
        self.ends = min(self.ends, time.monotonic() + self.seconds)
        return True


Answer = tuple[int, bytes, dict[str, str]]


@dataclass
class FaultyProxy:
    """An HTTP proxy in front of `upstream` ("http://host:port") with a queue of faults.

    `fail(fault, …, method="PUT")` adds faults; each matching request uses one. `windows` are faults of many requests.
    `requests` lists all requests as (method, path). The Host header stays unchanged, so signatures stay valid.
    """

    upstream: str
    # What becomes of every other answer: its status, body and headers.
    change: Callable[[Request, Answer], Answer] = lambda request, answer: answer
    requests: list[tuple[str, str]] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
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

    def _next_fault(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append((request.command, request.path))
            for number, (wanted, fault) in enumerate(self._faults):
                if wanted in ("", request.command):
                    del self._faults[number]
                    return fault
            return next((window.fault for window in self.windows if window.hit(request)), None)

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
        fault = self._next_fault(request)
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
        if fault.endless_s:
            request.send_response_only(200)
            request.send_header("Content-Length", "1000")
            request.send_header("ETag", '"dripping"')
            request.end_headers()
            while not self._stopping.wait(fault.endless_s):
                request.wfile.write(b"x")
        if fault.status is not None:
            text = f"<Error><Code>{fault.code}</Code><Message>a fault of the test</Message></Error>".encode()
            kind = "application/xml" if fault.body is None else "text/html"
            return request.respond(fault.status, text if fault.body is None else fault.body, Content_Type=kind)
        if fault.twice or fault.forward:
            self._pass_on(request, body)
        if fault.damage:
            body = bytes([body[0] ^ 1]) + body[1:]
        if fault.flip or fault.drip_s or fault.date_s:
            return self._respond_oddly(request, fault)
        if fault.twice or fault.damage or sent is not None:
            status, whole, headers = self._pass_on(request, body)
            request.respond(status, whole[:sent], **headers)
        request.close_connection |= not (fault.twice or fault.damage)

    def _respond_oddly(self, request: Request, fault: Fault) -> None:
        status, whole, headers = self._pass_on(request, request.body)
        if fault.date_s:
            headers["Date"] = formatdate(time.time() + fault.date_s, usegmt=True)
        if fault.flip and whole and status < 300:
            flipped = bytearray(whole)
            flipped[random.randrange(len(whole))] ^= 1 << random.randrange(8)
            whole = bytes(flipped)
        if not fault.drip_s:
            return request.respond(status, whole, **headers)
        request.respond(status, **headers)
        for at in range(len(whole)):
            if not self._stopping.wait(fault.drip_s):
                request.wfile.write(whole[at : at + 1])
