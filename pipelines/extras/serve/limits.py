"""Limits of the server of `skytrain serve`: who may ask, how much, and how long a request may take to arrive."""

import asyncio
import re
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipelines.extras.serve.openai_api import Answer, Refused

MAX_BYTES = 1 << 20  # of a request
ARRIVAL_SECONDS = 10.0  # of a request
MAX_IDLE = 64  # connections without a whole request, of up to MAX_BYTES each; the oldest makes room for a new one
ADDRESS = r"[0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:.]+\]"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """Answers short requests to this server, from its own page or from none, with headers that keep both apart.

    A Host header names an address, or one of `hosts`, with any port. Only by a name of its own can a foreign page lead
    a browser here as if to itself (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        known = "|".join([ADDRESS, *map(re.escape, hosts)])
        self.app, self.host = app, re.compile(f"({known})(:[0-9]+)?", re.IGNORECASE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        if scope["type"] == "http" and (refusal := self.refusal(scope)):
            await Answer(refusal.body, refusal.status)(scope, receive, send_with_headers)
        elif scope["type"] != "websocket":  # there are none
            await self.app(scope, receive, send_with_headers)

    def refusal(self, scope: Scope) -> Refused | None:
        """Why a request is refused."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
        if not self.host.fullmatch(host):
            return Refused(403, "this server answers on its own address only, or to a name given by --allow-host")
        if origin and origin != f"http://{host}":
            return Refused(403, "this server answers no page but its own")
        if b"transfer-encoding" in headers or int(headers.get(b"content-length", "0")) > MAX_BYTES:
            return Refused(413, f"a request has a Content-Length of at most {MAX_BYTES:,} bytes")
        if scope["method"] == "POST" and headers.get(b"content-type", "").partition(";")[0] != "application/json":
            return Refused(415, "the Content-Type is application/json")  # a foreign page can't send that unasked
        return None


class ImpatientProtocol(H11Protocol):
    """Closes a connection on which no whole request has arrived for ARRIVAL_SECONDS, for which uvicorn waits for ever,
    or that is the oldest of more than MAX_IDLE such ones, or on which more than MAX_BYTES arrive during an answer. So
    silent connections lock nobody out.

    h11 reads a request once the one before is answered. httptools reads it at once: if its client leaves then, uvicorn
    goes on with the answer to the first one.
    """

    limit: asyncio.TimerHandle | None = None  # while it is idle
    ahead = 0  # bytes of later requests that arrived during an answer, which h11 holds

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.ahead = self.ahead + len(data) if self._answers else 0
        if self.ahead > MAX_BYTES:
            self.transport.close()
        self._limit_arrival()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_arrival()

    @property
    def _answers(self) -> bool:
        return bool(self.cycle) and not self.cycle.more_body and not self.cycle.response_complete

    def _limit_arrival(self) -> None:
        if self._answers:
            self._stop_limit()
        elif self.limit is None:
            self.limit = self.loop.call_later(ARRIVAL_SECONDS, self.transport.close)
            idle = {
                one: one.limit.when() for one in self.connections if isinstance(one, ImpatientProtocol) and one.limit
            }
            if len(idle) > MAX_IDLE:
                oldest = min(idle, key=idle.__getitem__)
                oldest._stop_limit()
                oldest.transport.abort()
                self.connections.discard(oldest)  # uvicorn counts them before it looks at the next request

    def _stop_limit(self) -> None:
        if self.limit:
            self.limit.cancel()
        self.limit = None
