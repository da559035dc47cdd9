"""The configuration of a training run: `train` and `runtime`, two sections that a recipe shares with the trainer.

`train`, like `model`, enters fingerprints as it is written. `runtime` decides speed and safety,
so it may differ between two attempts of one run; like another kind of GPU, it changes only how numbers are rounded.
The descriptions of the fields are the source of docs/recipes.md; a unit stands in brackets at their end.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from trainer.config.errors import UserError
from trainer.config.model_config import Section
from trainer.config.source import WEIGHTS, Source

# The assumed life of a spot node, or of a node of an unknown market, until a run has attempts of its own. In the seven
# recorded markets of "Can't Be Late" (Wu et al. 2024), machines were available for 2,833 hours in 1,328 stretches: 2.1
# hours at a time on average, 0.7 to 6.1 in single markets.
PRIOR_SECONDS_BETWEEN_FAILURES = 2 * 3600.0

# Targets of train.stop_at, and the metric that passes each of them.
TARGETS = {"hellaswag": "eval/hellaswag_acc_norm", "core": "eval/core", "val_loss": "val/loss"}


class StopAt(Section):
    """Targets that end the training early: the first one that a measurement passes."""

    hellaswag: float | None = Field(
        default=None, gt=0, le=1, description="HellaSwag in completion style (acc_norm), at least [fraction of items]"
    )
    core: float | None = Field(default=None, gt=0, le=1, description="CORE, at least")
    val_loss: float | None = Field(default=None, gt=0, description="Validation loss, at most [nats]")

    @model_validator(mode="after")
    def _some_target(self) -> Self:
        if not self.targets:
            raise ValueError(f"no target is given; name one of {', '.join(TARGETS)}, or use null")
        return self

    @property
    def targets(self) -> dict[str, float]:
        """The given targets by name."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    def passed_by(self, metrics: Mapping[str, float]) -> str | None:
        """The first target that `metrics` pass: scores are at least the target, losses at most."""
        for name, target in self.targets.items():
            value = metrics.get(TARGETS[name])
            if value is not None and (value <= target if name == "val_loss" else value >= target):
                return name
        return None


class TrainConfig(Section):
    """The optimization: batch, length, schedule and data order. These fields decide the trained weights."""

    batch_tokens: int = Field(
        ge=1, description="Size of an optimizer step over all ranks; a multiple of model.block_size [tokens]"
    )
    batch_ramp_from: int | None = Field(
        default=None,
        ge=1,
        description="Size of the first step when the batch grows linearly to batch_tokens (GPT-3's ramp); must divide "
        "batch_tokens; the decay of rates then follows the tokens read; null: a constant batch [tokens]",
    )
    batch_ramp_tokens: int | None = Field(
        default=None, ge=1, description="Length of the ramp, from the start of the run [tokens]"
    )
    max_steps: int = Field(
        ge=0,
        description="Length of the training; 0 takes the weights of init_from as they are, to tune them "
        "[optimizer steps]",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: Muon for the matrices of the blocks, AdamW for embeddings, head and vectors",
    )
    learning_rate: float = Field(
        gt=0, description="Peak learning rate of AdamW; the schedule holds for all rates alike"
    )
    embedding_learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="With muon: AdamW's peak for the embeddings, GPT-2's tied one among them; nanochat has 0.3 for "
        "untied ones; null: learning_rate",
    )
    muon_learning_rate: float = Field(
        default=0.02, gt=0, description="Muon's peak (the value of modded-nanogpt and nanochat)"
    )
    muon_momentum_warmup_steps: int = Field(
        default=400,
        ge=0,
        description="Linear warm-up of Muon's momentum from 0.85 to 0.97, as nanochat; modded-nanogpt has 300 "
        "[optimizer steps]",
    )
    muon_weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="Muon's cautious weight decay at first (torch.optim.Muon's value; nanochat has 0.28 with "
        "scale_rates); it ends at 0, by a cosine",
    )
    scale_rates: bool = Field(
        default=False,
        description="With muon: learning rates and muon_weight_decay are those for 12 layers of width 768 and "
        "batches of 524,288 tokens, scaled to this model and batch as nanochat's are; `skytrain plan` prints them",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Linear warm-up from 0 to the peak [optimizer steps]")
    schedule: Literal["cosine", "wsd", "linear", "constant"] = Field(
        default="cosine", description="Learning rate after the warm-up; wsd: constant, then a linear decay"
    )
    min_lr_fraction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Learning rate at the end of cosine, linear and wsd [fraction of the peak]",
    )
    wsd_decay_fraction: float = Field(
        default=0.2, gt=0, le=1, description="Length of the decay of wsd, at the end [fraction of max_steps]"
    )
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="AdamW's decay of its two-dimensional tensors; with muon: see beta1",
    )
    beta1: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="AdamW's decay of the first moment; muon has numbers of "
        "its own for each group of parameters (trainer/optim/rates.py)",
    )
    beta2: float = Field(
        default=0.95, ge=0, lt=1, description="AdamW's decay of the second moment; with muon: see beta1"
    )
    epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon; with muon: see beta1")
    grad_clip: float | None = Field(default=1.0, gt=0, description="Largest global gradient norm; null: no clipping")
    skip_loss_zscore: float | None = Field(
        default=None,
        gt=0,
        description="Skip an update whose loss is this far above the mean of the last 128; null: off "
        "[standard deviations]",
    )
    skip_grad_norm_zscore: float | None = Field(
        default=None,
        gt=0,
        description="Skip an update whose gradient norm is this far above the mean of the last 128; null: off "
        "[standard deviations]",
    )
    seed: int = Field(default=1337, ge=0, lt=2**63, description="Seed of the initial weights and of the data order")
    val_every: int | None = Field(
        default=250,
        ge=1,
        description="Interval between validations; also one at the start and one at the end; null: none "
        "[optimizer steps]",
    )
    val_tokens: PositiveInt | Literal["auto"] = Field(
        default="auto",
        description="Size of a validation, at most the held-out shards; auto: all validations of the run together take "
        "about 2% of the training's time, and none is larger than 10,485,760 (20 x 524,288, as llm.c) [tokens]",
    )
    stop_at: StopAt | None = Field(
        default=None,
        description="End the training before max_steps, once a measurement passes a target: {hellaswag: 0.2955} or "
        "{core: 0.1139}, at least, after every evaluate.every steps; {val_loss: 3.28}, at most, after every val_every "
        "steps. The schedule still ends at max_steps; null: train max_steps",
    )
    precision: Literal["auto", "fp32", "bf16", "fp8", "fp8_head"] = Field(
        default="auto",
        description="Number format of the matrix products. auto: bf16 where the GPU has it, else fp32; "
        "the fingerprint contains the word auto, and the manifest the format. "
        "fp8 (the blocks) and fp8_head (the blocks and the head) need the fused engine and a GPU with fp8 (Hopper); "
        "fp8 also works in the engine sharded, with the extra float8 (torchao); "
        "short runs at 124M and 1558M ended at the loss of bf16 (docs/measurements.md)",
    )

    init_from: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="First weights, with a new optimizer and schedule: hf://ORG/NAME@COMMIT, a "
        "folder in its format (safetensors), a .bin of llm.c (version 3 or 5), or run:NAME[@STEP] of the same store; "
        "null: drawn from seed",
    )
    branch_from: str | None = Field(
        default=None,
        description="run:NAME@STEP: begin with the whole state of a commit of another run in the same store, its "
        "moments, step and position in the text, too; null: a run of its own",
    )

    @property
    def first_step(self) -> int:
        """The step at which the run begins: 0, or the step of the commit that it branches from."""
        return Source.of(self.branch_from, "branch_from").step or 0 if self.branch_from else 0

    @model_validator(mode="after")
    def _one_beginning(self) -> Self:
        init = Source.of(self.init_from, "init_from", WEIGHTS) if self.init_from else None
        if not self.max_steps and (init is None or init.step is not None):
            raise ValueError("max_steps 0 takes the weights of init_from as they are: name them there, and no commit")
        if self.branch_from is None:
            return self
        if Source.of(self.branch_from, "branch_from", ("run",)).step is None:
            raise ValueError(f"branch_from {self.branch_from} lacks a step; write run:NAME@STEP")
        if self.init_from is not None:
            raise ValueError("branch_from begins with the weights of its commit: remove init_from")
        if self.max_steps <= self.first_step:
            raise ValueError(
                f"max_steps {self.max_steps} ends before the branch begins; use more than its step {self.first_step}"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_fits(self) -> Self:
        other = "adamw" if self.optimizer == "muon" else "muon"
        for name in ADAMW_FIELDS if self.optimizer == "muon" else MUON_FIELDS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to optimizer {other}; set train.optimizer to {other}, or remove it")
        return self

    @model_validator(mode="after")
    def _ramp_fits(self) -> Self:
        first, full = self.batch_ramp_from, self.batch_tokens
        if (first is None) != (self.batch_ramp_tokens is None):
            given, missing = ("batch_ramp_tokens", "batch_ramp_from")[:: 1 if first is None else -1]
            raise ValueError(f"{given} is given without {missing}; a ramp needs both, a constant batch neither")
        if first is not None and full % first:
            nearest = next(n for n in range(min(first, full), 0, -1) if full % n == 0)
            raise ValueError(f"batch_ramp_from {first} does not divide batch_tokens {full}; {nearest} would")
        return self

    @model_validator(mode="after")
    def _target_is_measured(self) -> Self:
        if self.stop_at and self.stop_at.val_loss is not None and self.val_every is None:
            raise ValueError("stop_at.val_loss needs validations, and val_every is null; set train.val_every to 250")
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is more than max_steps {self.max_steps}; "
                "use fewer, or the learning rate never reaches its peak"
            )
        return self


# Fields that came later. A training that leaves them out keeps the fingerprint that it had before.
ADDED_FIELDS = ("stop_at", "init_from", "branch_from")
# In every fingerprint, though no recipe has these fields any more: existing trainings keep theirs.
FORMER_FIELDS = {"rollback_above_nats": None, "max_rollbacks": 3}
FORMER_MUON_FIELDS = {"head_learning_rate": None, "muon_momentum": 0.97}
# Fields without a meaning for AdamW alone, whose trainings keep their fingerprints, too.
MUON_FIELDS = (
    *("embedding_learning_rate", "muon_learning_rate", "muon_momentum_warmup_steps", "muon_weight_decay"),
    "scale_rates",
)
# Those without a meaning for Muon and the AdamW beside it.
ADAMW_FIELDS = ("weight_decay", "beta1", "beta2", "epsilon")


def identity_of(train: TrainConfig) -> dict[str, Any]:
    """The section as it decides the weights: without added fields, and their members, that are not set, and without
    those of an optimizer that does not run."""
    values = train.model_dump()
    if train.optimizer == "adamw":
        del values["optimizer"]
    for name in MUON_FIELDS if train.optimizer == "adamw" else ADAMW_FIELDS:
        del values[name]
    values |= FORMER_FIELDS | (FORMER_MUON_FIELDS if train.optimizer == "muon" else {})
    for name in ADDED_FIELDS:
        if (value := values.pop(name)) is not None:
            values[name] = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
    if train.batch_ramp_from:
        values["schedule_of"] = "tokens"  # what the schedules of a growing batch follow
    return values


Recompute = bool | Literal["selective"]  # of a block's inner values: none, all, or all but those of its products


class RuntimeConfig(Section):
    """How the run is carried out. No field here is part of a fingerprint: the training stays the same, though engine,
    sizes of micro-batches, number of ranks and reduce_dtype change how its sums are rounded."""

    micro_batch_size: PositiveInt | Literal["auto"] = Field(
        default=8,
        description="Largest number of sequences that a rank processes at once; auto: the most that fit into memory "
        "[sequences]",
    )
    processes: PositiveInt | Literal["auto"] = Field(
        default="auto", description="Ranks on each node; auto: one a GPU, or 1 on a CPU"
    )
    engine: str = Field(
        default="auto",
        description="Implementation of a step: auto, or a name. fused: our own forward and backward pass for CUDA; "
        "compiled: torch.compile; eager: plain PyTorch; sharded: FSDP2, which divides weights, gradients and optimizer "
        "over the ranks, in bf16 or fp32; auto: fused where it runs, else compiled on a GPU, else eager; "
        "sharded where that is too large for the memory of several GPUs",
    )
    shard_size: int | None = Field(
        default=None,
        ge=1,
        description="Ranks that divide one copy of the state, in the engine sharded; as many as a node has keep its "
        "traffic inside the node. Must divide the number of ranks; null: all of them [ranks]",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Neighbouring ranks that divide each matrix product of the blocks by heads and by the width of the "
        "MLP, in the engine sharded. Must divide shard_size; 1: none [ranks]",
    )
    recompute: Recompute = Field(
        default=False,
        description="Save memory (activation checkpointing): the backward pass computes GELU and LayerNorm again "
        "(fused; in fp8 GELU alone), or whole blocks (the other engines; about 30% more FLOPs); selective: all but "
        "products and attention (the other engines)",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Number format of gradients between ranks (fused, sharded); bf16 halves the traffic and rounds the "
        "gradients, and the manifest names it",
    )
    checkpoint_minutes: PositiveFloat | Literal["auto"] = Field(
        default="auto",
        description="Interval between checkpoints; auto: from the cost of a save and the run's own failures (Young "
        "1974) with the price of its traffic, and at least four times the last upload [minutes]",
    )
    keep_last: int = Field(default=2, ge=1, description="Number of latest checkpoints to keep")
    keep_every_steps: int | None = Field(
        default=None,
        ge=1,
        description="Also keep the checkpoints at multiples of this for good; null: none [optimizer steps]",
    )
    data_cache_gb: NonNegativeFloat | Literal["auto"] = Field(
        default="auto",
        description="Disk space of a node for shards from a bucket. Older shards are removed; those that a process "
        "reads, and the next one, stay in any case. auto: half of the space that is free without them [GB]",
    )
    deterministic: bool = Field(
        default=False,
        description="Bitwise equal results on the same number of ranks, at some cost of speed; a CPU always has them",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="Device of the ranks; auto: the first of cuda, mps, cpu that exists"
    )
    watchdog_minutes: PositiveFloat | Literal["auto"] | None = Field(
        default="auto",
        description="End a rank whose step makes no progress for this long (other phases: six times this); auto: "
        "10, or 20 steps if that is longer; null: never [minutes]",
    )


def seconds_from_environment(name: str, default: float, least: float = 0) -> float:
    """A duration in seconds from an environment variable. UserError if it is not a number of at least `least`."""
    text = os.environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds < float("inf"):
        raise UserError(f"{name}={text}: must be a number of seconds >= {least:g}; for example {name}={default:g}")
    return seconds
