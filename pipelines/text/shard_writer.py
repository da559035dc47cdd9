"""A text as token shards in llm.c's format.

The text is a stream of tokens: every document follows an end-of-text token, and shard i holds tokens
[i·shard_tokens, (i+1)·shard_tokens). Processes encode it (pool.py); here its tokens fill one shard, while the one
before is hashed and stored. A later attempt resumes behind the last receipt.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.manifest import ArtifactPlan, File
from pipelines.recipe import TokensConfig
from pipelines.text.encode import encoder_name
from pipelines.text.pool import tokens_of
from pipelines.text.receipts import ShardReceipt, existing_receipts, finished_key, receipt_key
from pipelines.text.sources import text_of
from pipelines.text.text import Text
from pipelines.text.tokenizer import tokenizer_of
from trainer.errors import FULL, DiskFull, UserError, is_full
from trainer.process import failpoint
from trainer.store import Store

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Reading:
    """What this attempt has read of its text. A finished shard is behind it."""

    bytes: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class ShardsJob:
    """The shards of a text to make in an attempt, and the tools."""

    config: TokensConfig
    plan: ArtifactPlan
    store: Store
    folder: Path  # scratch
    upload: Callable[[Path, str | None, str | None], File]  # path, name, sha256: into the attempt's folder of the store
    check: Callable[[], None]  # raises an exception to end the work
    note: Callable[[str], None]
    reading: Reading = field(default_factory=Reading)
    row_tokens: int | None = None  # of packed rows, which are counted
    processes: int | None = None  # None: one for each core


@dataclass(frozen=True)
class Progress:
    """How far a text is, in tokens."""

    stored: int  # with those of earlier attempts
    new: int  # of this attempt


@dataclass(frozen=True)
class NewShard:
    """A shard in scratch, and the place behind it."""

    path: Path
    sha256: str
    tokens: int
    document: int
    offset: int
    max_id: int
    invalid: int


def make_shards(job: ShardsJob) -> Generator[Progress, None, None]:
    """Make the missing shards. Yields the progress once each is stored.

    While a shard fills, the last one is uploaded, so scratch holds two. Closed in between, it finishes the upload.
    """
    receipts, complete = existing_receipts(job.store, job.plan, job.note)
    stored, new = sum(receipt.tokens for receipt in receipts), 0
    yield Progress(stored, new)
    if complete:
        return
    text, where = text_of(job.config), job.config.source
    state = unchanged_state(text, where, job.plan.identity["text"])
    with ThreadPoolExecutor(1, "upload") as thread:
        pending: Future[ShardReceipt] | None = None
        with closing(encoded_shards(job, text, receipts)) as shards:
            for index, shard in itertools.chain(enumerate(shards, len(receipts)), [(0, None)]):
                if pending:
                    receipts.append(pending.result())
                    stored, new = stored + receipts[-1].tokens, new + receipts[-1].tokens
                    yield Progress(stored, new)
                if shard:
                    if (now := text.state()) != state:
                        raise changed(where, now, state)
                    pending = thread.submit(store_shard, job, index, shard)
    body = json.dumps([receipt.to_json() for receipt in receipts]).encode()
    job.store.create(finished_key(job.plan.prefix), body)


def unchanged_state(text: Text, where: str, identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the files of a text. UserError unless it is the text of that identity."""
    state = text.state()  # before the contents: a change between the two is found later
    found = text.identity()
    if found != identity:
        contents = (each.get("sha256") or each.get("etag") for each in (found, identity))
        raise changed(where, *(dict(zip(state, each or (), strict=False)) for each in contents))
    return state


def changed(where: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> UserError:
    """The error for a text that is another one by now."""
    names = [name for name in before if now.get(name) != before.get(name)]
    which = f"'{names[0]}' of '{where}'" if names else f"'{where}'"
    return UserError(
        f"tokens.source: {which} changed after its artifact was planned; run again, and do not change a text "
        "while it is read"
    )


def encoded_shards(job: ShardsJob, text: Text, receipts: list[ShardReceipt]) -> Generator[NewShard, None, None]:
    """The shards behind the last receipt, as files."""
    from trainer.data.shards import token_dtype

    t = job.config
    encoding = tokenizer_of(t, job.store, job.plan.prefix)
    document, offset = (receipts[-1].document, receipts[-1].offset) if receipts else (0, 0)
    left = sys.maxsize if t.max_tokens is None else t.max_tokens - sum(receipt.tokens for receipt in receipts)
    numbers = itertools.count(len(receipts))
    file: ShardFile | None = None
    invalid = 0
    try:
        with closing(tokens_of(text, encoding, document, job.folder, job.check, job.processes)) as stream:
            for batch in stream if left else ():
                job.reading.tokens += len(batch.tokens)
                job.reading.bytes += batch.text_bytes
                job.check()
                first, at = document, offset  # the stream began with the document in which the last shard ended
                while at < len(batch.tokens) and left:
                    if file is None:
                        path = job.folder / shard_name(next(numbers), t)
                        file = ShardFile(path, min(left, t.shard_tokens), token_dtype(encoding.n_vocab))
                    end = min(len(batch.tokens), at + file.left)
                    file.write(batch.tokens[at:end])
                    invalid += sum(at <= start < end for start in batch.starts[list(batch.invalid)].tolist())
                    left, at = left - (end - at), end
                    behind, offset = batch.place(at)
                    document = first + behind
                    if not file.left:
                        yield NewShard(path, file.finish(), file.tokens, document, offset, file.max_id, invalid)
                        file, invalid = None, 0
                if not left:
                    break
        if file:
            yield NewShard(path, file.finish(), file.tokens, document, offset, file.max_id, invalid)
            file = None
    finally:
        if file:
            file.discard()


def store_shard(job: ShardsJob, index: int, shard: NewShard) -> ShardReceipt:
    """Write a shard to the store, then its receipt."""
    from trainer.data.shards import read_shard

    encoding = tokenizer_of(job.config, job.store, job.plan.prefix)
    rows = rows_in(encoding.eot_token, job.row_tokens, read_shard(shard.path))
    file = job.upload(shard.path, None, shard.sha256)
    shard.path.unlink()
    receipt = ShardReceipt(
        file, shard.tokens, shard.document, shard.offset, shard.max_id, rows, encoder_name(encoding), shard.invalid
    )
    if not job.store.create(receipt_key(job.plan.prefix, index), json.dumps(receipt.to_json()).encode()):
        job.check()  # another attempt made the same shard first; a newer attempt ends this one
    failpoint("tokenize")
    return receipt


def rows_in(eot: int, row_tokens: int | None, tokens: "np.ndarray") -> int | None:
    """The number of rows that a shard fills with documents; None without packing."""
    from trainer.data.packing import packed

    return None if row_tokens is None else len(packed(tokens, eot, row_tokens))


def shard_name(index: int, config: TokensConfig) -> str:
    """val_000000.bin … for the shards that are held out whole, then train_000000.bin …

    A shard whose split depends on the size of the text is called text_000000.bin until then (split.py).
    """
    if index < config.val_undecided_shards:
        return f"text_{index:06d}.bin"
    held_out = config.val_shards or 0
    return f"val_{index:06d}.bin" if index < held_out else f"train_{index - held_out:06d}.bin"


class ShardFile:
    """A new shard at `path` for `expected` tokens; it may end earlier. Threads hash and write it while the next tokens
    are read."""

    def __init__(self, path: Path, expected: int, dtype: "np.dtype[Any]") -> None:
        from trainer.data.shards import shard_header

        self.path, self.expected, self.dtype = path, expected, dtype
        self.tokens = self.max_id = 0
        header = shard_header(expected, dtype.itemsize)
        self._sha256 = hashlib.sha256(header)
        self._threads = ThreadPoolExecutor(2, "shard")
        self._pending: list[Future[Any]] = []
        with self._enough_disk():
            self._file = path.open("wb")
            self._file.write(header)

    @property
    def left(self) -> int:
        return self.expected - self.tokens

    def write(self, tokens: "np.ndarray") -> None:
        assert tokens.dtype == self.dtype and len(tokens) <= self.left, (tokens.dtype, len(tokens), self.left)
        content = tokens.view("u1").data
        self._wait()  # not more than one array is in the threads
        self._pending = [self._threads.submit(take, content) for take in (self._sha256.update, self._file.write)]
        self.tokens += len(tokens)
        self.max_id = max(self.max_id, int(tokens.max(initial=0)))

    def finish(self) -> str:
        """The sha256 of the complete file."""
        from trainer.data.shards import shard_header
        from trainer.store import sha256_of

        self._wait()
        self._threads.shutdown()
        with self._enough_disk():
            if self.left:  # the last shard
                self._file.seek(0)
                self._file.write(shard_header(self.tokens, self.dtype.itemsize))
            self._file.close()
        return sha256_of(self.path) if self.left else self._sha256.hexdigest()

    def discard(self) -> None:
        """Close and remove an incomplete file."""
        self._threads.shutdown()
        with suppress(OSError):  # the disk is full
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _wait(self) -> None:
        with self._enough_disk():
            for future in self._pending:
                future.result()

    @contextmanager
    def _enough_disk(self) -> Iterator[None]:
        """DiskFull for a full disk."""
        try:
            yield
        except OSError as error:
            if not is_full(error):
                raise
            raise DiskFull(f"{self.path.parent}: {FULL}") from error
