"""The receipts of finished shards in the store: an interrupted text resumes behind the last one.

Each finished shard leaves a receipt, which names the next document. The finished artifact has none: where its manifest
is removed, because a shard is damaged, all of them are made again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from pipelines.store.layout import ATTEMPT_FILE, receipt_key
from pipelines.store.manifest import ArtifactPlan, File
from trainer.base.record import Count, DamagedRecord, StoredRecord, decoded, decoded_at, typed
from trainer.base.store import Store


@dataclass(frozen=True)
class ShardReceipt(StoredRecord):
    """A finished shard, and the position in the text behind it."""

    file: File
    tokens: Count
    document: Count  # the next token is number `offset` of this document
    offset: Count
    max_id: Count  # the largest token
    rows: Count | None = None  # that the shard fills, if it is packed

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"file": self.file.to_json()}

    @classmethod
    def from_json(cls, values: Any, where: str = "a receipt") -> Self:
        """DamagedRecord, or NewerRecord."""
        from trainer.data.shards import form_of

        receipt = typed(cls, values, where)
        if form_of(receipt.file.size, receipt.tokens) is None:
            raise DamagedRecord(where, f"{receipt.tokens} tokens in {receipt.file.size} bytes")
        if not ATTEMPT_FILE.fullmatch(receipt.file.key):
            raise DamagedRecord(where, f"{receipt.file.key!r} is in no folder of an attempt")
        return receipt


def existing_receipts(
    store: Store, plan: ArtifactPlan, note: Callable[[str], None] = lambda line: None
) -> list[ShardReceipt]:
    """The receipts up to the first shard that is missing. Removes the receipts of shards that the store has lost: they
    are made again."""
    receipts = list[ShardReceipt]()
    while receipt := receipt_in(store, f"{plan.prefix}/{receipt_key(len(receipts))}", note):
        receipts.append(receipt)
    if receipts:
        note(f"  {len(receipts)} shard(s) exist from an earlier attempt")
    # The listing, of the folders of all attempts, is newer than the receipts.
    sizes = {entry.key: entry.size for entry in store.entries(f"{plan.prefix}/a")} if receipts else {}
    lost = [n for n, r in enumerate(receipts) if sizes.get(f"{plan.prefix}/{r.file.key}") != r.file.size]
    if lost:
        note(f"  {len(lost)} shards of {store.uri}/{plan.prefix} are missing; they are made again")
    for index in lost:
        store.delete(f"{plan.prefix}/{receipt_key(index)}")
    return receipts[: lost[0]] if lost else receipts


def receipt_in(store: Store, key: str, note: Callable[[str], None] = lambda line: None) -> ShardReceipt | None:
    """The receipt under a key of the store, or None without it. A damaged one is noted, and stays until its shard is
    made again."""
    try:
        return decoded_at(store, key, lambda body, where: ShardReceipt.from_json(decoded(body, where), where))
    except DamagedRecord as error:
        note(f"  {error}; its shards are made again")
        return None
