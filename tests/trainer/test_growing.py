"""Promises of a text that grows while it is read: every sequence has the same place, whenever it is asked for."""

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trainer_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_runs import Runner

from trainer.config import TrainConfig, identity_of
from trainer.data import TokenData
from trainer.errors import UserError
from trainer.events import PhaseChanged, Row
from trainer.shards import GrowingMixture, GrowingOrder, Mixture, Shard, known_order, reading_order, write_shard

BLOCK = 4
_one_thread, data, runner = trainer_runs._one_thread, trainer_runs.data, trainer_runs.runner
SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=8)


def shards_of(sizes: list[int]) -> list[Shard]:
    return [Shard(f"train_{i:06d}.bin", tokens) for i, tokens in enumerate(sizes)]


@settings(max_examples=150, deadline=None)
@given(SIZES.filter(lambda sizes: sum(max(0, n - 1) // BLOCK for n in sizes) > 0), st.integers(0, 2**63 - 1), st.data())
def test_a_sequence_has_its_place_before_the_text_is_whole(sizes: list[int], seed: int, draw: st.DataObject) -> None:
    shards, whole, growing = shards_of(sizes), GrowingOrder(BLOCK, seed), GrowingOrder(BLOCK, seed)
    whole.grow(shards, ended={0})
    count = sum(max(0, n - 1) // BLOCK for n in sizes)
    expected = [whole[g] for g in range(3 * count)]
    for epoch in range(3):  # every window once
        assert len(set(expected[epoch * count : (epoch + 1) * count])) == count
    assert [shard for shard, _ in expected[:count]] == sorted(shard for shard, _ in expected[:count])
    known = 0
    while known < len(shards):
        more = draw.draw(st.integers(1, len(shards) - known))
        growing.grow(shards[known : known + more], ended=())
        known += more
        there = int(growing.known)
        assert [growing[g] for g in range(there)] == expected[:there]
        assert growing.shards_of(range(there)) == whole.shards_of(range(there))
        assert list(growing.visits(there)) == []
    growing.grow([], ended={0})
    assert [growing[g] for g in range(3 * count)] == expected


@settings(max_examples=30, deadline=None)
@given(
    st.lists(SIZES.filter(lambda sizes: max(sizes) > BLOCK), min_size=2, max_size=3),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
    st.integers(0, 2**63 - 1),
    st.randoms(use_true_random=False),
)
def test_a_sequence_of_a_mixture_has_its_place_before_its_sources_are_whole(
    sizes: list[list[int]], weights: list[float], seed: int, draw: random.Random
) -> None:
    weights, ended = weights[: len(sizes)], range(len(sizes))
    texts = [[replace(shard, source=n) for shard in shards_of(one)] for n, one in enumerate(sizes)]
    shards = reading_order([shard for text in texts for shard in text], BLOCK, weights)
    whole, growing = GrowingMixture(BLOCK, seed, weights), GrowingMixture(BLOCK, seed, weights)
    whole.grow(shards, ended)
    count = 3 * sum(max(0, n - 1) // BLOCK for text in sizes for n in text)
    expected = [whole[g] for g in range(count)]
    first_reads = list(dict.fromkeys(shard for shard, _ in expected))
    assert first_reads == sorted(first_reads)
    mixture = Mixture(shards, BLOCK, seed, weights)
    assert [shards[shard].source for shard, _ in expected] == [shards[mixture[g][0]].source for g in range(count)]
    known, there = 0, [0] * len(texts)
    while not growing.whole:
        source = draw.randrange(len(texts))
        there[source] += 1
        done = {n for n in ended if there[n] > len(texts[n])}
        parts = [text[:most] for text, most in zip(texts, there, strict=True)]
        seen = known_order(parts, done, BLOCK, weights)
        assert seen == shards[: len(seen)] and len(seen) >= known
        read = Counter(shard.source for shard in seen)
        growing.grow(seen[known:], {n for n in done if read[n] == len(texts[n])})
        known = len(seen)
        reach = min(int(min(growing.known, count)), count)
        assert [growing[g] for g in range(reach)] == expected[:reach]
        assert growing.shards_of(range(reach)) == whole.shards_of(range(reach))
        assert growing.whole or list(growing.visits(int(growing.known))) == []
    assert known == len(shards) and [growing[g] for g in range(count)] == expected


def test_the_parts_of_a_text_are_read_at_the_same_pace() -> None:
    names = [f"train_{part:02d}_{number:06d}.bin" for part in range(2) for number in range(3)][:-1]
    assert [shard.name[6:-4] for shard in reading_order(Shard(name, 9) for name in names)] == [
        *("00_000000", "01_000000", "00_000001", "01_000001", "00_000002")
    ]


def test_data_that_grows_knows_what_it_lacks(tmp_path: Path) -> None:
    shards = shards_of([41, 41])
    for shard in shards:
        write_shard(tmp_path / shard.name, np.arange(41, dtype=np.uint16))
    data = TokenData([], tmp_path.joinpath, BLOCK, seed=1, more=lambda known: (shards[known:], {0}))
    assert data.lacks(range(1)) and not data.is_whole
    data.grow(shards[:1], ended=())
    assert not data.lacks(range(10)) and data.lacks(range(9, 11)) and data.runs_short(range(5))
    assert data.windows([data.order[g] for g in range(10)]).shape == (10, BLOCK + 1)
    with pytest.raises(UserError, match="its largest id is 70000, but model.vocab_size is 50257"):
        TokenData([], Path, BLOCK, 1, 50_257, more=lambda known: ([], {0})).grow([Shard("a", 9, max_id=70_000)], ())
    data.grow(shards[1:], ended={0})
    assert data.is_whole and not data.lacks(range(1000)) and not data.runs_short(range(1000))


def test_a_recipe_without_follow_tokens_keeps_its_fingerprint() -> None:
    train = TrainConfig(batch_tokens=8, max_steps=2, learning_rate=0.1)
    assert "follow_tokens" not in identity_of(train)
    assert identity_of(train.model_copy(update={"follow_tokens": True})) == identity_of(train) | {"follow_tokens": True}


# --- late data


def test_the_seconds_in_which_a_step_waits_for_a_shard_have_their_own_phase(runner: Callable[..., Runner]) -> None:
    run = runner(max_steps=6, val_every=None)

    def slow(name: str) -> Path:
        time.sleep(0.2)
        return run.data / name

    run.attempt(fetch=slow)
    assert [event for event in run.events_of(PhaseChanged) if event.phase == "data"]
    assert run.events_of(Row)[-1].phases["data"] >= 0.2  # of the first shard at least


def test_a_step_whose_shards_are_there_does_not_wait(tmp_path: Path) -> None:
    shards = shards_of([41, 41])
    for shard in shards:
        write_shard(tmp_path / shard.name, np.arange(41, dtype=np.uint16))
    data, waits = TokenData(shards, tmp_path.joinpath, BLOCK, seed=1), iter(range(100))
    data.waiting = lambda: nullcontext(next(waits))
    for first in range(0, 18, 2):  # both shards: the second is prefetched while the first is read
        assert data.failure(range(first, first + 2)) is None
        list(data.micro_batches(range(first, first + 2), 2, torch.device("cpu"), range(first + 2, first + 4)))
        if data._maps._prefetching:
            data._maps._prefetching.join(30)
    assert next(waits) == 1  # it waited once, for the very first shard
