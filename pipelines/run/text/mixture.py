"""A mixture of texts: each source has tokens of its own, as if it were the only one, and the mixture names their files.

So another mixture, other weights and a run of one source alone use the same shards. The weights are no part of the
tokens: training draws by them (trainer/data/shards.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelines.recipe.recipe import Recipe
from pipelines.run.text.llmc_shards import identity_of_shards, label_of, tokens_by_split
from pipelines.run.text.sources import estimated_tokens, source_label, text_of
from pipelines.store.manifest import HERE, ArtifactPlan, File, Manifest
from trainer.config.errors import UserError

SUMS = ("tokens", "train_tokens", "val_tokens", "documents", "cropped_tokens")  # facts to add up
BY_SHARD = ("shards", "max_ids", "rows")


def recipes_of_sources(recipe: Recipe) -> list[Recipe]:
    """The recipe with each source of its mixture as the only text."""
    return [recipe.model_copy(update={"tokens": tokens}) for tokens in recipe.tokens.each()]


def plan_of_text(recipe: Recipe) -> ArtifactPlan:
    """The identity of the tokens of one text. UserError for a text that cannot be read or is not pinned."""
    t = recipe.tokens
    text = identity_of_shards(t) if t.adopts else text_of(t).identity()
    identity: dict[str, Any] = {"stage": "tokenize", "text": text, "tokenizer": t.tokenizer_identity}
    if not t.adopts:
        identity |= {"shard_tokens": t.shard_tokens, "max_tokens": t.max_tokens, **t.split_identity()}
    label = label_of(t) if t.adopts else source_label(t.source, t.subset)
    return ArtifactPlan("tokenize", label, identity | recipe.packing_identity)


def texts_of(recipe: Recipe, plan: ArtifactPlan) -> list[tuple[Recipe, ArtifactPlan]]:
    """Each text of the tokens under `plan` alone, with its own plan: one, or the sources of a mixture.

    UserError for a source that has changed since.
    """
    if not recipe.tokens.sources:
        return [(recipe, plan)]
    texts = [(one, plan_of_text(one)) for one in recipes_of_sources(recipe)]
    for (one, own), planned in zip(texts, plan.identity["sources"], strict=True):
        if own.fingerprint != planned:
            raise UserError(
                f"tokens.sources: '{one.tokens.named}' changed after its artifact was planned; run again, and do not "
                "change a text while it is read"
            )
    return texts


def mixed_name(source: int, name: str) -> str:
    """train_000000.bin of source 1 is train_s01_000000.bin of the mixture."""
    split, _, rest = name.partition("_")
    return f"{split}_s{source:02d}_{rest}"


def mixed_files(sources: Sequence[Manifest]) -> list[File]:
    """The shards of all sources, where they lie in the store."""
    files = []
    for n, made in enumerate(sources):
        for file in made.files:
            if file.name in made.fact("shards"):
                key, at = (file.key, file.at) if file.at else (f"{made.prefix}/{file.key}", HERE)
                files.append(replace(file, name=mixed_name(n, file.name), key=key, at=at))
    return files


def mixed_facts(sources: Sequence[Manifest], names: Sequence[str]) -> dict[str, Any]:
    """The facts of a mixture, whose sources have these names."""
    known = {name for made in sources for name in made.facts}
    facts: dict[str, Any] = {name: sum(made.facts.get(name, 0) for made in sources) for name in SUMS if name in known}
    for name in known & {*BY_SHARD}:
        by_source = [made.facts.get(name, {}) for made in sources]
        facts[name] = {mixed_name(n, shard): count for n, of in enumerate(by_source) for shard, count in of.items()}
    if "eot" in known:
        (facts["eot"],) = {made.facts["eot"] for made in sources if "eot" in made.facts}
    return facts | {
        "sources": [
            {"source": name, **{fact: made.facts[fact] for fact in SUMS if fact in made.facts}}
            for name, made in zip(names, sources, strict=True)
        ]
    }


@dataclass(frozen=True)
class SourcePlan:
    """The tokens of a text, or of one source of a mixture, and the number of times that training reads them."""

    source: str
    train_tokens: int
    val_tokens: int
    share: float  # of the training's tokens
    epochs: float
    cropped: float | None  # share of the training split that packing leaves out; None: a stream, or not known
    warning: str | None  # training repeats the text too often


def sources_planned(recipe: Recipe, made: Manifest | None) -> list[SourcePlan]:
    """The sources of a recipe, one for a single text; none if only a server knows the size of one."""
    weights, planned = recipe.tokens.weights or (1.0,), []
    of_sources = made.facts.get("sources") if made and recipe.tokens.sources else None
    for number, alone in enumerate(recipes_of_sources(recipe)):
        share = weights[number] / sum(weights)
        facts = of_sources[number] if of_sources else None
        if made and not of_sources:
            facts = made.facts | {"train_tokens": made.fact("train_tokens")}
        if (found := amounts(alone, facts)) is None:
            return []
        left, held_out, cropped = found
        # A row has one token more than it trains on.
        readable = left if cropped is None else (left - cropped) * recipe.model.block_size // (recipe.row_tokens or 1)
        of = "the text" if len(weights) == 1 else f"source {number + 1}, {alone.tokens.named},"
        epochs = share * recipe.train_tokens / max(1, readable)
        warning = recipe.repeated_text(readable, share, of)
        share_cropped = None if cropped is None else cropped / max(1, left)
        name = alone.tokens.named
        planned.append(SourcePlan(name, left, held_out, share, epochs, share_cropped, warning))
    return planned


def amounts(recipe: Recipe, facts: dict[str, Any] | None) -> tuple[int, int, int | None] | None:
    """The tokens of both splits, and those that packing crops (None: not known). UserError for too small a text."""
    if facts is not None:
        return facts["train_tokens"], facts.get("val_tokens", 0), facts.get("cropped_tokens")
    if recipe.tokens.adopts:
        counts = tokens_by_split(recipe.tokens)
        train, val = counts["train"], counts["val"]
    elif estimate := estimated_tokens(recipe.tokens):
        val = min(recipe.tokens.held_out(estimate), estimate)
        train = estimate - val
    else:
        return None
    recipe.tokens.check_splits(train, val, recipe.model.block_size)
    return train, val, None
