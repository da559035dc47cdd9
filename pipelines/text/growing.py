"""The shards of a text that tokenize may still be making, for a run with `train.follow_tokens`.

A shard counts once its receipt is in the store. Training reads the first shards of all parts, then the second ones, and
so on: each part grows in this order. A part that has ended, by its list of receipts, is left out from there on. So the
order does not depend on when it is asked for; the manifest, once there, gives the same one. The sources of a mixture
grow so, each alone, and training reads them by their weights.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.manifest import File, Manifest, read_manifest
from pipelines.artifacts.shard_cache import shards_in
from pipelines.recipe import Recipe, TokensConfig
from pipelines.text.mixture import mixed_file, mixed_name, name_in_source
from pipelines.text.parts import ShardReceipt, finished_key, receipt_key
from trainer.config import seconds_from_environment
from trainer.errors import StoreUnavailable
from trainer.store import Store
from trainer.stored import decoded

if TYPE_CHECKING:
    from trainer.shards import Shard

AT_ONCE = 16  # receipts that are requested at the same time
MAKER_BEGINS_BY = "SKYTRAIN_TOKENS_BY"  # of a launch whose tokens another of its jobs makes


def maker_begins_by() -> float:
    """The time (unix seconds) until which the job beside this one begins to make the tokens; 0 without such a job."""
    return seconds_from_environment(MAKER_BEGINS_BY, 0.0)


class GrowingTokens:
    """The tokens under `prefix`, whole or not: as a manifest, but with more shards at every look."""

    files: Sequence[File] = ()  # `file` looks each one up

    def __init__(self, store: Store, prefix: str, config: TokensConfig) -> None:
        self.store, self.prefix, self.config = store, prefix, config
        self._shards: list[Shard] = []  # of the training split, in reading order
        self._whole = False
        self._manifest: Manifest | None = None  # once it is there
        self._next = (0, 0)  # number in the part, and part, of the next shard
        self._ends: dict[int, int] = {}  # by part that has ended: its number of training shards

    def more(self, known: int) -> "tuple[list[Shard], Collection[int]]":
        """The training shards behind the first `known` ones, and {0} if there will be no more."""
        if not self._whole:
            self._look()
        return self._shards[known:], {0} if self._whole else set()

    def val_shards(self) -> "list[Shard]":
        """The validation split, which comes first. StoreUnavailable if it is not there yet."""
        if manifest := self._finished():
            return shards_in(manifest, "val")
        receipts = [self._receipt(0, index) for index in range(self.config.val_whole_shards)]
        there = [receipt for receipt in receipts if receipt]
        if len(there) < len(receipts):
            raise StoreUnavailable(f"{self.store.uri}/{self.prefix}: has no validation split yet")
        return shards_of(self.prefix, there)

    def file(self, name: str) -> File:
        """A shard's file by its name. DamagedArtifact if the finished tokens lack it."""
        if self._manifest:
            return self._manifest.file(name)
        *part, number = name.removesuffix(".bin").split("_")[1:]
        index = int(number) + (self._held_out(int(part[0]) if part else 0) if name.startswith("train") else 0)
        if receipt := self._receipt(int(part[0]) if part else 0, index):
            return receipt.file
        if manifest := self._finished():
            return manifest.file(name)
        raise StoreUnavailable(f"{self.store.uri}/{self.prefix}: {name} was removed")

    def _look(self) -> None:
        """Read what is new in the store."""
        from trainer.shards import reading_order

        if manifest := self._finished():
            self._shards, self._whole = reading_order(shards_in(manifest, "train")), True
            return
        with ThreadPoolExecutor(AT_ONCE) as threads:
            while not self._whole:
                places = list(self._places(AT_ONCE))
                for (number, part), receipt in zip(
                    places, threads.map(lambda place: self._receipt(place[1], self._index(*place)), places), strict=True
                ):
                    if (number, part) != self._next:
                        continue
                    if receipt is None and not self._has_ended(part, number):
                        return
                    if receipt:
                        self._shards += shards_of(self.prefix, [receipt])
                    self._advance()

    def _finished(self) -> Manifest | None:
        """The manifest of the finished tokens; None until then."""
        self._manifest = self._manifest or read_manifest(self.store, self.prefix)
        return self._manifest

    def _places(self, count: int) -> Iterator[tuple[int, int]]:
        """The next places in reading order, among the parts that may go on."""
        number, part = self._next
        last = max(self._ends.values()) if len(self._ends) == self.config.parts else sys.maxsize
        while count and number < last:
            if number < self._ends.get(part, number + 1):
                yield number, part
                count -= 1
            number, part = (number, part + 1) if part + 1 < self.config.parts else (number + 1, 0)

    def _advance(self) -> None:
        """Go on to the next place; there is none once all parts have ended."""
        number, part = self._next
        self._next = (number, part + 1) if part + 1 < self.config.parts else (number + 1, 0)
        self._next = next(self._places(1), self._next)
        self._whole = not list(self._places(1))

    def _has_ended(self, part: int, number: int) -> bool:
        """Whether a part has no training shard of this number, because it is finished."""
        receipts = self._receipts(finished_key(self.prefix, part))
        if receipts is None:
            return False
        self._ends[part] = max(0, len(receipts) - self._held_out(part))
        return number >= self._ends[part]

    def _receipt(self, part: int, index: int) -> ShardReceipt | None:
        receipts = self._receipts(receipt_key(self.prefix, self.config, part, index))
        return receipts[0] if receipts else None

    def _receipts(self, key: str) -> list[ShardReceipt] | None:
        """The receipts of a record; None without it. DamagedRecord, which tokenize mends."""
        body = self.store.get(key)
        if body is None:
            return None
        content = decoded(body, f"{self.store.uri}/{key}")
        receipts = content if isinstance(content, list) else [content]
        return [ShardReceipt.from_json(one, f"{self.store.uri}/{key}") for one in receipts]

    def _index(self, number: int, part: int) -> int:
        return number + self._held_out(part)

    def _held_out(self, part: int) -> int:
        return self.config.val_whole_shards if part == 0 else 0


class GrowingSources:
    """The tokens of a mixture under `prefix`, whole or not, as those of one text. `prefixes`: of its sources."""

    files: Sequence[File] = ()

    def __init__(self, store: Store, prefix: str, recipe: Recipe, prefixes: Sequence[str]) -> None:
        self.prefix, self.block_size, self.weights = prefix, recipe.model.block_size, recipe.tokens.weights
        each = zip(prefixes, recipe.tokens.each(), strict=True)
        self.sources = [GrowingTokens(store, one, config) for one, config in each]

    def more(self, known: int) -> "tuple[list[Shard], Collection[int]]":
        """The training shards behind the first `known` ones, as far as training knows in which order it reads them; and
        the sources that get no more. None before each source has its first one, with its validation split."""
        from trainer.shards import known_order

        found = [source.more(0) for source in self.sources]
        if not all(map(any, found)):
            return [], set()
        texts = [self._mixed(n, shards) for n, (shards, _) in enumerate(found)]
        ended = [n for n, (_, ended) in enumerate(found) if ended]
        shards = known_order(texts, ended, self.block_size, self.weights)
        there = Counter(shard.source for shard in shards)
        return shards[known:], {n for n in ended if there[n] == len(texts[n])}

    def val_shards(self) -> "list[Shard]":
        """As `GrowingTokens.val_shards`, of all sources."""
        return [one for n, source in enumerate(self.sources) for one in self._mixed(n, source.val_shards())]

    def file(self, name: str) -> File:
        """As `GrowingTokens.file`."""
        number, own = name_in_source(name)
        return mixed_file(number, self.sources[number].prefix, self.sources[number].file(own))

    def _mixed(self, source: int, shards: "Iterable[Shard]") -> "list[Shard]":
        return [replace(shard, name=mixed_name(source, shard.name), source=source) for shard in shards]


def growing_tokens(store: Store, prefix: str, recipe: Recipe, sources: Sequence[str]) -> GrowingTokens | GrowingSources:
    """The tokens of a recipe under `prefix`, with the prefixes of its `sources` if it is a mixture."""
    return GrowingSources(store, prefix, recipe, sources) if sources else GrowingTokens(store, prefix, recipe.tokens)


def shards_of(prefix: str, receipts: Iterable[ShardReceipt]) -> "list[Shard]":
    """The shards of receipts."""
    known = list(receipts)
    facts = {
        "shards": {receipt.file.name: receipt.tokens for receipt in known},
        "max_ids": {r.file.name: r.max_id for r in known if r.max_id is not None},
        "rows": {r.file.name: r.rows for r in known if r.rows is not None and r.file.name.startswith("train")},
    }
    return shards_in(unfinished(prefix, tuple(receipt.file for receipt in known), facts), "")


def unfinished(
    prefix: str,
    files: tuple[File, ...] = (),
    facts: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of tokens that are not finished, which is never stored."""
    label, _, fingerprint = prefix.partition("/")[2].rpartition("-")
    return Manifest("tokenize", label, fingerprint, dict(identity or {}), {}, files, {}, dict(facts or {}), "", 0, 0.0)
