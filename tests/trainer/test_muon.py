"""Muon: its orthogonal directions, its update against the formula and torch.optim.Muon, its state in checkpoints."""

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
import trainer_runs
from safetensors import safe_open
from trainer_runs import EVERY_STEP, Runner, weights

from trainer.amounts import state_bytes
from trainer.config import TrainConfig
from trainer.models.gpt2 import Gpt2Config
from trainer.models.gpt2_module import GPT
from trainer.optim import muon
from trainer.optim.adamw import Rates, group_of, optimizer_for, rates_at

_one_thread, data, runner = trainer_runs._one_thread, trainer_runs.data, trainer_runs.runner
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


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 40, 120), (2, 120, 40), (1, 1, 9)])
def test_the_singular_values_of_a_direction_are_near_1_at_any_scale(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    matrices = u @ torch.diag_embed(s.clamp(min=0.01 * float(s.max()))) @ v  # the method promises from 0.001 on
    for scale in (1e-12, 1.0, 1e12):
        values = torch.linalg.svdvals(muon.orthogonal(scale * matrices).float())
        assert float(values.min()) > 0.84 and float(values.max()) < 1.16
    nearest = u @ v
    alike = torch.nn.functional.cosine_similarity(muon.orthogonal(matrices).float().flatten(1), nearest.flatten(1))
    assert float(alike.min()) > 0.99


# --- updates


def test_an_update_is_the_formula_with_a_cautious_decay() -> None:
    """In float64, but for the direction itself; AdamW moves all that is no matrix of a block."""
    model, twin = small_model(), small_model()
    config = TrainConfig(**TRAIN, muon_weight_decay=0.5, muon_momentum=0.9, muon_momentum_warmup_steps=2)
    optimizer = optimizer_for(model, config)
    names = dict(twin.named_parameters())
    rest = [p for name, p in names.items() if name not in MATRICES]
    decaying = {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1}
    kept = {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([decaying, kept], lr=0.01, betas=(0.9, 0.95))
    expected = {name: names[name].detach().double() for name in MATRICES}
    momentum = {name: torch.zeros_like(w) for name, w in expected.items()}
    for step, m in enumerate((0.85, 0.875, 0.9)):
        set_gradients(model, twin, seed=step)
        optimizer.rates = rates_at(step, config.model_copy(update={"schedule": "constant"}))
        assert optimizer.rates.momentum == pytest.approx(m) and optimizer.rates.matrix == 0.02
        optimizer.step()
        adamw.step()
        for name, w in expected.items():
            gradient = names[name].grad.double()  # type: ignore[union-attr]
            momentum[name] = m * momentum[name] + (1 - m) * gradient
            direction = {name: (m * momentum[name] + (1 - m) * gradient).bfloat16()}
            muon.to_directions_(direction)
            d = direction[name].double()
            expected[name] = w - 0.02 * (d + 0.5 * w * (d * w >= 0))
    for name, p in model.named_parameters():
        wanted = expected.get(name, names[name].detach().double())
        torch.testing.assert_close(p.detach().double(), wanted, atol=2e-4 if name in MATRICES else 1e-6, rtol=1e-5)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_updates_are_those_of_torchs_class_with_its_polynomial_and_without_decay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch does not divide c_attn into queries, keys and values, decays without caution, and iterates Jordan's
    polynomial; the momentum, the look ahead and the factor of tall matrices are the same."""
    orthogonal, jordans = muon.orthogonal, ((3.4445, -4.775, 2.0315),) * 5
    monkeypatch.setattr(muon, "SAFETY", 1.0)
    monkeypatch.setattr(muon, "orthogonal", lambda m, scale, **_: orthogonal(m, scale, jordans))
    monkeypatch.setattr(muon, "parts_of", lambda name, rows, columns: [rows])
    ours, theirs = small_model(), small_model()
    optimizer = optimizer_for(ours, TrainConfig(**TRAIN))
    optimizer.rates = Rates(0.01, 0.01, 0.01, matrix=0.02, momentum=0.95)
    names = dict(theirs.named_parameters())
    reference = torch.optim.Muon([names[name] for name in sorted(MATRICES)], lr=0.02, weight_decay=0.0, momentum=0.95)
    before = {name: p.detach().clone() for name, p in names.items()}
    for step in range(4):
        set_gradients(ours, theirs, seed=step)
        optimizer.step()
        reference.step()
    for name, p in ours.named_parameters():
        if name in MATRICES:
            moved, wanted = (w.detach() - before[name] for w in (p, names[name]))
            assert float((moved - wanted).norm() / wanted.norm()) < 0.03, name  # both round 15 products to bf16


def test_rates_follow_one_schedule_and_the_decay_may_end_at_0() -> None:
    config = TrainConfig(
        **TRAIN,
        warmup_steps=10,
        schedule="wsd",
        wsd_decay_fraction=0.65,
        min_lr_fraction=0.05,
        embedding_learning_rate=0.3,
        head_learning_rate=0.008,
        muon_momentum=0.97,
        muon_momentum_warmup_steps=40,
        muon_weight_decay=0.28,
        muon_weight_decay_schedule="cosine",
    )
    first, stable, last = (rates_at(step, config) for step in (0, 30, 99))
    decay = 0.14 * (1 + math.cos(0.3 * math.pi))
    assert astuple(stable) == pytest.approx((0.01, 0.3, 0.008, 0.02, 0.94, decay))
    assert (first.matrix, first.embedding) == pytest.approx((0.002, 0.03)) and first.momentum == 0.85
    floor = 0.05 + 0.95 / 65
    assert (last.vector, last.matrix, last.head) == pytest.approx((0.01 * floor, 0.02 * floor, 0.008 * floor))
    assert last.momentum == 0.97 and 0 < last.matrix_decay < 1e-4
    assert rates_at(30, config.model_copy(update={"optimizer": "adamw"})) == Rates.adamw(0.01)


# --- checkpoints


def tensors_in(run: Runner) -> dict[str, int]:
    """The elements of each tensor of the newest commit."""
    with safe_open(next(run.newest().glob("*.safetensors")), "pt") as file:
        return {name: file.get_slice(name).get_shape()[0] for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("beta2", [None, 0.95])
def test_a_muon_run_stopped_and_resumed_ends_bit_for_bit_and_stores_no_second_moment_of_matrices(
    runner: Callable[..., Runner], beta2: float | None
) -> None:
    changes = {"optimizer": "muon", "muon_beta2": beta2, "checkpoint_minutes": EVERY_STEP}
    whole, stopped = runner("whole", **changes), runner("stopped", **changes)
    model, _ = whole.attempt()
    stopped.attempt(stop_after=5)
    assert weights(stopped.attempt()[0]) == weights(model) and stopped.rows() == whole.rows()
    sizes, matrices = tensors_in(whole), {n: p for n, p in model.named_parameters() if group_of(n, p.dim()) == "matrix"}
    for name, _ in model.named_parameters():
        kinds = {kind for kind in ("exp_avg", "exp_avg_sq", "momentum", "row_squares") if f"{kind}.{name}" in sizes}
        of_a_matrix = {"momentum", "row_squares"} if beta2 else {"momentum"}
        assert kinds == (of_a_matrix if name in matrices else {"exp_avg", "exp_avg_sq"})
    c = whole.config
    assert c.model.matrix_parameters == sum(p.numel() for p in matrices.values())
    padded = c.model.model_copy(update={"vocab_size": c.model.padded_vocab_size})  # what `plan` counts has no padding
    rows = sum(p.size(0) for p in matrices.values()) if beta2 else 0
    assert 4 * (sum(sizes.values()) - rows) == state_bytes(padded, c.train)
