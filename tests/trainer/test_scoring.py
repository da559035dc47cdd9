"""Scores of rows of tokens on several ranks, in batches, against those of one row at a time."""

import math
import random
from collections.abc import Sequence

import pytest
from interfering import each
from tiny_models import model_of
from trainer_runs import ALONE, threaded_worlds

from trainer.base.parallel import World
from trainer.eval.scoring import RowScore, ScoredRow, score_items, score_rows
from trainer.models.gpt2 import Gpt2Config

CONFIG = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=97)


def some_rows(count: int) -> list[ScoredRow]:
    """Rows of 2 to 65 tokens."""
    chance = random.Random(0)
    rows = []
    for _ in range(count):
        tokens = [chance.randrange(97) for _ in range(chance.randint(2, 65))]
        start = chance.randint(1, len(tokens) - 1)
        rows.append(ScoredRow(tokens, start))
    return rows


def agrees(scores: Sequence[RowScore], expected: Sequence[RowScore]) -> None:
    assert [(s.tokens, s.greedy) for s in scores] == [(s.tokens, s.greedy) for s in expected]
    assert [s.loss for s in scores] == pytest.approx([s.loss for s in expected], rel=1e-5, abs=1e-5)


def test_ranks_share_the_items_and_each_gets_all_scores_in_as_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = model_of(CONFIG), some_rows(40)
    nothing_to_score = [ScoredRow([1, 2], 2)]
    groups = [*(rows[i : i + i % 4] for i in range(0, 31, 3)), nothing_to_score]
    expected = [[score_rows(model, [row], ALONE)[0] for row in group] for group in groups[:-1]]
    monkeypatch.setattr("trainer.eval.scoring.ITEMS_AT_ONCE", 4)
    monkeypatch.setattr("trainer.eval.scoring.TOKENS_AT_ONCE_CPU", 200)

    def run(world: World) -> tuple[list[list[RowScore]], int]:
        rounds: list[int] = []
        scores = score_items(
            model, len(groups), lambda indices: [groups[i] for i in indices], world, lambda: rounds.append(1)
        )
        return scores, len(rounds)

    results = each(threaded_worlds(3), run)
    assert len({rounds for _, rounds in results}) == 1 and results[0][1] > 1
    for scores, _ in results:
        assert len(scores) == 12 and scores[-1] == [RowScore(math.inf, 0, False)]
        for group, theirs in zip(scores[:-1], expected, strict=True):
            agrees(group, theirs)
