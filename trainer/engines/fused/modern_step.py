"""modern's part of a fused step: nothing in a norm has weights, ReLU², capped logits, and the options of the family.

Nothing of the value embeddings is saved but the token ids: the backward pass gathers the rows again and makes the gates
again from the first numbers of the norm. The weights of the residual stream, and backout, change the sum before a norm.
So they ride on the norms' kernels, and a block saves nothing for them; the backward pass keeps the gradients of the
residual streams, from which the embedding's is summed at its end. Backout's part in the middle of the model comes once
in a micro-batch, in PyTorch.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.engines.fused import kernels, llama_kernels
from trainer.engines.fused.flat import FlatState
from trainer.engines.fused.kernels import Mix, MixGradient
from trainer.engines.fused.llama_step import RotaryStep
from trainer.engines.fused.products import Normed, Operand, Products, ResidualGrad
from trainer.engines.fused.step import Norm, Saved
from trainer.models.modern import SOFTCAP, ModernConfig


class ModernStep(RotaryStep[Operand]):
    """The step of the family modern."""

    PACKED = {"attn.qkv": RotaryStep.QKV, "mlp.up": ("mlp.up_proj",)}
    NORMS = None
    ACTIVATION, SENSE = "relu2", -1
    norms_heads = norms_embedding = True
    cap = SOFTCAP
    config: ModernConfig

    def __init__(self, config: ModernConfig, state: FlatState, products: Products[Any], deterministic: bool) -> None:
        super().__init__(config, state, products, deterministic)
        L, C = config.n_layer, config.n_embd
        self.tables = {i: f"ve.{i}.weight" for i in config.value_layers}
        # A row for each block's first norm, and one for the head's: the numbers of a Mix; 32 bytes keep each aligned.
        self.mixes = torch.zeros(L + 1, 8, device=self.device)[:, :2]
        self.mixes[:, 0] = 1
        self.mix_sums = torch.zeros(L + 1, kernels.norm_partials(C, self.device), device=self.device)
        self.of_add = torch.zeros(L + 1, device=self.device)  # the gradients of the mixes' second numbers
        self.last = 2 * L  # the index of the head's norm
        self.after_middle = 2 * (L // 2 + 1) if config.backout else None  # of the norm after the block of `middle`
        self.tokens: Tensor  # (M,), of the micro-batch
        # What is mixed in, (M, C): the residual stream before all blocks and after the middle one; the gradients of the
        # streams that the first is mixed into, the last block's first; and the gradient of the other by its mix.
        self.start: Tensor | None = None
        self.middle: Tensor | None = None
        self.dstreams: list[Tensor] = []
        self.dmiddle: Tensor | None = None

    def _zero(self) -> None:
        super()._zero()
        self.mix_sums.zero_()
        self.of_add.zero_()
        for name in (*self.tables.values(), "smear_gate", "smear_lambda"):
            if name in self.state.gradients:
                self.state.gradients[name].zero_()

    # --- the residual stream: its weights, backout and smear

    def _embed(
        self, p: Products[Operand], tokens: Tensor, B: int
    ) -> tuple[Tensor, Normed[Operand], tuple[Tensor, Tensor | None]]:
        self.tokens, config, w, norm = tokens, self.config, self.state.weights, self.norms[0]
        self.dstreams.clear()  # of a micro-batch that ran out of memory
        if not (self._mixing or config.smear):
            return super()._embed(p, tokens, B)
        self.state.ready(self.embeddings)
        self.state.ready(0)
        if config.residual_lambdas:
            self.mixes[:-1] = torch.stack((w["resid_lambdas"], w["x0_lambdas"]), 1)
        if config.backout:
            self.mixes[-1, 1] = -w["backout_lambda"][0]
        embedded, _, _, rstd = kernels.embed_norm(tokens, w["wte.weight"], None, norm.weights, norm_first=True)
        start = llama_kernels.smear(embedded, *self._smear_weights(), len(tokens) // B) if config.smear else embedded
        self.start = start if config.residual_lambdas else None
        return *self._join(p, norm, start, None), (embedded, rstd)

    @property
    def _mixing(self) -> bool:
        """Whether the embedding, or the middle block's output, is mixed into the residual stream."""
        return self.config.residual_lambdas or self.config.backout

    def mix(self, norm: Norm) -> Mix | None:
        other = self.middle if norm.index == self.last else self.start if norm.index % 2 == 0 else None
        return None if other is None else Mix(self.mixes[norm.index // 2], other)

    def mix_gradient(self, norm: Norm) -> MixGradient | None:
        row = norm.index // 2
        return None if self.mix(norm) is None else MixGradient(self.mixes[row, :1], self.mix_sums[row])

    def _join(
        self, p: Products[Operand], norm: Norm, x: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, Normed[Operand]]:
        if norm.index == self.after_middle:
            assert delta is not None
            self.middle = x + delta
        return super()._join(p, norm, x, delta)

    def _norm_backward(
        self,
        p: Products[Operand],
        norm: Norm,
        dy: Tensor,
        x: Tensor,
        normed: Normed[Operand],
        residual: Tensor | None,
    ) -> ResidualGrad[Operand]:
        # The middle's gradient is added before the writer reads the sum.
        reached = norm.index == self.after_middle
        grad = super()._norm_backward(p, replace(norm, writer=None) if reached else norm, dy, x, normed, residual)
        if norm.index == self.last and self.middle is not None:
            self.dmiddle, of_add = kernels.mixed_in([grad.dx], self.mixes[-1:], self.middle)
            self.of_add[-1:] += of_add
        elif norm.index % 2 == 0 and self.start is not None:
            self.dstreams.append(grad.dx)
        if reached:
            assert norm.writer is not None and self.dmiddle is not None
            dx = grad.dx + self.dmiddle
            return ResidualGrad(dx, p.output_grad(norm.writer, dx))
        return grad

    def _embed_backward(self, tokens: Tensor, dx: Tensor, saved: tuple[Tensor, Tensor | None], B: int) -> None:
        if self.start is not None:
            dx, of_add = kernels.mixed_in(self.dstreams[::-1], self.mixes[:-1], self.start, dx)
            self.of_add[:-1] += of_add
        self.start = self.middle = self.dmiddle = None
        self.dstreams.clear()
        if self.config.smear:
            dx, *found = llama_kernels.smear_backward(dx, saved[0], *self._smear_weights(), len(tokens) // B)
            for name, gradient in zip(("smear_gate", "smear_lambda"), found, strict=True):
                self.state.gradients[name] += gradient
        super()._embed_backward(tokens, dx, saved, B)

    def _complete_rest(self) -> None:
        if self._mixing:
            keep = kernels.keep_gradients(self.mixes, self.mix_sums, self.of_add)
            found = {"resid_lambdas": keep[:-1], "x0_lambdas": self.of_add[:-1], "backout_lambda": -self.of_add[-1:]}
            for name in found.keys() & self.state.gradients.keys():
                self.state.gradients[name].copy_(found[name])
        super()._complete_rest()

    def _smear_weights(self) -> tuple[Tensor, Tensor]:
        return self.state.weights["smear_gate"], self.state.weights["smear_lambda"]

    # --- value embeddings

    def project(
        self, p: Products[Operand], i: int, x: Tensor, norm: Normed[Operand], B: int
    ) -> tuple[Tensor, Tensor | None]:
        qkv, rstd = super().project(p, i, x, norm, B)
        if i in self.tables:
            llama_kernels.add_values(qkv, *self._embedded(i, x, norm))
        return qkv, rstd

    def values_backward(self, i: int, dqkv: Tensor, saved: Saved[Operand], dinput: Tensor) -> None:
        if i in self.tables:
            drows, dweight = llama_kernels.values_backward(dinput, dqkv, *self._embedded(i, saved.x, saved.norm1))
            self._add_rows(self.tables[i], self.tokens, drows)
            gradient = self.state.gradients[self._gate_name(i)]
            gradient.copy_(dweight if self.first else gradient + dweight)

    def _embedded(self, i: int, x: Tensor, norm: Normed[Operand]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The input of block `i`'s norm and its statistic, the gate's weight, the tokens and their table."""
        weights = self.state.weights
        return x, norm.statistics[1], weights[self._gate_name(i)], self.tokens, weights[self.tables[i]]

    @staticmethod
    def _gate_name(i: int) -> str:
        return f"h.{i}.attn.ve_gate.weight"
