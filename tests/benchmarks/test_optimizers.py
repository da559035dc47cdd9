"""The benchmark of optimizers: its tokens to equal loss, from runs of several lengths."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.optimizers import MODERN_MUON, WITHOUT, Run, best_rate, ingredient_table, share_to_reach, table
from trainer.errors import UserError
from trainer.models.family import plain_model
from trainer.models.modern import ModernConfig

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


def test_an_ingredients_share_is_told_by_pairs_of_seeds_and_by_the_plain_models_other_lengths() -> None:
    plain = [Run(MODERN_MUON, 0.1, seed, 100, loss) for seed, loss in ((1, 2.0), (2, 2.2))]
    plain += [Run(MODERN_MUON, 0.1, 1, 25, 3.1)]
    runs = [*plain, Run("without x", 0.1, 1, 100, 2.5), Run("without x", 0.1, 2, 100, 2.7)]
    assert list(ingredient_table(runs, 100))[2:] == [
        "| modern + muon | 0.1 | 2.1000 (2) |  | 1.00 x |",
        "| without x | 0.1 | 2.6000 (2) | +0.5000 (+0.5000, +0.5000) | 0.50 x |",
    ]


@pytest.mark.parametrize("name", WITHOUT)
def test_a_model_without_an_ingredient_is_another_model(name: str) -> None:
    def logits(*patched: Any) -> torch.Tensor:
        config = ModernConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=128)
        with patch.object(*patched):
            model = plain_model(config)
            model.initialize(1)
            with torch.no_grad():
                model.head_weight.mul_(1000)  # so that the cap matters
                for each, p in model.named_parameters() if "projections" not in name else ():
                    if each.endswith(("o_proj.weight", "down_proj.weight")):  # 0 at the start
                        p.normal_(generator=torch.Generator().manual_seed(1))
                return model(torch.arange(8)[None])

    same = (WITHOUT[name][0], WITHOUT[name][1], vars(WITHOUT[name][0])[WITHOUT[name][1]])
    assert (logits(*WITHOUT[name]) - logits(*same)).abs().max() > 0.1


def test_an_arm_whose_rate_was_not_searched_is_named() -> None:
    with pytest.raises(UserError, match="--arms c: its learning rate was not searched"):
        best_rate(RUNS, "c", 100)
