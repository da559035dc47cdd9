"""Token shards, and the order in which training reads them: a pure function of (seed, epoch, step). No torch in this
module.

A shard is a file in one of llm.c's formats: a header of 256 int32 (20240520, 1, number of tokens), then uint16 tokens;
for a vocabulary above 65,536 ids (20240801, 7, number of tokens), then uint32 tokens. Every document starts with the
end-of-text token. A *window* is `block_size + 1` consecutive tokens at stride `block_size`: inputs and targets of one
sequence.

Packed shards (trainer/data/packing.py) have rows in place of windows, and a mixture draws from several sources by
weight.

There is no loader state to save. Sequence number g of a run belongs to epoch g // sequences_per_epoch. An epoch
permutes the shards, and then the windows inside each shard. So a run reads one shard after the other: it can start with
its first local shard, and a node needs few shards at a time. An epoch reads every window exactly once. A step reads the
same sequences at every world size: rank r takes the r-th slice of the step. The slices differ by at most one sequence.
"""

import heapq
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainer.config.amounts import batch_tokens_at, tokens_before
from trainer.config.config import TrainConfig
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig

PERIOD = 10_000  # sequences after which a mixture repeats the order of its sources, at most
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
HEADS = {2: (20240520, 1), 4: (20240801, 7)}  # by bytes of a token: magic number and version, as llm.c has them


@dataclass(frozen=True)
class Shard:
    """The file name and the number of tokens of a shard, which may not be local yet."""

    name: str
    tokens: int
    token_bytes: int = 2
    max_id: int | None = None  # its largest token; None: not known before it is read
    rows: int | None = None  # of a packed shard; None: a stream of windows
    source: int = 0  # of a mixture
    header: bool = True  # False: nanoGPT's, uint16 tokens alone

    @property
    def size(self) -> int:
        """The bytes of its file."""
        return shard_bytes(self.tokens, self.token_bytes) - HEADER_BYTES * (not self.header)

    def windows(self, block_size: int) -> int:
        return max(0, (self.tokens - 1) // block_size) if self.rows is None else self.rows


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type in which shards hold the ids of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def shard_bytes(tokens: int, token_bytes: int = 2) -> int:
    """The size of the file of a shard."""
    return HEADER_BYTES + token_bytes * tokens


def form_of(size: int, tokens: int) -> tuple[int, bool] | None:
    """The bytes of a token, and whether there is a header, in a file of `size` bytes with `tokens` tokens; None if that
    is not a shard."""
    if size and size == 2 * tokens:
        return 2, False
    return next(((width, True) for width in HEADS if shard_bytes(tokens, width) == size), None)


def split_of(name: str) -> str | None:
    """ "train" or "val" by the name of a shard, as tokenize (train_000000.bin), llm.c (fineweb_train_000001.bin) and
    nanoGPT (train.bin) write it; None for other files."""
    found = re.fullmatch(r"(?:.*_)?(train|val)(?:_\d+)*\.bin", name)
    return found[1] if found else None


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write uint16 or uint32 `tokens` (n,) in llm.c's format."""
    assert tokens.dtype in (np.uint16, np.uint32) and tokens.ndim == 1, (tokens.dtype, tokens.shape)
    width = tokens.dtype.itemsize
    with path.open("wb") as file:
        file.write(shard_header(len(tokens), width))
        file.write(np.ascontiguousarray(tokens, f"<u{width}").data)


def shard_header(tokens: int, token_bytes: int = 2) -> bytes:
    """The first HEADER_BYTES of a shard."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = *HEADS[token_bytes], tokens
    return header.tobytes()


def read_shard(shard: Path | BinaryIO, header: bool = True) -> np.ndarray:
    """The tokens of a shard, uint16 or uint32 (n,), memory-mapped. UserError for another or truncated file.
    Without `header`, it is nanoGPT's.

    An open file is closed, but the map duplicates its descriptor: a lock on it lasts as long as the array.
    """
    with shard.open("rb") if isinstance(shard, Path) else shard as file:
        if not header:
            return np.asarray(np.memmap(file, dtype="<u2", mode="r"))
        _, width = _read_header(file)
        # A plain array: slicing a memmap takes 3 us more, for each of the 512 windows of a step.
        return np.asarray(np.memmap(file, dtype=f"<u{width}", mode="r", offset=HEADER_BYTES))


def _read_header(file: BinaryIO) -> tuple[int, int]:
    """The number of tokens of a shard, and the bytes of each. UserError if the file is not a shard, or is truncated."""
    header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), dtype="<i4")
    width = next((width for width, head in HEADS.items() if tuple(header[:2]) == head), None)
    if width is None:
        heads = " or ".join(f"{magic}, {version}" for magic, version in HEADS.values())
        raise UserError(f"{file.name}: not a token shard (a shard starts with {heads}); run tokenize again")
    expected, size = shard_bytes(int(header[2]), width), os.fstat(file.fileno()).st_size
    if size != expected:
        raise UserError(f"{file.name}: {size} bytes, but its header requires {expected}; run tokenize again")
    return int(header[2]), width


def local_shards(folder: Path, split: str) -> list[Shard]:
    """The shards of a split in a folder, in order, as tokenize, llm.c or nanoGPT write them. UserError without any."""
    paths = sorted(path for path in folder.glob("*.bin") if split_of(path.name) == split)
    if not paths:
        raise UserError(f"{folder}: contains no {split}_*.bin shards; give a folder of tokenize, llm.c or nanoGPT")
    return [shard_at(path) for path in paths]


def shard_at(path: Path) -> Shard:
    """The shard in a file, by its size and header. UserError if there is none."""
    if not path.is_file():
        raise UserError(f"{path}: not a file; remove it, or give a folder that tokenize wrote")
    try:
        with path.open("rb") as file:
            start, size = file.read(8), os.fstat(file.fileno()).st_size
            if is_nanogpt(path.name, start, size):
                return Shard(path.name, size // 2, header=False)
            file.seek(0)
            return Shard(path.name, *_read_header(file))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make it readable") from error


def is_nanogpt(name: str, start: bytes, size: int) -> bool:
    """Whether a file is a shard of nanoGPT: by its name, and by a start that is not a header of llm.c."""
    heads = [np.array(head, "<i4").tobytes() for head in HEADS.values()]
    return name in ("train.bin", "val.bin") and size > 0 and size % 2 == 0 and start not in heads


def check_ids(shards: Iterable[Shard], vocab_size: int) -> None:
    """UserError for the first shard whose largest id is known, and outside the vocabulary."""
    for shard in shards:
        if shard.max_id is not None and shard.max_id >= vocab_size:
            raise UserError(
                f"{shard.name}: its largest id is {shard.max_id}, but model.vocab_size is {vocab_size}; "
                "use the vocabulary of the shards"
            )


class Order:
    """The shard and window of sequence number g of one text: a new permutation for each epoch."""

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

    def visits(self, sequence: int) -> Iterator[tuple[int, int]]:
        """(first sequence number, shard index) for each shard that is read from `sequence` on, without end."""
        while True:
            epoch, position = divmod(sequence, self.sequences_per_epoch)
            order, ends = self._shard_order(epoch)
            nth = int(np.searchsorted(ends, position, side="right"))
            yield sequence, int(order[nth])
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


class Mixture:
    """The order in which a run reads its shards, which name their source: each source has an `Order` of its own. A
    period of sequences reads from each source the number of its weight, evenly spread. Without `weights`, it is the
    order of a single text."""

    def __init__(self, shards: Sequence[Shard], block_size: int, seed: int, weights: Sequence[float]) -> None:
        self.shares = shares_of(weights or (1.0,))
        self.period = sum(self.shares)
        # The j-th of a source's n sequences stands at (j + 1/2) / n of the period.
        places = np.concatenate([(2 * np.arange(share) + 1) / (2 * share) for share in self.shares])
        sources = np.repeat(np.arange(len(self.shares)), self.shares)
        self._pattern = sources[np.argsort(places, kind="stable")]
        self._before = [np.append(0, np.cumsum(self._pattern == n)) for n in range(len(self.shares))]
        self._places = [np.flatnonzero(self._pattern == n) for n in range(len(self.shares))]
        self._shards = [[i for i, one in enumerate(shards) if one.source == n] for n in range(len(self.shares))]
        self.orders: list[Order] = []
        for number, mine in enumerate(self._shards):
            try:
                self.orders.append(Order([shards[i] for i in mine], block_size, seed))
            except UserError as error:
                raise UserError(f"tokens.sources: source {number + 1}: {error}" if weights else str(error)) from error

    def __getitem__(self, sequence: int) -> tuple[int, int]:
        """(shard index, window index) of sequence number `sequence`, from 0."""
        source = int(self._pattern[sequence % self.period])
        shard, window = self.orders[source][self.read_before(sequence, source)]
        return self._shards[source][shard], window

    def read_before(self, sequence: int, source: int) -> int:
        """The number of sequences of a source before number `sequence`."""
        periods, place = divmod(sequence, self.period)
        return periods * self.shares[source] + int(self._before[source][place])

    def sequence(self, source: int, number: int) -> int:
        """The sequence that is number `number` of a source, from 0."""
        periods, nth = divmod(number, self.shares[source])
        return periods * self.period + int(self._places[source][nth])

    def shards_of(self, sequences: range) -> list[int]:
        """The shards of consecutive `sequences`, in the order in which they are read first."""
        visits = takewhile(lambda visit: visit[0] < sequences.stop, self.visits(sequences.start))
        return [shard for _, shard in visits]

    def next_shards(self, sequence: int) -> list[int]:
        """The shards that training reads next: of each other source the present one, and one more."""
        return [shard for _, shard in islice(self.visits(sequence), 1, 1 + len(self.shares))]

    def visits(self, sequence: int) -> Iterator[tuple[int, int]]:
        """As `Order.visits`: the first sequence that is read from each shard."""
        return heapq.merge(*(self._visits_of(source, sequence) for source in range(len(self.shares))))

    def _visits_of(self, source: int, sequence: int) -> Iterator[tuple[int, int]]:
        for number, shard in self.orders[source].visits(self.read_before(sequence, source)):
            yield self.sequence(source, number), self._shards[source][shard]


def shares_of(weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to positive `weights`, as small as possible: exact to a ten-thousandth of the sum."""
    parts = [Fraction(weight) * PERIOD / sum(map(Fraction, weights)) for weight in weights]
    shares = [int(part) for part in parts]
    most_cut = sorted(range(len(parts)), key=lambda n: shares[n] - parts[n])
    for n in most_cut[: PERIOD - sum(shares)]:
        shares[n] += 1
    shares = [max(1, share) for share in shares]
    return [share // math.gcd(*shares) for share in shares]


def sequences_of(step: int, model: ModelConfig, train: TrainConfig, rank: int, world_size: int) -> range:
    """The sequence numbers that `rank` reads in update `step`: its slice of the step's, which is not empty if the step
    has at least `world_size` sequences."""
    first, count = tokens_before(step, train) // model.block_size, batch_tokens_at(step, train) // model.block_size
    return slices(range(first, first + count), world_size)[rank]


def slices(sequences: range, count: int) -> list[range]:
    """`sequences` in `count` consecutive parts whose lengths differ by at most one."""
    starts = [len(sequences) * i // count for i in range(count)]
    return [sequences[start:end] for start, end in zip(starts, [*starts[1:], len(sequences)], strict=False)]
