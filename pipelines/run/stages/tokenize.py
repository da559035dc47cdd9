"""tokenize: text becomes token shards (pipelines/run/text/shard_writer.py)."""

import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from pipelines.recipe.recipe import Recipe
from pipelines.run.stage import Built, Stage, Work
from pipelines.run.text.llmc_shards import adopted_shards, identity_of_shards, shards_found
from pipelines.run.text.mixture import mixed_facts, mixed_files, plan_of_text, recipes_of_sources, texts_of
from pipelines.run.text.receipts import ShardReceipt
from pipelines.run.text.shard_writer import ShardsJob, SplitShard, make_shards, rows_in, split_text
from pipelines.run.text.sources import estimated_tokens
from pipelines.run.text.tokenizer import stored_tokenizer, tokenizer_of
from pipelines.store.layout import TOKENIZER, receipt_key
from pipelines.store.manifest import ArtifactPlan, Manifest, fetch, find, upload
from trainer.config.errors import UserError


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the tokens. UserError for a text that cannot be read or is not pinned."""
    if not recipe.tokens.sources:
        return plan_of_text(recipe)
    made_of = [plan_of_text(one).fingerprint for one in recipes_of_sources(recipe)]
    return ArtifactPlan("tokenize", "mixture", {"stage": "tokenize", "sources": made_of})


def build(work: Work) -> Built:
    """Make the shards. UserError for a text that is too small."""
    texts = [work_for_source(work, *text) for text in texts_of(work.recipe, work.plan)]
    work.clock.enter("tokenize")
    if work.recipe.tokens.sources:
        return mix(work, texts)
    (one,) = texts
    if one.recipe.tokens.adopts:
        return adopt(one)
    built = finish(one, make_all_shards(one))
    work.report(tokens=built.facts["tokens"])
    return built


def work_for_source(work: Work, recipe: Recipe, plan: ArtifactPlan) -> Work:
    """The work on one text: all of it, or a source of a mixture."""
    if plan == work.plan:
        return work
    if (tokenizer := work.store.get(f"{work.plan.prefix}/{TOKENIZER}")) is not None:
        work.store.create(f"{plan.prefix}/{TOKENIZER}", tokenizer)
    return replace(work, plan=plan, recipe=recipe)


def finish(work: Work, receipts: list[ShardReceipt]) -> Built:
    """The split and the facts of a text whose shards are finished."""
    config = work.recipe.tokens
    eot = tokenizer_of(config, work.store, work.plan.prefix).eot_token
    shards = split_text(
        receipts,
        config,
        lambda file: fetch(work.store, work.plan.prefix, file, work.folder),
        work.upload,
        work.folder,
        partial(rows_in, eot, work.recipe.row_tokens),
    )
    check_splits(work.recipe, shards)
    files = [shard.file for shard in shards] + stored_tokenizer(config, work.store, work.plan.prefix)
    # With the document that max_tokens cuts.
    documents = receipts[-1].document + bool(receipts[-1].offset) if receipts else 0
    facts = facts_of(shards, documents) | packing_facts(shards, eot, work.recipe.row_tokens)
    undecided = [receipt.file.key for receipt in receipts[: config.undecided_shards]]
    return Built(files, facts, (*map(receipt_key, range(len(receipts))), *undecided))


def mix(work: Work, texts: list[Work]) -> Built:
    """The tokens of all sources, each an artifact that other runs find again."""
    made = [tokens_of_source(text) for text in texts]
    names = [text.recipe.tokens.named for text in texts]
    facts = mixed_facts(made, names)
    work.report(tokens=facts["tokens"])
    files = mixed_files(made) + stored_tokenizer(work.recipe.tokens, work.store, work.plan.prefix)
    return Built(files, facts)


def tokens_of_source(work: Work) -> Manifest:
    """The artifact of one source of a mixture, found or made. Two mixtures may make it at once: the same bytes."""
    own, named = work.plan, work.recipe.tokens.named
    if made := find(work.store, own):
        work.screen.note(f"  {own.prefix} exists: {named}")
        return made
    work.screen.note(f"  {own.prefix}: {named}")
    built = adopt(work) if work.recipe.tokens.adopts else finish(work, make_all_shards(work))
    return built.commit(work, own, {}, {"mixture": work.attempt.prefix})


def adopt(work: Work) -> Built:
    """Read shards that exist once, and name them in place. UserError for shards that cannot be trained on."""
    recipe, config = work.recipe, work.recipe.tokens
    if identity_of_shards(config) != work.plan.identity["text"]:
        raise UserError(f"tokens.source: '{config.source}' changed after its artifact was planned; run again")
    encoding = tokenizer_of(config, work.store, work.plan.prefix)
    shards: list[SplitShard] = []
    documents = done = 0
    with work.screen.bar("adopt", sum(one.size for one in shards_found(config).values())) as bar:
        vocabulary = (encoding.n_vocab, encoding.eot_token, recipe.row_tokens)
        found = adopted_shards(config, *vocabulary, work.store, work.folder, work.upload)
        with closing(found) as adopted:
            for shard, begun in adopted:
                work.check()
                shards.append(shard)
                documents, done = documents + begun, done + shard.file.size
                bar.update(done, f"{short_number(done)} bytes")
    check_splits(recipe, shards)
    files = [one.file for one in shards] + stored_tokenizer(config, work.store, work.plan.prefix)
    return Built(files, facts_of(shards, documents) | packing_facts(shards, encoding.eot_token, recipe.row_tokens))


def make_all_shards(work: Work) -> list[ShardReceipt]:
    """Make the missing shards of a text, with a bar. Returns the receipts of all."""
    config, row_tokens = work.recipe.tokens, work.recipe.row_tokens
    total = config.max_tokens or estimated_tokens(config)
    folder = work.folder / work.plan.name  # the sources of a mixture have shards of the same names
    folder.mkdir(exist_ok=True)
    started = time.monotonic()
    put = partial(upload, work.store, work.plan.prefix, work.attempt.number)
    job = ShardsJob(config, work.plan, work.store, folder, put, work.check, work.screen.note, row_tokens)
    with work.screen.bar("tokenize", total) as bar:
        shards = make_shards(job)
        receipts = next(shards)
        before = stored = sum(receipt.tokens for receipt in receipts)  # of earlier attempts
        work.report(tokens=before)
        try:
            for receipts in shards:
                stored = sum(receipt.tokens for receipt in receipts)
                speed = (stored - before) / (time.monotonic() - started)
                work.report(tokens=stored, tokens_per_second=speed)
                note = f"{short_number(stored)} tokens  {short_number(speed)} tok/s"
                bar.update(min(stored, total or stored), note)
        except MemoryError as error:
            raise UserError(
                f"tokenize: not enough free memory for the longest document plus one shard ({error}); "
                f"split the document, lower tokens.shard_tokens, or take a machine with more"
            ) from error
        bar.update(total or stored, f"{short_number(stored)} tokens")
    work.check()
    return receipts


def short_number(value: float) -> str:
    """950, 12.3k, 4.56M, 10.0B."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.0f}"


def facts_of(shards: list[SplitShard], documents: int) -> dict[str, Any]:
    """Counts of tokens and documents, and the tokens of each shard by name."""
    tokens = {shard.file.name: shard.tokens for shard in shards}
    return {
        "tokens": sum(tokens.values()),
        "train_tokens": sum(n for name, n in tokens.items() if name.startswith("train")),
        "val_tokens": sum(n for name, n in tokens.items() if name.startswith("val")),
        "documents": documents,
        "shards": tokens,
        "max_ids": {shard.file.name: shard.max_id for shard in shards},
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


def check_splits(recipe: Recipe, shards: list[SplitShard]) -> None:
    """UserError unless both splits hold a sequence."""
    sizes = {split: [one.tokens for one in shards if one.file.name.startswith(split)] for split in ("train", "val")}
    train, val = (max(found, default=0) for found in sizes.values())
    recipe.tokens.check_splits(train, val, recipe.model.block_size)


STAGE = Stage(plan, build)
