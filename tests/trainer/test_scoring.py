"""Scores of rows of tokens on several ranks, in batches, against those of one row at a time."""

import math
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_models import model_of

from trainer.eval.scoring import RowScore, ScoredRow, score_items, score_rows
from trainer.models.gpt2 import Gpt2Config
from trainer.parallel import World

ALONE = World(0, 0, 1, torch.device("cpu"))
CONFIG = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=97)


def some_rows(count: int, seed: int = 0) -> list[ScoredRow]:
    """Rows of 2 to 65 tokens."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        tokens = [chance.randrange(97) for _ in range(chance.randint(2, 65))]
        start = chance.randint(1, len(tokens) - 1)
        rows.append(ScoredRow(tokens, start))
    return rows


def agrees(scores: Sequence[RowScore], expected: Sequence[RowScore]) -> None:
    assert [(s.tokens, s.greedy) for s in scores] == [(s.tokens, s.greedy) for s in expected]
    assert [s.loss for s in scores] == pytest.approx([s.loss for s in expected], rel=1e-5, abs=1e-5)


class Ranks:
    """Threads as ranks, which gather by a barrier."""

    def __init__(self, count: int) -> None:
        self.count, self.values = count, [None] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def world(self, rank: int) -> World:
        ranks = self

        class Threaded(World):
            def gather(self, value: Any) -> list[Any]:
                ranks.values[rank] = value
                ranks.barrier.wait()
                values = list(ranks.values)
                ranks.barrier.wait()
                return values

        return Threaded(rank, 0, self.count, torch.device("cpu"))


def test_ranks_share_the_items_and_each_gets_all_scores_in_as_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, ranks = model_of(CONFIG), some_rows(40), Ranks(3)
    groups = [rows[i : i + i % 4] for i in range(0, 31, 3)] + [
        [ScoredRow([1, 2], 2)]
    ]  # the last one has nothing to score
    expected = [[score_rows(model, [row], ALONE)[0] for row in group] for group in groups[:-1]]
    monkeypatch.setattr("trainer.eval.scoring.ITEMS_AT_ONCE", 4)
    monkeypatch.setattr("trainer.eval.scoring.TOKENS_AT_ONCE_CPU", 200)
    results: dict[int, tuple[list[list[RowScore]], int]] = {}

    def run(rank: int) -> None:
        rounds: list[int] = []

        def rows_of(indices: Sequence[int]) -> list[list[ScoredRow]]:
            return [groups[i] for i in indices]

        world = ranks.world(rank)
        scores = score_items(model, len(groups), rows_of, world, lambda: rounds.append(1))
        results[rank] = scores, len(rounds)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({rounds for _, rounds in results.values()}) == 1 and results[0][1] > 1
    for scores, _ in results.values():
        assert len(scores) == 12 and scores[-1] == [RowScore(math.inf, 0, False)]
        for group, theirs in zip(scores[:-1], expected, strict=True):
            agrees(group, theirs)
