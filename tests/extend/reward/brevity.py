"""A reward of generated answers: more for fewer words than the right answer has."""

from typing import Any

from pipelines.extras.tune.rewards import Score, Tuning
from pipelines.recipe.recipe import RewardConfig


def brevity(reward: RewardConfig, tuning: Tuning) -> Score:
    def score(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        lengths = [len(completion[-1]["content"].split()) for completion in completions]
        return [1 / max(1, mine - len(right.split()) + 1) for mine, right in zip(lengths, answer, strict=True)]

    return score
