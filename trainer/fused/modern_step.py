"""modern's part of a fused step: nothing in a norm has weights, ReLU², capped logits, embedded values.

Nothing of the value embeddings is saved but the token ids: the backward pass gathers the rows again and makes the gates
again from the first numbers of the norm.
"""

from typing import Any

from torch import Tensor

from trainer.families.modern import EPSILON, SOFTCAP, ModernConfig
from trainer.fused import rotary
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
            rotary.add_values(qkv, *self._embedded(i, x, norm))

    def add_values_backward(self, i: int, dqkv: Tensor, x: Tensor, norm: Normed[Operand], dinput: Tensor) -> None:
        if i in self.tables:
            drows, dweight = rotary.values_backward(dinput, dqkv, *self._embedded(i, x, norm))
            self._add_rows(self.tables[i], self.tokens, drows)
            gradient = self.state.gradients[self._gate_name(i)]
            gradient.copy_(dweight if self.first else gradient + dweight)

    def _embedded(self, i: int, x: Tensor, norm: Normed[Operand]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The input of block `i`'s norm and its statistic, the gate's weight, the tokens and their table."""
        (rstd,) = norm.statistics
        weights = self.state.weights
        return x, rstd, weights[self._gate_name(i)], self.tokens, weights[self.tables[i]]

    @staticmethod
    def _gate_name(i: int) -> str:
        return f"h.{i}.attn.ve_gate.weight"
