"""Rows that begin with a document: the packing `documents` of a shard. No torch in this module.

A row is filled with the largest document of a buffer that fits whole, again and again. When none fits, the shortest one
fills the row to its end, and its other tokens are cropped (best fit, as in nanochat). So every row begins with an
end-of-text token, and every token of a row sees the begin of its document. Each shard is packed by itself, a pure
function of its tokens: whoever maps the shard computes the same rows.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import islice

import numpy as np

BUFFERED = 1000  # documents to choose from
PLACE_BITS = 40  # a shard of nanoGPT may have billions of tokens
PLACES, LARGEST = (1 << PLACE_BITS) - 1, (1 << 63 - PLACE_BITS) - 1


@dataclass(frozen=True)
class PackedRows:
    """The rows of a shard, as pieces of its tokens. Row r has the pieces firsts[r] to firsts[r + 1]."""

    starts: np.ndarray  # int64 (pieces,): the first token of each
    lengths: np.ndarray  # int64 (pieces,)
    firsts: np.ndarray  # int64 (rows + 1,)

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def fill(self, row: int, tokens: np.ndarray, into: np.ndarray) -> None:
        """Copy a row of the shard's `tokens` into an array of its length."""
        at = 0
        for piece in range(self.firsts[row], self.firsts[row + 1]):
            start, length = self.starts[piece], self.lengths[piece]
            into[at : at + length] = tokens[start : start + length]
            at += length


def packed(tokens: np.ndarray, eot: int, row_tokens: int) -> PackedRows:
    """The rows of `row_tokens` tokens of a shard whose documents begin with `eot`.

    Tokens before the first `eot` belong to a document of the shard before, and are in no row. A last row that is not
    full is left out.
    """
    begins = np.flatnonzero(tokens == eot)
    sizes = np.diff(begins, append=len(tokens))
    # A document as one integer that sorts by size, and by place: of equal ones the first in the shard is the largest.
    documents = iter((np.minimum(sizes, LARGEST) << PLACE_BITS | PLACES - begins).tolist())
    buffer = sorted(islice(documents, BUFFERED))
    starts: list[int] = []
    lengths: list[int] = []
    firsts, room = [0], row_tokens
    while buffer:
        at = bisect_left(buffer, (room + 1) << PLACE_BITS) - 1  # the largest that fits; -1: none does
        size, place = divmod(buffer.pop(max(at, 0)), PLACES + 1)
        starts.append(PLACES - place)
        lengths.append(min(size, room))
        room -= lengths[-1]
        if not room:
            firsts.append(len(starts))
            room = row_tokens
        if (following := next(documents, None)) is not None:
            insort(buffer, following)
    pieces = firsts[-1]
    return PackedRows(
        np.array(starts[:pieces], np.int64), np.array(lengths[:pieces], np.int64), np.array(firsts, np.int64)
    )
