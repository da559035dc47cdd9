"""How much text a recipe has, and how often training goes over it: by the tokens that were made, or before that."""

from dataclasses import dataclass
from typing import Any

from pipelines.artifacts.manifest import Manifest
from pipelines.recipe import Recipe
from pipelines.text.adopted import tokens_by_split
from pipelines.text.mixture import recipes_of_sources, sources_of
from pipelines.text.sources import estimated_tokens


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
    of_sources = sources_of(made.facts) if made and recipe.tokens.sources else []
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
    """The tokens of both splits, and those that packing crops (None: not known)."""
    if facts is not None:
        return facts["train_tokens"], facts.get("val_tokens", 0), facts.get("cropped_tokens")
    if recipe.tokens.adopts:
        counts = tokens_by_split(recipe.tokens)
        return counts["train"], counts["val"], None
    estimate = estimated_tokens(recipe.tokens)
    if not estimate:
        return None
    held_out = min(recipe.tokens.held_out(estimate), estimate)
    return estimate - held_out, held_out, None
