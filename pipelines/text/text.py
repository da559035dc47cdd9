"""A text as pieces, which processes read apart: what every source of text offers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.text.columns import Batches, TextBatch

PIECE_BYTES = 64 << 20  # of text


@dataclass(frozen=True)
class Piece:
    """A share of a text that one process reads: some files, or some row groups or bytes of a file."""

    names: tuple[str, ...]
    first: int = 0  # row group or byte
    end: int | None = None  # behind the last one; None: to the end of the file
    documents: int | None = None  # None: not known before it is read
    bytes: int = 0  # of the text of row groups


class Text(ABC):
    """A text of a fixed order, pinned to a version. Its documents are those of its pieces, numbered from 0."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Its canonical identity, for the fingerprint: equal identities give equal documents."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """All of the text, in order. UserError if it cannot be read."""

    @abstractmethod
    def read(self, piece: Piece) -> Iterator[TextBatch]:
        """The documents of a piece. UserError for a damaged file, with its place."""

    def resolved(self) -> "Text":
        """The same text, as far as a server has to be asked what it is."""
        return self

    def count(self, piece: Piece) -> int:
        """The number of documents of a piece."""
        return sum(map(len, self.read(piece))) if piece.documents is None else piece.documents

    def text_bytes(self) -> int | None:
        """About the bytes of its text; None if only a server knows, or if it is packed."""
        return None


def read_piece(text: Text, piece: Piece, start: int = 0) -> Batches:
    """The documents of a piece from number `start` on."""
    for batch in text.read(piece):
        if start < len(batch):
            yield TextBatch(batch.content[batch.bounds[start] :], batch.bounds[start:] - batch.bounds[start])
        start = max(0, start - len(batch))


def grouped(names: Iterable[tuple[str, int | None]], whole: bool) -> list[Piece]:
    """Pieces of files with these sizes in bytes (None: not known); if each file is one document, it is a `whole`."""
    pieces: list[Piece] = []
    group: list[str] = []
    total = 0
    for name, size in [*names, ("", None)]:
        if group and (total >= PIECE_BYTES or not name):
            pieces.append(Piece(tuple(group), documents=len(group) if whole else None))
            group, total = [], 0
        group.append(name)
        total += PIECE_BYTES if size is None else size
    return pieces
