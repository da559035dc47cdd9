"""A dataset on the Hugging Face Hub as a source of text, pinned to a commit."""

import re
from dataclasses import dataclass
from typing import Any

from pipelines.text.columns import Batches, datasets_library, reason_of, stream_batches
from pipelines.text.files import Files, check_parts
from pipelines.text.retry import with_retries
from trainer.errors import UserError

HUB = "hf://datasets/"


@dataclass(frozen=True)
class HubDataset:
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

    def files(self) -> None:
        return None

    def text_bytes(self) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def batches(self, start: int, part: int = 0, parts: int = 1) -> Batches:
        datasets = datasets_library()
        where = f"{HUB}{self.repository}" + (f" ({self.subset})" if self.subset else "")
        try:
            builder = with_retries(
                lambda: datasets.load_dataset_builder(self.repository, self.subset, revision=self.commit)
            )
            files = (builder.config.data_files or {}).get("train")
            if type(builder).__name__ == "Parquet" and files:
                # Nearly all datasets. The footers show which files lie before `start`.
                return Files("parquet", tuple(files), self.column, where).batches(start, part, parts)
            stream = with_retries(lambda: builder.as_streaming_dataset(split="train"))
            if parts > 1:
                check_parts(stream.num_shards, parts, where)
                stream = stream.shard(parts, part, contiguous=False)  # by files, as for all sources
        except UserError:
            raise
        except Exception as error:  # not found, gated, no such subset, no network
            raise UserError(
                f"tokens.source: {where} at {self.commit[:12]} cannot be opened ({reason_of(error)})"
            ) from error
        return stream_batches(stream, self.column, where, start)


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
