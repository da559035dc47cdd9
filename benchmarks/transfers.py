"""GB/s of checkpoints and files to and from S3, whose connections are slow: 100 MB/s each, as those of real buckets.

`python -m benchmarks.transfers [--gb GB] [--rounds N] [--connection MB]` starts a server of its own, in several
processes, that speaks as much of S3 as a transfer needs and keeps objects in --place. It saves a checkpoint, loads it,
uploads a file of an artifact and downloads it, verified, in rounds. The server takes cores, too: on a machine with few,
they are the limit. With PYTHONPATH=OTHER_CHECKOUT, `python benchmarks/transfers.py` times the code of that checkout.
"""

import argparse
import os
import re
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from pipelines.artifacts.manifest import download_verified, upload
from pipelines.artifacts.store import PART_BYTES, S3Store
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece
from trainer.events import EventLog
from trainer.metrics import PhaseClock
from trainer.parallel import World

SERVERS = 8
BLOCK = 1 << 20


class Connection:
    """One connection to the server: it answers requests until the client closes it."""

    def __init__(self, connection: socket.socket, place: Path, rate: float) -> None:
        self.connection, self.place, self.rate, self.buffered = connection, place, rate, b""

    def serve(self) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := self.head():
            method, target = head.split(" ", 2)[:2]
            path, _, query = target.partition("?")
            fields = dict(re.findall(r"(?im)^([a-z0-9-]+): *(.*?)\r?$", head))
            headers = {name.lower(): value for name, value in fields.items()}
            self.answer(method, path.lstrip("/").partition("/")[2].replace("/", "!"), query, headers)

    def head(self) -> str:
        while b"\r\n\r\n" not in self.buffered:
            received = self.connection.recv(65536)
            if not received:
                return ""
            self.buffered += received
        head, self.buffered = self.buffered.split(b"\r\n\r\n", 1)
        return head.decode()

    def answer(self, method: str, name: str, query: str, headers: dict[str, str]) -> None:
        file, length = self.place / name, int(headers.get("content-length", 0))
        if headers.get("expect"):
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if method == "PUT":
            number = int((re.findall(r"partNumber=(\d+)", query) or ["1"])[0])
            self.receive(file, (number - 1) * PART_BYTES, length)
            self.reply(200, b"", ETag='"0"')
        elif method == "POST":
            self.skip(length)
            of_upload = "<UploadId>1</UploadId>" if query.startswith("uploads") else '<ETag>"0"</ETag>'
            self.reply(200, f"<Result><Bucket>b</Bucket><Key>k</Key>{of_upload}</Result>".encode())
        elif method == "DELETE":
            file.unlink(missing_ok=True)
            self.reply(204, b"")
        elif not name:
            prefix = (re.findall(r"prefix=([^&]*)", query) or [""])[0].replace("%2F", "!")
            found = sorted(one for one in self.place.iterdir() if one.name.startswith(prefix))
            each = "".join(
                f"<Contents><Key>{one.name.replace('!', '/')}</Key><Size>{one.stat().st_size}</Size><ETag>0</ETag>"
                "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
                for one in found
            )
            self.reply(200, f"<Result><IsTruncated>false</IsTruncated>{each}</Result>".encode())
        elif not file.exists():
            self.reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.send(file, method, headers.get("range"))

    def send(self, file: Path, method: str, wanted: str | None) -> None:
        size = file.stat().st_size
        start, _, end = (wanted or "bytes=0-").removeprefix("bytes=").partition("-")
        first, last = int(start), min(int(end or size), size - 1)
        status = "206 Partial Content" if wanted else "200 OK"
        length = f"Content-Length: {last + 1 - first}\r\nContent-Range: bytes {first}-{last}/{size}\r\n"
        self.connection.sendall(f'HTTP/1.1 {status}\r\nETag: "0"\r\n{length}\r\n'.encode())
        started, sent = time.monotonic(), 0
        with file.open("rb") as source:
            while method == "GET" and first + sent <= last:
                sent += os.sendfile(
                    self.connection.fileno(), source.fileno(), first + sent, min(BLOCK, last + 1 - first - sent)
                )
                self.keep_pace(started, sent)

    def receive(self, file: Path, at: int, length: int) -> None:
        started, done = time.monotonic(), 0
        with open(file, "r+b" if file.exists() else "w+b") as target:
            while done < length:
                block = self.buffered[: length - done] or self.connection.recv(min(BLOCK, length - done))
                self.buffered = self.buffered[len(block) :]
                os.pwrite(target.fileno(), block, at + done)
                done += len(block)
                self.keep_pace(started, done)

    def skip(self, length: int) -> None:
        while len(self.buffered) < length:
            self.buffered += self.connection.recv(65536)
        self.buffered = self.buffered[length:]

    def keep_pace(self, started: float, count: int) -> None:
        time.sleep(max(0.0, started + count / self.rate - time.monotonic()))

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
        self.connection.sendall(head.encode() + body)


def serve(listener: socket.socket, place: Path, rate: float) -> None:
    """Accept connections for ever, each in a thread."""
    while True:
        connection = Connection(listener.accept()[0], place, rate)
        threading.Thread(target=connection.serve, daemon=True).start()


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connection", type=float, default=100.0, help="MB/s of each")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=options.place))
    objects = place / "objects"
    objects.mkdir()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    processes = [
        get_context("fork").Process(target=serve, args=(listener, objects, options.connection * 1e6), daemon=True)
        for _ in range(SERVERS)
    ]
    for process in processes:
        process.start()
    os.environ |= {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{listener.getsockname()[1]}",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
    }
    try:
        compare(S3Store("b"), place, options.gb, options.rounds)
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(place)


def compare(store: S3Store, place: Path, gb: float, rounds: int) -> None:
    """Print the GB/s of each transfer, round by round and their median."""
    world = World(0, 0, 1, torch.device("cpu"))
    weights = torch.randint(0, 255, (int(gb * 1e9),), dtype=torch.uint8).view(torch.bfloat16)
    (file := place / "weights").write_bytes(weights.view(torch.uint8).numpy().data)
    speeds: dict[str, list[float]] = {"save": [], "load": [], "upload": [], "download": []}
    print(f"{gb:g} GB, {os.cpu_count()} cores, code in {sys.modules['trainer'].__path__[0]}")
    for number in range(rounds):
        pieces = {"model.w": Piece.whole(weights)}
        with Checkpointer(store, "run", world, attempt=number + 1, keep_last=1) as checkpointer:
            log = EventLog(place / "events.jsonl", PhaseClock())
            checkpointer.prepare(pieces)
            checkpointer.save(TrainState(step=number + 1), pieces, log)
            speeds["save"].append(gb / timed(partial(checkpointer.finish, log)))
            loaded = {"model.w": Piece.whole(torch.zeros_like(weights))}
            speeds["load"].append(gb / timed(partial(checkpointer.load_latest, loaded, log)))
            assert torch.equal(loaded["model.w"].live.view(torch.uint8), weights.view(torch.uint8))
        started = time.perf_counter()
        stored = upload(store, "artifact", number + 1, file)
        speeds["upload"].append(gb / (time.perf_counter() - started))
        path, key = place / "copy", f"artifact/{stored.key}"
        speeds["download"].append(gb / timed(partial(download_verified, store, key, stored, path)))
        store.delete(key)
    for name, each in speeds.items():
        print(f"{name:9} {statistics.median(each):6.2f} GB/s  [{', '.join(f'{one:.2f}' for one in each)}]", flush=True)


if __name__ == "__main__":
    main()
