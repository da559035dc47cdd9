"""Batches of a run: shards are fetched as the read position gets to them, and a GPU never waits for its tokens.

Threads stack the windows (trainer/data/shards.py) of the next micro-batches: for 64 x 1025 tokens that takes the host a
millisecond. A separate stream copies them in the form of the file, 2 or 4 bytes a token, and widens them on the device.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from trainer.config.amounts import micro_batch_count
from trainer.data.packing import packed
from trainer.data.shard_maps import MOST_MAPPED, Fetch, ShardMaps
from trainer.data.shards import Mixture, Shard, check_ids, slices

PREFETCHED = 2  # micro-batches prefetched to a GPU: 1 MB each at 64 x 1024


class TokenData:
    """The tokens of one split. A shard is fetched when it is read; the next one, and the shards of the next step, are
    prefetched in the background.

    `weights` are those of the sources of a mixture, `eot` begins the documents of packed shards.
    UserError for a shard with an id outside the vocabulary: here, or before its first token is read. For `fetch`, see
    `ShardMaps`.
    """

    def __init__(
        self,
        shards: list[Shard],
        fetch: Fetch,
        block_size: int,
        seed: int,
        vocab_size: int = 1 << 32,
        weights: Sequence[float] = (),
        eot: int | None = None,
    ) -> None:
        check_ids(shards, vocab_size)
        self.shards, self.block_size = shards, block_size
        self.order = Mixture(shards, block_size, seed, weights)
        assert eot is not None or all(shard.rows is None for shard in shards), "packed shards need their <|endoftext|>"
        pack = partial(packed, eot=eot or 0, row_tokens=block_size + 1)
        self._maps = ShardMaps(shards, fetch, vocab_size, pack, MOST_MAPPED + 2 * len(weights))
        self._dtype = np.uint32 if any(shard.token_bytes == 4 for shard in shards) else np.uint16
        self._feed: GpuFeed | None = None
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext  # entered while a shard is awaited

    def windows(self, places: Sequence[tuple[int, int]]) -> np.ndarray:
        """The tokens of windows, each given as (shard index, window index): (len(places), block_size + 1), uint16, or
        uint32 if a shard has them."""
        rows = np.empty((len(places), self.block_size + 1), self._dtype)
        for row, (index, window) in zip(rows, places, strict=True):
            shard, start = self._maps.shard(index), window * self.block_size
            if shard.rows:
                shard.rows.fill(window, shard.tokens, row)
            else:
                row[:] = shard.tokens[start : start + self.block_size + 1]
        return rows

    def first_windows(self, count: int) -> list[tuple[int, int]]:
        """The first windows of the split, up to `count`, as (shard index, window index); of a mixture the first ones of
        each source, in proportion."""
        places: list[tuple[int, int]] = []
        for source, share in enumerate(self.order.shares):
            mine = (
                (s, w)
                for s, shard in enumerate(self.shards)
                if shard.source == source
                for w in range(shard.windows(self.block_size))
            )
            places += islice(mine, max(1, int(count * (share / self.order.period))))
        return places

    def micro_batches(
        self, sequences: range, micro_batch_size: int, device: torch.device, upcoming: range = range(0)
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets, int64 (B, block_size) each, for the given sequence numbers.

        They come in the fewest micro-batches with B up to `micro_batch_size`, whose B differ by at most one.

        `upcoming`: the sequences that the next call will probably request. On a GPU the first of them are prefetched.
        """
        present = self.order.shards_of(sequences)
        following = upcoming or sequences[-1:]
        coming = [*self.order.shards_of(upcoming), *self.order.next_shards(following[-1])]
        self._maps.keep({*present, *coming})
        self._bring(sequences)
        batches, upcoming_batches = (
            slices(several, micro_batch_count(len(several), micro_batch_size)) for several in (sequences, upcoming)
        )
        if device.type == "cuda":
            self._feed = self._feed or GpuFeed(self._windows, device)
            yield from self._feed.batches(batches, upcoming_batches)
        else:
            yield from (to_device(self._windows(batch), device) for batch in batches)
        self._maps.prefetch(coming)

    def failure(self, sequences: range) -> Exception | None:
        """Map the shards of `sequences`. The error if one of them cannot be had; None if all can be read."""
        try:
            self._bring(sequences)
            for shard in self.order.shards_of(sequences):
                self._maps.shard(shard)
        except Exception as error:
            return error
        return None

    def is_late(self, sequences: range) -> bool:
        """Whether a read of these sequences would wait for one of their first shards."""
        return any(not self._maps.has(shard) for shard in self._first_shards(sequences))

    def _bring(self, sequences: range) -> None:
        """Wait for the first shards of these sequences: more of them would push each other out."""
        if self.is_late(sequences):
            with self.waiting():
                for shard in self._first_shards(sequences):
                    self._maps.shard(shard)

    def _first_shards(self, sequences: range) -> list[int]:
        return self.order.shards_of(sequences)[: MOST_MAPPED // 2]

    def _windows(self, sequences: range) -> np.ndarray:
        """The tokens of sequences, as `windows` gives them."""
        return self.windows([self.order[s] for s in sequences])

    def checksum(self, sequences: range) -> int:
        """The sum of the CRC-32s of the windows of `sequences`: it does not depend on their division between ranks, and
        float64 holds it exactly for 2 million of them."""
        return sum(map(crc32, self._windows(sequences)))


class GpuFeed:
    """Copies micro-batches to a GPU on a separate stream, in threads, before they are needed. `windows` stacks those of
    a range, (B, T + 1).

    It holds only unfinished and prefetched micro-batches. The next step drops those that it does not use.
    """

    def __init__(self, windows: Callable[[range], np.ndarray], device: torch.device) -> None:
        self.windows, self.device, self.stream = windows, device, torch.cuda.Stream(device)
        self._futures: dict[range, Future[tuple[Tensor, Tensor, torch.cuda.Event]]] = {}

    def batches(self, ranges: list[range], upcoming: list[range]) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches of `ranges`, each ready for the stream that is current at its `next`. Meanwhile threads
        copy the next ones, at the end those of `upcoming`."""
        queue = ranges + upcoming[:PREFETCHED]
        self._futures = {sequences: future for sequences, future in self._futures.items() if sequences in queue}
        for i, sequences in enumerate(ranges):
            for later in queue[i : i + 1 + PREFETCHED]:
                if later not in self._futures:
                    self._futures[later] = Future()
                    # A daemon thread: a shard that does not arrive must not keep the process from exiting.
                    threading.Thread(target=self._copy, args=(later, self._futures[later]), daemon=True).start()
            tokens, targets, copied = self._futures.pop(sequences).result()
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in (tokens, targets):
                tensor.record_stream(stream)  # otherwise the next copy could reuse its memory while it is read
            yield tokens, targets

    def _copy(self, sequences: range, future: "Future[tuple[Tensor, Tensor, torch.cuda.Event]]") -> None:
        try:
            windows = self.windows(sequences)
            with torch.cuda.stream(self.stream):
                future.set_result((*to_device(windows, self.device), self.stream.record_event()))
        except Exception as error:  # raised where the result is needed
            future.set_exception(error)


def to_device(windows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Unsigned windows (B, T + 1) -> int64 inputs and targets (B, T) on `device`. The host waits for no GPU."""
    if device.type != "cuda":
        tokens = torch.from_numpy(windows.astype(np.int64)).to(device)
        return tokens[:, :-1], tokens[:, 1:]
    # torch supports few operations on unsigned types. As int16 the upper half of the ids is negative until the mask.
    narrow = torch.from_numpy(windows.view(f"i{windows.itemsize}")).pin_memory().to(device, non_blocking=True)
    mask = (1 << 8 * windows.itemsize) - 1
    inputs, targets = (part.to(torch.int64).bitwise_and_(mask) for part in (narrow[:, :-1], narrow[:, 1:]))
    return inputs, targets


class PendingNumbers:
    """Numbers on the way from the device to the host. They do not wait for later work of the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=numbers.is_cuda)  # MPS has no event to wait for
        self._arrived = torch.cuda.current_stream().record_event() if numbers.is_cuda else None

    def values(self) -> list[float]:
        """The numbers, as soon as they are on the host."""
        if self._arrived:
            self._arrived.synchronize()
        return self._numbers.tolist()
