"""Token shards, and the order in which training reads them: a pure function of (seed, epoch, step).

A shard is a file in llm.c's format: 256 int32 of header (20240520, 1, number of tokens), then uint16
tokens; every document starts with the end-of-text token. A *window* is `block_size + 1` neighbouring
tokens at stride `block_size`: inputs and targets of one sequence.

There is no loader state to save. Sequence number g of a run lies in epoch g // sequences_per_epoch;
the epoch's shards are permuted, then the windows inside each shard, so a run can start once the first
shard is local. Every window of the epoch is read exactly once, and a step reads the same sequences at
every world size: rank r takes the r-th equal slice of the step.

A GPU never waits for its text: threads stack the windows of the next micro-batches (64 x 1025 of them take
the host a millisecond), and a stream of their own copies them as they lie in the file, 2 bytes a token, and
widens them on the device.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.config import ModelConfig, TrainConfig, UserError, batch_tokens_at, tokens_before

T = TypeVar("T")

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256
HEADER_BYTES = 4 * HEADER_INTS
AHEAD = 2  # micro-batches that are made ready on a GPU before they are asked for: 1 MB each at 64 x 1024


@dataclass(frozen=True)
class Shard:
    """A shard that may not be local yet: its file name and how many tokens it holds."""

    name: str
    tokens: int

    def windows(self, block_size: int) -> int:
        return max(0, (self.tokens - 1) // block_size)


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write uint16 `tokens` (n,) in llm.c's format."""
    assert tokens.dtype == np.uint16 and tokens.ndim == 1, (tokens.dtype, tokens.shape)
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2", copy=False).tobytes())


def read_shard(path: Path) -> np.ndarray:
    """The tokens of a shard, uint16 (n,), memory-mapped. UserError if it isn't one or is cut off."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    header = np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), dtype="<i4")
    if tuple(header[:2]) != (MAGIC, VERSION):
        raise UserError(f"{path}: not a token shard (it should start with {MAGIC}, {VERSION}); run tokenize again")
    expected = HEADER_BYTES + 2 * int(header[2])
    if path.stat().st_size != expected:
        raise UserError(f"{path}: {path.stat().st_size} bytes where its header says {expected}; run tokenize again")
    # As a plain array: slicing a memmap costs 3 us more, for each of a step's 512 windows.
    return np.asarray(np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES))


def local_shards(folder: Path, split: str) -> list[Shard]:
    """The shards `<split>_*.bin` of a folder, in order. UserError if there are none."""
    paths = sorted(folder.glob(f"{split}_*.bin"))
    if not paths:
        raise UserError(f"{folder}: no {split}_*.bin shards there; point to a folder that tokenize wrote")
    return [Shard(path.name, len(read_shard(path))) for path in paths]


class Order:
    """Which window of which shard is sequence number g of a run: a permutation drawn anew each epoch."""

    def __init__(self, shards: Iterable[Shard], block_size: int, seed: int) -> None:
        self.windows = np.array([s.windows(block_size) for s in shards], dtype=np.int64)
        self.seed = seed
        self.sequences_per_epoch = int(self.windows.sum())
        if self.sequences_per_epoch == 0:
            raise UserError(
                f"tokens: no shard holds a sequence of {block_size} + 1 tokens; "
                "give more text or a smaller model.block_size"
            )
        # The last windows of one shard and the first of the next are in use at once.
        self._shard_order = lru_cache(maxsize=2)(self._draw_shard_order)
        self._window_order = lru_cache(maxsize=4)(self._draw_window_order)

    def __getitem__(self, sequence: int) -> tuple[int, int]:
        """(shard index, window index) of sequence number `sequence`, from 0."""
        epoch, position = divmod(sequence, self.sequences_per_epoch)
        order, ends = self._shard_order(epoch)
        place = int(np.searchsorted(ends, position, side="right"))
        shard = int(order[place])
        start = int(ends[place]) - int(self.windows[shard])
        return shard, int(self._window_order(epoch, shard)[position - start])

    def next_shard(self, sequence: int) -> int:
        """The shard that is read after the one of `sequence`: what to prefetch."""
        epoch, position = divmod(sequence, self.sequences_per_epoch)
        _, ends = self._shard_order(epoch)
        end = int(ends[np.searchsorted(ends, position, side="right")])
        return self[epoch * self.sequences_per_epoch + end][0]

    def _draw_shard_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = self._permutation(len(self.windows), epoch)
        return order, np.cumsum(self.windows[order])

    def _draw_window_order(self, epoch: int, shard: int) -> np.ndarray:
        return self._permutation(int(self.windows[shard]), epoch, shard + 1)

    def _permutation(self, n: int, *key: int) -> np.ndarray:
        # RandomState's stream is frozen (NEP 19): the order survives an upgrade of numpy.
        words = [self.seed & 0xFFFFFFFF, self.seed >> 32, *key]
        return np.random.RandomState(np.array(words, dtype=np.uint32)).permutation(n)


def sequences_of(step: int, model: ModelConfig, train: TrainConfig, rank: int, world_size: int) -> range:
    """The sequence numbers that `rank` reads in update `step`: its slice of the step's."""
    share = batch_tokens_at(step, train) // model.block_size // world_size
    first = tokens_before(step, train) // model.block_size + rank * share
    return range(first, first + share)


class TokenData:
    """One split: its shards, fetched when first read, and the next one prefetched meanwhile.

    `fetch(name)` returns a local path, blocking until the file is there and verified.
    """

    def __init__(self, shards: list[Shard], fetch: Callable[[str], Path], block_size: int, seed: int) -> None:
        self.shards, self.fetch, self.block_size = shards, fetch, block_size
        self.order = Order(shards, block_size, seed)
        self._tokens: dict[int, np.ndarray] = {}
        self._fetching = [threading.Lock() for _ in shards]
        self._prefetched: set[int] = set()
        self._feed: GpuFeed | None = None

    def window(self, shard: int, window: int) -> np.ndarray:
        """The `block_size + 1` tokens of one window, uint16."""
        start = window * self.block_size
        return self._shard(shard)[start : start + self.block_size + 1]

    def micro_batches(
        self, sequences: range, micro_batch_size: int, device: torch.device, then: range = range(0)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets, int64 (micro_batch_size, block_size) each, for the given sequence numbers.

        `then`: the sequences that are likely to be asked for next. On a GPU the first of them are made ready too.
        """
        parts, next_parts = (cut(several, micro_batch_size) for several in (sequences, then))
        if device.type == "cuda":
            self._feed = self._feed or GpuFeed(self._windows, device)
            yield from self._feed.batches(parts, next_parts)
        else:
            yield from (to_device(self._windows(part), device) for part in parts)
        self._prefetch(self.order.next_shard(sequences[-1]))

    def _windows(self, sequences: range) -> np.ndarray:
        """uint16 (len(sequences), block_size + 1)."""
        return np.stack([self.window(*self.order[s]) for s in sequences])

    def digest(self, sequences: range) -> int:
        """See `sequence_digest`."""
        return sequence_digest(self.order, sequences)

    def _shard(self, index: int) -> np.ndarray:
        with self._fetching[index]:
            if index not in self._tokens:
                tokens = read_shard(self.fetch(self.shards[index].name))
                if len(tokens) != self.shards[index].tokens:
                    raise UserError(
                        f"{self.shards[index].name}: {len(tokens)} tokens where {self.shards[index].tokens} "
                        "were announced; run tokenize again"
                    )
                self._tokens[index] = tokens
            return self._tokens[index]

    def _prefetch(self, index: int) -> None:
        if index not in self._tokens and index not in self._prefetched:
            self._prefetched.add(index)
            threading.Thread(target=self._read_ahead, args=(index,), daemon=True).start()

    def _read_ahead(self, index: int) -> None:
        # A failed prefetch is no news: the read that needs the shard fetches again and reports.
        with suppress(Exception):
            self._shard(index)


class GpuFeed:
    """Copies micro-batches to a GPU on a stream of its own. `windows` stacks those of a range, uint16 (B, T + 1)."""

    def __init__(self, windows: Callable[[range], np.ndarray], device: torch.device) -> None:
        self.windows, self.device, self.stream = windows, device, torch.cuda.Stream(device)
        self.ahead = Ahead(self._copied)

    def batches(self, parts: list[range], then: list[range]) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches of `parts`, each ready for the stream that is current when it is asked for."""
        for tokens, targets, copied in self.ahead.each(parts, then):
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in (tokens, targets):
                tensor.record_stream(stream)  # or its memory would be given to the next copy while it is read
            yield tokens, targets

    def _copied(self, part: range) -> tuple[Tensor, Tensor, torch.cuda.Event]:
        windows = self.windows(part)
        with torch.cuda.stream(self.stream):
            return *to_device(windows, self.device), self.stream.record_event()


class Ahead(Generic[T]):
    """Makes what ranges of sequences stand for in threads, before it is asked for.

    It remembers only what it has begun: a range that is not asked for after all is forgotten with the next step.
    """

    def __init__(self, make: Callable[[range], T]) -> None:
        self.make = make
        self._begun: dict[range, Future[T]] = {}

    def each(self, parts: list[range], then: list[range]) -> Iterator[T]:
        """Of each of `parts` what `make` makes of it, the next ones (`then` behind the last) under way meanwhile."""
        coming = parts + then[:AHEAD]
        self._begun = {part: future for part, future in self._begun.items() if part in coming}
        for place, part in enumerate(parts):
            for later in coming[place : place + 1 + AHEAD]:
                self._begin(later)
            yield self._begun.pop(part).result()

    def _begin(self, part: range) -> None:
        if part not in self._begun:
            self._begun[part] = Future()
            # A daemon: a shard that does not come must not keep a process that is to leave.
            threading.Thread(target=self._run, args=(part, self._begun[part]), daemon=True).start()

    def _run(self, part: range, future: Future[T]) -> None:
        try:
            future.set_result(self.make(part))
        except Exception as error:  # raised where the result is needed
            future.set_exception(error)


def cut(sequences: range, size: int) -> list[range]:
    """Neighbouring pieces of `size` sequences."""
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


def to_device(windows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """uint16 windows (B, T + 1) -> int64 inputs and targets (B, T) on `device`. Waits for no GPU."""
    if device.type != "cuda":
        tokens = torch.from_numpy(windows.astype(np.int64)).to(device)
        return tokens[:, :-1], tokens[:, 1:]
    # torch can do little with uint16: as int16 the upper half of the ids is negative until it is masked.
    narrow = torch.from_numpy(windows.view(np.int16)).pin_memory().to(device, non_blocking=True)
    inputs, targets = (part.to(torch.int64).bitwise_and_(0xFFFF) for part in (narrow[:, :-1], narrow[:, 1:]))
    return inputs, targets


def sequence_digest(order: Order, sequences: range) -> int:
    """A sum over the windows that are read, so that it doesn't depend on which rank reads which."""
    return sum(_window_digest(*order[s]) for s in sequences)


def _window_digest(shard: int, window: int) -> int:
    # 32 bits: a step's sum over up to 2 million sequences stays exact in a float64.
    return int.from_bytes(blake2b(f"{shard}:{window}".encode(), digest_size=4).digest(), "little")
