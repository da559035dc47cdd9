"""A text as token shards in llm.c's format.

The text is a stream of tokens: every document follows an end-of-text token, and shard i holds tokens
[i·shard_tokens, (i+1)·shard_tokens). Processes encode it (pool.py); here its tokens fill one shard, while the one
before is hashed and stored. A later attempt resumes behind the last receipt.

The validation split is the first tokens of the text. How many is known only when all shards are finished, so until then
the first ones lie apart from the others. Then they are cut into shards of both splits, and deleted once the artifact
exists.
"""

import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.recipe.tokens_config import TokensConfig
from pipelines.run.text.encode import Encoder
from pipelines.run.text.pool import tokens_of
from pipelines.run.text.receipts import ShardReceipt, existing_receipts, receipt_in
from pipelines.run.text.sources import text_of
from pipelines.run.text.tokenizer import tokenizer_of
from pipelines.store.layout import receipt_key
from pipelines.store.manifest import ArtifactPlan, File
from trainer.base.store import Store
from trainer.config.errors import UserError

if TYPE_CHECKING:
    import numpy as np


UPLOADS = 2  # at a time


@dataclass(frozen=True)
class ShardsJob:
    """The shards of a text to make in an attempt, and the tools."""

    config: TokensConfig
    plan: ArtifactPlan
    store: Store
    folder: Path  # scratch
    upload: Callable[[Path, str], File]  # by name, into the attempt's folder of the store
    check: Callable[[], None]  # raises an exception to end the work
    note: Callable[[str], None]
    row_tokens: int | None = None  # of packed rows, which are counted
    processes: int | None = None  # None: one for each core


@dataclass(frozen=True)
class NewShard:
    """The tokens of a shard, and the place in the text behind them."""

    tokens: "np.ndarray"  # (n,)
    document: int
    offset: int


def make_shards(job: ShardsJob) -> Generator[list[ShardReceipt], None, None]:
    """Make the missing shards. Yields the receipts of all stored shards, at first and once another is stored.

    While a shard fills, UPLOADS others are hashed and stored: one thread would limit 16 cores. Closed in between, it
    finishes the uploads.
    """
    receipts = existing_receipts(job.store, job.plan, job.note)
    yield receipts
    check_unchanged(job)
    with ThreadPoolExecutor(UPLOADS, "upload") as threads:
        pending = deque[Future[ShardReceipt]]()
        with closing(encoded_shards(job, receipts)) as shards:
            for index, shard in itertools.chain(enumerate(shards, len(receipts)), [(0, None)]):
                while len(pending) >= (UPLOADS if shard else 1):
                    receipts.append(pending.popleft().result())
                    yield receipts
                if shard:
                    check_unchanged(job)
                    pending.append(threads.submit(store_shard, job, index, shard, pending[-1] if pending else None))


def check_unchanged(job: ShardsJob) -> None:
    """UserError unless the text is the one of the plan. A local file that was hashed before is only looked at."""
    if text_of(job.config).identity(look=False) != job.plan.identity["text"]:
        raise UserError(
            f"tokens.source: '{job.config.source}' changed after its artifact was planned; run again, and do not "
            "change a text while it is read"
        )


def encoded_shards(job: ShardsJob, receipts: list[ShardReceipt]) -> Generator[NewShard, None, None]:
    """The shards behind the last receipt."""
    import numpy as np

    t = job.config
    encoder = Encoder(tokenizer_of(t, job.store, job.plan.prefix))
    document, offset = (receipts[-1].document, receipts[-1].offset) if receipts else (0, 0)
    left = sys.maxsize if t.max_tokens is None else t.max_tokens - sum(receipt.tokens for receipt in receipts)
    tokens, filled = np.empty(0, encoder.dtype), 0
    with closing(tokens_of(text_of(t), encoder, document, job.folder, job.check, job.processes)) as stream:
        for batch in stream if left else ():
            job.check()
            first, at = document, offset  # the stream began with the document in which the last shard ended
            while at < len(batch.tokens) and left:
                if not filled:
                    tokens = np.empty(min(left, t.shard_tokens), encoder.dtype)
                count = min(len(tokens) - filled, len(batch.tokens) - at)
                tokens[filled : filled + count] = batch.tokens[at : at + count]
                left, at, filled = left - count, at + count, filled + count
                behind, offset = batch.place(at)
                document = first + behind
                if filled == len(tokens):
                    yield NewShard(tokens, document, offset)
                    filled = 0
            if not left:
                break
    if filled:
        yield NewShard(tokens[:filled], document, offset)


def store_shard(job: ShardsJob, index: int, shard: NewShard, before: Future[ShardReceipt] | None) -> ShardReceipt:
    """Write a shard to the store, then its receipt, after the receipt of the shard before."""
    from trainer.data.shards import write_shard

    eot, undecided = tokenizer_of(job.config, job.store, job.plan.prefix).eot_token, job.config.undecided_shards
    rows, largest = rows_in(eot, job.row_tokens, shard.tokens), int(shard.tokens.max())
    whole, path = job.config.val_shards or 0, job.folder / f"{index:06d}.bin"
    try:
        write_shard(path, shard.tokens)
        name = f"undecided/{index:06d}.tokens" if index < undecided else f"train_{index - whole:06d}.bin"
        file = job.upload(path, name)
    finally:
        path.unlink(missing_ok=True)
    receipt = ShardReceipt(file, len(shard.tokens), shard.document, shard.offset, largest, rows)
    if before:
        before.result()
    key, body = f"{job.plan.prefix}/{receipt_key(index)}", json.dumps(receipt.to_json()).encode()
    if not job.store.create(key, body):
        job.check()  # another attempt made the same shard first; a newer attempt ends this one
        if receipt_in(job.store, key) is None:
            job.store.put(key, body)  # in place of a damaged one
    return receipt


def rows_in(eot: int, row_tokens: int | None, tokens: "np.ndarray") -> int | None:
    """The number of rows that a shard fills with documents; None without packing."""
    from trainer.data.packing import packed

    return None if row_tokens is None else len(packed(tokens, eot, row_tokens))


@dataclass(frozen=True)
class SplitShard:
    """A shard of the finished text: its name says whether it is for training or for validation."""

    file: File
    tokens: int
    max_id: int  # the largest token
    rows: int | None = None  # that it fills, if it is packed


def split_text(
    receipts: Sequence[ShardReceipt],
    config: TokensConfig,
    fetch: Callable[[File], Path],
    save: Callable[[Path], File],
    folder: Path,
    rows_of: "Callable[[np.ndarray], int | None]" = lambda tokens: None,
) -> list[SplitShard]:
    """The shards of both splits, with the undecided ones cut. `fetch` gives a local copy of a shard, `save` stores one,
    `folder` is scratch, `rows_of` counts the rows of a packed shard."""
    from trainer.data.shards import read_shard, write_shard

    total = sum(receipt.tokens for receipt in receipts)
    left = config.held_out(total)
    shards: list[SplitShard] = []
    for index, receipt in enumerate(receipts):
        if index >= config.undecided_shards:
            shards.append(SplitShard(receipt.file, receipt.tokens, receipt.max_id, receipt.rows))
            continue
        tokens = read_shard(fetch(receipt.file))
        for split, piece in (("val", tokens[:left]), ("train", tokens[left:])):
            if len(piece):
                path = folder / f"{split}_{index:06d}.bin"
                write_shard(path, piece)
                shards.append(SplitShard(save(path), len(piece), int(piece.max(initial=0)), rows_of(piece)))
                path.unlink()
        left -= min(left, receipt.tokens)
    return shards
