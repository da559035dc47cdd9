"""What the sections of a recipe imply: the tokens of steps and validations, the bytes of a state, the ranks' shares."""

from bisect import bisect_right
from functools import lru_cache

from trainer.config.config import TrainConfig
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig


@lru_cache
def batch_stages(train: TrainConfig) -> tuple[tuple[int, int, int], ...]:
    """(step, tokens before it, tokens of each step from there on) for each size of batch, from step 0.

    The ramp is GPT-3's (Brown et al. 2020, 2.3): linear in the tokens seen. Every batch is a multiple of the
    first.
    """
    full = train.batch_tokens
    first, ramp = train.batch_ramp_from or full, train.batch_ramp_tokens or 0
    stages = [(0, 0, first)]
    for multiple in range(2, full // first + 1):
        due = -(-ramp * (multiple - 1) // (full // first - 1))  # tokens, rounded up
        step, before, batch = stages[-1]
        steps = -(-(due - before) // batch)
        if steps > 0:
            stages.append((step + steps, before + steps * batch, multiple * first))
        else:  # a step went past the whole stage
            stages[-1] = (step, before, multiple * first)
    return tuple(stages)


def batch_tokens_at(step: int, train: TrainConfig) -> int:
    """Tokens of update number `step` (0-based), over all ranks."""
    stages = batch_stages(train)
    return stages[bisect_right(stages, step, key=lambda stage: stage[0]) - 1][2]


def tokens_before(step: int, train: TrainConfig) -> int:
    """Tokens of all updates before update number `step`; of a whole run with `step` = max_steps."""
    stages = batch_stages(train)
    first, before, batch = stages[bisect_right(stages, step, key=lambda stage: stage[0]) - 1]
    return before + (step - first) * batch


def tokens_of_steps(train: TrainConfig, steps: int) -> int:
    """Tokens of a run's first `steps` updates. A branch pays for none before its first step."""
    return tokens_before(train.first_step + steps, train) - tokens_before(train.first_step, train)


def validations(train: TrainConfig) -> int:
    """The number of validations of a whole run: at the start, every `val_every` steps and at the end."""
    if train.val_every is None or not train.max_steps:
        return 0
    return 1 + train.max_steps // train.val_every + bool(train.max_steps % train.val_every)


LARGEST_AUTO_VAL_TOKENS = 20 * 524_288  # as llm.c
AUTO_VAL_PERCENT = 2  # of the time of the training, for all validations together


def val_tokens(model: ModelConfig, train: TrainConfig) -> int:
    """The size of a validation: as configured, or of AUTO_VAL_PERCENT, in whole sequences.

    A forward pass takes a third of a training step. The size depends on the recipe alone, not on measured times: so a
    resumed run, and a run on another machine, validate on the same tokens.
    """
    if train.val_tokens != "auto":
        return train.val_tokens
    affordable = 3 * AUTO_VAL_PERCENT * tokens_before(train.max_steps, train) // (100 * max(1, validations(train)))
    return max(1, min(affordable, LARGEST_AUTO_VAL_TOKENS) // model.block_size) * model.block_size


def val_share(model: ModelConfig, train: TrainConfig) -> float:
    """The time of all validations of a run as a share of its training steps'."""
    return validations(train) * val_tokens(model, train) / max(1, 3 * tokens_before(train.max_steps, train))


def state_bytes(model: ModelConfig, train: TrainConfig) -> int:
    """The size of weights and optimizer in float32, in memory and in a checkpoint: AdamW has two moments of every
    parameter, Muon only the momentum of its matrices. (NorMuon's numbers a row are left out: less than 0.1%.)"""
    return 12 * model.parameters - (4 * model.matrix_parameters if train.optimizer == "muon" else 0)


def steps_to_come(done: int, train: TrainConfig) -> float:
    """Remaining work after `done` steps, in steps of their mean size (at the start: of the first step's size)."""
    mean = tokens_before(done, train) / done if done else batch_tokens_at(0, train)
    return (tokens_before(train.max_steps, train) - tokens_before(done, train)) / mean


def sequences_per_step(model: ModelConfig, train: TrainConfig) -> int:
    """Sequences of `block_size` tokens in one optimizer step, over all ranks; with a ramp, at its end.

    UserError if a batch is not a multiple of block_size.
    """
    for field, tokens in (("batch_tokens", train.batch_tokens), ("batch_ramp_from", train.batch_ramp_from)):
        if tokens is not None and tokens % model.block_size:
            nearest = max(1, round(tokens / model.block_size)) * model.block_size
            raise UserError(
                f"train.{field}: {tokens} is not a multiple of model.block_size {model.block_size}; {nearest} would be"
            )
    return train.batch_tokens // model.block_size


def check_shares(model: ModelConfig, train: TrainConfig, world_size: int) -> None:
    """UserError if a step has fewer sequences than the run has processes. The shares need not be equal."""
    full = sequences_per_step(model, train)
    first = (train.batch_ramp_from or train.batch_tokens) // model.block_size
    if first >= world_size:
        return
    field, enough = "batch_tokens", world_size
    if full >= world_size:
        field, enough = "batch_ramp_from", next(n for n in range(world_size, full + 1) if full % n == 0)
    raise UserError(
        f"train.{field}: {first * model.block_size} is {first} sequence(s) of {model.block_size} tokens, too few for "
        f"{world_size} processes; use at most {first} (on one node: --set runtime.processes={first}), "
        f"or --set train.{field}={enough * model.block_size}"
    )


def micro_batch_count(share: int, most: int) -> int:
    """The fewest micro-batches of up to `most` sequences for a rank's `share` of a step."""
    return -(-share // most)


def micro_batch_of(share: int, most: int) -> int:
    """The size of the largest of these micro-batches: they differ by at most one sequence."""
    return -(-share // micro_batch_count(share, most))
