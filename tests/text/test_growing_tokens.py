"""Promises of tokens that are read while they are made."""

from pathlib import Path

import pytest
from texts import FourFiles

from pipelines.artifacts.manifest import Manifest, key_of
from pipelines.artifacts.shard_cache import shards_in
from pipelines.stages.tokenize import facts_of
from pipelines.text.growing import GrowingTokens
from pipelines.text.parts import finished_part, make_parts
from pipelines.text.split import split_text
from trainer.errors import StoreUnavailable
from trainer.shards import Shard, reading_order
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
