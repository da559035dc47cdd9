"""What a training run is told: three frozen sections that a recipe shares with the trainer.

`model` and `train` decide the bytes of the result; `runtime` only how fast and how safely they come
about, so it may differ between two attempts of one run.
"""

import difflib
import os
from bisect import bisect_right
from functools import lru_cache
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from trainer.errors import UserError

# What is assumed of a spot node, or one of a market that nobody knows, until a run's own attempts tell more. The seven
# recorded markets that benchmarks/goodput.py replays had a machine for 2,833 hours in 1,328 stretches, so for 2.1 hours
# at a time; single ones for 0.7 to 6.1.
PRIOR_SECONDS_BETWEEN_FAILURES = 2 * 3600.0


class Section(BaseModel):
    """A strict, frozen part of a configuration. Unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _yaml_floats(cls, value: Any, info: Any) -> Any:
        # YAML 1.1 reads `6e-4` as a string: the dot is missing.
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, str) and float in (annotation, *getattr(annotation, "__args__", ())):
            try:
                return float(value)
            except ValueError:
                return value
        return value


class ModelConfig(Section):
    """GPT-2's shape. 124M/350M/774M/1558M are n_layer 12/24/36/48."""

    n_layer: int = Field(ge=1)
    n_head: int = Field(ge=1)
    n_embd: int = Field(ge=1)
    block_size: int = Field(ge=1)
    vocab_size: int = Field(default=50_257, ge=2, le=65_536)  # shards hold uint16

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}; "
                f"{self.n_embd - self.n_embd % self.n_head or self.n_head} would be"
            )
        return self

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 128, which tensor cores like (50257 -> 50304)."""
        return -(-self.vocab_size // 128) * 128

    @property
    def parameters(self) -> int:
        """All parameters with the padded vocabulary; the head is tied and counted once."""
        c = self.n_embd
        block = 12 * c * c + 13 * c  # qkv, projection, two MLP matrices, their biases, two norms
        return self.padded_vocab_size * c + self.block_size * c + self.n_layer * block + 2 * c

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward: 6N + 12·L·C·T, N without position embeddings.

        Source: PaLM (Chowdhery et al. 2022), appendix B. Attention is counted in full, not by its causal half.
        """
        n = self.parameters - self.block_size * self.n_embd
        return 6 * n + 12 * self.n_layer * self.n_embd * self.block_size


class TrainConfig(Section):
    """What is optimized, for how long and in which order. Batches are counted in tokens."""

    batch_tokens: int = Field(ge=1)
    # GPT-3's ramp: from the first step's tokens linearly to batch_tokens over the first so many tokens of the run.
    batch_ramp_from: int | None = Field(default=None, ge=1)
    batch_ramp_tokens: int | None = Field(default=None, ge=1)
    max_steps: int = Field(ge=1)
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    min_lr_fraction: float = Field(default=0.0, ge=0, le=1)  # where cosine, linear and wsd end
    wsd_decay_fraction: float = Field(default=0.2, gt=0, le=1)  # the last part of the steps, only for wsd
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    grad_clip: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)
    # Updates whose loss or gradient norm lies that many standard deviations above its last 128 are skipped.
    skip_loss_zscore: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    skip_grad_norm_zscore: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    # A mean loss over 32 updates that far above the best one over 128 is divergence. 0.5 is a good value where
    # all shards are alike; off by default, as shards of prose and of code may differ by more than a nat.
    rollback_above_nats: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_rollbacks: int = Field(default=3, ge=0)  # then it stops with a diagnosis
    seed: int = Field(default=1337, ge=0, lt=2**63)
    val_every: int | None = Field(default=250, ge=1)
    val_tokens: int = Field(default=10_485_760, ge=1)  # 20 x 524,288, as llm.c; at most what the shards hold
    # fp8: Hopper, fused engine; equal to bf16 at 124M and 1558M, in short runs (benchmarks/README.md).
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8_head"] = "auto"

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
    def _warmup_ends(self) -> Self:
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is more than max_steps {self.max_steps}; "
                "it would never reach learning_rate"
            )
        return self


class RuntimeConfig(Section):
    """How the run is carried out. Nothing here changes what is learned."""

    # Sequences a rank pushes through at once; auto = the most that fit.
    micro_batch_size: int | Literal["auto"] = 8
    processes: int | Literal["auto"] = "auto"  # ranks on this node; auto = GPUs, or 1 on a CPU
    # How a step is run. fused: our own forward and backward for CUDA; compiled: torch.compile; eager: plain PyTorch.
    engine: Literal["auto", "fused", "compiled", "eager"] = "auto"
    # Less memory: the backward pass computes again GELU and LayerNorm (fused; in fp8 GELU alone), or whole blocks
    # (~30% more FLOPs).
    recompute: bool = False
    data_parallel: Literal["zero1", "all_reduce"] = "zero1"  # of the fused engine; the others add up by all-reduce
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # of gradients on the wire, in the fused engine
    checkpoint_minutes: float | Literal["auto"] = "auto"
    keep_last: int = Field(default=2, ge=1)
    keep_every_steps: int | None = Field(default=None, ge=1)  # commits that stay for good
    deterministic: bool = False
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    watchdog_minutes: float | Literal["auto"] | None = "auto"  # without progress in a step; auto = 10, or 20 steps

    @field_validator("processes", "micro_batch_size")
    @classmethod
    def _at_least_one(cls, value: int | str, info: Any) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} {info.field_name.replace('_', ' ')} can't train; use 1 or more, or 'auto'")
        return value

    @field_validator("checkpoint_minutes", "watchdog_minutes")
    @classmethod
    def _some_minutes(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and not 0 < value < float("inf"):
            raise ValueError(f"{value} minutes is no interval; use a positive number, or 'auto'")
        return value


@lru_cache
def batch_stages(train: TrainConfig) -> tuple[tuple[int, int, int], ...]:
    """(step, tokens before it, tokens of each step from there on) for each size of batch, from step 0.

    The ramp is GPT-3's (Brown et al. 2020, 2.3): linear in the tokens seen. Every batch is a multiple of the
    first, so that ranks which can share that one equally can share them all.
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


def steps_to_come(done: int, train: TrainConfig) -> float:
    """What is left to do after `done` steps, counted in steps of their mean size (at the start: of the first's)."""
    mean = tokens_before(done, train) / done if done else batch_tokens_at(0, train)
    return (tokens_before(train.max_steps, train) - tokens_before(done, train)) / mean


def sequences_per_step(model: ModelConfig, train: TrainConfig) -> int:
    """Sequences of `block_size` tokens in one optimizer step, over all ranks; with a ramp, at its end."""
    for field, tokens in (("batch_tokens", train.batch_tokens), ("batch_ramp_from", train.batch_ramp_from)):
        if tokens is not None and tokens % model.block_size:
            nearest = max(1, round(tokens / model.block_size)) * model.block_size
            raise UserError(
                f"train.{field}: {tokens} is not a multiple of model.block_size {model.block_size}; {nearest} would be"
            )
    return train.batch_tokens // model.block_size


def grad_accum_steps(model: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world_size: int) -> int:
    """Micro-batches each rank accumulates in one step: batch_tokens / (block_size · micro_batch_size · ranks).

    While the batch ramps up they may be smaller, see `micro_batch_of`.
    """
    if train.batch_ramp_from and (first := train.batch_ramp_from // model.block_size) % world_size:
        raise UserError(
            f"train.batch_ramp_from: {train.batch_ramp_from} is {first} sequences of {model.block_size} tokens, "
            f"which {world_size} processes can't share equally; use a multiple of {world_size * model.block_size}"
        )
    micro_batch_size = 1 if runtime.micro_batch_size == "auto" else runtime.micro_batch_size
    sequences, at_once = sequences_per_step(model, train), micro_batch_size * world_size
    if sequences % at_once:
        raise UserError(
            f"train.batch_tokens: {train.batch_tokens} is {sequences} sequences of {model.block_size} tokens, "
            f"not a multiple of runtime.micro_batch_size {runtime.micro_batch_size} x {world_size} process(es); "
            f"use a micro_batch_size that divides {sequences // world_size}"
            if sequences % world_size == 0
            else f"train.batch_tokens: {train.batch_tokens} is {sequences} sequences of {model.block_size} tokens, "
            f"which {world_size} processes can't share equally; use a number of processes that divides {sequences}"
        )
    return sequences // at_once


def micro_batch_of(share: int, most: int) -> int:
    """The largest number of sequences up to `most` that divides a rank's `share` of a step."""
    return next(n for n in range(min(share, most), 0, -1) if share % n == 0)


def explain(error: ValidationError, model: type[BaseModel], where: str) -> UserError:
    """pydantic's errors as one line each: `where: train.learning_rte: unknown field; did you mean …`."""
    lines: dict[str, list[str]] = {}  # a union complains once for each of its members: one line for the field
    for e in error.errors():
        path, message = _one_line(e, model)
        lines.setdefault(path, []).append(message)
    complaints = (": ".join(filter(None, (where, path, ", or ".join(m)))) for path, m in lines.items())
    return UserError("\n".join(complaints))


def _one_line(error: ErrorDetails, model: type[BaseModel]) -> tuple[str, str]:
    """The field, and what is wrong with it."""
    path = [str(p) for p in error["loc"]]
    if error["type"] == "extra_forbidden":
        known = list(_fields_at(model, path[:-1]))
        near = difflib.get_close_matches(path[-1], known, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(known)}"
        return ".".join(path), f"unknown field; {hint}"
    if error["type"] == "missing":
        return ".".join(path), "missing; a value is required here"
    # Unions put the name of their member ('int', 'literal[…]') at the end of loc: it says nothing to a user.
    if len(path) > 1 and path[-1] not in _fields_at(model, path[:-1]):
        path = path[:-1]
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    got = "" if error["type"] == "value_error" else f" (got {error['input']!r})"
    return ".".join(path), f"{message}{got}"


def _fields_at(model: type[BaseModel], path: list[str]) -> dict[str, Any]:
    for name in path:
        annotation = model.model_fields[name].annotation if name in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return {}
        model = annotation
    return dict(model.model_fields)


def seconds_from_environment(name: str, default: float) -> float:
    """A duration that the user may set. UserError if it is none."""
    text = os.environ.get(name) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UserError(f"{name}={text}: not a number of seconds; for example {name}={default:g}")
    return seconds
