"""AdamW as GPT-2's reproductions use it, and the learning rate as a pure function of the step."""

import math

import torch

from trainer.config import TrainConfig


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """The learning rate of update number `step` (0-based), after llm.c's convention.

    Linear warmup reaches `learning_rate` at the last warmup step; then cosine or linear to
    `min_lr_fraction` of it at `max_steps`, constant, or WSD (warmup, stable, decay: Hu et al. 2024,
    MiniCPM; here with a linear decay over the last `wsd_decay_fraction` of the steps).
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


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and embeddings (2-D) and leaves biases and norms alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cuda", "cpu")
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=fused
    )
