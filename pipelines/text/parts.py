"""The parts of a text as token shards in llm.c's format.

The files of the text are distributed over `tokens.parts` parts, one by default. Each part is its own stream of tokens:
every document follows an end-of-text token, and shard i holds tokens [i·shard_tokens, (i+1)·shard_tokens). Each
finished shard leaves a receipt in the store, which names the next document. A later attempt resumes there and does not
tokenize the part again. A finished part leaves a list of its receipts; its text is not opened again.

Several nodes take the parts one by one, by leases (leases.py): the bytes are the same for any number of nodes.
"""

import itertools
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pipelines.artifacts.manifest import ArtifactPlan, File, find
from pipelines.recipe import TokensConfig
from pipelines.text.encode import EncodersDiffer, encoder_name, token_stream
from pipelines.text.leases import Lease, PartTaken, take
from pipelines.text.shard_file import ShardFile
from pipelines.text.sources import Source, open_source
from pipelines.text.tokenizer import tokenizer_of
from pipelines.text.unchanged import UnchangedText
from trainer.process import failpoint
from trainer.store import Store
from trainer.stored import Count, DamagedRecord, Stored, decoded, typed

if TYPE_CHECKING:
    import numpy as np

RECORDS = "adopted"  # the folder of the records of adopted shards (adopted.py)
WAIT_SECONDS = 1.0  # between two looks for a part to take


@dataclass(frozen=True)
class ShardReceipt(Stored):
    """A finished shard, and the position in the part's stream behind it."""

    file: File
    tokens: Count
    document: Count  # the next token is number `offset` of this document
    offset: Count
    max_id: Count | None = None  # the largest token; None in the receipts of older versions
    rows: Count | None = None  # that the shard fills, if it is packed
    encoder: str | None = None  # the library that made it; None in the receipts of older versions
    invalid: Count = 0  # documents that begin in it and hold U+FFFD for what was not valid UTF-8

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"file": self.file.to_json()}

    @classmethod
    def from_json(cls, values: Any, where: str = "a receipt") -> Self:
        """DamagedRecord, or NewerRecord."""
        from trainer.shards import form_of

        receipt = typed(cls, values, where)
        if form_of(receipt.file.size, receipt.tokens) is None:
            raise DamagedRecord(where, f"{receipt.tokens} tokens in {receipt.file.size} bytes")
        if not re.fullmatch(r"a\d{4,9}/.*", receipt.file.key):
            raise DamagedRecord(where, f"{receipt.file.key!r} is in no folder of an attempt")
        if receipt.encoder is not None and not re.fullmatch(r"[a-z]+ [\w.+-]{1,40}", receipt.encoder):
            raise DamagedRecord(where, "no name and version of a library")
        return receipt

    @property
    def attempt(self) -> int:
        """The attempt that made the shard."""
        return int(self.file.key.partition("/")[0].removeprefix("a"))


@dataclass
class Reading:
    """What a node has read of its text in this attempt. A finished shard is behind it."""

    bytes: int = 0
    tokens: int = 0
    reference: bool = False  # the fast encoder has erred: tiktoken encodes the rest


@dataclass(frozen=True)
class PartsJob:
    """The parts that one node may make in an attempt, and its tools."""

    config: TokensConfig
    plan: ArtifactPlan
    store: Store
    parts: Sequence[int]  # in the order in which the node looks for one to make
    folder: Path  # scratch
    upload: Callable[[Path, str | None, str | None], File]  # path, name, sha256: into the attempt's folder of the store
    check: Callable[[], None]  # raises an exception to end the work
    note: Callable[[str], None]
    reading: Reading = field(default_factory=Reading)
    row_tokens: int | None = None  # of packed rows, which are counted
    attempt: int = 1
    waits: bool = True  # until all parts are finished; else the node leaves when no part is left for it
    shared: bool = False  # other nodes look for parts of this text, too; always so for a text in several parts


@dataclass(frozen=True)
class PartsProgress:
    """How far a node is, in tokens."""

    stored: int  # of the parts that it has taken, and if it waits, of those that were finished before
    new: int  # that it made


def parts_in_order(rank: int, nodes: int, parts: int) -> list[int]:
    """All parts, in the order in which a node looks for one that no other node works on: its own share first."""
    own = range(rank, parts, nodes)
    return [*own, *(part for part in range(parts) if part not in own)]


def make_parts(job: PartsJob) -> Generator[PartsProgress, None, None]:
    """Make the missing shards of the job's parts, one part after the other, as far as no other node works on them.
    Yields the progress after each shard.

    A job that waits ends once all its parts are finished, and takes over those of a node that is gone; another job ends
    when no part is left to take.
    """
    unfinished = [part for part in job.parts if not is_complete(job, part)]
    finished = [finished_part(job.store, job.plan, part) or [] for part in job.parts if part not in unfinished]
    stored = sum(receipt.tokens for part in finished for receipt in part) if job.waits else 0
    if finished:
        job.note(f"  {sum(map(len, finished))} shards exist from an earlier attempt")
    new = 0
    yield PartsProgress(stored, new)
    text: UnchangedText | None = None  # the text of finished parts is not opened
    while unfinished:
        taken = next(((part, lease) for part in unfinished if (lease := lease_of(job, part))), None)
        if taken is None:
            if not job.waits:
                return
            job.check()
            time.sleep(WAIT_SECONDS)
            unfinished = [part for part in unfinished if finished_part(job.store, job.plan, part) is None]
            continue
        part, lease = taken
        with lease:
            mine = replace(job, check=partial(check_both, job.check, lease.check))
            receipts = existing_shards(mine, part)
            if receipts:
                stored += sum(receipt.tokens for receipt in receipts)
                yield PartsProgress(stored, new)
            try:
                # A finished mixture forgets the lists of its sources' parts.
                if finished_part(job.store, job.plan, part) is None and find(job.store, job.plan) is None:
                    text = text or text_of(job)
                    with closing(make_part(mine, text, part, receipts)) as shards_made:
                        for receipt in shards_made:
                            stored, new = stored + receipt.tokens, new + receipt.tokens
                            yield PartsProgress(stored, new)
                    body = json.dumps([receipt.to_json() for receipt in receipts]).encode()
                    job.store.create(finished_key(job.plan.prefix, part), body)
            except PartTaken:
                job.note(f"  another node has taken over part {part}")
                continue
        unfinished.remove(part)


def lease_of(job: PartsJob, part: int) -> "Lease | NoLease | None":
    """The right to work on a part; None while another node works on it. One node alone makes a text in one part, unless
    it is a source of a mixture."""
    if not (job.shared or job.config.parts > 1):
        return NoLease()
    return take(job.store, job.plan.prefix, part, job.attempt, uuid.uuid4().hex)


class NoLease(nullcontext[None]):
    """The lease of a node that works alone."""

    def check(self) -> None: ...


def check_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def is_complete(job: PartsJob, part: int) -> bool:
    """Whether a part is finished and the store has all its shards."""
    receipts = finished_part(job.store, job.plan, part, job.note)
    return receipts is not None and not lost_shards(receipts, job)


def existing_shards(job: PartsJob, part: int) -> list[ShardReceipt]:
    """The receipts of a part up to the first shard that is missing. The records of lost shards are removed: they are
    made again."""
    receipts = read_receipts(job, part)
    if receipts:
        job.note(f"  {len(receipts)} shards exist from an earlier attempt")
    lost = lost_shards(receipts, job)
    if not lost:
        return receipts
    job.note(f"  {len(lost)} shards of {job.store.uri}/{job.plan.prefix} are missing; they are made again")
    job.store.delete(finished_key(job.plan.prefix, part))
    for index in lost:
        job.store.delete(receipt_key(job.plan.prefix, job.config, part, index))
    return receipts[: lost[0]]


def lost_shards(receipts: list[ShardReceipt], job: PartsJob) -> list[int]:
    """The numbers of the shards of a part that the store has no more. The listing is newer than the receipts."""
    folders = {receipt.attempt for receipt in receipts}
    entries = (entry for number in folders for entry in job.store.entries(f"{job.plan.prefix}/a{number:04d}/"))
    stored = {entry.key: entry.size for entry in entries}
    return [n for n, r in enumerate(receipts) if stored.get(f"{job.plan.prefix}/{r.file.key}") != r.file.size]


def text_of(job: PartsJob) -> UnchangedText:
    """The text of the job's plan. UserError if it is another one by now."""
    t = job.config
    source = open_source(t.source, t.subset, t.revision, t.text_column, None)
    return UnchangedText(source, t.source, job.plan.identity["text"])


@dataclass(frozen=True)
class NewShard:
    """A shard in scratch, the place behind it, and the library that encoded it."""

    path: Path
    sha256: str
    tokens: int
    document: int
    offset: int
    max_id: int
    encoder: str
    invalid: int


def make_part(
    job: PartsJob, text: UnchangedText, part: int, receipts: list[ShardReceipt]
) -> Generator[ShardReceipt, None, None]:
    """Make the missing shards of a part, and add their receipts to `receipts`. Yields each once it is stored.

    While a shard fills, the last one is uploaded, so scratch holds two. Closed in between, it finishes the upload.
    """
    with ThreadPoolExecutor(1, "upload") as thread:
        while True:
            pending: Future[ShardReceipt] | None = None
            differ: EncodersDiffer | None = None
            try:
                with closing(encoded_shards(job, text.source, part, receipts)) as shards:
                    for index, shard in enumerate(shards, len(receipts)):
                        text.check()
                        if pending:
                            receipts.append(pending.result())
                            yield receipts[-1]
                        pending = thread.submit(store_shard, job, part, index, shard)
            except EncodersDiffer as error:
                differ = error
            if pending:
                receipts.append(pending.result())
                yield receipts[-1]
            if differ is None:
                return
            job.note(f"  {differ}; tiktoken encodes the rest of this node's text, from the last stored shard on")
            job.reading.reference = True


def encoded_shards(
    job: PartsJob, source: Source, part: int, receipts: list[ShardReceipt]
) -> Generator[NewShard, None, None]:
    """The shards of a part behind the last receipt, as files. EncodersDiffer if the fast encoder errs."""
    from trainer.shards import token_dtype

    t, reference = job.config, job.reading.reference
    encoding = tokenizer_of(t, job.store, job.plan.prefix)
    document, offset = (receipts[-1].document, receipts[-1].offset) if receipts else (0, 0)
    limit = t.tokens_of_part(part)
    left = sys.maxsize if limit is None else limit - sum(receipt.tokens for receipt in receipts)
    numbers = itertools.count(len(receipts))
    file: ShardFile | None = None
    invalid = 0

    def finished(shard: ShardFile) -> NewShard:
        sha256 = shard.finish()
        name = encoder_name(encoding, reference)
        return NewShard(shard.path, sha256, shard.tokens, document, offset, shard.max_id, name, invalid)

    texts = source.batches(document, part, t.parts)
    try:
        with closing(token_stream(encoding, texts, os.cpu_count() or 1, reference)) as stream:
            for batch in stream:
                job.reading.tokens += len(batch.tokens)
                job.reading.bytes += batch.text_bytes
                job.check()
                first, at = document, offset  # the stream began with the document in which the last shard ended
                while at < len(batch.tokens) and left:
                    if file is None:
                        path = job.folder / shard_name(part, next(numbers), t)
                        file = ShardFile(path, min(left, t.shard_tokens), token_dtype(encoding.n_vocab))
                    end = min(len(batch.tokens), at + file.left)
                    file.write(batch.tokens[at:end])
                    invalid += sum(at <= start < end for start in batch.starts[list(batch.invalid)].tolist())
                    left, at = left - (end - at), end
                    behind, offset = batch.place(at)
                    document = first + behind
                    if not file.left:
                        yield finished(file)
                        file, invalid = None, 0
                if not left:
                    break
        if file:
            yield finished(file)
            file = None
    finally:
        if file:
            file.discard()


def store_shard(job: PartsJob, part: int, index: int, shard: NewShard) -> ShardReceipt:
    """Write a shard to the store, then its receipt."""
    from trainer.shards import read_shard

    eot = tokenizer_of(job.config, job.store, job.plan.prefix).eot_token
    rows = rows_in(eot, job.row_tokens, read_shard(shard.path))
    file = job.upload(shard.path, None, shard.sha256)
    shard.path.unlink()
    receipt = ShardReceipt(
        file, shard.tokens, shard.document, shard.offset, shard.max_id, rows, shard.encoder, shard.invalid
    )
    body = json.dumps(receipt.to_json()).encode()
    if not job.store.create(receipt_key(job.plan.prefix, job.config, part, index), body):
        job.check()  # another attempt made the same shard first; a newer attempt ends this one
    failpoint("tokenize")
    return receipt


def rows_in(eot: int, row_tokens: int | None, tokens: "np.ndarray") -> int | None:
    """The number of rows that a shard fills with documents; None without packing."""
    from trainer.packing import packed

    return None if row_tokens is None else len(packed(tokens, eot, row_tokens))


def read_receipts(job: PartsJob, part: int) -> list[ShardReceipt]:
    """The shards of a part that earlier attempts finished, from the first one up to the first gap."""
    receipts = finished_part(job.store, job.plan, part, job.note)
    if receipts is None:
        receipts = []
        while one := _receipts_in(job.store, receipt_key(job.plan.prefix, job.config, part, len(receipts)), job.note):
            receipts += one
    return receipts


def finished_part(
    store: Store, plan: ArtifactPlan, part: int, note: Callable[[str], None] = lambda line: None
) -> list[ShardReceipt] | None:
    """All shards of a finished part; None for an unfinished one."""
    return _receipts_in(store, finished_key(plan.prefix, part), note)


def forget_receipts(store: Store, plan: ArtifactPlan, until_attempt: int) -> None:
    """Remove the receipts of the shards that this attempt and earlier ones made, and the records of adopted ones."""
    # The lists first: without its list, a finished part is still known by its shards' receipts.
    for folder in ("parts", "shards"):
        for entry in store.entries(f"{plan.prefix}/{folder}/"):
            receipts = _receipts_in(store, entry.key) or []
            if all(receipt.attempt <= until_attempt for receipt in receipts):
                store.delete(entry.key)
    for entry in store.entries(f"{plan.prefix}/{RECORDS}/"):
        store.delete(entry.key)


def _receipts_in(store: Store, key: str, note: Callable[[str], None] = lambda line: None) -> list[ShardReceipt] | None:
    """The receipts of a record of the store, or None without it. A damaged record is removed, with a note: its shards
    are made again, and a record is created only where there is none."""
    body = store.get(key)
    if body is None:
        return None
    try:
        content = decoded(body, f"{store.uri}/{key}")
        receipts = content if isinstance(content, list) else [content]
        return [ShardReceipt.from_json(one, f"{store.uri}/{key}") for one in receipts]
    except DamagedRecord as error:
        note(f"  {error}; its shards are made again")
        store.delete(key)
        return None


def receipt_key(prefix: str, config: TokensConfig, part: int, index: int) -> str:
    return f"{prefix}/shards/{part_prefix(part, config)}{index:06d}.json"


def finished_key(prefix: str, part: int) -> str:
    return f"{prefix}/parts/{part:02d}.json"


def shard_name(part: int, index: int, config: TokensConfig) -> str:
    """val_000000.bin … for the shards of part 0 that are held out whole, then train_000000.bin …

    With several parts: train_00_000000.bin …, train_01_000000.bin … A shard whose split depends on the size of the text
    is called text_000000.bin until then (split.py).
    """
    held_out = config.val_whole_shards if part == 0 else 0
    split, number = ("val", index) if index < held_out else ("train", index - held_out)
    if index < config.val_undecided_shards:
        split = "text"
    return f"{split}_{part_prefix(part, config)}{number:06d}.bin"


def part_prefix(part: int, config: TokensConfig) -> str:
    """The part's number in names of shards and receipts; empty for a text in one part."""
    return f"{part:02d}_" if config.parts > 1 else ""
