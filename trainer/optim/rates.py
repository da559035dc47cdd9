"""The numbers that the schedule gives to an update, as functions of the step, and for each group of parameters.

Where the batch grows, schedules follow the tokens read, and the warm-ups the steps.

Parameters fall into groups by name and shape, by one rule for every model: the matrices of the blocks (`h.…`), which
Muon moves if the run uses it; and, always for AdamW, the untied head, the embeddings and all vectors. Alone, AdamW has
the same numbers for all. Beside Muon, each group has nanochat's (github.com/karpathy/nanochat, gpt.py, July 2026).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from trainer.config.amounts import batch_tokens_at, tokens_before
from trainer.config.config import TrainConfig
from trainer.config.model_config import ModelConfig

Group = Literal["matrix", "embedding", "values", "head", "vector", "residual", "start", "gate"]
# Those that are vectors of the family modern: weights of the residual stream, of the embedding in it, and gates.
VECTORS: Mapping[str, Group] = {
    **{"resid_lambdas": "residual", "x0_lambdas": "start"},
    **dict.fromkeys(("smear_gate", "smear_lambda", "backout_lambda"), "gate"),
}


def group_of(name: str, dimensions: int) -> Group:
    """The group of a parameter. GPT-2's wte is its head, too, and is an embedding."""
    if dimensions < 2:
        return VECTORS.get(name, "vector")
    if name.startswith(("h.", "ve.")):
        return "matrix" if name.startswith("h.") else "values"
    return "head" if name == "lm_head.weight" else "embedding"


class Moments(NamedTuple):
    """AdamW's numbers of a group that no schedule changes."""

    beta1: float
    beta2: float
    epsilon: float
    decay: float


# A larger epsilon damps the rows of rare tokens early on.
BESIDE_MUON: Mapping[Group, Moments] = {
    "embedding": Moments(0.8, 0.995, 1e-10, 0.001),
    "values": Moments(0.8, 0.995, 1e-10, 0.01),
    "head": Moments(0.8, 0.96, 1e-10, 0.01),
    "vector": Moments(0.8, 0.95, 1e-10, 0.0),
    "residual": Moments(0.8, 0.95, 1e-10, 0.05),
    "start": Moments(0.96, 0.95, 1e-10, 0.0),
    "gate": Moments(0.8, 0.95, 1e-10, 0.0),
}


def moments_of(group: Group, config: TrainConfig) -> Moments:
    """AdamW's numbers for a group that it moves. Alone, it decays what is two-dimensional."""
    if config.optimizer == "muon":
        return BESIDE_MUON[group]
    decays = group in ("matrix", "embedding", "values", "head")
    return Moments(config.beta1, config.beta2, config.epsilon, config.weight_decay if decays else 0.0)


@dataclass(frozen=True)
class Rates:
    """The numbers of an update that the schedule sets."""

    of: Mapping[Group, float]  # the learning rates
    momentum: float = 0.0  # Muon's
    matrix_decay: float = 0.0  # Muon's weight decay

    @classmethod
    def adamw(cls, learning_rate: float) -> "Rates":
        """One learning rate for all groups."""
        return cls(dict.fromkeys(get_args(Group), learning_rate))


def rates_at(step: int, config: TrainConfig, model: ModelConfig) -> Rates:
    """The numbers of update `step` (0-based)."""
    return rates_of(learning_rate_at(step, config), step, config, model)


def rates_of(rate: float, step: int, config: TrainConfig, model: ModelConfig) -> Rates:
    """The numbers of update `step` (0-based) when `learning_rate` is `rate` there: all rates keep their ratios."""
    if config.optimizer == "adamw":
        return Rates.adamw(rate)
    top, share = peaks(config, model, batch_tokens_at(step, config)), rate / config.learning_rate
    left = 0.5 * (1 + math.cos(math.pi * full_steps(step, config) / full_steps(config.max_steps, config)))
    return Rates(
        {group: share * peak for group, peak in top.of.items()}, momentum_at(step, config), left * top.matrix_decay
    )


REFERENCE_BATCH, REFERENCE_WIDTH, REFERENCE_LAYERS = 1 << 19, 768, 12  # of nanochat's rates


def full_steps(step: int, config: TrainConfig) -> float:
    """The tokens of all updates before update `step`, in batches of `batch_tokens`: the time of schedules."""
    return tokens_before(step, config) / config.batch_tokens


def peaks(config: TrainConfig, model: ModelConfig, batch_tokens: int | None = None) -> Rates:
    """The largest numbers of a run with Muon, in steps of `batch_tokens`; None: of the largest batch.

    With `scale_rates` the configured rates are for a batch of 2^19 tokens and 12 layers of 768. As nanochat does,
    all rates and the decay are multiplied by the root of the batch's ratio; rates of embeddings and head also by the
    root of the inverse ratio of widths; the decay also by the inverse ratio of the weights in blocks and head, so that
    the time in which weights are forgotten stays a constant share of a training (Wang & Aitchison 2024). The rate of
    gates is never scaled.
    """
    batch = width = decay = 1.0
    if config.scale_rates:
        head = model.padded_vocab_size
        reference = 12 * REFERENCE_LAYERS * REFERENCE_WIDTH**2 + head * REFERENCE_WIDTH
        batch = math.sqrt((batch_tokens or config.batch_tokens) / REFERENCE_BATCH)
        width = math.sqrt(REFERENCE_WIDTH / model.n_embd)
        decay = batch * reference / (model.matrix_parameters + head * model.n_embd)
    embedding = batch * width * (config.embedding_learning_rate or config.learning_rate)
    rates: dict[Group, float] = {
        "matrix": batch * config.muon_learning_rate,
        "embedding": embedding,
        "values": embedding / 2,
        "head": batch * width * config.learning_rate,
        "vector": batch * config.learning_rate,
        "residual": batch * 0.005,
        "start": batch * 0.5,
        "gate": 0.2,
    }
    return Rates(rates, MOMENTUM, decay * config.muon_weight_decay)


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """The learning rate of update number `step` (0-based), by llm.c's convention.

    A linear warmup reaches `learning_rate` at the last warmup step. Then follows a cosine or a line to
    `min_lr_fraction` of it at `max_steps`, or a constant, or WSD (warmup, stable, decay: Hu et al. 2024, MiniCPM; here
    with a linear decay over the last `wsd_decay_fraction` of the steps).
    """
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_fraction
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    now, start, end = (full_steps(n, config) for n in (step, config.warmup_steps, config.max_steps))
    done = (now - start) / max(1.0, end - start)
    if config.schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "linear":
        return floor + (peak - floor) * (1 - done)
    if config.schedule == "wsd":
        return floor + (peak - floor) * min(1.0, (end - now) / _wsd_decay_steps(config))
    return peak


# Muon's momentum in the first step, after the warm-up and at the end of wsd (nanochat).
FIRST_MOMENTUM, MOMENTUM, LAST_MOMENTUM = 0.85, 0.97, 0.9


def momentum_at(step: int, config: TrainConfig) -> float:
    """Muon's momentum in update `step` (0-based): early gradients differ most, so they are forgotten sooner, and in the
    decay of wsd the weights change least."""
    if step < config.muon_momentum_warmup_steps:
        return FIRST_MOMENTUM + (MOMENTUM - FIRST_MOMENTUM) * step / config.muon_momentum_warmup_steps
    left = full_steps(config.max_steps, config) - full_steps(step, config)
    done = max(0.0, 1 - left / _wsd_decay_steps(config)) if config.schedule == "wsd" else 0.0
    return MOMENTUM + (LAST_MOMENTUM - MOMENTUM) * done


def _wsd_decay_steps(config: TrainConfig) -> int:
    return max(1, round(config.wsd_decay_fraction * full_steps(config.max_steps, config)))
