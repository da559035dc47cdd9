"""HTTP servers in a thread of the test, which gives their answers."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Request(BaseHTTPRequestHandler):
    """A request, which `respond` answers."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:
        vars(self).pop("body", None)  # of the connection's last request
        self.server.answer(self)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    @cached_property
    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def respond(self, status: int, body: str | bytes = b"", **headers: str) -> None:
        _, whole = self.body, body.encode() if isinstance(body, str) else body
        self.send_response_only(status)
        standard = {"Content_Length": str(len(whole)), "Date": self.date_time_string()}
        for name, value in (standard | headers).items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(whole)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    answer: Callable[[Request], object]

    def handle_error(self, *_: Any) -> None:
        """A client that closes its connection is no error."""


@contextmanager
def answering(answer: Callable[[Request], object]) -> Iterator[str]:
    """The address of a server that passes every request to `answer`."""
    with Server(("127.0.0.1", 0), Request) as server:
        server.answer = answer
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Hub:
    """A repository of the Hugging Face Hub at one commit: its list of files, and the files, also in part."""

    def __init__(self, kind: str, name: str, commit: str, files: dict[str, bytes]) -> None:
        self.api, self.name, self.commit, self.files = f"/api/{kind}/{name}", name, commit, files
        self.resolve = f"{'/datasets' if kind == 'datasets' else ''}/{name}/resolve/{commit}/"
        self.wrong_sum = False
        self.sent: list[str] = []  # paths of the files that it sent

    def answer(self, request: Request) -> None:
        path = request.path.partition("?")[0]
        if path == f"{self.api}/revision/{self.commit}":
            siblings = [{"rfilename": name} for name in self.files]
            return request.respond(200, json.dumps({"id": self.name, "sha": self.commit, "siblings": siblings}))
        if path.startswith(tree := f"{self.api}/tree/{self.commit}"):
            found = [name for name in sorted(self.files) if name.startswith(path.removeprefix(tree).strip("/"))]
            rows = [{"type": "file", "path": n, "size": len(self.files[n]), "oid": "0" * 40} for n in found]
            return request.respond(200, json.dumps(rows), Content_Type="application/json")
        body = self.files.get(path.removeprefix(self.resolve)) if path.startswith(self.resolve) else None
        if body is None:
            code = "EntryNotFound" if path.startswith(self.resolve) else "RepoNotFound"
            return request.respond(404, X_Error_Code=code, X_Error_Message="not found")
        digest = "0" * 64 if self.wrong_sum else hashlib.sha256(body).hexdigest()
        tag = digest if path.endswith(".safetensors") else digest[:40]
        headers = {"ETag": f'"{tag}"', "X_Repo_Commit": self.commit, "Accept_Ranges": "bytes"}
        if request.command == "HEAD":
            return request.respond(200, body, **headers)
        self.sent.append(request.path)
        if not (asked := request.headers.get("Range")):
            return request.respond(200, body, **headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = body[int(first) : int(last or len(body)) + 1]
        place = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
        request.respond(206, part, Content_Range=place, **headers)
