"""Promises of the count of equal hashes: exact however many runs there are, in bounded memory."""

import tempfile
from functools import partial

import numpy as np
import pytest

from pipelines.text.repeats import Repeats


@pytest.mark.parametrize("run", [1, 7, 64, 100_000])
def test_equal_hashes_are_counted_within_and_between_runs(run: int) -> None:
    random = np.random.default_rng(0)
    hashes = random.integers(0, 1 << 64, 2000, np.uint64)
    hashes = np.concatenate([hashes, hashes[:300], np.full(50, hashes[0]), np.array([0, 0, (1 << 64) - 1], np.uint64)])
    random.shuffle(hashes)
    repeats = Repeats(run)
    for piece in np.array_split(hashes, 11):
        repeats.add(piece)
    assert repeats.count() == len(hashes) - len(np.unique(hashes)) == 351


def test_without_hashes_there_are_none_again() -> None:
    assert Repeats().count() == 0


def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.text.repeats.TemporaryFile", partial(open, "/dev/full", "r+b", 0))
    repeats = Repeats(2)
    with pytest.raises(OSError) as refused:
        repeats.add(np.arange(4, dtype=np.uint64))
    assert refused.value.filename == tempfile.gettempdir()
