"""A checkpoint's pieces: which ranges of which tensors a rank stores, and their copy in host memory.

A file of a checkpoint is a safetensors file of flattened tensors, or of contiguous pieces or rectangles of them. A rank
stores the pieces that only it holds. The ranks divide the pieces that all of them hold. So nothing is gathered and
nothing is stored twice. The header gives the place of each piece in the format of torch.distributed.checkpoint, which
can load such a folder, too, unless a rank has several pieces of one tensor (`tensor_of`). A rank reads only the ranges
that it needs, so a run can resume at any world size from the checkpoint of any other (trainer/checkpoint/loading.py).
Nothing is pickled.
"""

import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.base.places import Place
from trainer.optim.optimizers import AdamW

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# torch.distributed.checkpoint.hf_storage reads each tensor's "saved_offsets" under this key; "shape" is our addition.
SHARDING = "DCP_SHARDING_INFO"
# Largest gap, in elements, between two tensors of one buffer that are copied together.
MAX_GAP = 4096
# Bytes of one copy of several tensors, and of an allocation in host memory: torch rounds pinned memory up to a power of
# two. Alone, the 873 tensors of a rank of 6.9B took a third more than their bytes.
MAX_COPY_BYTES = 1 << 29
ALIGNED = 64  # bytes of a tensor in an allocation


@dataclass(frozen=True)
class Piece:
    """A range of a flattened tensor or a rectangle of a matrix, as this rank holds it."""

    live: Tensor  # (n,), a view of the memory that training changes
    start: int  # index of its first element in the flattened tensor
    shape: tuple[int, ...]  # of the whole tensor
    replicated: bool  # every rank holds an identical piece
    stored: bool = True  # by this rank; False: another one holds an identical piece, and stores it
    rows: int = 1  # of a rectangle

    @classmethod
    def whole(cls, tensor: Tensor) -> "Piece":
        """A contiguous tensor that every rank holds."""
        return cls(tensor.detach().view(-1), 0, tuple(tensor.shape), replicated=True)

    @property
    def end(self) -> int:
        return self.place.end

    @property
    def place(self) -> Place:
        n = self.live.numel()
        return Place(self.start, n) if self.rows == 1 else Place(self.start, n // self.rows, self.rows, self.shape[-1])


def tensor_of(key: str) -> str:
    """The name of a piece's tensor: a rank that holds several pieces of it names them NAME, NAME#1, NAME#2."""
    return key.partition("#")[0]


def training_tensors(model: torch.nn.Module, optimizer: AdamW) -> dict[str, Piece]:
    """Weights and the optimizer's state under stable names. They share memory with the tensors of the training."""
    kinds: dict[str, Mapping[Tensor, Tensor]] = {"model": {p: p for p in model.parameters()}, **optimizer.state()}
    found = {
        f"{kind}.{name}": Piece.whole(tensors[p])
        for kind, tensors in kinds.items()
        for name, p in model.named_parameters()
        if p in tensors
    }
    return found | {f"squares.{name}": Piece.whole(squares) for name, squares in optimizer.squares.items()}


def share_of(pieces: dict[str, Piece], rank: int, world_size: int) -> list[str]:
    """Names of the pieces that `rank` stores: its own ones, and a share of about equal bytes of the replicated ones."""
    load = [0] * world_size
    shares: list[list[str]] = [[] for _ in range(world_size)]
    replicated = {name: piece.live.nbytes for name, piece in pieces.items() if piece.replicated}
    for name in sorted(replicated, key=lambda n: (-replicated[n], n)):
        least = load.index(min(load))
        shares[least].append(name)
        load[least] += replicated[name]
    return shares[rank] + [n for n in pieces if n not in replicated and pieces[n].stored]


class HostCopy:
    """A copy of the pieces that this rank stores, in host memory that is allocated once.

    A thread pins that memory beforehand: 19 GB took 10 s. On a GPU the copy runs on its own stream, next to forward and
    backward of the next step; only the next update waits for it, see `before_update`. Neighbouring pieces, such as
    all pieces of a flat buffer, are copied together: 1,740 copies are more than the driver queues, and launching them
    took as long as copying.
    """

    def __init__(self, pieces: dict[str, Piece], rank: int, world_size: int) -> None:
        self.pieces = {name: pieces[name] for name in share_of(pieces, rank, world_size)}
        on_gpu = any(piece.live.device.type == "cuda" for piece in self.pieces.values())
        self._stream = torch.cuda.Stream() if on_gpu else None
        self._taken: torch.cuda.Event | None = None
        pool = ThreadPoolExecutor(1, thread_name_prefix="pin")
        self._host = pool.submit(self._allocate)
        pool.shutdown(wait=False)

    def _allocate(self) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """The host tensor of each piece, and the (host, live) pairs of the copies."""
        if self._stream:
            torch.cuda.set_device(self._stream.device)  # a new thread starts on device 0
        runs: list[tuple[list[str], Tensor]] = []
        for names in contiguous_runs({name: piece.live for name, piece in self.pieces.items()}):
            first, last = (self.pieces[name].live for name in (names[0], names[-1]))
            runs.append(
                (names, first.as_strided((last.storage_offset() + last.numel() - first.storage_offset(),), (1,)))
            )
        sizes = [-(-live.nbytes // ALIGNED) * ALIGNED for _, live in runs]
        left, buffer = sum(sizes), torch.empty(0)
        host_tensors: dict[str, Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for (names, live), size in zip(runs, sizes, strict=True):
            if size > len(buffer):
                bytes_ = max(size, min(left, MAX_COPY_BYTES))
                buffer = torch.empty(bytes_, dtype=torch.uint8, pin_memory=self._stream is not None)
            host, buffer, left = buffer[: live.nbytes].view(live.dtype), buffer[size:], left - size
            copies.append((host, live))
            for name in names:
                t = self.pieces[name].live
                offset = t.storage_offset() - live.storage_offset()
                host_tensors[name] = host[offset : offset + t.numel()]
        return {name: host_tensors[name] for name in self.pieces}, copies

    def take(self) -> None:
        """Copy the live pieces. On a GPU: start to copy them."""
        if self._stream is None:
            self._copy(non_blocking=False)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(non_blocking=True)
            self._taken = self._stream.record_event()

    def _copy(self, non_blocking: bool) -> None:
        for host, live in self._host.result()[1]:
            host.copy_(live, non_blocking=non_blocking)

    def before_update(self) -> None:
        """Make the GPU finish the copy before it changes the live pieces. The host does not wait."""
        if self._taken:
            torch.cuda.current_stream().wait_event(self._taken)

    def safetensors(self) -> list[memoryview]:
        """The copy as the parts of a safetensors file (format: 8 bytes of length, JSON header, raw data)."""
        if self._taken:
            self._taken.synchronize()
        host, end = self._host.result()[0], 0
        header: dict[str, Any] = {}
        sharding: dict[str, Any] = {}
        for name, t in host.items():
            start, end = end, end + t.nbytes
            place, shape = self.pieces[name].place, self.pieces[name].shape
            flat = place.count == 1
            offsets = [place.start] if flat else list(divmod(place.start, place.stride))
            held = [place.run] if flat else [place.count, place.run]
            sharding[name] = {"saved_offsets": offsets, "shape": list(shape)}
            header[name] = {"dtype": DTYPES[t.dtype], "shape": held, "data_offsets": [start, end]}
        header["__metadata__"] = {SHARDING: json.dumps(sharding)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        data = [t.view(torch.uint8).numpy().data for t in host.values()]
        return [memoryview(struct.pack("<Q", len(text)) + text), *data]


def contiguous_runs(tensors: dict[str, Tensor]) -> list[list[str]]:
    """The names of contiguous tensors, grouped into runs of neighbours in one buffer, up to MAX_COPY_BYTES each."""

    def position(name: str) -> tuple[int, str, int]:
        t = tensors[name]
        return t.untyped_storage().data_ptr(), str(t.dtype), int(t.storage_offset())

    runs: list[list[str]] = []
    end, start = (0, "", 0), 0
    for name in sorted(tensors, key=position):
        t, at = tensors[name], position(name)
        neighbour = at[:2] == end[:2] and 0 <= at[2] - end[2] <= MAX_GAP
        if not neighbour or (at[2] + t.numel() - start) * t.itemsize > MAX_COPY_BYTES:
            runs.append([])
            start = at[2]
        runs[-1].append(name)
        end = (*at[:2], at[2] + t.numel())
    return runs


class DamagedPieces(ValueError):
    """Files that do not hold the pieces exactly once, or that lie about them."""
