"""Muon: its orthogonal directions, its update against the formulas and torch.optim.Muon, the rates and moments beside
it, its state in checkpoints."""

import math
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from trainer_runs import EVERY_STEP, Runner, Runners, weights

from trainer.config.amounts import batch_tokens_at, state_bytes, tokens_before
from trainer.config.config import TrainConfig
from trainer.models.gpt2 import Gpt2Config
from trainer.models.gpt2_module import GPT
from trainer.models.modern import ModernConfig
from trainer.optim import muon
from trainer.optim.optimizers import optimizer_for
from trainer.optim.rates import BESIDE_MUON, Group, Rates, group_of, peaks, rates_at

MODEL = Gpt2Config(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=50)
MATRICES = {f"h.{i}.{part}.weight" for i in (0, 1) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
TRAIN: dict[str, Any] = {"batch_tokens": 64, "max_steps": 100, "learning_rate": 0.01, "optimizer": "muon"}


def small_model() -> GPT:
    model = GPT(MODEL)
    model.initialize(0)
    return model


def set_gradients(*models: GPT, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*(model.parameters() for model in models), strict=True):
        gradient = torch.randn(same[0].shape, generator=generator)
        for p in same:
            p.grad = gradient.clone()


# --- orthogonal directions


# --- updates


def reference_direction(u: Tensor, squares: Tensor) -> Tensor:
    """The D of one matrix, (rows, columns) float64, from its U by the formulas of the papers; changes `squares`."""
    rows, columns = u.shape
    x = u / u.norm(dim=1, keepdim=True) / (rows**0.5 * 1.01)  # MuonEq, and the norm 1 / 1.01
    for a, b, c in muon.POLAR_EXPRESS:
        x = a * x + (b * x @ x.T + c * x @ x.T @ x @ x.T) @ x
    x *= min(rows, columns) ** 0.5 / x.norm()  # Muon+
    along = 1 if rows >= columns else 0  # NorMuon
    squares.mul_(0.9).add_(0.1 * x.square().mean(along, keepdim=True))
    even = x / squares.sqrt()
    return even * x.norm() / even.norm() * max(1, rows / columns) ** 0.5


def test_an_update_is_the_formula_with_a_cautious_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, against ours without the roundings to bf16. AdamW moves all that is no matrix of a block, each group
    with its own numbers."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    model, twin = small_model(), small_model()
    config = TrainConfig(**TRAIN, muon_weight_decay=0.5, muon_momentum_warmup_steps=2)
    optimizer = optimizer_for(model, config)
    names = dict(twin.named_parameters())
    groups = []
    for group in ("embedding", "vector"):
        beta1, beta2, eps, decay = BESIDE_MUON[group]
        own = [p for name, p in names.items() if group_of(name, p.dim()) == group]
        groups.append({"params": own, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay, "lr": 0.01})
    adamw = torch.optim.AdamW(groups)
    expected = {name: names[name].detach().double() for name in MATRICES}
    momentum = {name: torch.zeros_like(w) for name, w in expected.items()}
    squares: dict[str, Tensor] = {}
    for step, m in enumerate((0.85, 0.91, 0.97)):
        set_gradients(model, twin, seed=step)
        optimizer.rates = rates_at(step, config.model_copy(update={"schedule": "constant"}), MODEL)
        assert optimizer.rates.momentum == pytest.approx(m) and optimizer.rates.of["matrix"] == 0.02
        optimizer.step()
        adamw.step()
        for name, w in expected.items():
            grad = names[name].grad
            assert grad is not None
            gradient = grad.double()
            momentum[name] = m * momentum[name] + (1 - m) * gradient
            parts = (m * momentum[name] + (1 - m) * gradient).split(16 if "c_attn" in name else len(w))
            moved = []
            for i, u in enumerate(parts):
                shape = (len(u), 1) if len(u) >= u.size(1) else (1, u.size(1))
                moved.append(reference_direction(u, squares.setdefault(f"{name}.{i}", u.new_zeros(shape))))
            d, factor = torch.cat(moved), 2.0 if "c_fc" in name else 1.0
            decay = 0.5 * 0.5 * (1 + math.cos(math.pi * step / 100))
            expected[name] = w - 0.02 * (d + factor * decay * w * (d * w >= 0))
    for name, p in model.named_parameters():
        wanted = expected.get(name, names[name].detach().double())
        torch.testing.assert_close(p.detach().double(), wanted, atol=1e-5, rtol=1e-5)


RATES: dict[str, Any] = {
    "warmup_steps": 10,
    "schedule": "wsd",
    "wsd_decay_fraction": 0.65,
    "min_lr_fraction": 0.05,
    "embedding_learning_rate": 0.3,
    "learning_rate": 0.008,
    "muon_weight_decay": 0.28,
}


def test_rates_follow_one_schedule_and_the_decay_ends_at_0() -> None:
    config = TrainConfig(**TRAIN | RATES | {"muon_momentum_warmup_steps": 40})
    first, stable, last = (rates_at(step, config, MODEL) for step in (0, 30, 99))
    wanted = {"vector": 0.008, "embedding": 0.3, "values": 0.15, "head": 0.008, "matrix": 0.02}
    wanted |= {"residual": 0.005, "start": 0.5, "gate": 0.2}
    assert stable.of == pytest.approx(wanted) and stable.momentum == pytest.approx(0.85 + 0.75 * 0.12)
    assert stable.matrix_decay == pytest.approx(0.14 * (1 + math.cos(0.3 * math.pi)))
    assert (first.of["matrix"], first.of["embedding"]) == pytest.approx((0.002, 0.03)) and first.momentum == 0.85
    floor = 0.05 + 0.95 / 65
    assert last.of == pytest.approx({group: rate * floor for group, rate in wanted.items()})
    assert last.momentum == pytest.approx(0.97 - 0.07 * 64 / 65) and 0 < last.matrix_decay < 1e-4
    assert rates_at(30, config.model_copy(update={"optimizer": "adamw"}), MODEL) == Rates.adamw(0.008)


@pytest.mark.parametrize(
    ("layers", "batch", "decay", "rates"),
    [
        (12, 1 << 19, 0.28, {"matrix": 0.02, "embedding": 0.3, "head": 0.008, "residual": 0.005}),
        (24, 1 << 20, 0.0597, {"matrix": 0.0283, "embedding": 0.3, "values": 0.15, "head": 0.008, "start": 0.7071}),
    ],
)
def test_scaled_rates_are_nanochats(layers: int, batch: int, decay: float, rates: dict[Group, float]) -> None:
    """The figures that its base_train.py prints for d12 and d24 with its vocabulary."""
    model = ModernConfig(n_layer=layers, n_head=layers // 2, n_embd=64 * layers, block_size=2048, vocab_size=32_768)
    config = TrainConfig(**TRAIN | RATES | {"batch_tokens": batch, "scale_rates": True})
    top = peaks(config, model)
    assert top.matrix_decay == pytest.approx(decay, rel=2e-3) and top.of["gate"] == 0.2
    assert {group: top.of[group] for group in rates} == pytest.approx(rates, rel=2e-3)


def test_a_growing_batch_has_the_rates_of_its_size_and_the_schedule_of_its_tokens() -> None:
    constant = TrainConfig(
        **TRAIN | RATES | {"batch_tokens": 1 << 19, "scale_rates": True, "muon_momentum_warmup_steps": 9}
    )
    ramp = {"batch_ramp_from": 1 << 18, "batch_ramp_tokens": 60 << 19, "max_steps": 200}
    grown, compared = constant.model_copy(update=ramp), 0
    constant = constant.model_copy(update={"max_steps": tokens_before(200, grown) >> 19})
    for step in range(50, 200):
        position, rest = divmod(tokens_before(step, grown), 1 << 19)
        if not rest:
            root = (batch_tokens_at(step, grown) / (1 << 19)) ** 0.5
            now, wanted = rates_at(step, grown, MODEL), rates_at(position, constant, MODEL)
            scaled = {group: rate * (1 if group == "gate" else root) for group, rate in wanted.of.items()}
            assert now.of == pytest.approx(scaled) and now.momentum == pytest.approx(wanted.momentum)
            assert now.matrix_decay == pytest.approx(root * wanted.matrix_decay)
            compared += 1
    assert compared > 50


# --- checkpoints


def tensors_in(run: Runner) -> dict[str, int]:
    """The elements of each tensor of the newest commit."""
    with safe_open(next(run.newest().glob("*.safetensors")), "pt") as file:
        return {name: file.get_slice(name).get_shape()[0] for name in file.keys()}  # noqa: SIM118


def test_a_muon_run_stopped_and_resumed_ends_bit_for_bit_and_stores_no_second_moment_of_matrices(
    runner: Runners,
) -> None:
    changes = {"optimizer": "muon", "checkpoint_minutes": EVERY_STEP}
    whole, stopped = runner("whole", **changes), runner("stopped", **changes)
    model, _ = whole.attempt()
    stopped.attempt(stop_after=5)
    assert weights(stopped.attempt()[0]) == weights(model) and stopped.rows() == whole.rows()
    sizes, matrices = tensors_in(whole), {n: p for n, p in model.named_parameters() if group_of(n, p.dim()) == "matrix"}
    for name, _ in model.named_parameters():
        kinds = {kind for kind in ("exp_avg", "exp_avg_sq", "momentum", "squares") if f"{kind}.{name}" in sizes}
        assert kinds == ({"momentum", "squares"} if name in matrices else {"exp_avg", "exp_avg_sq"})
    c = whole.config
    assert c.model.matrix_parameters == sum(p.numel() for p in matrices.values())
    padded = c.model.model_copy(update={"vocab_size": c.model.padded_vocab_size})  # what `plan` counts has no padding
    rows = sum(max(p.shape) for p in matrices.values())
    assert 4 * (sum(sizes.values()) - rows) == state_bytes(padded, c.train)
