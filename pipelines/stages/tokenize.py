"""tokenize: text becomes token shards in llm.c's format, the first `val_shards` of them held out.

The text's files are dealt out to `tokens.parts` parts, one by default. A part is a stream of its own: every document
behind an end-of-text token; its shard i holds tokens [i·shard_tokens, (i+1)·shard_tokens). Each finished shard leaves a
receipt in the store that says which document comes next, so a later attempt goes on there instead of tokenizing
everything again; a finished part leaves a list of its receipts, and is not opened again.

Of N nodes, node r makes parts r, r + N, r + 2N, …: the bytes are the same for every N. The head's are made here in
`build`, the others' in pipelines/lend.py; no file is shared but those in the store.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.manifest import ArtifactPlan, File
from pipelines.nodes.head import NodeAddress, failure
from pipelines.recipe import Recipe, TokensConfig
from pipelines.stage import Built, Work
from pipelines.text.sources import documents, source_identity, source_label
from pipelines.text.tokenizer import token_stream, tokenizer
from pipelines.tracking.ledger import attempts
from trainer.errors import Interrupted, UserError
from trainer.process import failpoint
from trainer.store import Store

if TYPE_CHECKING:
    import numpy as np

LOOK_SECONDS = 0.2  # between two looks at how far the other nodes are


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    t = recipe.tokens
    identity = {
        "stage": "tokenize",
        "text": source_identity(t.source, t.subset, t.revision, t.text_column, parts=t.parts),
        "tokenizer": t.tokenizer,
        "shard_tokens": t.shard_tokens,
        "max_tokens": t.max_tokens,
        "val_shards": t.val_shards,
    }
    if t.parts > 1:  # one stream has the fingerprint that it had before there were parts
        identity["parts"] = t.parts
    return ArtifactPlan("tokenize", source_label(t.source, t.subset), identity)


@dataclass(frozen=True)
class ShardReceipt:
    """A finished shard, and where the part's stream goes on behind it."""

    file: File
    tokens: int
    document: int  # the next token is number `offset` of this document
    offset: int


@dataclass(frozen=True)
class Share:
    """The parts that one node makes in an attempt, and with what."""

    config: TokensConfig
    plan: ArtifactPlan
    store: Store
    parts: range
    folder: Path  # scratch
    upload: Callable[[Path], File]  # into the attempt's folder of the store
    check: Callable[[], None]  # raises what is to end the work
    note: Callable[[str], None]


@dataclass(frozen=True)
class Tally:
    """How far a node is with its parts, in tokens."""

    there: int  # in the store
    new: int  # of these, made by this attempt


def parts_of(place: NodeAddress, parts: int) -> range:
    """The parts that a node makes; none, if there are more nodes than parts."""
    return range(place.rank, parts, place.count)


def build(work: Work) -> Built:
    config = work.recipe.tokens
    forget_finished(work.store, work.plan)
    # One part is one node's affair: nobody waits for the others, nor are they asked.
    head = work.head if config.parts > 1 else None
    if head:
        head.gathered(0)
        head.begin_parts(work.attempt.number)
    place = head.place if head else NodeAddress()
    share = Share(
        config,
        work.plan,
        work.store,
        parts_of(place, config.parts),
        work.folder,
        work.upload,
        lambda: check(work),
        work.screen.note,
    )
    work.clock.enter("tokenize")
    with work.screen.bar("tokenize", config.max_tokens) as bar:
        started = time.monotonic()

        def tell(mine: Tally) -> None:
            tallies = [mine, *(Tally(*told) for told in (head.told() if head else []))]
            tokens = sum(t.there for t in tallies)
            speed = sum(t.new for t in tallies) / (time.monotonic() - started)
            bar.update(tokens, f"{tokens:,} tokens  {speed:,.0f} tok/s")
            work.report(tokens=tokens, tokens_per_second=speed)

        mine = Tally(0, 0)
        for mine in make(share):
            tell(mine)
        while head and len(head.ended()) < place.count - 1:
            check(work)
            tell(mine)
            time.sleep(LOOK_SECONDS)
        check(work)
        tell(mine)
    parts = [part for number in range(config.parts) if (part := finished(work.store, work.plan, number)) is not None]
    assert len(parts) == config.parts, f"{work.plan.prefix}/parts/ has {len(parts)} lists of {config.parts}"
    receipts = [receipt for part in parts for receipt in part]
    check_split(work.recipe, receipts)
    names = {r.file.name: r.tokens for r in receipts}
    facts = {
        "tokens": sum(names.values()),
        "train_tokens": sum(n for name, n in names.items() if name.startswith("train")),
        "val_tokens": sum(n for name, n in names.items() if name.startswith("val")),
        "documents": sum(part[-1].document for part in parts if part),
        "shards": names,
    }
    work.tracker.dataset("tokenize", work.plan.label, work.plan.fingerprint, config.source)
    return Built([r.file for r in receipts], facts)


def check(work: Work) -> None:
    """Leave if asked to stop, if a newer attempt has taken over, or if another node can't make its parts."""
    if work.head and (lost := work.head.lost()) and work.stop.ending is Interrupted:
        raise Interrupted(f"node {lost[0]} is gone")
    work.check()
    for part in work.head.ended() if work.head else []:
        if part.kind:
            raise failure(part)


def make(share: Share) -> Iterator[Tally]:
    """Make the shards that are missing of a node's parts, one part after the other; after each, how far it is."""
    receipts = {part: read_receipts(share, part) for part in share.parts}
    before = sum(r.tokens for part in receipts.values() for r in part)
    if shards := sum(map(len, receipts.values())):
        share.note(f"  {shards} shards are there from an earlier attempt")
    new = 0
    yield Tally(before, new)
    for part, made in receipts.items():
        if finished(share.store, share.plan, part) is not None:
            continue
        for shard in missing_shards(share, part, made):
            made.append(save_shard(share, part, len(made), *shard))
            failpoint("tokenize")
            new += made[-1].tokens
            yield Tally(before + new, new)
        body = json.dumps([asdict(receipt) for receipt in made]).encode()
        share.store.create(finished_key(share.plan, part), body)


def missing_shards(share: Share, part: int, receipts: list[ShardReceipt]) -> Iterator[tuple["np.ndarray", int, int]]:
    """The shards that are still missing of a part: tokens, and the document and offset behind them."""
    import numpy as np

    t = share.config
    document, offset = (receipts[-1].document, receipts[-1].offset) if receipts else (0, 0)
    most = t.tokens_of_part(part)
    left = None if most is None else most - sum(r.tokens for r in receipts)
    buffer, filled = np.empty(t.shard_tokens, np.uint16), 0
    texts = documents(t.source, t.subset, t.revision, t.text_column, document, part=part, parts=t.parts)
    with (
        closing(texts),
        closing(token_stream(tokenizer(t.tokenizer), texts, threads=os.cpu_count() or 1)) as stream,
    ):
        for tokens in stream:
            share.check()
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


def save_shard(share: Share, part: int, index: int, tokens: "np.ndarray", document: int, offset: int) -> ShardReceipt:
    from trainer.shards import write_shard

    path = share.folder / shard_name(part, index, share.config)
    write_shard(path, tokens)
    receipt = ShardReceipt(share.upload(path), len(tokens), document, offset)
    path.unlink()
    body = json.dumps(asdict(receipt)).encode()
    if not share.store.create(receipt_key(share, part, index), body):
        share.check()  # another attempt was there before us, with the same tokens; a newer one ends this
    return receipt


def read_receipts(share: Share, part: int) -> list[ShardReceipt]:
    """The shards of a part that earlier attempts have finished, from the first one on without a gap."""
    receipts = finished(share.store, share.plan, part)
    if receipts is None:
        receipts = []
        while body := share.store.get(receipt_key(share, part, len(receipts))):
            receipts.append(receipt_of(json.loads(body)))
    return receipts


def finished(store: Store, plan: ArtifactPlan, part: int) -> list[ShardReceipt] | None:
    """All shards of a part that needs no more work."""
    body = store.get(finished_key(plan, part))
    return [receipt_of(values) for values in json.loads(body)] if body else None


def forget_finished(store: Store, plan: ArtifactPlan) -> None:
    """Remove the receipts of attempts up to one that finished the artifact, whose manifest is gone: whoever removed it
    wants the shards made anew, as the message about a damaged one says."""
    done = max((beat.attempt for beat in attempts(store, plan.prefix) if beat.state == "done"), default=0)
    if not done:
        return
    # The lists first: what is not in one is still found by its receipt.
    for folder in ("parts", "shards"):
        for entry in store.entries(f"{plan.prefix}/{folder}/"):
            told = json.loads(store.get(entry.key) or b"[]")
            receipts = [receipt_of(values) for values in (told if isinstance(told, list) else [told])]
            if all(attempt_of(receipt) <= done for receipt in receipts):
                store.delete(entry.key)


def attempt_of(receipt: ShardReceipt) -> int:
    return int(receipt.file.key.partition("/")[0].removeprefix("a"))


def receipt_of(values: dict[str, Any]) -> ShardReceipt:
    return ShardReceipt(**values | {"file": File(**values["file"])})


def receipt_key(share: Share, part: int, index: int) -> str:
    return f"{share.plan.prefix}/shards/{prefix_of(part, share.config)}{index:06d}.json"


def finished_key(plan: ArtifactPlan, part: int) -> str:
    return f"{plan.prefix}/parts/{part:02d}.json"


def shard_name(part: int, index: int, config: TokensConfig) -> str:
    """val_000000.bin … for the first `val_shards` of part 0, then train_000000.bin …; of several parts
    train_00_000000.bin …, train_01_000000.bin …"""
    held_out = config.val_shards if part == 0 else 0
    split, number = ("val", index) if index < held_out else ("train", index - held_out)
    return f"{split}_{prefix_of(part, config)}{number:06d}.bin"


def prefix_of(part: int, config: TokensConfig) -> str:
    return f"{part:02d}_" if config.parts > 1 else ""


def check_split(recipe: Recipe, receipts: list[ShardReceipt]) -> None:
    """UserError unless both splits hold at least one sequence, and as much is held out as was asked for."""
    t, block = recipe.tokens, recipe.model.block_size
    first = sum(r.tokens for r in receipts if f"_{prefix_of(0, t)}" in r.file.name)
    if t.parts > 1 and first < t.val_shards * t.shard_tokens:  # other parts would hide that there is nothing left of it
        raise UserError(
            f"tokens.val_shards: {t.val_shards} shard(s) of {t.shard_tokens:,} tokens are to be held out of the first "
            f"of {t.parts} parts, and it has {first:,} tokens: use fewer or smaller shards, fewer parts or more text"
        )
    for name, split in (("val", "validation"), ("train", "training")):
        if not any(r.tokens > block for r in receipts if r.file.name.startswith(name)):
            raise UserError(
                f"tokens.shard_tokens: the text gives {sum(r.tokens for r in receipts):,} tokens, that is "
                f"{len(receipts)} shard(s) of {t.shard_tokens:,}, of which the first {t.val_shards} are held "
                f"out; no {split} sequence of {block} + 1 tokens is left: use smaller shards or more text"
            )
