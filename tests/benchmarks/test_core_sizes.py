"""The made items of benchmarks/scoring.py are a CORE bundle with the sizes that it states."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.scoring import SIZES, WORDS, make_bundle
from trainer.core import TASKS, read_bundle, read_items


def test_made_items_are_a_bundle_of_all_tasks_with_the_stated_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(SIZES) == set(TASKS)
    for name, size in SIZES.items():
        monkeypatch.setitem(SIZES, name, size._replace(items=60))
    for task in read_bundle(make_bundle(tmp_path / "bundle")):
        items, size = read_items(task), SIZES[task.name]
        assert {len(item.beginnings) * len(item.endings) for item in items} == {size.choices} and len(items) == 60
        words = [len(text.split()) for item in items for text in item.beginnings]
        mean, deviation = size.beginning
        assert abs(np.mean(words) - mean) < 1 + 5 * deviation / 60**0.5
    assert task.examples == size.examples


def test_its_words_are_single_tokens(shared_data: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken (pip)")
    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    assert all(len(encode(f" {word}")) == 1 for word in WORDS)
