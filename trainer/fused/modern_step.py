"""modern's part of a fused step: nothing in a norm has weights, ReLU², capped logits, embedded values.

Value embeddings are plain PyTorch. Nothing of them is saved but the token ids: the backward pass gathers the rows again
and makes the gates again from the first numbers of the norm.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.families.modern import EPSILON, SOFTCAP, ModernConfig
from trainer.fused.flat import FlatState
from trainer.fused.products import Normed, Operand, Products
from trainer.fused.rotary_step import Block, RotaryStep, SavedMlp


class ModernStep(RotaryStep[Operand]):
    """The step of the family modern."""

    UP, EPSILON, SENSE = ("mlp.up_proj",), EPSILON, -1
    norms_heads = norms_embedding = True
    cap = SOFTCAP
    config: ModernConfig

    def __init__(self, config: ModernConfig, state: FlatState, products: Products[Any], deterministic: bool) -> None:
        super().__init__(config, state, products, deterministic)
        self.tables = {i: f"ve.{i}.weight" for i in config.value_layers}
        self.tokens: Tensor  # (M,), of the micro-batch

    def mlp(self, p: Products[Operand], block: Block, y: Operand) -> tuple[Operand, SavedMlp[Operand]]:
        kept, act = p.linear_activated(block.up, y, block.down, "relu2")
        return act, SavedMlp(kept, None if p.recompute_activation else p.saved(act))

    def mlp_backward(
        self, p: Products[Operand], block: Block, dy: Operand, saved: SavedMlp[Operand], add: bool
    ) -> Operand:
        act = p.activated(block.down, saved.kept, "relu2") if saved.act is None else saved.act
        p.weight_grad(block.down, dy, act, add)
        return p.input_grad_activated(block.down, dy, saved.kept, block.up, "relu2")

    # --- value embeddings

    def _zero(self) -> None:
        super()._zero()
        for table in self.tables.values():
            self.state.gradients[table].zero_()

    def _embed(
        self, p: Products[Operand], tokens: Tensor, B: int
    ) -> tuple[Tensor, Normed[Operand], tuple[Tensor, Tensor]]:
        self.tokens = tokens
        return super()._embed(p, tokens, B)

    def add_values(self, i: int, qkv: Tensor, x: Tensor, norm: Normed[Operand]) -> None:
        if i in self.tables:
            _, gate = self._gate(i, x, norm)
            values = self._values(qkv)
            values += gate[..., None] * self._embedded(i)

    def add_values_backward(self, i: int, dqkv: Tensor, x: Tensor, norm: Normed[Operand], dinput: Tensor) -> None:
        if i not in self.tables:
            return
        weight, gradient = (of[self._gate_name(i)] for of in (self.state.weights, self.state.gradients))
        front, gate = self._gate(i, x, norm)
        dvalues = self._values(dqkv)
        rows = (gate[..., None] * dvalues).flatten(1)
        self.state.gradients[self.tables[i]].index_add_(0, self.tokens, rows)
        dgate = (dvalues.float() * self._embedded(i)).sum(-1)
        dlogit = dgate * gate * (1 - gate / 2)  # (M, kv_heads), of the sigmoid's input
        gradient.copy_(dlogit.T @ front if self.first else gradient + dlogit.T @ front)
        dinput[:, : front.size(1)] += dlogit @ weight.float()

    def _values(self, qkv: Tensor) -> Tensor:
        """The values of packed projections (M, kv_heads, D), a view."""
        heads = self.config.kv_heads
        return qkv[:, -heads * self.config.head_size :].unflatten(1, (heads, -1))

    def _embedded(self, i: int) -> Tensor:
        """The tokens' rows in block `i`'s table, (M, kv_heads, D)."""
        rows = self.state.weights[self.tables[i]][self.tokens]
        return rows.unflatten(1, (self.config.kv_heads, -1))

    def _gate(self, i: int, x: Tensor, norm: Normed[Operand]) -> tuple[Tensor, Tensor]:
        """The first numbers of the norm's output (M, GATE_WIDTH), and the weights 0 to 2 of block `i`'s embedded values
        (M, kv_heads); fp32.
        """
        weight = self.state.weights[self._gate_name(i)].float()
        (rstd,) = norm.statistics
        front = x[:, : weight.size(1)].float() * rstd[:, None]
        return front, 2 * torch.sigmoid(front @ weight.T)

    @staticmethod
    def _gate_name(i: int) -> str:
        return f"h.{i}.attn.ve_gate.weight"
