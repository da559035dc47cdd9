"""GPT-2's part of a fused step: LayerNorms, GELU, biases, learned positions, a head tied to the token embedding."""

from typing import Any

import torch
from torch import Tensor

from trainer.config.model_config import ModelConfig
from trainer.engines.fused import kernels
from trainer.engines.fused.flat import FlatState
from trainer.engines.fused.products import Operand, Products
from trainer.engines.fused.step import FusedStep, Saved


class Gpt2Step(FusedStep[Operand]):
    """The step of the family gpt2."""

    BLOCK_LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    NORMS = ("ln_1", "ln_2", "ln_f")
    ACTIVATION = "gelu"
    up_sums: Tensor

    def __init__(self, config: ModelConfig, state: FlatState, products: Products[Any], deterministic: bool) -> None:
        super().__init__(config, state, products, deterministic)
        C, L, Q = config.n_embd, config.n_layer, kernels.column_partials(self.device)
        self.q_sums = torch.zeros(L, Q, C, device=self.device)
        self.up_sums = torch.zeros(L, Q, 4 * C, device=self.device)

    def _zero(self) -> None:
        super()._zero()
        for sums in (self.q_sums, self.up_sums, self.state.gradients["wpe.weight"]):
            sums.zero_()

    def project_backward(self, p: Products[Operand], i: int, dqkv: Tensor, saved: Saved[Operand], B: int) -> Operand:
        kernels.column_sums(dqkv[:, : self.config.n_embd], self.q_sums[i])  # see `_attention_bias`
        return super().project_backward(p, i, dqkv, saved, B)

    def _embed_backward(self, tokens: Tensor, dx: Tensor, saved: tuple[Tensor, Tensor | None], B: int) -> None:
        super()._embed_backward(tokens, dx, saved, B)
        positions = dx.view(B, -1, self.config.n_embd).sum(0, dtype=torch.float32)
        self.state.gradients["wpe.weight"][: len(positions)] += positions

    def _complete(self, i: int) -> None:
        g, block = self.state.gradients, f"h.{i}."
        g[block + "mlp.c_fc.bias"].copy_(self.up_sums[i].sum(0))
        # The norms behind the two projections have summed up the gradients of their biases.
        projection, down = (sums[2].sum(0) for n in (1, 2) if (sums := self.norms[2 * i + n].sums) is not None)
        g[block + "attn.c_proj.bias"].copy_(projection)
        self._attention_bias(i, projection)
        g[block + "mlp.c_proj.bias"].copy_(down)
        super()._complete(i)

    def _attention_bias(self, i: int, projection: Tensor) -> None:
        """The gradient of block `i`'s query, key and value biases; `projection` is that of the projection's bias.

        Attention's weights add up to 1 for every query: a constant added to all values is one added to the output,
        and a constant added to all keys changes nothing. So only the queries' gradient has to be added up.
        """
        q, k, v = self.state.gradients[f"h.{i}.attn.c_attn.bias"].view(3, -1)
        q.copy_(self.q_sums[i].sum(0))
        k.zero_()
        v.copy_(projection @ self.blocks[i].out.weight.float())
