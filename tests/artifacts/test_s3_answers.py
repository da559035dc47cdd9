"""What an answer of an S3 server means: the first one of each test is odd, and the request is repeated."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from servers import free_ports

from pipelines.artifacts.s3_client import clients_from_environment
from pipelines.artifacts.s3_store import S3Store

BODY = b"the body of the object"
HEAD = b'HTTP/1.1 %s\r\nETag: "1"\r\nContent-Length: %d\r\nConnection: close\r\n%s\r\n'
DATE = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
ITEM = f'<Contents><Key>key</Key>{DATE}<ETag>"1"</ETag><Size>3</Size></Contents>'
ENDS = "<IsTruncated>false</IsTruncated>"


def listing(content: str) -> bytes:
    body = f"<ListBucketResult>{content}</ListBucketResult>".encode()
    return HEAD % (b"200 OK", len(body), b"") + body


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, *answers: bytes) -> Iterator[tuple[S3Store, list[bytes]]]:
    """A store behind a server that gives these answers, one a connection, and the requests so far."""
    (port,), asked = free_ports(1), list[bytes]()

    def serve(listener: socket.socket) -> None:
        for answer in answers:
            connection, _ = listener.accept()
            asked.append(connection.recv(65536))
            connection.sendall(answer)
            if answer.endswith(b"cut"):  # a close with this option is a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.close()

    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        (client,) = clients_from_environment("s3://bucket", 20, 1)
        yield S3Store("bucket", client=client, time_limit_s=20), asked
        server.join(10)


WHOLE = HEAD % (b"200 OK", len(BODY), b"") + BODY
ODD: dict[str, tuple[Callable[[S3Store], object], bytes, bytes, object]] = {
    "a reset in the middle": (lambda s: s.get("key"), HEAD % (b"503 Slow Down", 9, b"") + b"cut", WHOLE, BODY),
    **{
        f"a listing without {lacking}": (
            lambda s: [one.key for one in s.entries("")],
            listing(ITEM.replace(lacking, "") + ENDS),
            listing(ITEM + ENDS),
            ["key"],
        )
        for lacking in ("<Key>key</Key>", DATE, '<ETag>"1"</ETag>', "<Size>3</Size>")
    },
    "a date": (
        lambda s: [one.size for one in s.entries("")],
        listing(ITEM.replace("2026-01-01T00:00:00.000Z", "soon") + ENDS),
        listing(ITEM + ENDS),
        [3],
    ),
    "a page without the next": (
        lambda s: s.entries(""),
        listing("<IsTruncated>true</IsTruncated>"),
        listing(ENDS),
        [],
    ),
    "a clock": (
        lambda s: s.clock() > 0,
        listing(ENDS).replace(b"Connection", b"Date: soon\r\nConnection"),
        listing(ENDS),
        True,
    ),
    "a range": (
        lambda s: s.read_into("key", 0, memoryview(bytearray(22))),
        HEAD % (b"206 Partial Content", len(BODY), b"Content-Range: bytes 0-21/100000000000000\r\n") + BODY,
        WHOLE,
        22,
    ),
}


@pytest.mark.parametrize(("operation", "odd", "right", "result"), ODD.values(), ids=ODD)
def test_an_odd_answer_is_a_reason_to_ask_again(
    operation: Callable[[S3Store], object], odd: bytes, right: bytes, result: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(monkeypatch, odd, right) as (store, asked):
        assert operation(store) == result
    assert len(asked) == 2


def test_an_object_of_a_size_that_none_has_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    huge = HEAD % (b"200 OK", 10**14, b"")
    with serving(monkeypatch, huge, HEAD % (b"200 OK", len(BODY), b""), WHOLE) as (store, asked):
        store.download("key", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY and len(asked) == 3
