"""Connections to a bucket that bound a whole answer: a server that sends a byte every few seconds is as absent as one
that is silent.

The time-out of a socket bounds its silence alone. Here, all time that this process waits for an answer counts: each
time-out has to bring LEAST_BYTES, or the end. The waits are short, so that `WAITING.check` can end them.
"""

import io
import socket
import time
from http.client import HTTPResponse
from typing import Any

from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool

from trainer.base.store import POLL_SECONDS, WAITING

LEAST_BYTES = 16 << 10  # the 64 connections of a node need 90 kB/s together, with 12 s for each


class SteadyReader(socket.SocketIO):
    """The bytes of one answer. TimeoutError once it has brought too few."""

    def __init__(self, sock: Any) -> None:
        super().__init__(sock, "r")
        sock._io_refs += 1  # as `makefile` does: the socket closes with its last reader
        self._socket, self._waited, self._arrived = sock, 0.0, 0

    def readinto(self, buffer: Any) -> int:
        limit = self._socket.gettimeout()
        while self._waited <= limit or self._arrived >= LEAST_BYTES:
            if self._waited > limit:
                self._waited, self._arrived = 0.0, 0
            WAITING.check()
            began = time.monotonic()
            self._socket.settimeout(min(POLL_SECONDS, limit))
            try:
                count: int = self._socket.recv_into(buffer)
                self._arrived += count
                return count
            except TimeoutError:
                continue
            finally:
                self._socket.settimeout(limit)
                self._waited += time.monotonic() - began
        raise TimeoutError(f"{self._arrived} bytes in {limit:.0f} s")


class SteadyResponse(HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.fp = io.BufferedReader(SteadyReader(sock))


class Connection(AWSHTTPConnection):
    response_class = SteadyResponse


class TLSConnection(AWSHTTPSConnection):
    response_class = SteadyResponse


class ConnectionPool(AWSHTTPConnectionPool):
    ConnectionCls = Connection


class TLSConnectionPool(AWSHTTPSConnectionPool):
    ConnectionCls = TLSConnection


POOLS = {"http": ConnectionPool, "https": TLSConnectionPool}
