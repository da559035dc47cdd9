"""The learning rate against llm.c's log and torch's schedules; AdamW and clipping against torch's own."""

import re
from pathlib import Path

import pytest
import torch

from trainer.base.parallel import clip_, flat_gradients
from trainer.config.config import TrainConfig
from trainer.models.gpt2 import Gpt2Config
from trainer.models.gpt2_module import GPT
from trainer.optim.optimizers import AdamW
from trainer.optim.rates import learning_rate_at

CONFIG = TrainConfig(batch_tokens=64, max_steps=100, learning_rate=0.5, warmup_steps=10)
MODEL = Gpt2Config(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=50)


def with_(**changes: object) -> TrainConfig:
    return TrainConfig(**(CONFIG.model_dump() | changes))


def small_model() -> GPT:
    model = GPT(MODEL)
    model.initialize(0)
    return model


# --- learning rate


def test_the_cosine_is_the_one_in_llmcs_log(shared_data: Path) -> None:
    logged = re.findall(r"s:(\d+) trl:\S+ lr:(\S+)", (shared_data / "llmc_124M_main.log").read_text())
    assert len(logged) > 10_000
    config = with_(max_steps=1 + int(logged[-1][0]), learning_rate=6e-4, warmup_steps=700)
    # The log has six decimals.
    worst = max(abs(learning_rate_at(int(step), config) - float(lr)) for step, lr in logged)
    assert worst <= 0.51e-6


def series_of_torch(config: TrainConfig) -> list[float]:
    """The steps after warmup by torch's schedulers, which work by recurrence rather than by formula."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    steps, floor = config.max_steps - config.warmup_steps, config.min_lr_fraction
    schedulers = torch.optim.lr_scheduler
    chosen = {
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, steps, eta_min=floor * config.learning_rate),
        "linear": lambda: schedulers.LinearLR(optimizer, 1.0, max(floor, 1e-12), total_iters=steps),
        "constant": lambda: schedulers.ConstantLR(optimizer, 1.0),
    }[config.schedule]()
    series = []
    for _ in range(steps):
        series.append(float(chosen.get_last_lr()[0]))
        optimizer.step()
        chosen.step()
    return series


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 10, 99])
def test_schedules_equal_torchs(schedule: str, floor: float, warmup: int) -> None:
    config = with_(schedule=schedule, min_lr_fraction=floor, warmup_steps=warmup)
    ours = [learning_rate_at(step, config) for step in range(warmup, 100)]
    assert ours == pytest.approx(series_of_torch(config), rel=1e-6, abs=1e-9)


# --- AdamW


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e9])
def test_clipping_equals_torchs(max_norm: float) -> None:
    ours, theirs = small_model(), small_model()
    gradients = flat_gradients(ours)
    generator = torch.Generator().manual_seed(2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        b.grad = torch.randn(a.shape, generator=generator)
        assert a.grad is not None
        a.grad.copy_(b.grad)
    norm = gradients.norm()
    clip_(gradients, norm, max_norm)
    assert float(norm) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-7, rtol=1e-5)


def test_updates_are_those_of_torchs_class_bit_for_bit() -> None:
    ours, theirs = small_model(), small_model()
    config = with_(weight_decay=0.3)
    optimizer = AdamW(ours, config)
    parameters = list(theirs.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    reference = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)
    for step in range(6):
        for p, q in zip(ours.parameters(), parameters, strict=True):
            q.grad = torch.randn(p.shape)
            p.grad = q.grad.clone()
        if step == 3:  # as a checkpoint of a run that had skipped updates, or done more
            optimizer.set_steps(40)
            for state in reference.state.values():
                state["step"].fill_(40)
        optimizer.step()
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), parameters, strict=True))
