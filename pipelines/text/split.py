"""The validation split of a text: its first tokens, counted over the parts in order.

A recipe that holds out whole shards knows their names in advance. A share of the text is known only when all parts are
finished, so until then every shard is named train_…. Then the head, alone, cuts the first shards: the split depends on
the recipe and the text, not on nodes or attempts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.artifacts.manifest import File
from pipelines.recipe import TokensConfig
from pipelines.text.parts import ShardReceipt, part_prefix


@dataclass(frozen=True)
class SplitShard:
    """A shard of the finished text: its name says whether it is for training or for validation."""

    file: File
    tokens: int


def split_text(
    parts: Sequence[Sequence[ShardReceipt]],
    config: TokensConfig,
    fetch: Callable[[File], Path],
    save: Callable[[Path], File],
    folder: Path,
) -> list[SplitShard]:
    """The shards of both splits. `fetch` gives a local copy of a shard, `save` stores one, `folder` is scratch.

    A shard that is held out is stored again under its new name; the one in which the boundary lies becomes two.
    """
    total = sum(receipt.tokens for part in parts for receipt in part)
    left = 0 if config.val_whole_shards else min(config.held_out(total), total)
    shards: list[SplitShard] = []
    for number, part in enumerate(parts):
        for index, receipt in enumerate(part):
            if left:
                shards += cut(receipt, left, f"{part_prefix(number, config)}{index:06d}", fetch, save, folder)
                left -= min(left, receipt.tokens)
            else:
                shards.append(SplitShard(receipt.file, receipt.tokens))
    return shards


def cut(
    receipt: ShardReceipt,
    held_out: int,
    number: str,
    fetch: Callable[[File], Path],
    save: Callable[[Path], File],
    folder: Path,
) -> list[SplitShard]:
    """A shard's first `held_out` tokens as val_….bin, and the others as train_…_rest.bin."""
    from trainer.shards import read_shard, write_shard

    tokens = read_shard(fetch(receipt.file))
    pieces = {f"val_{number}.bin": tokens[:held_out], f"train_{number}_rest.bin": tokens[held_out:]}
    shards = []
    for name, piece in pieces.items():
        if len(piece):
            path = folder / name
            write_shard(path, piece)
            shards.append(SplitShard(save(path), len(piece)))
            path.unlink()
    return shards
