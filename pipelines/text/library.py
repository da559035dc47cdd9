"""The standard library of the running Python as a source of text: no download, no account."""

import hashlib
import os
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.text.columns import TextBatch, packed
from pipelines.text.files import sha256_of_text
from pipelines.text.text import Piece, Text, grouped
from trainer.errors import UserError

STDLIB = "python-stdlib"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class StandardLibrary(Text):
    """Every module of the running Python that can be decoded, one document each, sorted by relative path."""

    folder: Path

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name in self._names():
            digest.update(f"{sha256_of_text(str(self.folder / name))} {name}\n".encode())
        return {"source": STDLIB, "sha256": digest.hexdigest()}

    def pieces(self) -> list[Piece]:
        return grouped(((name, (self.folder / name).stat().st_size) for name in self._names()), whole=False)

    def read(self, piece: Piece) -> Iterator[TextBatch]:
        return packed(self._texts(piece.names))

    def text_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in self._names())

    def _texts(self, names: tuple[str, ...]) -> Iterator[str]:
        for name in names:
            try:
                with tokenize.open(self.folder / name) as file:
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError):  # the declared encoding is unknown or wrong
                continue
            yield text

    def _names(self) -> list[str]:
        names = []
        for folder, below, files in os.walk(self.folder):
            below[:] = [name for name in below if name not in NOT_LIBRARY]
            relative = Path(folder).relative_to(self.folder)
            names += [(relative / name).as_posix() for name in files if name.endswith(".py")]
        if not names:
            raise UserError(f"tokens.source: {STDLIB}: this Python has no .py files in {self.folder}; name text files")
        return sorted(names)
