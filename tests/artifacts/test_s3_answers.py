"""What an answer of an S3 server means."""

import socket
import threading

import boto3
from botocore.config import Config
from servers import free_ports

from pipelines.artifacts.store import S3Store

BODY = b"the body of the object"
HEAD = b'HTTP/1.1 %s\r\nETag: "1"\r\nContent-Length: %d\r\nConnection: close\r\n\r\n'


def test_an_error_whose_connection_is_reset_in_the_middle_is_a_reason_to_ask_again() -> None:
    (port,) = free_ports(1)
    asked = []

    def serve(listener: socket.socket) -> None:
        for whole in (False, True):
            connection, _ = listener.accept()
            asked.append(connection.recv(65536))
            head = HEAD % (b"200 OK" if whole else b"503 Slow Down", len(BODY))
            connection.sendall(head + (BODY if whole else BODY[:5]))
            if not whole:  # a close with this option is a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            connection.close()

    with socket.create_server(("127.0.0.1", port)) as listener:
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        once = Config(retries={"total_max_attempts": 1})
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", config=once, **keys)
        assert S3Store("bucket", client=client, time_limit_s=20).get("key") == BODY
        server.join(10)
    assert len(asked) == 2
