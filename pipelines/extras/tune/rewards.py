"""Our rewards: what the group `skytrain.rewards` names, as everyone's.

Each is a function of the reward in the recipe and of the step of tuning that runs. It returns the reward in TRL's form:
`score(prompts, completions, **columns)` gives a number, or None, for each completion; prompts and completions are lists
of {role, content}.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pipelines.extras.tune.conversations import COLUMNS, answer_in, columns_of
from pipelines.extras.tune.reward_code import ARGUMENTS, RewardCode
from pipelines.extras.tune.tune_task import TuneTask
from pipelines.recipe.recipe import REWARD, RewardConfig, TuneConfig
from pipelines.run.text.chat import ChatTokens
from trainer.config.extensions import REWARDS, extension

Score = Callable[..., list[Any]]


class Tuning(Protocol):
    """The step of tuning that runs, as far as rewards use it."""

    step: TuneConfig
    task: TuneTask
    folder: Path  # of the attempt, on this node
    tokens: ChatTokens
    device: Any  # of torch

    def padded(self, ids: list[list[int]], side: str) -> Any:
        """Ids as a batch for transformers, padded on one side, on the device."""


def score_of(reward: RewardConfig, tuning: Tuning) -> Score:
    """A reward in TRL's form, which gets the columns of the data by name."""
    score: Score = extension(REWARDS, reward.kind, f"tune.{tuning.step.name}.rewards")(reward, tuning)

    def with_columns(**given: Any) -> list[Any]:
        passed = {name: given[name] for name in (*ARGUMENTS, "answer") if name in given}
        return score(**passed | columns_of(given.get(COLUMNS, ())))

    with_columns.__name__ = reward.function or reward.kind  # in the names of TRL's metrics
    return with_columns


def exact_match(reward: RewardConfig, tuning: Tuning) -> Score:
    """1 for an answer that is the row's `answer`."""

    def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(answer_in(a) == answer_in(b)) for a, b in zip(texts_of(completions), answer, strict=True)]

    return score


def length(reward: RewardConfig, tuning: Tuning) -> Score:
    """1 for an answer of at most `characters`, which falls to 0 at twice as many."""
    limit = reward.characters or 1
    return lambda completions, **_: [min(1.0, max(0.0, 2 - len(text) / limit)) for text in texts_of(completions)]


def in_a_process(reward: RewardConfig, tuning: Tuning) -> Score:
    """What a function of the recipe's author returns, or 1 for an answer that `pattern` matches."""
    return RewardCode(reward, tuning.task.allow_code)


def of_a_model(reward: RewardConfig, tuning: Tuning) -> Score:
    """The score of the reward model that an earlier step made. It crops an answer that has, as text, more tokens than
    were generated; TRL's own call would not."""
    import torch
    import transformers

    folder, longest = tuning.folder / f"{REWARD}-{reward.step}", tuning.task.recipe.model.block_size
    kind = transformers.AutoModelForSequenceClassification
    judge = kind.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, local_files_only=True)
    judge.to(tuning.device).eval()

    @torch.no_grad()
    def score(prompts: list[Any], completions: list[Any], **_: Any) -> Any:
        chats = [[*prompt, *answer] for prompt, answer in zip(prompts, completions, strict=True)]
        ids = [tuning.tokens.conversation(chat)[0][:longest] for chat in chats]
        return judge(**tuning.padded(ids, "right")).logits[:, 0].tolist()

    return score


def texts_of(completions: list[Any]) -> list[str]:
    """The generated texts."""
    return [completion[-1]["content"] for completion in completions]
