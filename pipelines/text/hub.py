"""A dataset on the Hugging Face Hub as a source of text, pinned to a commit."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.text.columns import TextBatch, datasets_library, reason_of
from pipelines.text.files import Files, common_kind
from pipelines.text.retry import with_retries
from pipelines.text.text import Piece, Text
from trainer.errors import UserError

HUB = "hf://datasets/"


@dataclass(frozen=True)
class HubDataset(Text):
    """The train split of a dataset on the Hugging Face Hub at one commit."""

    repository: str
    subset: str | None
    commit: str
    column: str

    def identity(self) -> dict[str, Any]:
        return {
            "source": HUB + self.repository,
            "subset": self.subset,
            "revision": self.commit,
            "text_column": self.column,
        }

    @property
    def where(self) -> str:
        return f"{HUB}{self.repository}" + (f" ({self.subset})" if self.subset else "")

    def resolved(self) -> Text:
        files = (self._builder().config.data_files or {}).get("train", ())
        if not files:
            raise UserError(f"tokens.source: {self.where} has no files of a train split")
        return Files(common_kind(tuple(files)), tuple(files), self.column, self.where, self.commit)

    def pieces(self) -> list[Piece]:
        return self.resolved().pieces()

    def read(self, piece: Piece) -> Iterator[TextBatch]:
        return self.resolved().read(piece)

    @functools.cache  # noqa: B019  (one dataset a process)
    def _builder(self) -> Any:
        try:
            load = datasets_library().load_dataset_builder
            return with_retries(lambda: load(self.repository, self.subset, revision=self.commit))
        except Exception as error:  # not found, gated, no such subset, no network
            raise UserError(
                f"tokens.source: {self.where} at {self.commit[:12]} cannot be opened ({reason_of(error)})"
            ) from error


def pinned_commit(source: str, revision: str | None) -> str:
    """The revision, if it is a full commit hash: a branch or tag can move, and the tokens would with it."""
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    repository = "/".join(source.removeprefix(HUB).split("/")[:2])
    given = f"'{revision}' can move" if revision else "none is given"
    raise UserError(
        f"tokens.revision: {given}; '{source}' needs the 40 hex digits of a commit, which "
        f"`git ls-remote https://huggingface.co/datasets/{repository} main` prints"
    )
