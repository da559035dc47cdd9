"""Loading a checkpoint: several threads fetch its chunks, verify them and copy them into the pieces.

A rank fetches only the chunks with ranges that it needs. Each passes through a small buffer, part by part, while it is
hashed: a buffer for whole chunks in each thread is new memory, whose page faults took as long as the transfer of 2 GB.
Nothing goes through the disk.
"""

import json
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.base.parallel import World
from trainer.base.places import Place
from trainer.base.record import MOST_COUNT, DamagedRecord
from trainer.base.store import Store, Take, read_again, side_by_side
from trainer.checkpoint.commits import FileReceipt
from trainer.checkpoint.pieces import DTYPES, SHARDING, DamagedPieces, Piece, tensor_of
from trainer.config.errors import NotAFile

# Of a thread's buffer; and of the ranges of a file's first chunk, which come side by side, because all else waits.
# Smaller buffers take more turns of Python's lock, larger ones longer to pin.
RANGE_BYTES = 2 << 20
MOST_DIMENSIONS = 8  # of a tensor: the product of a million huge numbers would take minutes
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """A piece of a tensor, as a file holds it."""

    place: Place
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]  # of the whole tensor
    offset: int  # of its first byte in the file


Contents = dict[str, Held]  # of a file, by tensor


@dataclass(frozen=True)
class Span:
    """Bytes `start` to `end` of a file that belong to a piece; the first of them is the piece's byte `at`."""

    start: int
    end: int
    name: str
    at: int


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `end` of the file with this index in the checkpoint."""

    file: int
    number: int
    start: int
    end: int


def load_files(
    store: Store, folder: str, files: Sequence[FileReceipt], pieces: dict[str, Piece], world: World
) -> str | None:
    """Fill `pieces` from the files of a checkpoint. Returns a description of the damage on every rank, None without.

    After a damage the pieces are zero. Errors of the store are raised: they are no damage. A collective call.
    """
    source = Source(store, folder, files)
    sinks: dict[str, Sink] = {}

    def read_headers() -> dict[int, Contents]:
        return {file: source.contents(file) for file in range(world.rank, len(files), world.world_size)}

    def fill() -> None:
        contents = [next(one[file] for one in found if file in one) for file in range(len(files))]
        spans = spans_of(pieces, contents, sinks)
        run_jobs(jobs_of(files, spans), source, sinks, buffers.result(), world.device)

    readers = min(store.connections, sum(len(receipt.chunks) for receipt in files))
    with ThreadPoolExecutor(1) as pool:
        buffers = pool.submit(buffers_of, readers, world.device)  # beside the headers
        found, damage = agreed(world, read_headers)
        damage = damage or agreed(world, fill)[1]
    for name, piece in pieces.items():
        if damage:
            piece.live.zero_()
        else:
            sinks[name].finish()
    return damage


def agreed(world: World, work: Callable[[], T]) -> tuple[list[T], str | None]:
    """What `work` gave on every rank, and the first damage that any of them found. A collective call.

    Work raises damage once it has read again, see `read_again`."""
    result: Any = None
    damage = None
    try:
        result = work()
    except (DamagedPieces, DamagedRecord, NotAFile) as error:
        damage = str(error)
    answers = world.gather((result, damage))
    return [one for one, _ in answers], next((damage for _, damage in answers if damage), None)


class Source:
    """The files of a checkpoint in the store."""

    def __init__(self, store: Store, folder: str, files: Sequence[FileReceipt]) -> None:
        self.store, self.folder, self.files = store, folder, files
        self._first: dict[int, memoryview] = {}  # by file: the verified chunk with its header, until it is needed again

    def contents(self, file: int) -> Contents:
        """What a file holds, by its verified header."""
        receipt = self.files[file]
        first = chunks_of(receipt, file)[:1]
        if not first:
            raise DamagedPieces(f"{receipt.name}: is empty")
        buffer = memoryview(bytearray(first[0].end))

        def read(at: int) -> int:
            return self._read(first[0], at, buffer[at : at + RANGE_BYTES])

        def read_chunk() -> None:
            self._verify(first[0], sum(side_by_side(read, range(0, len(buffer), RANGE_BYTES))), sha256(buffer))

        read_again(self.store, read_chunk, DamagedPieces)
        self._first[file] = buffer
        return contents_of(receipt, buffer)

    def fetch(self, chunk: Chunk, buffer: memoryview, take: Take) -> None:
        """Read a chunk through the buffer: `take` gets its parts, in the buffer, and the place of each in the chunk.
        DamagedPieces after the last one if they are not what was saved."""
        if not chunk.number and (known := self._first.pop(chunk.file, None)):
            for at in range(0, len(known), len(buffer)):
                part = known[at : at + len(buffer)]
                buffer[: len(part)] = part
                take(at, buffer[: len(part)])
            return
        digest = sha256()

        def hash_and_take(at: int, part: memoryview) -> None:
            nonlocal digest
            digest = digest if at else sha256()  # each read begins again
            digest.update(part)
            take(at, part)

        def read_chunk() -> None:
            self._verify(chunk, self._read(chunk, 0, buffer, chunk.end - chunk.start, hash_and_take), digest)

        read_again(self.store, read_chunk, DamagedPieces)

    def _read(self, chunk: Chunk, at: int, buffer: memoryview, *through: Any) -> int:
        try:
            name = self.files[chunk.file].name
            return self.store.read_into(f"{self.folder}/{name}", chunk.start + at, buffer, *through)
        except (FileNotFoundError, NotAFile) as error:
            raise DamagedPieces(f"a file is missing: {error}") from error

    def _verify(self, chunk: Chunk, count: int, digest: Any) -> None:
        receipt = self.files[chunk.file]
        if count != chunk.end - chunk.start or digest.hexdigest() != receipt.chunks[chunk.number]:
            raise DamagedPieces(
                f"{receipt.name}: bytes {chunk.start:,} to {chunk.end:,} do not have the sha256 in COMMIT.json"
            )


def chunks_of(receipt: FileReceipt, file: int) -> list[Chunk]:
    """The chunks of a file, all but the last one of equal length. DamagedPieces if their hashes are of another file."""
    length = receipt.chunk_bytes
    starts = range(0, receipt.size, length)
    if len(starts) != len(receipt.chunks):
        raise DamagedPieces(f"{receipt.name}: COMMIT.json has {len(receipt.chunks)} hashes for {len(starts)} chunks")
    return [Chunk(file, number, at, min(at + length, receipt.size)) for number, at in enumerate(starts)]


def contents_of(receipt: FileReceipt, start_of_file: memoryview) -> Contents:
    """What a file holds, by its first bytes. DamagedPieces for a header that lies."""
    try:
        (size,) = struct.unpack_from("<Q", start_of_file)
        header = json.loads(bytes(start_of_file[8 : 8 + size]))
        found: Contents = {}
        for name, sharding in json.loads(header["__metadata__"][SHARDING]).items():
            offsets, counts, (first, last) = (
                sharding["saved_offsets"],
                header[name]["shape"],
                header[name]["data_offsets"],
            )
            shape, dtype = tuple(sharding["shape"]), header[name]["dtype"]
            if dtype not in TORCH_DTYPES:
                raise ValueError(f"{name} holds {dtype}, no weights or moments")
            numbers = (*offsets, *counts, first, last, *shape)
            if len(shape) > MOST_DIMENSIONS or not all(type(n) is int and 0 <= n <= MOST_COUNT for n in numbers):
                raise ValueError(f"{name} is at no place")
            if len(offsets) == 1:  # of the flattened tensor
                offsets, counts, rows, width = (0, *offsets), (1, *counts), 1, math.prod(shape)
            else:
                rows, width = shape
            (top, left), (count, run) = offsets, counts
            inside = 8 + size + last <= receipt.size and top + count <= rows and left + run <= width
            if not inside or last - first != count * run * TORCH_DTYPES[dtype].itemsize:
                raise ValueError(f"{name} has another length than its place")
            found[name] = Held(Place(top * width + left, run, count, max(1, width)), dtype, shape, 8 + size + first)
        return found
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedPieces(f"{receipt.name}: {error!r}") from error


def spans_of(pieces: Mapping[str, Piece], contents: Sequence[Contents], sinks: "dict[str, Sink]") -> list[list[Span]]:
    """The bytes of each file that a rank needs; and where those of each piece go, into `sinks`. DamagedPieces if the
    files do not hold all pieces exactly once."""
    by_tensor: dict[str, list[tuple[int, Held]]] = {}
    for file, one in enumerate(contents):
        for name, held in one.items():
            by_tensor.setdefault(tensor_of(name), []).append((file, held))
    found: list[list[Span]] = [[] for _ in contents]
    for name, piece in pieces.items():
        parts, dtypes = [], set()
        for file, held in by_tensor.get(tensor_of(name), ()):
            if held.shape != piece.shape:
                raise DamagedPieces(f"{name} is {list(held.shape)}; this version's is {piece.shape}")
            dtypes.add(held.dtype)
            parts += [(to, start, count, file, held) for start, to, count in held.place.shared(piece.place)]
        at, parts = 0, sorted(parts, key=lambda part: part[:4])
        for to, start, count, file, held in parts:
            at = to + count if to == at else -1  # a gap, or twice
            size = TORCH_DTYPES[held.dtype].itemsize
            found[file].append(Span(held.offset + start * size, held.offset + (start + count) * size, name, to * size))
        if at < piece.live.numel() or len(dtypes) > 1:
            raise DamagedPieces(f"{name} is incomplete, or held twice; another model or version may have made it")
        sinks[name] = Sink(piece.live, TORCH_DTYPES[dtypes.pop()] if dtypes else piece.live.dtype)
    return found


class Sink:
    """The bytes of a piece, as the files hold it."""

    def __init__(self, live: Tensor, stored: torch.dtype) -> None:
        self.live = live
        direct = live.dtype == stored and live.is_contiguous()
        self.staged = None if direct else torch.empty(live.numel(), dtype=stored)
        self.bytes = (live if self.staged is None else self.staged).view(torch.uint8)
        self.array = self.bytes.numpy() if self.bytes.device.type == "cpu" else None

    def put(self, at: int, data: Tensor) -> None:
        """Copy bytes to the place `at`. On a GPU in the current stream: `data` must stay until it is through."""
        if self.array is not None:
            self.array[at : at + len(data)] = data.numpy()  # unlike copy_, this starts no threads of its own
        else:
            self.bytes[at : at + len(data)].copy_(data, non_blocking=data.is_pinned())

    def finish(self) -> None:
        """Make the piece from what arrived in another type."""
        if self.staged is not None:
            self.live.copy_(self.staged)


@dataclass(frozen=True)
class Job:
    """A chunk with bytes of this rank's pieces."""

    chunk: Chunk
    spans: tuple[Span, ...]


def jobs_of(files: Sequence[FileReceipt], spans: Sequence[Sequence[Span]]) -> list[Job]:
    """The chunks that a rank needs."""
    jobs = []
    for file, receipt in enumerate(files):
        chunks = by_chunk(spans[file], receipt.chunk_bytes)
        jobs += [
            Job(chunk, tuple(chunks[chunk.number])) for chunk in chunks_of(receipt, file) if chunk.number in chunks
        ]
    return jobs


def by_chunk(spans: Sequence[Span], length: int) -> dict[int, list[Span]]:
    """The spans by the chunks of a file that hold some of their bytes."""
    found: dict[int, list[Span]] = {}
    for span in spans:
        for number in range(span.start // length, (span.end - 1) // length + 1):
            found.setdefault(number, []).append(span)
    return found


def buffers_of(readers: int, device: torch.device) -> Tensor:
    """A buffer for each reader. Pinned at once: the driver pins for one thread at a time."""
    on_gpu = device.type == "cuda" and readers > 0
    if on_gpu:
        torch.cuda.set_device(device)  # a new thread starts on device 0
    return torch.empty(readers, RANGE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)


def run_jobs(
    jobs: Sequence[Job], source: Source, sinks: Mapping[str, Sink], buffers: Tensor, device: torch.device
) -> None:
    """Do all jobs in some threads, one for each buffer. Raises the error of one that fails."""
    left, lock, failed, started = iter(jobs), threading.Lock(), threading.Event(), threading.Event()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)  # the threads copy on streams of their own

    def next_job() -> Job | None:
        with lock:
            return None if failed.is_set() else next(left, None)

    def work(buffer: Tensor) -> None:
        started.wait()
        if on_gpu:
            torch.cuda.set_device(device)  # a new thread starts on device 0
        stream = torch.cuda.Stream(device) if on_gpu else None
        copied = torch.cuda.Event(blocking=True) if on_gpu else None
        try:
            with torch.cuda.stream(stream):  # None: no effect
                while job := next_job():
                    do_job(job, source, sinks, buffer, copied)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max(1, len(jobs)), thread_name_prefix="load") as pool:
        try:
            futures = [pool.submit(work, buffer) for buffer in buffers[: len(jobs)]]
        finally:
            started.set()  # all at once: beside threads that work, the start of each one waits for Python's lock
        for future in futures:
            future.result()


def do_job(
    job: Job, source: Source, sinks: Mapping[str, Sink], buffer: Tensor, copied: "torch.cuda.Event | None"
) -> None:
    """Get a chunk through the buffer, and copy its bytes into the pieces. On a GPU in the current stream: the event
    sleeps until a part is there, where a stream's own wait keeps a core busy."""
    start, end = job.chunk.start, job.chunk.end
    inside = [
        Span(max(0, span.start - start), min(span.end, end) - start, span.name, span.at + max(0, start - span.start))
        for span in job.spans
    ]
    spans = by_chunk(inside, len(buffer))

    def take(at: int, part: memoryview) -> None:
        for span in spans.get(at // len(buffer), ()):
            first, last = max(span.start, at), min(span.end, at + len(part))
            sinks[span.name].put(span.at + first - span.start, buffer[first - at : last - at])
        if copied:
            copied.record()
            copied.synchronize()  # the next part takes its place

    source.fetch(job.chunk, buffer.numpy().data, take)
