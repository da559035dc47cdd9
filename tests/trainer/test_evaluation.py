"""Evaluation while a run trains: it changes nothing of the training, is resumable, and a target may end the run.
Validation loss against the plain way of computing it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import model_of
from torch import Tensor
from trainer_runs import ALONE, Runner, Runners, weights

from trainer.base.events import Row
from trainer.base.parallel import World
from trainer.checkpoint.commits import committed_state, series
from trainer.data.batches import TokenData
from trainer.data.shards import Shard, write_shard
from trainer.eval.evaluation import Evaluation, TextSampler, validation, validation_loss
from trainer.eval.scoring import Scored
from trainer.models.gpt2 import Gpt2Config
from trainer.models.language_model import LanguageModel

SCORE = "eval/hellaswag_acc_norm"
BATCHES = 3  # of a measurement
TOKENS = torch.zeros(1, 33, dtype=torch.long)
for i in range(32):
    TOKENS[0, i + 1] = (5 * TOKENS[0, i] + 3) % 70  # the language of the data


class Killed(BaseException):
    """The end of a process in the middle of a measurement."""


class Score:
    """A score of the weights in three batches, which rises as the loss falls."""

    def __init__(self, die_in_batch: int | None = None) -> None:
        self.die_in_batch, self.batches = die_in_batch, 0
        self.before_death: Callable[[], bool] = lambda: True
        self.measured: list[float] = []

    def __call__(self, model: Scored, world: World, check: Callable[[], None]) -> dict[str, float]:
        for _ in range(BATCHES):
            check()
            self.batches += 1
            if self.batches == self.die_in_batch:
                while not self.before_death():
                    time.sleep(0.01)
                raise Killed
        logits = model.head(model.hidden(TOKENS[:, :-1]).flatten(0, 1)).float()
        self.measured.append(1 / (1 + float(F.cross_entropy(logits, TOKENS[0, 1:]))))
        return {SCORE: self.measured[-1]}


def evaluated(make: Runners, name: str, score: Score, every: int = 5, **changes: Any) -> Runner:
    run = make(name, **changes)
    run.evaluation = Evaluation(every, (score,), TextSampler(0, str, seed=1, texts=2, tokens=3))
    return run


def scores_of(run: Runner) -> dict[int, float]:
    """The committed scores by step."""
    return {row["step"]: row[SCORE] for row in series(run.store, "run") if SCORE in row}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_leaves_losses_and_weights_as_they_are_without_it(runner: Runners, precision: str) -> None:
    run = evaluated(runner, "evaluated", Score(), precision=precision)
    same, state = run.attempt()
    assert run.ended(same) == runner.undisturbed(precision=precision)
    assert list(scores_of(run)) == [5, 10, 12]  # every five steps and after the last one, not at the start
    assert (state.evaluated_step, state.scores) == (12, {SCORE: scores_of(run)[12]})
    texts = [event.samples for event in run.events_of(Row) if event.samples]
    assert len(texts) == 3 and all(len(each) == 2 for each in texts)
    assert [row["samples"] for row in series(run.store, "run") if "samples" in row] == texts


@pytest.mark.parametrize("batch", [1, 9])  # in the first batch at step 5, and at 12, the end
def test_a_kill_in_an_evaluation_repeats_that_evaluation_and_no_step(runner: Runners, batch: int) -> None:
    whole = evaluated(runner, "whole", Score())
    model, _ = whole.attempt()
    score = Score(die_in_batch=batch)
    run = evaluated(runner, "killed", score)
    step = [5, 10, 12][(batch - 1) // BATCHES]
    score.before_death = lambda: step in run.commits()  # it uploads while the ranks evaluate
    with pytest.raises(Killed):
        run.attempt()
    assert run.commits()[0] == step and step not in scores_of(run)
    done = len(run.events_of(Row))
    resumed, state = run.attempt()
    assert run.events_of(Row)[done].step == step  # no step again: first the evaluation
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)
    assert scores_of(run) == scores_of(whole) and len(score.measured) == 3
    assert state.is_complete(run.config.train, 5) and committed_state(run.store, "run") == state


@pytest.mark.parametrize("batch", [3, 4])  # of the score, and of a token of the first text
def test_a_stop_in_an_evaluation_is_heard_before_its_next_batch_and_the_next_attempt_evaluates(
    runner: Runners, batch: int
) -> None:
    whole = evaluated(runner, "whole", Score(), val_every=None)
    model, _ = whole.attempt()
    score = Score()
    run = evaluated(runner, "stopped", score, val_every=None)
    _, state = run.attempt(stop_in_val_batch=batch)
    assert score.batches == min(batch - 1, BATCHES)
    assert state.step == 5 and run.commits() == [5] and not scores_of(run)
    resumed, _ = run.attempt()
    assert run.rows() == whole.rows() and weights(resumed) == weights(model)
    assert scores_of(run) == scores_of(whole)


def target_between(run: Runner, low: int, high: int) -> float:
    scores = scores_of(run)
    assert scores[low] < scores[high]
    return (scores[low] + scores[high]) / 2


def test_a_passed_target_ends_the_run_committed_and_complete(runner: Runners) -> None:
    whole = evaluated(runner, "whole", Score(), every=3)
    whole.attempt()
    target = target_between(whole, 3, 6)
    run = evaluated(runner, "target", Score(), every=3, stop_at={"hellaswag": target})
    model, state = run.attempt()
    assert state.step == 6 and state.passed(run.config.train) == "hellaswag"
    assert state.val_step == 6 and state.is_complete(run.config.train, 3)  # the end is validated, too
    assert committed_state(run.store, "run") == state
    assert list(scores_of(run)) == [3, 6]
    again, state_again = run.attempt()
    assert state_again == state and weights(again) == weights(model)


def test_a_validation_loss_ends_the_run_at_most_at_its_target(runner: Runners) -> None:
    whole = runner("whole", val_every=2)
    whole.attempt()
    losses = {row["step"]: row["val/loss"] for row in whole.rows() if "val/loss" in row}
    run = runner("target", val_every=2, stop_at={"val_loss": losses[6]})
    _, state = run.attempt()
    assert (state.step, state.val_loss) == (6, losses[6])
    assert run.commits()[0] == 6 and state.is_complete(run.config.train)


# --- validation loss

SMALL = Gpt2Config(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=97)


def val_data(folder: Path, sizes: list[int]) -> TokenData:
    random = np.random.RandomState(0)
    shards = [Shard(f"val_{i:06d}.bin", n) for i, n in enumerate(sizes)]
    for shard in shards:
        write_shard(folder / shard.name, random.randint(0, SMALL.vocab_size, shard.tokens).astype(np.uint16))
    return TokenData(shards, folder.joinpath, SMALL.block_size, seed=0)


@torch.no_grad()
def naive_losses(model: LanguageModel, data: TokenData, folder: Path) -> tuple[Tensor, Tensor]:
    """The losses and the targets, (windows, block_size): one window at a time from the raw tokens."""
    losses, targets = [], []
    for shard in data.shards:
        tokens = np.frombuffer((folder / shard.name).read_bytes()[1024:], dtype="<u2").astype(np.int64)
        for start in range(0, len(tokens) - SMALL.block_size, SMALL.block_size):
            window = torch.from_numpy(tokens[start : start + SMALL.block_size + 1])
            log_p = model(window[None, :-1])[0].double().log_softmax(-1)
            losses.append(-log_p[range(SMALL.block_size), window[1:]])
            targets.append(window[1:])
    return torch.stack(losses), torch.stack(targets)


@pytest.mark.parametrize(("max_tokens", "windows"), [(10**9, 15), (16 * 7 + 15, 7), (1, 1)])
def test_val_loss_and_bits_per_byte_are_means_over_the_first_tokens_and_their_text(
    tmp_path: Path, max_tokens: int, windows: int
) -> None:
    data, model = val_data(tmp_path, [100, 0, 16, 150]), model_of(SMALL)
    sizes = torch.arange(SMALL.vocab_size) % 5  # bytes of text; a special token has none
    losses, targets = (found[:windows] for found in naive_losses(model, data, tmp_path))
    bits = float(losses[sizes[targets] > 0].sum() / np.log(2) / sizes[targets].sum())
    expected = pytest.approx(float(losses.mean()), rel=1e-6)
    for batch_size in (1, 4, 64):
        assert validation_loss(model, data, max_tokens, batch_size, ALONE) == expected
        found = validation(model.losses, data, max_tokens, batch_size, ALONE, sizes)
        assert found == (expected, pytest.approx(bits, rel=1e-6))
    assert validation(model.losses, data, max_tokens, 4, ALONE, 0 * sizes)[1] == np.inf
