"""tokenize: text becomes token shards (pipelines/text/parts.py)."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipelines.artifacts.manifest import ArtifactPlan, Manifest, commit, fetch, find, upload
from pipelines.recipe import Recipe, TokensConfig
from pipelines.screen import Bar
from pipelines.stage import Built, Work
from pipelines.text.adopted import adopted_shards, identity_of_shards, shards_found
from pipelines.text.mixture import mixed_facts, mixed_files, plan_of_text, recipes_of_sources, texts_of
from pipelines.text.parts import (
    PartsJob,
    PartsProgress,
    Reading,
    ShardReceipt,
    finished_part,
    forget_receipts,
    make_parts,
    part_prefix,
    rows_in,
)
from pipelines.text.sources import open_source
from pipelines.text.split import SplitShard, split_text
from pipelines.text.tokenizer import TOKENIZER_FILE, kept_tokenizer, tokenizer_of
from pipelines.tracking.ledger import attempts
from trainer.errors import Interrupted, UserError
from trainer.store import Store

POLL_SECONDS = 0.2  # between two checks of the workers' progress


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the tokens. UserError for a text that cannot be read or is not pinned."""
    if not recipe.tokens.sources:
        return plan_of_text(recipe)
    made_of = [plan_of_text(one).fingerprint for one in recipes_of_sources(recipe)]
    return ArtifactPlan("tokenize", "mixture", {"stage": "tokenize", "sources": made_of})


def build(work: Work) -> Built:
    """Make the shards. UserError for a text that is too small."""
    texts = [works_on(work, *text) for text in texts_of(work.recipe, work.plan)]
    for one in texts:
        forget_removed_artifact(work.store, one.plan)
    work.clock.enter("tokenize")
    if work.recipe.tokens.sources:
        return mix(work, texts)
    (one,) = texts
    if one.recipe.tokens.adopts:
        return adopt(one)
    make_all_parts(one)
    built = finish(one)
    work.report(tokens=built.facts["tokens"])
    return built


def works_on(work: Work, recipe: Recipe, plan: ArtifactPlan) -> Work:
    """The work on one text: all of it, or a source of a mixture."""
    if plan == work.plan:
        return work
    if (tokenizer := work.store.get(f"{work.plan.prefix}/{TOKENIZER_FILE}")) is not None:
        work.store.create(f"{plan.prefix}/{TOKENIZER_FILE}", tokenizer)
    return replace(work, plan=plan, recipe=recipe, scratch_of=work.plan)


def finish(work: Work) -> Built:
    """The split and the facts of a text whose parts are finished."""
    config = work.recipe.tokens
    parts = [part for n in range(config.parts) if (part := finished_part(work.store, work.plan, n)) is not None]
    if len(parts) < config.parts:  # this process stood still for so long that gc took it for dead
        work.attempt.check()
        raise Interrupted(f"{work.plan.prefix}/parts/ has {len(parts)} lists of {config.parts}: gc removed the others")
    eot = tokenizer_of(config, work.store, work.plan.prefix).eot_token
    shards = split_text(
        parts,
        config,
        lambda file: fetch(work.store, work.plan.prefix, file, work.folder),
        work.upload,
        work.folder,
        partial(rows_in, eot, work.recipe.row_tokens),
    )
    check_split(work.recipe, shards)
    files = [shard.file for shard in shards] + kept_tokenizer(config, work.store, work.plan.prefix)
    facts = facts_of(shards, documents_of(parts)) | packing_facts(shards, eot, work.recipe.row_tokens)
    about = facts_of_text(parts)
    if invalid := about.get("invalid_documents"):
        work.screen.note(f"  {invalid:,} documents were not valid UTF-8: U+FFFD stands for their damaged bytes")
    return Built(files, facts | about)


def mix(work: Work, texts: list[Work]) -> Built:
    """The tokens of all sources, each an artifact that other runs find again."""
    made = [tokens_of_source(text) for text in texts]
    names = [text.recipe.tokens.named for text in texts]
    facts = mixed_facts(made, names)
    work.report(tokens=facts["tokens"])
    files = mixed_files(made) + kept_tokenizer(work.recipe.tokens, work.store, work.plan.prefix)
    return Built(files, facts)


def tokens_of_source(work: Work) -> Manifest:
    """The artifact of one source of a mixture, found or made. Two mixtures may make it at once: the same bytes."""
    own, named = work.plan, work.recipe.tokens.named
    if made := find(work.store, own):
        work.screen.note(f"  {own.prefix} exists: {named}")
        return made
    work.screen.note(f"  {own.prefix}: {named}")
    if work.recipe.tokens.adopts:
        built = adopt(work)
    else:
        make_all_parts(work)
        if made := find(work.store, own):  # of another mixture
            return made
        built = finish(work)
    assert work.scratch_of
    manifest = Manifest(
        stage=own.stage,
        label=own.label,
        fingerprint=own.fingerprint,
        identity=own.identity,
        inputs={},
        files=tuple(built.files),
        provenance={"mixture": work.scratch_of.prefix},
        facts=built.facts,
        run=work.attempt.latest.run,
        attempt=work.attempt.number,
        created=time.time(),
    )
    made = commit(work.store, manifest)
    forget_receipts(work.store, own, sys.maxsize)  # so a removed manifest means: make everything again
    return made


def adopt(work: Work) -> Built:
    """Read shards that exist once, and name them in place. UserError for shards that cannot be trained on."""
    recipe, config = work.recipe, work.recipe.tokens
    if identity_of_shards(config) != work.plan.identity["text"]:
        raise UserError(f"tokens.source: '{config.source}' changed after its artifact was planned; run again")
    encoding = tokenizer_of(config, work.store, work.plan.prefix)
    shards: list[SplitShard] = []
    documents = done = 0
    with work.screen.bar("adopt", sum(one.size for one in shards_found(config))) as bar:
        vocabulary = (encoding.n_vocab, encoding.eot_token, recipe.row_tokens)
        found = adopted_shards(config, *vocabulary, work.store, work.plan.prefix, work.folder, work.upload)
        with closing(found) as adopted:
            for one in adopted:
                work.check()
                shards.append(one.shard)
                documents, done = documents + one.documents, done + one.shard.file.size
                bar.update(done, f"{short_number(done)} bytes")
    for split in ("train", "val"):
        if not any(one.tokens > recipe.model.block_size for one in shards if one.file.name.startswith(split)):
            raise UserError(
                f"tokens.source: '{config.source}' has no {split} shard with a sequence of {recipe.model.block_size} "
                "+ 1 tokens; use larger shards or a smaller model.block_size"
            )
    files = [one.file for one in shards] + kept_tokenizer(config, work.store, work.plan.prefix)
    return Built(files, facts_of(shards, documents) | packing_facts(shards, encoding.eot_token, recipe.row_tokens))


def forget_removed_artifact(store: Store, plan: ArtifactPlan) -> None:
    """Forget the shards of an artifact that an attempt finished, if its manifest was removed.

    The message about a damaged artifact advises to remove its manifest; the shards are then made again.
    """
    done = [beat.attempt for beat in attempts(store, plan.prefix) if beat.state == "done"]
    if done:
        forget_receipts(store, plan, max(done))


def make_all_parts(work: Work) -> None:
    """Make the parts that no other node makes, and wait until all are finished."""
    report(work, parts_made(work))


def report(work: Work, made: Iterable[PartsProgress]) -> None:
    """Report the progress while parts are made."""
    started = time.monotonic()
    for own in made:
        speed = own.new / (time.monotonic() - started)
        tokens = max(work.attempt.latest.progress.tokens or 0, own.stored)
        work.report(tokens=tokens, tokens_per_second=speed)
    check(work)


def parts_made(work: Work) -> Generator[PartsProgress, None, None]:
    """As `make_parts`, for this node's parts of a text, with a bar."""
    config = work.recipe.tokens
    size = size_of_text(config)
    folder = work.folder / work.plan.name  # sources that are made in step have shards of the same names
    folder.mkdir(exist_ok=True)
    with work.screen.bar("tokenize", config.max_tokens or size) as bar:
        shown = ReadingBar(bar, Reading(), config.max_tokens, size, list)

        def look() -> None:
            check(work)
            shown.draw()

        job = PartsJob(
            config,
            work.plan,
            work.store,
            range(config.parts),
            folder,
            partial(upload, work.store, work.plan.prefix, work.attempt.number),
            look,
            work.screen.note,
            shown.reading,
            work.recipe.row_tokens,
            work.attempt.number,
        )
        for own in make_parts(job):
            shown.before = own.stored - own.new
            yield own
        shown.end()


@dataclass
class ReadingBar:
    """The bar of the stage: bytes of the node's own text, or tokens where there is a limit. It moves within a shard."""

    bar: Bar
    reading: Reading
    max_tokens: int | None
    size: int | None  # of the text, in bytes
    others: Callable[[], list[PartsProgress]]  # of other nodes
    before: int = 0  # tokens of earlier attempts
    started: float = field(default_factory=time.monotonic)
    drawn: float = 0.0

    def draw(self) -> None:
        if time.monotonic() - self.drawn < POLL_SECONDS:
            return
        self.drawn = time.monotonic()
        others = self.others()
        read = self.reading.tokens + sum(one.new for one in others)
        tokens = self.before + self.reading.tokens + sum(one.stored for one in others)
        note = f"{short_number(read / (self.drawn - self.started))} tok/s"
        if self.size is None:
            self.bar.update(min(tokens, self.max_tokens or tokens), f"{short_number(tokens)} tokens  {note}")
        else:
            # Earlier attempts left the tokens that they made on record, not the bytes that they read.
            done = min(self.size, self.reading.bytes * tokens // max(1, self.reading.tokens))
            self.bar.update(done, f"{short_number(done)} of {short_number(self.size)} bytes  {note}")

    def end(self) -> None:
        if self.size is not None:
            self.bar.update(self.size, f"{short_number(self.size)} bytes")


def size_of_text(config: TokensConfig) -> int | None:
    """About the bytes of the text that one node reads to its end; None with a limit, and where only a server knows."""
    if config.max_tokens is not None:
        return None
    return open_source(config.source, config.subset, config.revision, config.text_column, None).text_bytes()


def short_number(value: float) -> str:
    """950, 12.3k, 4.56M, 10.0B."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.0f}"


def check(work: Work) -> None:
    """Raise if asked to stop, or if a newer attempt has taken over."""
    work.check()


def documents_of(parts: list[list[ShardReceipt]]) -> int:
    """The number of documents of the whole text."""
    return sum(part[-1].document for part in parts if part)


def facts_of_text(parts: list[list[ShardReceipt]]) -> dict[str, Any]:
    """The libraries that encoded the text, each with its number of shards as they were read; and the number of
    documents in which U+FFFD stands for bytes that were not UTF-8, if there are any."""
    receipts = [receipt for part in parts for receipt in part]
    invalid = sum(receipt.invalid for receipt in receipts)
    encoders = {"encoders": dict(Counter(receipt.encoder or "unknown" for receipt in receipts))}
    return encoders | ({"invalid_documents": invalid} if invalid else {})


def facts_of(shards: list[SplitShard], documents: int) -> dict[str, Any]:
    """Counts of tokens and documents, and the tokens of each shard by name."""
    tokens = {shard.file.name: shard.tokens for shard in shards}
    return {
        "tokens": sum(tokens.values()),
        "train_tokens": sum(n for name, n in tokens.items() if name.startswith("train")),
        "val_tokens": sum(n for name, n in tokens.items() if name.startswith("val")),
        "documents": documents,
        "shards": tokens,
        "max_ids": {shard.file.name: shard.max_id for shard in shards if shard.max_id is not None},
    }


def packing_facts(shards: list[SplitShard], eot: int, row_tokens: int | None) -> dict[str, Any]:
    """The rows of each training shard, and the tokens of that split that are in no row; nothing for a stream.

    UserError if no shard fills a row.
    """
    if row_tokens is None:
        return {}
    train = [shard for shard in shards if shard.file.name.startswith("train")]
    rows = {shard.file.name: shard.rows or 0 for shard in train}
    if not sum(rows.values()):
        raise UserError(
            f"tokens.packing: no training shard fills a row of {row_tokens} tokens with documents; use packing: "
            "stream, more text or a smaller model.block_size"
        )
    cropped = sum(shard.tokens for shard in train) - row_tokens * sum(rows.values())
    return {"rows": rows, "eot": eot, "cropped_tokens": cropped}


def check_split(recipe: Recipe, shards: list[SplitShard]) -> None:
    """UserError unless both splits hold a sequence and the validation split is complete."""
    t, block = recipe.tokens, recipe.model.block_size
    total = sum(shard.tokens for shard in shards)
    first = sum(shard.tokens for shard in shards if f"_{part_prefix(0, t)}" in shard.file.name)
    # The other parts would hide that training lacks this one.
    if t.val_whole_shards and t.parts > 1 and first < t.held_out(total):
        raise UserError(
            f"tokens.val_shards: {t.val_shards} shard(s) of {t.shard_tokens:,} tokens are to be held out of the first "
            f"of {t.parts} parts, and it has {first:,} tokens: use val_fraction, fewer parts or more text"
        )
    if t.val_whole_shards:
        held_out, remedy = f"the first {t.val_shards} shard(s) of {t.shard_tokens:,}", "use val_fraction or more text"
    else:
        held_out, remedy = f"{min(t.held_out(total), total):,} of them", "set tokens.val_tokens or use more text"
    for name, split in (("val", "validation"), ("train", "training")):
        if not any(shard.tokens > block for shard in shards if shard.file.name.startswith(name)):
            raise UserError(
                f"tokens: the text gives {total:,} tokens; {held_out} are held out, and no {split} sequence of "
                f"{block} + 1 tokens is left: {remedy}"
            )
