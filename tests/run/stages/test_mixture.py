"""A mixture of texts: every source has tokens of its own, and training reads them in proportion, whatever happens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stage_work import SMALL, tokenized

from pipelines.recipe.loader import changed_recipe, load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.run.stage import Work, plans_of
from pipelines.run.stages import tokenize
from pipelines.run.text.llmc_shards import places_of
from pipelines.run.text.mixture import sources_planned
from pipelines.store.layout import manifest_key
from pipelines.store.manifest import DamagedArtifact, find
from pipelines.store.shard_cache import ShardCache, shards_in
from trainer.config.errors import UserError
from trainer.data.batches import TokenData
from trainer.data.shards import read_shard, write_shard


def shards(folder: Path) -> Path:
    """A set of shards as nanoGPT has them: ids from 200 on."""
    folder.mkdir()
    for name, size in (("val", 60), ("train", 900)):
        document = np.append(256, 200 + np.arange(11) % 50)
        np.tile(document, size).astype(np.uint16).tofile(folder / f"{name}.bin")
    return folder


def mixture(folder: Path, weights: tuple[float, float] = (3, 1), **tokens: Any) -> Recipe:
    text = folder / "text.jsonl"
    text.write_text("".join(f'{{"text": "letters {number}, again"}}\n' for number in range(1500)))
    sources = [{"source": str(text), "weight": weights[0]}, {"source": f"llmc://{folder}/shards", "weight": weights[1]}]
    values = load_recipe("smoke", SMALL).model_dump()
    values["tokens"] |= {"source": "", "sources": sources, "max_tokens": None, "val_shards": None, **tokens}
    return changed_recipe(values, (), "mixture")


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_training_and_validation_read_every_source_in_proportion(
    work: Callable[[str], Work], tmp_path: Path, packing: str
) -> None:
    mine, _ = work("tokenize"), shards(tmp_path / "shards")
    recipe = mixture(tmp_path, packing=packing)
    manifest = tokenized(mine, recipe)
    cache = ShardCache(mine.store, manifest, mine.home / "cache", "auto", places_of(recipe.tokens))
    data = TokenData(
        shards_in(manifest, "train"), cache.fetch, 8, 0, 257, recipe.tokens.weights, manifest.facts.get("eot")
    )
    of_adopted = (data.windows([data.order[n] for n in range(400)]) >= 200).sum(axis=1) > 4  # <|endoftext|> is 256
    assert of_adopted.sum() == 100 and of_adopted[:40].sum() == 10  # evenly spread, too
    val = TokenData(shards_in(manifest, "val"), cache.fetch, 8, 0, 257, recipe.tokens.weights)
    assert ((val.windows(val.first_windows(24)) >= 200).sum(axis=1) > 4).sum() == 6
    assert [one["train_tokens"] for one in manifest.facts["sources"]][1] == 12 * 900
    assert sum(one["tokens"] for one in manifest.facts["sources"]) == manifest.facts["tokens"]


def test_each_source_is_an_artifact_that_other_runs_find(work: Callable[[str], Work], tmp_path: Path) -> None:
    mine, _ = work("tokenize"), shards(tmp_path / "shards")
    recipe = mixture(tmp_path)
    manifest = tokenized(mine, recipe)
    for one in recipe.tokens.each():
        alone = recipe.model_copy(update={"tokens": one})
        assert (found := find(mine.store, tokenize.plan(alone, {})))
        files = {file.sha256 for file in found.files}
        assert files < {file.sha256 for file in manifest.files}
        assert not [entry for entry in mine.store.entries(f"{found.prefix}/") if "/shards/" in entry.key]
    before = {entry.key: entry.modified for entry in mine.store.entries("tokens/")}
    # Other weights are another training on the same tokens; another second source keeps the first.
    heavier = mixture(tmp_path, (1, 1))
    ours, theirs = plans_of(recipe), plans_of(heavier)
    assert ours["tokenize"] == theirs["tokenize"] and ours["train"].fingerprint != theirs["train"].fingerprint
    assert plans_of(mixture(tmp_path, (6, 2)))["train"] == ours["train"]  # the same shares
    write_shard(tmp_path / "shards" / "train_000000.bin", np.full(200, 7, np.uint16))
    tokenized(mine, mixture(tmp_path))
    assert before.items() <= {entry.key: entry.modified for entry in mine.store.entries("tokens/")}.items()


def test_a_damaged_shard_of_a_source_names_both_artifacts(work: Callable[[str], Work], tmp_path: Path) -> None:
    mine, _ = work("tokenize"), shards(tmp_path / "shards")
    manifest = tokenized(mine, recipe := mixture(tmp_path))
    (own,) = (file for file in manifest.files if file.name == "train_s00_000000.bin")
    source = find(mine.store, tokenize.plan(recipe.model_copy(update={"tokens": recipe.tokens.each()[0]}), {}))
    assert source
    mine.store.put(own.key, b"x" * own.size)
    cache = ShardCache(mine.store, manifest, mine.home / "cache", "auto", places_of(recipe.tokens))
    with pytest.raises(DamagedArtifact, match=f"remove {manifest_key(source.prefix)} and that of the mixture"):
        cache.fetch(own.name)
    for one in (source, manifest):
        mine.store.delete(manifest_key(one.prefix))
    again = tokenized(mine, recipe)
    fresh = ShardCache(mine.store, again, mine.home / "cache", "auto").fetch(own.name)
    assert b"letters" in read_shard(fresh).astype(np.uint8).tobytes()


def test_the_plan_warns_about_each_source_that_is_read_too_often(work: Callable[[str], Work], tmp_path: Path) -> None:
    mine, _ = work("tokenize"), shards(tmp_path / "shards")
    recipe = mixture(tmp_path, (1, 3))
    steps = 5 * (12 * 900) // 48  # the second source five times, the first a quarter of that
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_steps": steps})})
    for manifest in (None, tokenized(mine, recipe)):
        first, second = sources_planned(recipe, manifest)
        assert second.epochs == pytest.approx(5, rel=0.01) and first.warning is None
        assert second.warning and second.warning.startswith(
            f"training goes over source 2, llmc://{tmp_path}/shards, 5.0"
        )


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"sources": []}, "tokens.sources: list should have at least 1 item"),
        (
            {"sources": [{"source": "a", "weight": 0}]},
            "tokens.sources.0.weight: must be greater than 0 (got 0)",
        ),
        ({"sources": [{"source": "a", "weight": float("nan")}]}, "tokens.sources.0.weight: must be"),
        ({"sources": [{"source": "a"}]}, "tokens.sources.0.weight: missing"),
        (
            {"sources": [{"source": "a", "wait": 1, "weight": 1}]},
            "tokens.sources.0.wait: unknown field; did you mean 'w",
        ),
        ({"sources": [{"source": "a", "weight": 1}], "source": "b"}, "tokens: source and sources are both given"),
        (
            {"sources": [{"source": "a", "weight": 1}], "max_tokens": 500_000},
            "tokens: max_tokens belongs to one source",
        ),
        ({}, "tokens: source: missing"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_one_line(tokens: dict[str, Any], message: str) -> None:
    values = load_recipe("smoke", SMALL).model_dump()
    values["tokens"] = {"tokenizer": "bytes"} | tokens
    with pytest.raises(UserError) as refused:
        changed_recipe(values, (), "mine.yaml")
    assert str(refused.value).startswith(f"mine.yaml: {message}") and "\n" not in str(refused.value)
