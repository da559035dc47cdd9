"""Promises of tokens that are read while they are made."""

from collections import Counter
from pathlib import Path

import pytest
from texts import FourFiles

from pipelines.artifacts.manifest import Manifest, key_of
from pipelines.artifacts.shard_cache import shards_in
from pipelines.recipe import changed_recipe, load_recipe
from pipelines.stages.tokenize import facts_of
from pipelines.text.growing import GrowingSources, GrowingTokens
from pipelines.text.parts import finished_part, make_parts, make_texts
from pipelines.text.split import split_text
from trainer.errors import StoreUnavailable
from trainer.shards import GrowingMixture, Shard, reading_order
from trainer.store import LocalStore


@pytest.mark.parametrize("parts", [1, 3])
def test_training_sees_the_shards_in_one_order_while_they_are_made_and_after(parts: int, tmp_path: Path) -> None:
    files = FourFiles(tmp_path)
    config, store = files.config.model_copy(update={"parts": parts}), LocalStore(tmp_path / "store")
    growing = GrowingTokens(store, files.plan.prefix, config)
    assert growing.more(0) == ([], set())
    with pytest.raises(StoreUnavailable, match="has no validation split yet"):
        growing.val_shards()
    seen: list[Shard] = []
    makers = [make_parts(files.job(range(part, part + 1), store.root, 1, config=config)) for part in range(parts)]
    while makers:
        for maker in list(makers):
            if next(maker, None) is None:
                makers.remove(maker)
            more, ended = growing.more(len(seen))
            seen += more
            assert ended == (set() if makers else {0})
            assert GrowingTokens(store, files.plan.prefix, config).more(0)[0] == seen  # after a kill
    receipts = [finished_part(store, files.plan, part) or [] for part in range(parts)]
    shards = split_text(receipts, config, lambda file: Path(), lambda path: receipts[0][0].file, tmp_path)
    about = (files.plan.stage, files.plan.label, files.plan.fingerprint, files.plan.identity)
    manifest = Manifest(*about, {}, tuple(s.file for s in shards), {}, facts_of(shards, 0), "", 1, 1.0)
    assert seen == reading_order(shards_in(manifest, "train"))
    assert growing.val_shards() == shards_in(manifest, "val") and len(growing.val_shards()) == 2
    named = {shard.name: growing.file(shard.name) for shard in (*seen, *growing.val_shards())}
    assert named == {file.name: file for file in manifest.files}
    store.create(key_of(manifest.prefix), manifest.to_json())
    for folder in ("shards", "parts"):  # as `gc` does
        for entry in list(store.entries(f"{manifest.prefix}/{folder}/")):
            store.delete(entry.key)
    late = GrowingTokens(store, files.plan.prefix, config)
    assert late.more(0) == (seen, {0}) and {name: late.file(name) for name in named} == named


def test_training_sees_the_shards_of_a_mixture_in_one_order_while_its_sources_are_made_in_step(tmp_path: Path) -> None:
    """The second source has a third of the weight, and ends first."""
    store, fields = LocalStore(tmp_path / "store"), {"tokenizer": "bytes", "shard_tokens": 1500, "val_shards": 2}
    for n in range(4):
        (tmp_path / f"{n}.txt").write_text(f"{n} " * 5000)
    texts = [FourFiles(tmp_path, f"[{n}].txt", max_tokens=most, **fields) for n, most in (("012", 22_000), ("3", 6000))]
    sources = [{"source": text.config.source, "weight": weight} for text, weight in zip(texts, (3, 1), strict=True)]
    values = load_recipe("smoke").model_dump() | {"tokens": {"source": "", "sources": sources, **fields}}
    recipe = changed_recipe(values, (), "mine.yaml")
    block, weights = recipe.model.block_size, recipe.tokens.weights
    prefixes = [text.plan.prefix for text in texts]

    def look() -> GrowingSources:
        return GrowingSources(store, "tokens/mixture-1", recipe, prefixes)

    growing, seen, read = look(), list[Shard](), list[int]()
    jobs = [text.job(range(1), store.root, config=text.config) for text in texts]
    assert growing.more(0) == ([], set())
    order = GrowingMixture(block, 1, weights)
    for progress in make_texts([make_parts(job) for job in jobs], weights):
        more, ended = growing.more(len(seen))
        seen += more
        assert look().more(0) == (seen, ended)  # after a kill
        order.grow(more, ended)
        read.append(min(int(order.known), 10_000))
        assert progress.new == progress.stored
    more, ended = growing.more(len(seen))
    seen += more
    order.grow(more, ended)
    assert ended == {0, 1} and order.whole
    assert list(dict.fromkeys(read)) == [0, 46, 90, 176, 185]  # the sequences that training could read
    assert Counter(shard.source for shard in seen) == {0: 13, 1: 2}
    assert seen == reading_order(seen[::-1], block, weights) and [one.source for one in seen[:4]] == [0, 1, 0, 0]
    assert [one.name for one in growing.val_shards()] == [f"val_s0{n}_00000{i}.bin" for n in range(2) for i in range(2)]
    for shard in (*seen, *growing.val_shards()):
        assert store.path_of(growing.file(shard.name).key).stat().st_size == shard.size
