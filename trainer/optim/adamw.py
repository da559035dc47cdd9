"""The optimizers of the plain module, and the numbers that the schedule gives to an update, as functions of the step.

Parameters fall into groups by name and shape, by one rule for every model: the matrices of the blocks (`h.…`), which
Muon moves if the run uses it; and, always for AdamW, the untied head, the embeddings and all vectors.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.config import TrainConfig
from trainer.optim import muon

Group = Literal["matrix", "embedding", "head", "vector"]


def group_of(name: str, dimensions: int) -> Group:
    """The group of a parameter. GPT-2's wte is its head, too, and is an embedding."""
    if dimensions < 2:
        return "vector"
    if name.startswith("h."):
        return "matrix"
    return "head" if name == "lm_head.weight" else "embedding"


@dataclass(frozen=True)
class Rates:
    """The numbers of an update that the schedule sets."""

    vector: float  # the learning rates
    embedding: float
    head: float
    matrix: float
    momentum: float = 0.0  # Muon's
    matrix_decay: float = 0.0  # Muon's weight decay

    @classmethod
    def adamw(cls, learning_rate: float) -> "Rates":
        """One learning rate for all groups."""
        return cls(learning_rate, learning_rate, learning_rate, learning_rate)

    def of(self, group: Group) -> float:
        rate: float = getattr(self, group)
        return rate


def rates_at(step: int, config: TrainConfig) -> Rates:
    """The numbers of update `step` (0-based)."""
    return rates_of(learning_rate_at(step, config), step, config)


def rates_of(rate: float, step: int, config: TrainConfig) -> Rates:
    """The numbers of update `step` (0-based) when its learning rate is `rate`: all groups' rates keep their ratios."""
    if config.optimizer == "adamw":
        return Rates.adamw(rate)
    share = rate / config.learning_rate
    return Rates(
        vector=rate,
        embedding=share * (config.embedding_learning_rate or config.learning_rate),
        head=share * (config.head_learning_rate or config.learning_rate),
        matrix=share * config.muon_learning_rate,
        momentum=momentum_at(step, config),
        matrix_decay=matrix_decay_at(step, config),
    )


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """The learning rate of update number `step` (0-based), by llm.c's convention.

    A linear warmup reaches `learning_rate` at the last warmup step. Then follows a cosine or a line to
    `min_lr_fraction` of it at `max_steps`, or a constant, or WSD (warmup, stable, decay: Hu et al. 2024, MiniCPM; here
    with a linear decay over the last `wsd_decay_fraction` of the steps).
    """
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_fraction
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    if config.schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "linear":
        return floor + (peak - floor) * (1 - done)
    if config.schedule == "wsd":
        decay_steps = max(1, round(config.wsd_decay_fraction * config.max_steps))
        return floor + (peak - floor) * min(1.0, (config.max_steps - step) / decay_steps)
    return peak


FIRST_MOMENTUM = 0.85


def momentum_at(step: int, config: TrainConfig) -> float:
    """Muon's momentum in update `step` (0-based): early gradients differ most, so they are forgotten sooner."""
    first, last = min(FIRST_MOMENTUM, config.muon_momentum), config.muon_momentum
    return first + (last - first) * min(1.0, step / max(1, config.muon_momentum_warmup_steps))


def matrix_decay_at(step: int, config: TrainConfig) -> float:
    """Muon's weight decay in update `step` (0-based)."""
    left = 1 - step / config.max_steps
    share = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}
    return config.muon_weight_decay * share[config.muon_weight_decay_schedule]


class AdamW:
    """torch's fused AdamW (Loshchilov & Hutter 2019): matrices and embeddings (2-D) decay, biases and norms do not.

    The state is allocated before the first step, so that a checkpoint can fill it. The class `torch.optim.AdamW`
    allocates it in that step, and imports all of torch.compile: on a CPU that takes 2 of the 5 s from the start of a
    process to its first step.
    """

    def __init__(
        self, model: torch.nn.Module, config: TrainConfig, groups: Collection[Group] = get_args(Group)
    ) -> None:
        self.config = config
        self.rates = Rates.adamw(config.learning_rate)
        self.param_groups: list[dict[str, Any]] = []  # GradScaler reads them
        for group in groups:
            if parameters := list(parameters_of(model, group).values()):
                decay = 0.0 if group == "vector" else config.weight_decay
                self.param_groups.append({"params": parameters, "weight_decay": decay, "group": group})
        moved = [p for group in self.param_groups for p in group["params"]]
        self.exp_avg: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in moved}
        self.exp_avg_sq: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in moved}
        self.steps: dict[Tensor, Tensor] = {p: torch.zeros((), device=p.device) for p in moved}

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update the parameters by their gradients, divided by `divisor` if it is given, unless `skip` is 1.0. Both are
        scalars on the device, so the host does not wait for them."""
        for group in self.param_groups:
            parameters = group["params"]
            adamw(
                parameters,
                [p.grad for p in parameters],
                [self.exp_avg[p] for p in parameters],
                [self.exp_avg_sq[p] for p in parameters],
                [],
                [self.steps[p] for p in parameters],
                fused=True,
                grad_scale=divisor,
                found_inf=skip,
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=self.rates.of(group["group"]),
                weight_decay=group["weight_decay"],
                eps=self.config.epsilon,
                maximize=False,
            )

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far. The bias correction of the moments depends on it."""
        for count in self.steps.values():
            count.fill_(steps)

    def state(self) -> dict[str, Mapping[Tensor, Tensor]]:
        """What a checkpoint has to hold, by kind and parameter."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


class Muon(AdamW):
    """Muon for the matrices of the blocks, AdamW for all other parameters. Every rank moves all matrices."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig) -> None:
        super().__init__(model, config, ("embedding", "head", "vector"))
        self.matrices = parameters_of(model, "matrix")
        self.momentum: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in self.matrices.values()}
        self.row_squares: dict[Tensor, Tensor] = {}  # of NorMuon
        if config.muon_beta2 is not None:
            self.row_squares = {p: p.new_zeros(p.size(0), requires_grad=False) for p in self.matrices.values()}

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        assert divisor is None and skip is None, "only AdamW takes them"
        super().step()
        rates, beta2 = self.rates, self.config.muon_beta2
        directions = {}
        for name, p in self.matrices.items():
            assert p.grad is not None
            directions[name] = muon.look_ahead(self.momentum[p], p.grad, rates.momentum)
        squares = {name: self.row_squares[p] for name, p in self.matrices.items()} if beta2 is not None else None
        muon.to_directions_(directions, squares, 1 - (beta2 or 0.0))
        for name, p in self.matrices.items():
            muon.move_(p, directions[name], rates.matrix, rates.matrix_decay)

    def state(self) -> dict[str, Mapping[Tensor, Tensor]]:
        return super().state() | {"momentum": self.momentum, "row_squares": self.row_squares}


def parameters_of(model: torch.nn.Module, group: Group) -> dict[str, Tensor]:
    """The parameters of a group by name."""
    return {name: p for name, p in model.named_parameters() if group_of(name, p.dim()) == group}


def optimizer_for(model: torch.nn.Module, config: TrainConfig) -> AdamW:
    """The optimizer of the configuration."""
    return Muon(model, config) if config.optimizer == "muon" else AdamW(model, config)
