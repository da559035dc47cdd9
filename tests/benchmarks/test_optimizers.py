"""The benchmark of optimizers: its tokens to equal loss, from runs of several lengths."""

import pytest

from benchmarks.optimizers import Run, best_rate, share_to_reach, table
from trainer.config.errors import UserError

RUNS = [
    Run("a", 0.1, 1, 100, 2.0),
    Run("a", 0.2, 1, 100, 1.8),
    Run("a", 0.2, 2, 100, 1.9),
    Run("b", 0.1, 1, 100, 1.5),
    Run("b", 0.2, 1, 100, float("nan")),
    Run("b", 0.1, 1, 25, 2.2),
]


def test_the_tokens_to_the_first_arms_loss_are_interpolated_between_lengths_at_the_best_rate() -> None:
    assert best_rate(RUNS, "a", 100) == 0.2 and best_rate(RUNS, "b", 100) == 0.1  # a diverged run is none
    assert share_to_reach(1.85, RUNS, "b", 100) == pytest.approx(0.5)  # half of the way from 25 to 100 in logarithms
    assert share_to_reach(1.4, RUNS, "b", 100) is None and share_to_reach(1.85, RUNS, "a", 100) is None
    assert list(table(RUNS, 100))[2:] == [
        "| a | 0.2 | 1.8500 (2) | 0.0707 |  |",
        "| b | 0.1 | 1.5000 (1) |  | 0.50 x |",
    ]


def test_an_arm_whose_rate_was_not_searched_is_named() -> None:
    with pytest.raises(UserError, match="--arms c: its learning rate was not searched"):
        best_rate(RUNS, "c", 100)
