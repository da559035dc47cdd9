"""GB/s of checkpoints and files to and from S3, whose connections are slow: 100 MB/s each, as those of real buckets.

`python -m benchmarks.transfers [--gb GB] [--rounds N] [--connection MB] [--cores N] [--device cuda] [--ranks N]
[--against CHECKOUT]` starts a server of its own, in several processes, that speaks as much of S3 as a transfer needs
and keeps objects in --place. It saves a checkpoint of tensors on --device, loads it, uploads a file and downloads it,
verified, in rounds. With --ranks so many processes, each with its share of the node's connections and on a GPU of its
own, do so at once, with --gb each; the figures are those of all together. The server takes cores, too: on a machine
with few, they are the limit, and the client's own seconds of processor time a GB show more; or slower connections, of
as many as a machine with --cores opens. With --against the code of another checkout and this one take turns, each round
in new processes, and the ratios are printed. It runs the code of eda2ad97 and later.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from pipelines.store.manifest import download_verified, upload
from pipelines.store.s3_store import S3Store
from trainer.base.events import EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece

PART_BYTES = 16 << 20  # of the uploads of all versions
SERVERS = 8
T = TypeVar("T")
BLOCK = 1 << 20


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection. `place` holds the objects; `rate` is in bytes a second."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    place: Path
    rate: float

    def do_PUT(self) -> None:
        part = int((re.findall(r"partNumber=(\d+)", self.path) or ["1"])[0])
        file, length = self.file(), int(self.headers["content-length"])
        started, done = time.monotonic(), 0
        with open(os.open(file, os.O_RDWR | os.O_CREAT), "r+b") as target:  # parts of a file arrive side by side
            while done < length:
                block = self.rfile.read1(min(BLOCK, length - done))
                os.pwrite(target.fileno(), block, (part - 1) * PART_BYTES + done)
                done += len(block)
                self.keep_pace(started, done)
        self.reply(200, ETag='"0"')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        of_upload = "<UploadId>1</UploadId>" if "?uploads" in self.path else '<ETag>"0"</ETag>'
        self.reply(200, f"<Result><Bucket>b</Bucket><Key>k</Key>{of_upload}</Result>")

    def do_DELETE(self) -> None:
        self.file().unlink(missing_ok=True)
        self.reply(204)

    def do_GET(self) -> None:
        file = self.file()
        if file == self.place:
            self.list_objects()
        elif not file.exists():
            self.reply(404, "<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.send(file)

    do_HEAD = do_GET

    def list_objects(self) -> None:
        prefix = (re.findall(r"prefix=([^&]*)", self.path) or [""])[0].replace("%2F", "!")
        found = sorted(one for one in self.place.iterdir() if one.name.startswith(prefix))
        each = "".join(
            f"<Contents><Key>{one.name.replace('!', '/')}</Key><Size>{one.stat().st_size}</Size><ETag>0</ETag>"
            "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for one in found
        )
        self.reply(200, f"<Result><IsTruncated>false</IsTruncated>{each}</Result>")

    def send(self, file: Path) -> None:
        size, wanted = file.stat().st_size, self.headers.get("range")
        start, _, end = (wanted or "bytes=0-").removeprefix("bytes=").partition("-")
        first, last = int(start), min(int(end or size), size - 1)
        self.head(206 if wanted else 200, last + 1 - first, ETag='"0"', Content_Range=f"bytes {first}-{last}/{size}")
        started, sent = time.monotonic(), 0
        with file.open("rb") as source:
            while self.command == "GET" and first + sent <= last:
                sent += os.sendfile(
                    self.connection.fileno(), source.fileno(), first + sent, min(BLOCK, last + 1 - first - sent)
                )
                self.keep_pace(started, sent)

    def file(self) -> Path:
        return self.place / self.path.partition("?")[0].lstrip("/").partition("/")[2].replace("/", "!")

    def keep_pace(self, started: float, count: int) -> None:
        time.sleep(max(0.0, started + count / self.rate - time.monotonic()))

    def head(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(length), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def reply(self, status: int, body: str = "", **headers: str) -> None:
        self.head(status, len(body), **headers)
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """A server whose socket several processes share."""

    request_queue_size = 1024


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """What `work` returns, its seconds, and the seconds of processor time of this process."""
    started, used = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - started, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connection", type=float, default=100.0, help="MB/s of each")
    parser.add_argument("--cores", type=int, help="open as many connections as a machine with so many cores")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=1, help="processes at once")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--against", type=Path, help="a checkout of the code before")
    options = parser.parse_args()
    if options.against:
        return print_ratios(options.against.resolve(), sys.argv[1:], options.rounds)
    place = Path(tempfile.mkdtemp(dir=options.place))
    objects = place / "objects"
    objects.mkdir()
    Handler.place, Handler.rate = objects, options.connection * 1e6
    server = Server(("127.0.0.1", 0), Handler)
    processes = [get_context("fork").Process(target=server.serve_forever, daemon=True) for _ in range(SERVERS)]
    for process in processes:
        process.start()
    os.environ |= {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
        "LOCAL_WORLD_SIZE": str(options.ranks),
    }
    spawned = get_context("spawn")
    together = spawned.Barrier(options.ranks), spawned.Array("d", options.ranks)
    ranks = [spawned.Process(target=compare, args=(rank, options, place, *together)) for rank in range(options.ranks)]
    try:
        for rank in ranks:
            rank.start()
        while (left := [rank.sentinel for rank in ranks if rank.is_alive()]) and not any(
            rank.exitcode for rank in ranks
        ):
            wait(left)
        sys.exit(int(any(rank.exitcode for rank in ranks)))
    finally:
        for one in [*processes, *ranks]:
            one.kill()
        shutil.rmtree(place)


def print_ratios(other: Path, arguments: list[str], rounds: int) -> None:
    """Time the code of another checkout and this one in turn, and print this one's speed over the other's."""
    at = arguments.index("--against")
    command = [sys.executable, __file__, *arguments[:at], *arguments[at + 2 :], "--rounds", "1"]
    trees = other, Path(__file__).resolve().parents[1]
    speeds: list[dict[str, list[float]]] = [{}, {}]
    for _ in range(rounds):
        for tree, found in zip(trees, speeds, strict=True):
            environment = os.environ | {"PYTHONPATH": str(tree)}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            print(done.stdout, flush=True)
            for name, speed in re.findall(r"(\w+) +([\d.]+) GB/s", done.stdout):
                found.setdefault(name, []).append(float(speed))
    for name, each in speeds[1].items():
        print(f"{name:9} {statistics.median(each) / statistics.median(speeds[0][name]):.2f} x", flush=True)


def compare(number: int, options: argparse.Namespace, place: Path, barrier: Any, seconds: Any) -> None:
    """Take the part of a rank; rank 0 prints the GB/s of each transfer, round by round and their median."""
    if options.cores:
        os.cpu_count = lambda: options.cores
    device = torch.device(f"cuda:{number}" if options.device == "cuda" else "cpu")
    store, world, gb = S3Store("b", f"rank{number}"), World(0, 0, 1, device), options.gb
    place = place / str(number)
    place.mkdir()
    weights = torch.randint(0, 255, (int(gb * 1e9),), dtype=torch.uint8).view(torch.bfloat16)
    (file := place / "weights").write_bytes(weights.view(torch.uint8).numpy().data)
    weights = weights.to(device)
    speeds: dict[str, list[float]] = {"save": [], "load": [], "upload": [], "download": []}
    processor: dict[str, float] = {}

    def time_of(name: str, work: Callable[[], T]) -> T:
        barrier.wait()
        result, seconds[number], processor[name] = timed(work)
        barrier.wait()
        speeds[name].append(gb * options.ranks / max(seconds))
        return result

    for step in range(1, options.rounds + 1):
        pieces = {"model.w": Piece.whole(weights)}
        with Checkpointer(store, "run", world, attempt=step, keep_last=1) as checkpointer:
            log = EventLog(place / "events.jsonl", PhaseClock())
            checkpointer.prepare(pieces)
            barrier.wait()  # a save goes on by itself
            checkpointer.save(TrainState(step=step), pieces, log)
            time_of("save", partial(checkpointer.finish, log))
            loaded = {"model.w": Piece.whole(torch.zeros_like(weights))}
            time_of("load", partial(checkpointer.load_latest, loaded, log))
            assert torch.equal(loaded["model.w"].live.view(torch.uint8), weights.view(torch.uint8))
        stored = time_of("upload", partial(upload, store, "artifact", step, file))
        key = f"artifact/{stored.key}"
        time_of("download", partial(download_verified, store, key, stored, place / "copy"))
        store.delete(key)
    if number:
        return
    print(f"{options.ranks} x {gb:g} GB, {os.cpu_count()} cores, code in {sys.modules['trainer'].__path__[0]}")
    for name, each in speeds.items():
        rounded = ", ".join(f"{one:.3f}" for one in each)
        cost = f"{processor[name] / gb:.2f} s of processor time a GB"
        print(f"{name:9} {statistics.median(each):6.3f} GB/s  [{rounded}], {cost}", flush=True)


if __name__ == "__main__":
    main()
