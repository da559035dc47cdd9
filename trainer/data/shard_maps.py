"""The shards of a split that this process maps: those that it reads, and those that come next.

A run may have 100,000 shards, but the kernel allows a process 65,530 maps (vm.max_map_count), and a mapped file cannot
leave the disk. So maps behind the read position are dropped.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainer.config.errors import DiskFull, UserError
from trainer.data.packing import PackedRows
from trainer.data.shards import Shard, read_shard

Fetch = Callable[[str], Path | BinaryIO]
PREFETCHED_SHARDS = 4
MOST_MAPPED = 8  # the prefetched ones, and those that the three threads of a GPU read (trainer/data/batches.py)


@dataclass(frozen=True)
class Mapped:
    """The tokens of a shard, and its rows if it is packed."""

    tokens: np.ndarray
    rows: PackedRows | None = None


class ShardMaps:
    """The mapped shards of a split, by index; at most `most`. Thread-safe. `pack` makes the rows of a packed shard.

    A shard whose largest id is not known is searched for ids outside the vocabulary when it is mapped.
    `fetch(name)` returns a local path, or the file itself, open: a shard cache leases it. It blocks until the file is
    complete and verified.
    """

    def __init__(
        self,
        shards: list[Shard],
        fetch: Fetch,
        vocab_size: int,
        pack: Callable[[np.ndarray], PackedRows],
        most: int = MOST_MAPPED,
    ) -> None:
        self.shards, self.fetch, self.vocab_size, self.pack, self.most = shards, fetch, vocab_size, pack, most
        self._maps: OrderedDict[int, Mapped] = OrderedDict()  # the last used one at the end
        self._changing = threading.Lock()
        self._fetching: dict[int, threading.Lock] = {}
        self._tried: set[int] = set()  # mapped ahead, or failed to be
        self._prefetching: threading.Thread | None = None

    def shard(self, index: int) -> Mapped:
        """A shard; fetched if it is not mapped. The caller must not keep it."""
        if (mapped := self._mapped(index)) is not None:
            return mapped
        try:
            return self._fetched(index)
        except DiskFull:
            self.keep(())  # the other shards of this process may use the space; they can be fetched again
            return self._fetched(index)

    def has(self, index: int) -> bool:
        """Whether a shard is mapped."""
        return index in self._maps

    def keep(self, needed: Collection[int]) -> None:
        """Drop the maps of all other shards."""
        with self._changing:
            for index in self._maps.keys() - set(needed):
                del self._maps[index]
            self._tried.intersection_update(needed)

    def prefetch(self, coming: list[int]) -> None:
        """Map the first shards of `coming` in the background, unless the thread of an earlier call is still busy."""
        if self._prefetching and self._prefetching.is_alive():
            return
        missing = [index for index in coming if index not in self._tried | self._maps.keys()][:PREFETCHED_SHARDS]
        if missing:
            self._tried.update(missing)
            self._prefetching = threading.Thread(target=self._read_ahead, args=(missing,), daemon=True)
            self._prefetching.start()

    def _read_ahead(self, indices: list[int]) -> None:
        # No report of a failed prefetch: the read that needs the shard fetches again, and raises.
        for index in indices:
            with suppress(Exception):
                self._fetched(index)

    def _mapped(self, index: int) -> Mapped | None:
        with self._changing:
            if index in self._maps:
                self._maps.move_to_end(index)
            return self._maps.get(index)

    def _fetched(self, index: int) -> Mapped:
        """A shard. Of several threads that need it, one fetches it."""
        with self._changing:
            fetching = self._fetching.setdefault(index, threading.Lock())
        with fetching:
            if (mapped := self._mapped(index)) is not None:
                return mapped
            try:
                mapped = self._read(self.shards[index])
                with self._changing:
                    self._maps[index] = mapped
                    while len(self._maps) > self.most:
                        self._maps.popitem(last=False)
                return mapped
            finally:
                with self._changing:
                    self._fetching.pop(index, None)

    def _read(self, shard: Shard) -> Mapped:
        try:
            tokens = read_shard(self.fetch(shard.name), shard.header)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename}: removed while a run reads it; put it back") from error
        if len(tokens) != shard.tokens:
            raise UserError(f"{shard.name}: {len(tokens)} tokens where {shard.tokens} are expected; run tokenize again")
        if shard.max_id is None and tokens.max(initial=0) >= self.vocab_size:  # 0.05 s for 100M tokens
            place = int(np.argmax(tokens >= self.vocab_size))
            raise UserError(
                f"{shard.name}: token {place:,} has the id {tokens[place]}, but model.vocab_size is {self.vocab_size}; "
                "use the vocabulary of the shards"
            )
        rows = None if shard.rows is None else self.pack(tokens)
        if rows and len(rows) != shard.rows:
            raise UserError(f"{shard.name}: {len(rows)} rows where {shard.rows} are expected; run tokenize again")
        return Mapped(tokens, rows)
