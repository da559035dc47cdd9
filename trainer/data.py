"""The text of a run as batches: shards are fetched when they are first read, and a GPU never waits for its text.

Threads stack the windows (trainer/shards.py) of the next micro-batches (64 x 1025 of them take the host a
millisecond), and a stream of their own copies them as they lie in the file, 2 bytes a token, and widens them on the
device.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.shards import Order, Shard, read_shard, sequence_digest

T = TypeVar("T")
AHEAD = 2  # micro-batches that are made ready on a GPU before they are asked for: 1 MB each at 64 x 1024


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
        self, sequences: range, micro_batch_size: int, device: torch.device, upcoming: range = range(0)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets, int64 (micro_batch_size, block_size) each, for the given sequence numbers.

        `upcoming`: the sequences that the next call will probably request. On a GPU the first of them are prefetched.
        """
        batches, upcoming_batches = (cut(several, micro_batch_size) for several in (sequences, upcoming))
        if device.type == "cuda":
            self._feed = self._feed or GpuFeed(self._windows, device)
            yield from self._feed.batches(batches, upcoming_batches)
        else:
            yield from (to_device(self._windows(batch), device) for batch in batches)
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
