"""Packed rows begin with a document and lose as little as best fit can; a mixture reads every source in proportion."""

import itertools
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.config import TrainConfig
from trainer.data.batches import TokenData
from trainer.data.packing import packed
from trainer.data.shards import Mixture, Order, Shard, sequences_of, write_shard
from trainer.models.gpt2 import Gpt2Config

EOT, CPU = 9, torch.device("cpu")


def text_of(sizes: list[int], before: int = 0) -> np.ndarray:
    """Documents of so many tokens, each with its number in every token but the first; `before` belong to none."""
    documents = [[EOT] + [10 + number] * (size - 1) for number, size in enumerate(sizes)]
    return np.array([1] * before + list(itertools.chain(*documents)), np.uint16)


def rows_of(tokens: np.ndarray, row_tokens: int) -> list[list[int]]:
    rows, filled = packed(tokens, EOT, row_tokens), []
    for row in range(len(rows)):
        rows.fill(row, tokens, into := np.zeros(row_tokens, np.uint16))
        filled.append(into.tolist())
    return filled


@settings(max_examples=30)
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(0, 5), st.integers(2, 12))
def test_every_row_begins_with_a_document_and_no_token_is_read_twice(
    sizes: list[int], before: int, row_tokens: int
) -> None:
    tokens = text_of(sizes, before)
    rows = packed(tokens, EOT, row_tokens)
    ends = rows.starts + rows.lengths
    places = [p for a, b in zip(rows.starts.tolist(), ends.tolist(), strict=True) for p in range(a, b)]
    assert len(places) == len(set(places)) == len(rows) * row_tokens
    assert all(row[0] == EOT for row in rows_of(tokens, row_tokens))
    assert all(tokens[start] == EOT for start in rows.starts)
    # A document is cropped at its end, and only by the end of a row.
    assert all(end == len(tokens) or tokens[end] == EOT for end in np.delete(ends, rows.firsts[1:] - 1))


def test_the_largest_document_that_fits_comes_next_and_the_shortest_is_cropped() -> None:
    assert rows_of(text_of([3, 5, 9, 2, 4]), 8) == [
        [EOT, 11, 11, 11, 11, EOT, 10, 10],  # 5 of 8, then 3 of 3
        [EOT, 14, 14, 14, EOT, 13, EOT, 12],  # 4 of 8, 2 of 4, and 2 of the 9 tokens of the last one
    ]


def test_the_rows_of_a_text_never_change() -> None:
    # Runs that began with an older version resume with this one: these numbers never change.
    rows = packed(text_of([int(n) for n in np.random.RandomState(3).randint(1, 40, 3000)]), EOT, 33)
    numbers = (rows.starts.sum(), (rows.starts * np.arange(len(rows.starts))).sum(), rows.lengths.sum(), len(rows))
    assert tuple(map(int, numbers)) == PINNED


PINNED = (92154193, 151731370929, 54648, 1656)


def packed_shards(folder: Path) -> list[Shard]:
    shards, random = [], np.random.RandomState(5)
    for i in range(4):
        tokens = text_of([int(n) for n in random.randint(1, 12, 60)])
        write_shard(folder / f"train_{i:06d}.bin", tokens)
        shards.append(Shard(f"train_{i:06d}.bin", len(tokens), rows=len(packed(tokens, EOT, 9))))
    return shards


def test_training_reads_every_row_once_an_epoch_at_any_number_of_ranks(tmp_path: Path) -> None:
    # Written once: a thread of any TokenData may still map a shard, and a truncated map is a bus error.
    shards = packed_shards(tmp_path)
    data = TokenData(shards, tmp_path.joinpath, 8, 0, eot=EOT)
    count = sum(shard.rows or 0 for shard in data.shards)
    assert data.order.orders[0].sequences_per_epoch == count
    expected = sorted(
        row[:-1] for i in range(4) for row in rows_of(np.fromfile(tmp_path / f"train_{i:06d}.bin", "<u2")[512:], 9)
    )
    epoch = [row for tokens, _ in data.micro_batches(range(count, 2 * count), 7, CPU) for row in tokens.tolist()]
    assert sorted(epoch) == expected
    model = Gpt2Config(n_layer=1, n_head=1, n_embd=8, block_size=8)
    train = TrainConfig(batch_tokens=8 * 12, max_steps=50, learning_rate=0.1)

    def step(number: int, ranks: int) -> list[list[int]]:
        mine = (sequences_of(number, model, train, rank, ranks) for rank in range(ranks))
        parts = (TokenData(shards, tmp_path.joinpath, 8, 0, eot=EOT).micro_batches(part, 5, CPU) for part in mine)
        return [row for part in parts for inputs, _ in part for row in inputs.tolist()]

    assert step(3, 1) == step(3, 2) == step(3, 4) == step(3, 12)


# --- mixtures


def sources(sizes: list[int], windows: int) -> list[Shard]:
    """Shards of several sources, of so many shards each, in turn."""
    return [Shard(f"{n}-{i}", 4 * windows + 1, source=n) for n, count in enumerate(sizes) for i in range(count)]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 99), st.integers(0, 500))
def test_any_stretch_of_a_mixture_has_every_source_in_proportion(counts: list[int], seed: int, first: int) -> None:
    weights = [1.0 + n for n in range(len(counts))]
    shards = sources(counts, windows=5)
    order = Mixture(shards, 4, seed, weights)
    length = 60
    read = [order[g] for g in range(first, first + length)]
    for n, weight in enumerate(weights):
        count = sum(shards[shard].source == n for shard, _ in read)
        assert abs(count - length * weight / sum(weights)) <= len(weights)
        # Each source is read in the order that it would have alone: so each of its windows once in its epoch.
        alone, mine = Order([s for s in shards if s.source == n], 4, seed), order._shards[n]
        begun = order.read_before(first, n)
        expected = [(mine[shard], window) for shard, window in (alone[begun + k] for k in range(count))]
        assert [place for place in read if shards[place[0]].source == n] == expected
    assert read == [Mixture(shards, 4, seed, weights)[g] for g in range(first, first + length)]  # no state


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 300), st.integers(1, 80))
def test_the_shards_of_a_mixture_are_known_before_they_are_read(counts: list[int], first: int, length: int) -> None:
    order = Mixture(sources(counts, windows=3), 4, 1, [2.0 + n for n in range(len(counts))])
    read = list(dict.fromkeys(order[g][0] for g in range(first, first + length)))
    assert list(dict.fromkeys(order.shards_of(range(first, first + length)))) == read
    last = first + length - 1
    known = {*order.shards_of(range(first, first + length)), *order.next_shards(last)}
    assert order[last + 1][0] in known  # so no step waits for a shard that nobody prefetched
