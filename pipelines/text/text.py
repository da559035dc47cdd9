"""A text as pieces, which processes read apart: what every source of text offers."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.text.columns import Batches, TextBatch, from_document
from pipelines.text.retry import with_retries

PIECE_BYTES = 64 << 20  # of text


@dataclass(frozen=True)
class Piece:
    """A share of a text that one process reads: some files, or some row groups or bytes of a file."""

    names: tuple[str, ...]
    first: int = 0  # row group or byte
    end: int | None = None  # behind the last one; None: to the end of the file
    documents: int | None = None  # None: not known before it is read


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

    def state(self) -> Mapping[str, Hashable]:
        """Its files by name, each with a state that changes when the file does; none for a pinned text."""
        return {}


def read_piece(text: Text, piece: Piece, start: int = 0) -> Batches:
    """The documents of a piece from number `start` on; a server that is busy or unreachable is asked again."""
    batches: Iterator[TextBatch] | None = None

    def following() -> TextBatch | None:
        nonlocal batches
        batches = batches or from_document(text.read(piece), start)
        try:
            return next(batches, None)
        except BaseException:
            batches = None
            raise

    while (batch := with_retries(following)) is not None:
        start += len(batch)
        yield batch


def grouped(names: Iterable[tuple[str, int | None]], whole: bool) -> list[Piece]:
    """Pieces of files with these sizes in bytes (None: not known); if each file is one document, it is a `whole`."""
    pieces: list[Piece] = []
    group: list[str] = []
    total = 0
    for name, size in names:
        group.append(name)
        total += PIECE_BYTES if size is None else size
        if total >= PIECE_BYTES:
            pieces.append(Piece(tuple(group), documents=len(group) if whole else None))
            group, total = [], 0
    if group:
        pieces.append(Piece(tuple(group), documents=len(group) if whole else None))
    return pieces
