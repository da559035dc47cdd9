"""Token shards, and the order in which training reads them: a pure function of (seed, epoch, step). No torch in this
module.

A shard is a file in llm.c's format: a header of 256 int32 (20240520, 1, number of tokens), then uint16 tokens. Every
document starts with the end-of-text token. A *window* is `block_size + 1` consecutive tokens at stride `block_size`:
inputs and targets of one sequence.

There is no loader state to save. Sequence number g of a run belongs to epoch g // sequences_per_epoch. An epoch
permutes the shards, and then the windows inside each shard. So a run reads one shard after the other: it can start with
its first local shard, and a node needs few shards at a time. An epoch reads every window exactly once. A step reads the
same sequences at every world size: rank r takes the r-th slice of the step. The slices differ by at most one sequence.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice, takewhile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainer.config import ModelConfig, TrainConfig, batch_tokens_at, tokens_before
from trainer.errors import UserError

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256
HEADER_BYTES = 4 * HEADER_INTS


@dataclass(frozen=True)
class Shard:
    """The file name and the number of tokens of a shard, which may not be local yet."""

    name: str
    tokens: int

    def windows(self, block_size: int) -> int:
        return max(0, (self.tokens - 1) // block_size)


def shard_bytes(tokens: int) -> int:
    """The size of the file of a shard."""
    return HEADER_BYTES + 2 * tokens


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write uint16 `tokens` (n,) in llm.c's format."""
    assert tokens.dtype == np.uint16 and tokens.ndim == 1, (tokens.dtype, tokens.shape)
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2", copy=False).tobytes())


def read_shard(shard: Path | BinaryIO) -> np.ndarray:
    """The tokens of a shard, uint16 (n,), memory-mapped. UserError if the file is not a shard, or is truncated.

    An open file is closed, but the map duplicates its descriptor: a lock on it lasts as long as the array.
    """
    with shard.open("rb") if isinstance(shard, Path) else shard as file:
        _count_tokens(file)
        # A plain array: slicing a memmap takes 3 us more, for each of the 512 windows of a step.
        return np.asarray(np.memmap(file, dtype="<u2", mode="r", offset=HEADER_BYTES))


def _count_tokens(file: BinaryIO) -> int:
    """The number of tokens in a shard's header. UserError if the file is not a shard, or is truncated."""
    header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), dtype="<i4")
    if tuple(header[:2]) != (MAGIC, VERSION):
        raise UserError(f"{file.name}: not a token shard (a shard starts with {MAGIC}, {VERSION}); run tokenize again")
    expected, size = shard_bytes(int(header[2])), os.fstat(file.fileno()).st_size
    if size != expected:
        raise UserError(f"{file.name}: {size} bytes, but its header requires {expected}; run tokenize again")
    return int(header[2])


def local_shards(folder: Path, split: str) -> list[Shard]:
    """The shards `<split>_*.bin` of a folder, in order. UserError without any."""
    paths = sorted(folder.glob(f"{split}_*.bin"))
    if not paths:
        raise UserError(f"{folder}: contains no {split}_*.bin shards; give a folder that tokenize wrote")
    return [Shard(path.name, _tokens_in(path)) for path in paths]


def _tokens_in(path: Path) -> int:
    if not path.is_file():
        raise UserError(f"{path}: not a file; remove it, or give a folder that tokenize wrote")
    try:
        with path.open("rb") as file:
            return _count_tokens(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make it readable") from error


class Order:
    """The shard and window of sequence number g of a run: a new permutation for each epoch."""

    def __init__(self, shards: Iterable[Shard], block_size: int, seed: int) -> None:
        self.windows = np.array([s.windows(block_size) for s in shards], dtype=np.int64)
        self.seed = seed
        self.sequences_per_epoch = int(self.windows.sum())
        if self.sequences_per_epoch == 0:
            raise UserError(
                f"tokens: no shard contains {block_size} + 1 tokens; give more text or a smaller model.block_size"
            )
        # A step may use the last windows of one shard and the first of the next.
        self._shard_order = lru_cache(maxsize=2)(self._draw_shard_order)
        self._window_order = lru_cache(maxsize=4)(self._draw_window_order)

    def __getitem__(self, sequence: int) -> tuple[int, int]:
        """(shard index, window index) of sequence number `sequence`, from 0."""
        epoch, position = divmod(sequence, self.sequences_per_epoch)
        order, ends = self._shard_order(epoch)
        nth = int(np.searchsorted(ends, position, side="right"))
        shard = int(order[nth])
        start = int(ends[nth]) - int(self.windows[shard])
        return shard, int(self._window_order(epoch, shard)[position - start])

    def shards_of(self, sequences: range) -> list[int]:
        """The shards of consecutive `sequences`, in the order in which they are read."""
        return [shard for shard, _ in takewhile(lambda visit: visit[1] < sequences.stop, self._visits(sequences.start))]

    def next_shard(self, sequence: int) -> int:
        """The shard that training reads after the shard of `sequence`."""
        return next(shard for shard, _ in islice(self._visits(sequence), 1, None))

    def _visits(self, sequence: int) -> Iterator[tuple[int, int]]:
        """(shard index, first sequence number) for each shard that is read from `sequence` on, without end."""
        while True:
            epoch, position = divmod(sequence, self.sequences_per_epoch)
            order, ends = self._shard_order(epoch)
            nth = int(np.searchsorted(ends, position, side="right"))
            yield int(order[nth]), sequence
            sequence = epoch * self.sequences_per_epoch + int(ends[nth])

    def _draw_shard_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = self._permutation(len(self.windows), epoch)
        return order, np.cumsum(self.windows[order])

    def _draw_window_order(self, epoch: int, shard: int) -> np.ndarray:
        return self._permutation(int(self.windows[shard]), epoch, shard + 1)

    def _permutation(self, n: int, *key: int) -> np.ndarray:
        # RandomState's stream is frozen (NEP 19): an upgrade of numpy does not change the order.
        key_parts = [self.seed & 0xFFFFFFFF, self.seed >> 32, *key]
        return np.random.RandomState(np.array(key_parts, dtype=np.uint32)).permutation(n)


def sequences_of(step: int, model: ModelConfig, train: TrainConfig, rank: int, world_size: int) -> range:
    """The sequence numbers that `rank` reads in update `step`: its slice of the step's, which is not empty if the step
    has at least `world_size` sequences."""
    first, count = tokens_before(step, train) // model.block_size, batch_tokens_at(step, train) // model.block_size
    return slices(range(first, first + count), world_size)[rank]


def slices(sequences: range, count: int) -> list[range]:
    """`sequences` in `count` consecutive parts whose lengths differ by at most one."""
    starts = [len(sequences) * i // count for i in range(count)]
    return [sequences[start:end] for start, end in zip(starts, [*starts[1:], len(sequences)], strict=False)]


def sequence_digest(order: Order, sequences: range) -> int:
    """A checksum of the windows of `sequences`. It is a sum, so it does not depend on their division between ranks."""
    return sum(_window_digest(*order[s]) for s in sequences)


def _window_digest(shard: int, window: int) -> int:
    # 32 bits: the sum over up to 2 million sequences is exact in float64.
    return int.from_bytes(blake2b(f"{shard}:{window}".encode(), digest_size=4).digest(), "little")
