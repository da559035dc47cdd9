"""A shard that is written while its tokens arrive: its sha256 is known with its last byte."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import FULL, DiskFull, is_full
from trainer.store import sha256_of

if TYPE_CHECKING:
    import numpy as np


class ShardFile:
    """A new shard at `path` for `expected` tokens; it may end earlier."""

    def __init__(self, path: Path, expected: int, dtype: "np.dtype[Any]") -> None:
        from trainer.shards import shard_header

        self.path, self.expected, self.dtype = path, expected, dtype
        self.tokens = self.max_id = 0
        header = shard_header(expected, dtype.itemsize)
        self._sha256 = hashlib.sha256(header)
        with self._enough_disk():
            self._file = path.open("wb")
            self._file.write(header)

    @property
    def left(self) -> int:
        return self.expected - self.tokens

    def write(self, tokens: "np.ndarray") -> None:
        assert tokens.dtype == self.dtype and len(tokens) <= self.left, (tokens.dtype, len(tokens), self.left)
        self.tokens += len(tokens)
        self.max_id = max(self.max_id, int(tokens.max(initial=0)))
        content = tokens.view("u1").data
        self._sha256.update(content)
        with self._enough_disk():
            self._file.write(content)

    def finish(self) -> str:
        """The sha256 of the complete file."""
        from trainer.shards import shard_header

        with self._enough_disk():
            if self.left:  # the last shard of a part
                self._file.seek(0)
                self._file.write(shard_header(self.tokens, self.dtype.itemsize))
            self._file.close()
        return sha256_of(self.path) if self.left else self._sha256.hexdigest()

    def discard(self) -> None:
        """Close and remove an incomplete file."""
        with suppress(OSError):  # the disk is full
            self._file.close()
        self.path.unlink(missing_ok=True)

    @contextmanager
    def _enough_disk(self) -> Iterator[None]:
        """DiskFull for a full disk."""
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            raise DiskFull(f"{self.path.parent}: {FULL}") from error
