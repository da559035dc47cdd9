"""AdamW with the settings of GPT-2's reproductions, and the learning rate as a pure function of the step."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.config import TrainConfig


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


class AdamW:
    """torch's fused AdamW (Loshchilov & Hutter 2019): matrices and embeddings (2-D) decay, biases and norms do not.

    The state is allocated before the first step, so that a checkpoint can fill it. The class `torch.optim.AdamW`
    allocates it in that step, and imports all of torch.compile: on a CPU that takes 2 of the 5 s from the start of a
    process to its first step.
    """

    def __init__(self, model: torch.nn.Module, config: TrainConfig) -> None:
        self.config = config
        self.learning_rate = config.learning_rate
        parameters = list(model.parameters())
        self.param_groups: list[dict[str, Any]] = [  # GradScaler reads them
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.exp_avg: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in parameters}
        self.exp_avg_sq: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in parameters}
        self.steps: dict[Tensor, Tensor] = {p: torch.zeros((), device=p.device) for p in parameters}

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters by their gradients."""
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
                amsgrad=False,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=self.learning_rate,
                weight_decay=group["weight_decay"],
                eps=self.config.epsilon,
                maximize=False,
            )

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far. The bias correction of the moments depends on it."""
        for count in self.steps.values():
            count.fill_(steps)
