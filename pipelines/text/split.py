"""The validation split of a text: its first tokens.

A recipe that holds out whole shards knows their names in advance. A share of the text is known only when all shards are
finished, so until then the first ones are named text_…. Then they get their names, and the one in which the boundary
lies is cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.artifacts.manifest import File
from pipelines.recipe import TokensConfig
from pipelines.text.receipts import ShardReceipt

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class SplitShard:
    """A shard of the finished text: its name says whether it is for training or for validation."""

    file: File
    tokens: int
    max_id: int | None = None  # the largest token; None if nobody has looked
    rows: int | None = None  # that it fills, if it is packed


def split_text(
    receipts: Sequence[ShardReceipt],
    config: TokensConfig,
    fetch: Callable[[File], Path],
    save: Callable[[Path], File],
    folder: Path,
    rows_of: "Callable[[np.ndarray], int | None]" = lambda tokens: None,
) -> list[SplitShard]:
    """The shards of both splits. `fetch` gives a local copy of a shard, `save` stores one, `folder` is scratch,
    `rows_of` counts the rows of a packed shard.

    The shard in which the boundary lies becomes two; the others are only named.
    """
    from trainer.data.shards import read_shard, write_shard

    total = sum(receipt.tokens for receipt in receipts)
    left = 0 if config.val_shards else min(config.held_out(total), total)
    shards: list[SplitShard] = []
    for index, receipt in enumerate(receipts):
        if 0 < left < receipt.tokens:
            tokens = read_shard(fetch(receipt.file))
            for name, piece in (("val", tokens[:left]), ("train", tokens[left:])):
                path = folder / f"{name}_{index:06d}.bin"
                write_shard(path, piece)
                shards.append(SplitShard(save(path), len(piece), int(piece.max(initial=0)), rows_of(piece)))
                path.unlink()
        else:
            file = receipt.file
            if index < config.val_undecided_shards:
                file = replace(file, name=f"{'val' if left else 'train'}_{index:06d}.bin")
            shards.append(SplitShard(file, receipt.tokens, receipt.max_id, receipt.rows))
        left -= min(left, receipt.tokens)
    return shards
