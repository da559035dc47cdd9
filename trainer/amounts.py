"""What the sections of a recipe imply: the tokens of steps and validations, the bytes of a state, the ranks' shares."""

from trainer.config import TrainConfig
from trainer.errors import UserError
from trainer.models.model_config import ModelConfig


def validations(train: TrainConfig) -> int:
    """The number of validations of a whole run: at the start, every `val_every` steps and at the end."""
    if train.val_every is None:
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
    affordable = 3 * AUTO_VAL_PERCENT * train.max_steps * train.batch_tokens // (100 * max(1, validations(train)))
    return max(1, min(affordable, LARGEST_AUTO_VAL_TOKENS) // model.block_size) * model.block_size


def val_share(model: ModelConfig, train: TrainConfig) -> float:
    """The time of all validations of a run as a share of its training steps'."""
    return validations(train) * val_tokens(model, train) / (3 * train.max_steps * train.batch_tokens)


def state_bytes(model: ModelConfig, train: TrainConfig) -> int:
    """The size of weights and optimizer in float32, in memory and in a checkpoint: AdamW has two moments of every
    parameter, Muon only the momentum of its matrices. (NorMuon's numbers a row are left out: less than 0.1%.)"""
    return 12 * model.parameters - (4 * model.matrix_parameters if train.optimizer == "muon" else 0)


def sequences_per_step(model: ModelConfig, train: TrainConfig) -> int:
    """Sequences of `block_size` tokens in one optimizer step, over all ranks.

    UserError if a batch is not a multiple of block_size.
    """
    if train.batch_tokens % model.block_size:
        nearest = max(1, round(train.batch_tokens / model.block_size)) * model.block_size
        raise UserError(
            f"train.batch_tokens: {train.batch_tokens} is not a multiple of model.block_size {model.block_size}; "
            f"{nearest} would be"
        )
    return train.batch_tokens // model.block_size


def check_shares(model: ModelConfig, train: TrainConfig, world_size: int) -> None:
    """UserError if a step has fewer sequences than the run has processes. The shares need not be equal."""
    if (sequences := sequences_per_step(model, train)) < world_size:
        raise UserError(
            f"train.batch_tokens: {train.batch_tokens} is {sequences} sequence(s) of {model.block_size} tokens, too "
            f"few for {world_size} processes; use at most {sequences} (on one node: --set "
            f"runtime.processes={sequences}), or --set train.batch_tokens={world_size * model.block_size}"
        )


def micro_batch_count(share: int, most: int) -> int:
    """The fewest micro-batches of up to `most` sequences for a rank's `share` of a step."""
    return -(-share // most)


def micro_batch_of(share: int, most: int) -> int:
    """The size of the largest of these micro-batches: they differ by at most one sequence."""
    return -(-share // micro_batch_count(share, most))
