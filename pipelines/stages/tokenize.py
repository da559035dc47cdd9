"""tokenize: text becomes token shards in llm.c's format, the first `val_shards` of them held out.

Shard i holds tokens [i·shard_tokens, (i+1)·shard_tokens) of one stream: every document behind an
end-of-text token. Each finished shard leaves a receipt in the store that says which document comes next,
so a later attempt goes on there instead of tokenizing everything again.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipelines.artifacts.manifest import File, Plan
from pipelines.recipe import Recipe
from pipelines.stage import Built, Work
from pipelines.text import documents, source_identity, source_label
from pipelines.tokenizer import token_stream, tokenizer
from trainer.config import UserError
from trainer.process import moment

if TYPE_CHECKING:
    import numpy as np
    import tiktoken


def plan(recipe: Recipe, plans: dict[str, Plan]) -> Plan:
    t = recipe.tokens
    identity = {
        "stage": "tokenize",
        "text": source_identity(t.source, t.subset, t.revision, t.text_column),
        "tokenizer": t.tokenizer,
        "shard_tokens": t.shard_tokens,
        "max_tokens": t.max_tokens,
        "val_shards": t.val_shards,
    }
    return Plan("tokenize", source_label(t.source, t.subset), identity)


@dataclass(frozen=True)
class Receipt:
    """A finished shard, and where the stream goes on behind it."""

    file: File
    tokens: int
    document: int  # the next token is number `offset` of this document
    offset: int


def build(work: Work) -> Built:
    config = work.recipe.tokens
    receipts = read_receipts(work)
    if receipts:
        work.screen.note(f"  {len(receipts)} shards are there from an earlier attempt")
    encoding = tokenizer(config.tokenizer)
    work.clock.enter("tokenize")
    with work.screen.bar("tokenize", config.max_tokens) as bar:
        started, before = time.monotonic(), sum(r.tokens for r in receipts)
        for shard in shards(work, receipts, encoding):
            receipts.append(save_shard(work, len(receipts), *shard))
            moment("tokenize")
            tokens = sum(r.tokens for r in receipts)
            speed = (tokens - before) / (time.monotonic() - started)
            bar.update(tokens, f"{tokens:,} tokens  {speed:,.0f} tok/s")
            work.report(tokens=tokens, tokens_per_second=speed)
    check_split(work.recipe, receipts)
    names = {r.file.name: r.tokens for r in receipts}
    facts = {
        "tokens": sum(names.values()),
        "train_tokens": sum(n for name, n in names.items() if name.startswith("train")),
        "val_tokens": sum(n for name, n in names.items() if name.startswith("val")),
        "documents": receipts[-1].document,
        "shards": names,
    }
    work.tracker.dataset("tokenize", work.plan.label, work.plan.fingerprint, config.source)
    return Built([r.file for r in receipts], facts)


def shards(
    work: Work, receipts: list[Receipt], encoding: "tiktoken.Encoding"
) -> Iterator[tuple["np.ndarray", int, int]]:
    """The shards that are still missing: tokens, and the document and offset behind them."""
    import numpy as np

    t = work.recipe.tokens
    document, offset = (receipts[-1].document, receipts[-1].offset) if receipts else (0, 0)
    left = None if t.max_tokens is None else t.max_tokens - sum(r.tokens for r in receipts)
    buffer, filled = np.empty(t.shard_tokens, np.uint16), 0
    with (
        closing(documents(t.source, t.subset, t.revision, t.text_column, start=document)) as texts,
        closing(token_stream(encoding, texts, threads=os.cpu_count() or 1)) as stream,
    ):
        for tokens in stream:
            work.check()
            while offset < len(tokens) and left != 0:
                take = min(len(tokens) - offset, t.shard_tokens - filled, t.shard_tokens if left is None else left)
                buffer[filled : filled + take] = tokens[offset : offset + take]
                filled, offset = filled + take, offset + take
                left = None if left is None else left - take
                if filled == t.shard_tokens:
                    yield buffer, document, offset
                    filled = 0
            if left == 0:
                break
            document, offset = document + 1, 0
    if filled:
        yield buffer[:filled], document, offset


def save_shard(work: Work, index: int, tokens: "np.ndarray", document: int, offset: int) -> Receipt:
    from trainer.shards import write_shard

    path = work.folder / shard_name(index, work.recipe.tokens.val_shards)
    write_shard(path, tokens)
    receipt = Receipt(work.upload(path), len(tokens), document, offset)
    path.unlink()
    body = json.dumps(asdict(receipt)).encode()
    if not work.store.create(receipt_key(work.plan, index), body):
        work.attempt.check()  # only a newer attempt can have been there before us
    return receipt


def read_receipts(work: Work) -> list[Receipt]:
    """The shards that earlier attempts have finished, from the first one on without a gap."""
    receipts: list[Receipt] = []
    while body := work.store.get(receipt_key(work.plan, len(receipts))):
        values = json.loads(body)
        receipts.append(Receipt(**values | {"file": File(**values["file"])}))
    return receipts


def receipt_key(plan: Plan, index: int) -> str:
    return f"{plan.prefix}/shards/{index:06d}.json"


def shard_name(index: int, val_shards: int) -> str:
    """val_000000.bin … for the first `val_shards`, then train_000000.bin …"""
    return f"val_{index:06d}.bin" if index < val_shards else f"train_{index - val_shards:06d}.bin"


def check_split(recipe: Recipe, receipts: list[Receipt]) -> None:
    """UserError unless both splits hold at least one sequence."""
    t, block = recipe.tokens, recipe.model.block_size
    for split, part in (("validation", receipts[: t.val_shards]), ("training", receipts[t.val_shards :])):
        if not any(r.tokens > block for r in part):
            raise UserError(
                f"tokens.shard_tokens: the text gives {sum(r.tokens for r in receipts):,} tokens, that is "
                f"{len(receipts)} shard(s) of {t.shard_tokens:,}, of which the first {t.val_shards} are held "
                f"out; no {split} sequence of {block} + 1 tokens is left: use smaller shards or more text"
            )
