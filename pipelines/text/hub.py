"""A dataset on the Hugging Face Hub as a source of text, pinned to a commit."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.text.columns import TextBatch, check_column, column_batches, datasets_library, reading, reason_of
from pipelines.text.files import Files
from pipelines.text.retry import with_retries
from pipelines.text.text import Piece, Text
from trainer.errors import UserError

HUB = "hf://datasets/"
ROWS = 1_000  # of a dataset that only `datasets` can read: ~5 MB of web text


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
        """Its parquet files, as nearly all datasets have them; else itself, which `datasets` streams."""
        files = (self._builder().config.data_files or {}).get("train")
        if type(self._builder()).__name__ == "Parquet" and files:
            return Files("parquet", tuple(files), self.column, self.where, self.commit)
        return self

    def pieces(self) -> list[Piece]:
        return [Piece((str(number),)) for number in range(self._stream().num_shards)]

    def read(self, piece: Piece) -> Iterator[TextBatch]:
        stream = self._stream()
        rows = stream.shard(stream.num_shards, int(piece.names[0]), contiguous=False)
        with reading(self.where):
            for table in rows.with_format("arrow").iter(batch_size=ROWS):
                check_column(table.schema, self.column, self.where)
                for chunk in table.column(self.column).chunks:
                    yield from column_batches(chunk)

    def _stream(self) -> Any:
        return with_retries(lambda: self._builder().as_streaming_dataset(split="train"))

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
