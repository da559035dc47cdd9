"""The receipts of finished shards in the store: an interrupted text resumes behind the last one.

Each finished shard leaves a receipt, which names the next document. A finished text leaves a list of its receipts; it
is not opened again.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from pipelines.artifacts.manifest import ArtifactPlan, File
from trainer.record import LARGE_BYTES, Count, DamagedRecord, StoredRecord, decoded, typed
from trainer.store import Store


@dataclass(frozen=True)
class ShardReceipt(StoredRecord):
    """A finished shard, and the position in the text behind it."""

    file: File
    tokens: Count
    document: Count  # the next token is number `offset` of this document
    offset: Count
    max_id: Count | None = None  # the largest token; None in the receipts of older versions
    rows: Count | None = None  # that the shard fills, if it is packed
    encoder: str | None = None  # the library that made it; None in the receipts of older versions

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"file": self.file.to_json()}

    @classmethod
    def from_json(cls, values: Any, where: str = "a receipt") -> Self:
        """DamagedRecord, or NewerRecord."""
        from trainer.data.shards import form_of

        receipt = typed(cls, values, where)
        if form_of(receipt.file.size, receipt.tokens) is None:
            raise DamagedRecord(where, f"{receipt.tokens} tokens in {receipt.file.size} bytes")
        if not re.fullmatch(r"a\d{4,9}/.*", receipt.file.key):
            raise DamagedRecord(where, f"{receipt.file.key!r} is in no folder of an attempt")
        return receipt

    @property
    def attempt(self) -> int:
        """The attempt that made the shard."""
        return int(self.file.key.partition("/")[0].removeprefix("a"))


def existing_receipts(store: Store, plan: ArtifactPlan, note: Callable[[str], None]) -> tuple[list[ShardReceipt], bool]:
    """The receipts up to the first shard that is missing, and whether they are all of the text. Removes the receipts
    of shards that the store has lost: they are made again."""
    finished = finished_receipts(store, plan, note)
    receipts = finished or []
    while finished is None and (one := _receipts_in(store, receipt_key(plan.prefix, len(receipts)), note)):
        receipts += one
    if receipts:
        note(f"  {len(receipts)} shards exist from an earlier attempt")
    # The listing is newer than the receipts.
    folders = {receipt.attempt for receipt in receipts}
    entries = (entry for number in folders for entry in store.entries(f"{plan.prefix}/a{number:04d}/"))
    sizes = {entry.key: entry.size for entry in entries}
    lost = [n for n, r in enumerate(receipts) if sizes.get(f"{plan.prefix}/{r.file.key}") != r.file.size]
    if not lost:
        return receipts, finished is not None
    note(f"  {len(lost)} shards of {store.uri}/{plan.prefix} are missing; they are made again")
    store.delete(finished_key(plan.prefix))
    for index in lost:
        store.delete(receipt_key(plan.prefix, index))
    return receipts[: lost[0]], False


def finished_receipts(
    store: Store, plan: ArtifactPlan, note: Callable[[str], None] = lambda line: None
) -> list[ShardReceipt] | None:
    """The receipts of all shards of a finished text; None for an unfinished one."""
    return _receipts_in(store, finished_key(plan.prefix), note)


def forget_receipts(store: Store, plan: ArtifactPlan, until_attempt: int) -> None:
    """Remove the receipts of the shards that this attempt and earlier ones made."""
    # The list first: without it, a finished text is still known by its shards' receipts.
    for folder in ("parts", "shards"):
        for entry in store.entries(f"{plan.prefix}/{folder}/"):
            receipts = _receipts_in(store, entry.key) or []
            if all(receipt.attempt <= until_attempt for receipt in receipts):
                store.delete(entry.key)


def _receipts_in(store: Store, key: str, note: Callable[[str], None] = lambda line: None) -> list[ShardReceipt] | None:
    """The receipts of a record of the store, or None without it. A damaged record is removed, with a note: its shards
    are made again, and a record is created only where there is none."""
    body = store.get(key)
    if body is None:
        return None
    try:
        content = decoded(body, f"{store.uri}/{key}", LARGE_BYTES)
        receipts = content if isinstance(content, list) else [content]
        return [ShardReceipt.from_json(one, f"{store.uri}/{key}") for one in receipts]
    except DamagedRecord as error:
        note(f"  {error}; its shards are made again")
        store.delete(key)
        return None


def receipt_key(prefix: str, index: int) -> str:
    return f"{prefix}/shards/{index:06d}.json"


def finished_key(prefix: str) -> str:
    return f"{prefix}/parts/00.json"
