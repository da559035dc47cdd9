"""A request to an S3 server, passed on as it came: the base of servers that stand between a client and a store."""

import http.client
import http.server


class ForwardingHandler(http.server.BaseHTTPRequestHandler):
    """A handler that passes requests on to `upstream`, (host, port), and gives its answers, whole or cut."""

    protocol_version = "HTTP/1.1"
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
