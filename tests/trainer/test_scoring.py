"""Scores of rows of tokens against the plain way of computing them, on one rank and on several."""

import math
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import trainer_runs
from tiny_models import model_of

from trainer.config import RuntimeConfig, TrainConfig
from trainer.engine import make_engine
from trainer.errors import Interrupted
from trainer.families.gpt2 import Gpt2Config
from trainer.model import LanguageModel
from trainer.parallel import World
from trainer.scoring import Row, RowScore, _batches, _sorted, _strips, score_rows

ALONE = World(0, 0, 1, torch.device("cpu"))
CONFIG = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=97)

_one_thread = trainer_runs._one_thread


def some_rows(count: int, seed: int = 0) -> list[Row]:
    """Rows of 2 to 65 tokens; some end before their last token."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        tokens = [chance.randrange(97) for _ in range(chance.randint(2, 65))]
        start = chance.randint(1, len(tokens) - 1)
        rows.append(Row(tokens, start, chance.choice((None, chance.randint(start + 1, len(tokens))))))
    return rows


@torch.no_grad()
def naive(model: LanguageModel, rows: Sequence[Row]) -> list[RowScore]:
    """One row at a time, all logits, one token after the other."""
    scores = []
    for row in rows:
        logits = model(torch.tensor([list(row.tokens[:-1])]))[0].double()
        counted = range(row.start, len(row.tokens) if row.end is None else row.end)
        losses = [-logits[t - 1].log_softmax(-1)[row.tokens[t]].item() for t in counted]
        greedy = all(int(logits[t - 1].argmax()) == row.tokens[t] for t in counted)
        scores.append(RowScore(sum(losses), len(losses), greedy))
    return scores


def likely(model: LanguageModel, row: Row) -> Row:
    """The row with its second half replaced by the model's own first choices."""
    tokens, half = list(row.tokens), max(1, len(row.tokens) // 2)
    for t in range(half, len(tokens)):
        tokens[t] = int(model(torch.tensor([tokens[:t]]))[0, -1].argmax())
    return Row(tokens, half)


def agrees(scores: Sequence[RowScore], expected: Sequence[RowScore]) -> None:
    assert [(s.tokens, s.greedy) for s in scores] == [(s.tokens, s.greedy) for s in expected]
    assert [s.loss for s in scores] == pytest.approx([s.loss for s in expected], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("tokens_at_once", [1, 100, 1000, None])
def test_scores_equal_those_of_one_row_at_a_time_in_the_order_of_the_rows(tokens_at_once: int | None) -> None:
    model = model_of(CONFIG)
    rows = some_rows(40)
    rows += [likely(model, row) for row in rows[:10]]
    expected = naive(model, rows)
    assert sum(score.greedy for score in expected) >= 10
    agrees(score_rows(model, rows, ALONE, tokens_at_once), expected)


def questions(count: int, seed: int = 1) -> list[Row]:
    """Rows of questions with 1 to 5 choices, of which some are a beginning of another."""
    chance, rows = random.Random(seed), []
    for _ in range(count):
        context = [chance.randrange(97) for _ in range(chance.randint(1, 50))]
        for _ in range(chance.randint(1, 5)):
            tokens = (context + [chance.randrange(97) for _ in range(chance.randint(1, 12))])[-65:]
            rows.append(Row(tokens, max(1, chance.randint(len(context) - 5, len(tokens) - 1))))
        rows.append(Row(rows[-1].tokens[: rows[-1].start + 1], rows[-1].start))
    return rows


@pytest.mark.parametrize("tokens_at_once", [1, 500, None])
def test_rows_that_share_their_beginning_have_the_scores_that_they_have_alone(tokens_at_once: int | None) -> None:
    model, rows = model_of(CONFIG), questions(30)
    rows += [likely(model, row) for row in rows[:30]]
    expected = naive(model, rows)
    agrees(score_rows(model, rows, ALONE, tokens_at_once), expected)


def test_a_beginning_that_rows_share_is_computed_once() -> None:
    context = list(range(40))
    rows = [Row(context + [60 + choice] * length, 40) for choice, length in enumerate((3, 9, 5, 1))]
    (strip,) = _strips(rows, 128)
    assert (strip.rows, strip.shared, strip.length) == ([0, 1, 2, 3], 40, 40 + 2 + 8 + 4)
    assert [strip.length for strip in _strips(rows, 0)] == [42, 48, 44, 40]  # for an engine without branches
    assert [strip.rows for strip in _strips(rows, 50)] == [[0, 1], [2, 3]]
    before = np.array(context[:30])  # one array in front of several rows is known to be alike
    known = [Row(row.tokens[30:], row.start, None, before) for row in rows]
    assert _strips(known, 128) == [strip]
    assert [list(row.part(0, row.length)) for row in known] == [row.tokens for row in rows]
    others = [Row([5, *row.tokens], 41) for row in rows[:1]]
    assert [strip.rows for strip in _strips([*rows[:2], *others, *rows[2:]], 128)] == [[0, 1], [2], [3, 4]]


def test_batches_have_few_shapes() -> None:
    model, shapes = model_of(CONFIG), []
    hidden = model.hidden
    model.hidden = lambda tokens, context=None: shapes.append(tuple(tokens.shape)) or hidden(tokens, context)  # type: ignore[method-assign,func-returns-value]
    score_rows(model, some_rows(300), ALONE, tokens_at_once=320)
    assert len(shapes) > 30 and len(set(shapes)) <= 3  # widths 64 and 32, and a last batch
    assert all(height * width <= 320 for height, width in shapes)


def test_few_tokens_of_a_batch_are_padding_where_beginnings_and_rests_differ_in_length() -> None:
    chance, rows = random.Random(0), []
    for _ in range(400):
        context = [chance.randrange(97) for _ in range(chance.randint(17, 40))]
        rows += [Row(context + [chance.randrange(97)] * chance.randint(1, 24), len(context)) for _ in range(4)]
    strips = _strips(rows, 128)
    batches = _batches(_sorted(strips), 1600)
    assert sum(batch.height * batch.width for batch in batches) < 1.25 * sum(strip.length for strip in strips)


def test_a_model_short_of_memory_limits_the_batches() -> None:
    model, shapes = model_of(CONFIG), []
    hidden = model.hidden
    model.hidden = lambda tokens, context=None: shapes.append(tokens.numel()) or hidden(tokens, context)  # type: ignore[method-assign,func-returns-value]
    score_rows(model, some_rows(50), ALONE)
    largest, model.tokens_at_once = max(shapes), 128
    shapes.clear()
    score_rows(model, some_rows(50), ALONE)
    assert max(shapes) <= 128 < largest


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


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_share_the_rows_and_each_gets_all_scores_in_as_many_rounds(count: int) -> None:
    model, rows, ranks = model_of(CONFIG), some_rows(31), Ranks(count)
    results: dict[int, tuple[list[RowScore], int]] = {}

    def run(rank: int) -> None:
        rounds: list[int] = []
        scores = score_rows(model, rows, ranks.world(rank), 200, before_batch=lambda: rounds.append(1))
        results[rank] = scores, len(rounds)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({rounds for _, rounds in results.values()}) == 1 and results[0][1] > 1
    for scores, _ in results.values():
        agrees(scores, naive(model, rows))


def test_fewer_rows_than_ranks_and_no_rows_at_all_are_scored() -> None:
    model, ranks = model_of(CONFIG), Ranks(1)
    assert score_rows(model, [], ALONE) == []
    alone = World(2, 0, 3, torch.device("cpu"))
    object.__setattr__(alone, "gather", ranks.world(0).gather)
    assert score_rows(model, [], alone) == []


def test_an_interruption_before_a_batch_ends_the_scoring() -> None:
    left = [3]

    def before_batch() -> None:
        left[0] -= 1
        if not left[0]:
            raise Interrupted

    with pytest.raises(Interrupted):
        score_rows(model_of(CONFIG), some_rows(100), ALONE, 64, before_batch)
    assert left == [0]


def test_progress_ends_at_the_number_of_rows() -> None:
    seen: list[int] = []
    score_rows(model_of(CONFIG), some_rows(50), ALONE, 200, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 50 and len(set(seen)) > 5


def test_an_engine_scores_with_its_weights_in_place_in_its_own_precision() -> None:
    rows, model = some_rows(20), model_of(CONFIG)
    expected = naive(model, rows)
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 0.05)):
        fields = {"batch_tokens": 64, "max_steps": 1, "learning_rate": 0.1, "precision": precision}
        train = TrainConfig.model_validate(fields)
        engine = make_engine(CONFIG, train, RuntimeConfig(engine="eager"), ALONE)
        for name, piece in engine.weights().items():
            piece.copy_(model.state_dict()[name])
        scores = score_rows(engine, rows, ALONE)
        assert [s.loss for s in scores] == pytest.approx([s.loss for s in expected], rel=tolerance)
        assert all(math.isfinite(s.loss) for s in scores)
