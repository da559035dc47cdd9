"""Products in bf16: operands are plain bf16 tensors, sums are fp32, and the activation rides on the MLP's products. Of
ReLU² the output is all that is saved, since its root is the input where that has a gradient.

A block saves 16·C bf16 numbers a token (x, norm, qkv 3, attention, x, norm, MLP 4 + 4). `recompute` leaves out the
outputs of the norms and of the GELU (6·C); the backward pass makes them again.
"""

import torch
from torch import Tensor

from trainer.engines.fused import epilogues, gemm, kernels
from trainer.engines.fused.kernels import Activation
from trainer.engines.fused.llama_kernels import Turn
from trainer.engines.fused.products import (
    Linear,
    NormBackwardKernel,
    Normed,
    NormKernel,
    Products,
    ResidualGrad,
    head_chunks,
)


class Bf16Products(Products[Tensor]):
    """The policy whose operands are bf16 tensors."""

    def __init__(self, device: torch.device, recompute: bool) -> None:
        self.recompute_norms = self.recompute_activation = recompute
        self.one = torch.ones(1, device=device)

    # --- operands

    def norm(self, reader: Linear, kernel: NormKernel) -> tuple[Tensor, Normed[Tensor]]:
        x, y, *statistics = kernel(None)
        return x, Normed(y, tuple(statistics))

    def norm_backward(self, writer: Linear | None, kernel: NormBackwardKernel) -> ResidualGrad[Tensor]:
        dx, _ = kernel(None)
        return ResidualGrad(dx, dx)

    def input(self, layer: Linear, x: Tensor) -> Tensor:
        return x

    def output_grad(self, layer: Linear, dy: Tensor) -> Tensor:
        return dy

    def saved(self, x: Tensor) -> Tensor:
        return x

    def activated(self, layer: Linear, kept: Tensor, activation: Activation) -> Tensor:
        return kernels.gelu(kept) if activation == "gelu" else kept

    # --- products

    def linear(self, layer: Linear, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return gemm.linear(x, layer.weight, bias)

    def linear_turned(self, layer: Linear, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        return epilogues.rotary_linear(x, layer.weight, turn)

    def linear_activated(
        self, layer: Linear, x: Tensor, reader: Linear, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        if activation == "gelu":
            assert layer.bias is not None
            return gemm.linear_gelu(x, layer.weight, layer.bias)
        assert layer.bias is None
        act = epilogues.relu2_linear(x, layer.weight)
        return act, act

    def input_grad(self, layer: Linear, dy: Tensor) -> Tensor:
        return gemm.input_grad(dy, layer.weight)

    def input_grad_activated(
        self,
        layer: Linear,
        dy: Tensor,
        kept: Tensor,
        writer: Linear,
        activation: Activation,
        sums: Tensor | None = None,
    ) -> Tensor:
        if activation == "gelu":
            dpre = gemm.input_grad_gelu(dy, layer.weight, kept)
        else:
            dpre = epilogues.relu2_input_grad(dy, layer.weight, kept)
        if sums is not None:
            kernels.column_sums(dpre, sums)
        return dpre

    def weight_grad(self, layer: Linear, dy: Tensor, x: Tensor, accumulate: bool) -> None:
        gemm.weight_grad(dy, x, layer.gradient, accumulate)

    def head(
        self,
        layer: Linear,
        y: Tensor,
        targets: Tensor,
        vocab_size: int,
        factor: Tensor | None,
        accumulate: bool,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(y), device=y.device)
        dy = torch.empty_like(y)
        backward = factor is not None
        for part in head_chunks(len(y), len(layer.weight)):
            logits = gemm.linear(y[part], layer.weight)
            scale = self.one if factor is None else factor
            kernels.cross_entropy(logits, targets[part], vocab_size, scale, losses[part], backward, cap)
            if backward:
                gemm.input_grad(logits, layer.weight, out=dy[part])
                gemm.weight_grad(logits, y[part], layer.gradient, accumulate or part.start > 0)
        return losses, dy
