"""Scores of rows of tokens against the plain way of computing them, on one rank and on several."""

import math
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import trainer_runs
from tiny_models import model_of

from trainer.eval.scoring import RowScore, ScoredRow, score_items, score_rows
from trainer.models.gpt2 import Gpt2Config
from trainer.models.language_model import LanguageModel
from trainer.parallel import World

ALONE = World(0, 0, 1, torch.device("cpu"))
CONFIG = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=97)

_one_thread = trainer_runs._one_thread


def some_rows(count: int, seed: int = 0) -> list[ScoredRow]:
    """Rows of 2 to 65 tokens."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        tokens = [chance.randrange(97) for _ in range(chance.randint(2, 65))]
        start = chance.randint(1, len(tokens) - 1)
        rows.append(ScoredRow(tokens, start))
    return rows


@torch.no_grad()
def naive(model: LanguageModel, rows: Sequence[ScoredRow]) -> list[RowScore]:
    """One row at a time, all logits, one token after the other."""
    scores = []
    for row in rows:
        logits = model(torch.tensor([list(row.tokens[:-1])]))[0].double()
        counted = range(row.start, len(row.tokens))
        losses = [-logits[t - 1].log_softmax(-1)[row.tokens[t]].item() for t in counted]
        greedy = all(int(logits[t - 1].argmax()) == row.tokens[t] for t in counted)
        scores.append(RowScore(sum(losses), len(losses), greedy))
    return scores


def likely(model: LanguageModel, row: ScoredRow) -> ScoredRow:
    """The row with its second half replaced by the model's own first choices."""
    tokens, half = list(row.tokens), max(1, len(row.tokens) // 2)
    for t in range(half, len(tokens)):
        tokens[t] = int(model(torch.tensor([tokens[:t]]))[0, -1].argmax())
    return ScoredRow(tokens, half)


def agrees(scores: Sequence[RowScore], expected: Sequence[RowScore]) -> None:
    assert [(s.tokens, s.greedy) for s in scores] == [(s.tokens, s.greedy) for s in expected]
    assert [s.loss for s in scores] == pytest.approx([s.loss for s in expected], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("tokens_at_once", [1, 200, None])
def test_scores_equal_those_of_one_row_at_a_time_in_the_order_of_the_rows(tokens_at_once: int | None) -> None:
    model = model_of(CONFIG)
    model.tokens_at_once = tokens_at_once
    rows = some_rows(40)
    rows += [likely(model, row) for row in rows[:10]]
    expected = naive(model, rows)
    assert sum(score.greedy for score in expected) >= 10
    agrees(score_rows(model, rows, ALONE), expected)


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
    monkeypatch.setattr("trainer.eval.scoring.ITEMS_AT_ONCE", 4)
    monkeypatch.setattr("trainer.eval.scoring.TOKENS_AT_ONCE_CPU", 200)
    model, rows, ranks = model_of(CONFIG), some_rows(40), Ranks(3)
    groups = [rows[i : i + i % 4] for i in range(0, 31, 3)] + [
        [ScoredRow([1, 2], 2)]
    ]  # the last one has nothing to score
    expected = [naive(model, group) for group in groups[:-1]]
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
