"""How many of many hashes are equal to an earlier one, in bounded memory.

An external sort: hashes are collected up to RUN, sorted, and written to one temporary file without their repeats. Then
all runs are merged one range of values after the other. The hashes are uniform, so ranges of equal width are alike.
"""

from collections.abc import Iterator
from itertools import pairwise
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING

from trainer.errors import is_full

if TYPE_CHECKING:
    import numpy as np

RUN = 4_000_000  # hashes in memory: 32 MB
CELLS = 1024  # the finest division of the values into ranges


class Repeats:
    """Hashes (uint64) of things, and the number of those that came before. OSError for a full temporary folder.

    Memory: 32 bytes for each hash of a `run`, and 4 KiB for each run; above CELLS runs, 32 bytes for a CELLS-th of all
    hashes. Disk: 8 bytes a hash.
    """

    def __init__(self, run: int = RUN) -> None:
        import numpy as np

        self._file = TemporaryFile()  # noqa: SIM115
        self._buffer = np.empty(run, np.uint64)
        self._filled = 0
        self._cells: list[np.ndarray] = []  # of each run: where each cell begins (CELLS + 1,), in hashes
        self._repeats = 0  # within a run

    def add(self, hashes: "np.ndarray") -> None:
        """Add hashes (n,)."""
        while len(hashes):
            taken = hashes[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            hashes = hashes[len(taken) :]
            if self._filled == len(self._buffer):
                self._write_run()

    def count(self) -> int:
        """The number of hashes that are equal to an earlier one."""
        self._write_run()
        return self._repeats + sum(len(hashes) - int(_first_ones(hashes).sum()) for hashes in self._ranges())

    def _write_run(self) -> None:
        import numpy as np

        hashes = self._buffer[: self._filled]
        run = hashes[_first_ones(hashes)]
        self._repeats += len(hashes) - len(run)
        self._filled = 0
        starts = np.arange(CELLS, dtype=np.uint64) * np.uint64((1 << 64) // CELLS)
        self._cells.append(np.append(np.searchsorted(run, starts), len(run)).astype(np.uint32))
        try:
            self._file.write(run.data)
            self._file.flush()
        except OSError as error:
            if is_full(error):
                error.filename = gettempdir()
            raise

    def _ranges(self) -> "Iterator[np.ndarray]":
        """The hashes of all runs, one range of values after the other."""
        import numpy as np

        sizes = [int(cells[-1]) for cells in self._cells]
        begins = [0, *np.cumsum(sizes).tolist()]
        ranges = min(CELLS, max(1, -(-sum(sizes) // len(self._buffer))))
        for first, behind in pairwise(CELLS * n // ranges for n in range(ranges + 1)):
            pieces = []
            for begin, cells in zip(begins, self._cells, strict=False):
                self._file.seek(8 * (begin + int(cells[first])))
                pieces.append(np.frombuffer(self._file.read(8 * int(cells[behind] - cells[first])), np.uint64))
            yield np.concatenate(pieces)


def _first_ones(hashes: "np.ndarray") -> "np.ndarray":
    """Sorts `hashes` in place. Where each value begins (n,), bool."""
    import numpy as np

    hashes.sort()
    first = np.ones(len(hashes), bool)
    np.not_equal(hashes[1:], hashes[:-1], out=first[1:])
    return first
