"""GPT-2's part of a fused step: LayerNorms, GELU, biases, learned positions, a head tied to the token embedding.

Biases of products cost no pass of their own: the forward pass adds them in the products, or in the norm that follows.
Their gradients are column sums of tensors that a kernel writes anyway.
"""

from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from trainer.fused import kernels
from trainer.fused.attention import Attention, SavedAttention
from trainer.fused.flat import FlatState
from trainer.fused.kernels import Fp8Out
from trainer.fused.products import Linear, Normed, Operand, Products, ResidualGrad
from trainer.fused.step import FusedStep
from trainer.models.model_config import ModelConfig


@dataclass(frozen=True)
class LayerNorm:
    """The parameters (C,) of a LayerNorm and its place in the model."""

    weight: Tensor
    bias: Tensor
    writer: Linear | None  # the layer whose output and bias are added to the residual stream just before the norm
    reader: Linear  # the layer whose input is the norm's output
    sums: Tensor  # (3, P, C) partial sums of the gradients of weight, bias, and the writer's bias


@dataclass(frozen=True)
class Block:
    """The layers of a block."""

    ln_1: LayerNorm
    qkv: Linear
    projection: Linear
    ln_2: LayerNorm
    fc: Linear
    fc_projection: Linear


@dataclass
class Saved(Generic[Operand]):
    """The tensors that the forward pass of a block saves for its backward pass. M tokens, width C."""

    x: Tensor  # (M, C)
    norm1: Normed[Operand]
    qkv: Tensor  # (M, 3C)
    attention: SavedAttention
    attended: Operand
    x_mid: Tensor  # (M, C), after attention
    norm2: Normed[Operand]
    pre: Tensor  # (M, 4C), the MLP before its GELU
    act: Operand | None  # and after it; None: the backward pass makes it again


class PartialSums:
    """Partial column sums that the kernels add to over a step's micro-batches: gradients of norms and biases."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        C, L = config.n_embd, config.n_layer
        P, Q = kernels.norm_partials(C, device), kernels.column_partials(device)
        self.norms = torch.zeros(2 * L + 1, 3, P, C, device=device)  # of weight, bias, and the bias added before it
        self.q = torch.zeros(L, Q, C, device=device)
        self.fc = torch.zeros(L, Q, 4 * C, device=device)

    def zero_(self) -> None:
        for sums in (self.norms, self.q, self.fc):
            sums.zero_()


class Gpt2Step(FusedStep[Operand]):
    """The step of the family gpt2."""

    BLOCK_LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")

    @classmethod
    def head_name(cls, config: ModelConfig) -> str:
        return "wte"

    def __init__(self, config: ModelConfig, state: FlatState, products: Products[Any], deterministic: bool) -> None:
        super().__init__(config, state, products, deterministic)
        self.attention = Attention(config.n_head, config.n_embd, self.device, deterministic)
        self.attentions = [self.attention]
        self.sums = PartialSums(config, self.device)
        self.head = self._linear(self.head_name(config))
        self.blocks = self._blocks()
        ln_f = self._norm("ln_f", 2 * self.n_blocks, self.blocks[-1].fc_projection, self.head)
        # In the order of the forward pass: two norms a block, then ln_f.
        self.norms = [norm for block in self.blocks for norm in (block.ln_1, block.ln_2)] + [ln_f]

    def _zero(self) -> None:
        self.sums.zero_()
        self.state.gradients["wpe.weight"].zero_()

    def _norm(self, name: str, index: int, writer: Linear | None, reader: Linear) -> LayerNorm:
        weights = self.state.weights
        return LayerNorm(weights[f"{name}.weight"], weights[f"{name}.bias"], writer, reader, self.sums.norms[index])

    def _blocks(self) -> list[Block]:
        blocks: list[Block] = []
        writer: Linear | None = None
        for i, names in enumerate(self.layer_names(self.config)[:-1]):
            qkv, projection, fc, fc_projection = (self._linear(name) for name in names)
            ln_1 = self._norm(f"h.{i}.ln_1", 2 * i, writer, qkv)
            ln_2 = self._norm(f"h.{i}.ln_2", 2 * i + 1, projection, fc)
            blocks.append(Block(ln_1, qkv, projection, ln_2, fc, fc_projection))
            writer = fc_projection
        return blocks

    # --- forward

    def _embed(self, p: Products[Operand], tokens: Tensor, B: int) -> tuple[Tensor, Normed[Operand], None]:
        self.state.ready(self.embeddings)
        self.state.ready(0)
        w, norm = self.state.weights, self.norms[0]
        positions = w["wpe.weight"][: len(tokens) // B]

        def kernel(out: Fp8Out | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return kernels.embed_norm(tokens, w["wte.weight"], positions, norm.weight, norm.bias, out)

        return *p.norm(norm.reader, kernel), None

    def _forward(
        self, p: Products[Operand], i: int, x: Tensor, norm: Normed[Operand], B: int
    ) -> tuple[Tensor, Normed[Operand], Saved[Operand]]:
        block, norm1 = self.blocks[i], norm
        assert norm1.y is not None
        qkv = p.linear(block.qkv, norm1.y, block.qkv.bias)
        output, attention = self.attention.forward(qkv, B)
        attended = p.input(block.projection, output)
        delta = p.linear(block.projection, attended)
        x_mid, norm2 = self._join(p, block.ln_2, x, delta)
        del delta
        assert norm2.y is not None
        pre, act = p.linear_activated(block.fc, norm2.y, block.fc_projection, "gelu")
        delta = p.linear(block.fc_projection, act)
        if i + 1 < self.n_blocks:
            self.state.ready(i + 1)
        out, norm = self._join(p, self.norms[2 * i + 2], x_mid, delta)
        saved_act = None if p.recompute_activation else p.saved(act)
        saved = Saved(x, norm1, qkv, attention, p.saved(attended), x_mid, norm2, pre, saved_act)
        if p.recompute_norms:
            norm1.y = norm2.y = None
        return out, norm, saved

    def _join(self, p: Products[Operand], norm: LayerNorm, x: Tensor, delta: Tensor) -> tuple[Tensor, Normed[Operand]]:
        """The residual stream with `delta` and its bias added, and the norm of it. (In the product's epilogue the sum
        cost 1% of a step of 1558M on an H200, and gained 0.2% at 124M.)"""
        assert norm.writer is not None
        bias = norm.writer.bias

        def kernel(out: Fp8Out | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return kernels.add_norm(x, delta, bias, norm.weight, norm.bias, out)

        return p.norm(norm.reader, kernel)

    # --- backward

    def _backward(
        self, p: Products[Operand], i: int, grad: ResidualGrad[Operand], saved: Saved[Operand], B: int
    ) -> ResidualGrad[Operand]:
        block, add, s = self.blocks[i], not self.first, saved
        act = p.activated(block.fc_projection, s.pre, "gelu") if s.act is None else s.act
        p.weight_grad(block.fc_projection, grad.dy, act, add)
        del act
        dpre = p.input_grad_activated(block.fc_projection, grad.dy, s.pre, block.fc, "gelu", self.sums.fc[i])
        p.weight_grad(block.fc, dpre, self._normed(p, block.ln_2, s.x_mid, s.norm2), add)
        dinput = p.input_grad(block.fc, dpre)
        del dpre
        grad = self._norm_backward(p, block.ln_2, dinput, s.x_mid, s.norm2, grad.dx)
        p.weight_grad(block.projection, grad.dy, s.attended, add)
        dinput = p.input_grad(block.projection, grad.dy)
        dqkv = p.output_grad(block.qkv, self._attention_backward(i, dinput, s.qkv, B, s.attention))
        p.weight_grad(block.qkv, dqkv, self._normed(p, block.ln_1, s.x, s.norm1), add)
        dinput = p.input_grad(block.qkv, dqkv)
        return self._norm_backward(p, block.ln_1, dinput, s.x, s.norm1, grad.dx)

    def _last_norm_backward(
        self, p: Products[Operand], dy: Tensor, x: Tensor, norm: Normed[Operand]
    ) -> ResidualGrad[Operand]:
        return self._norm_backward(p, self.norms[-1], dy, x, norm, None)

    def _normed(self, p: Products[Operand], norm: LayerNorm, x: Tensor, normed: Normed[Operand]) -> Operand:
        """A norm's output, made again where it was not saved."""
        if normed.y is not None:
            return normed.y
        mean, rstd = normed.statistics
        return p.input(norm.reader, kernels.norm_again(x, mean, rstd, norm.weight, norm.bias))

    def _norm_backward(
        self,
        p: Products[Operand],
        norm: LayerNorm,
        dy: Tensor,
        x: Tensor,
        normed: Normed[Operand],
        residual: Tensor | None,
    ) -> ResidualGrad[Operand]:
        """From the gradient `dy` (M, C) of a norm's output to that of its input, plus `residual` (M, C)."""
        mean, rstd = normed.statistics

        def kernel(out: Fp8Out | None) -> tuple[Tensor, Tensor | None]:
            return kernels.norm_backward(dy, x, mean, rstd, norm.weight, residual, norm.sums, out)

        return p.norm_backward(norm.writer, kernel)

    def _attention_backward(self, i: int, dy: Tensor, qkv: Tensor, B: int, saved: SavedAttention) -> Tensor:
        """The gradient of the packed projections (M, 3C). Adds up that of the queries' bias, see `_attention_bias`."""
        dqkv = self.attention.backward(dy, qkv, B, saved)
        kernels.column_sums(dqkv[:, : self.config.n_embd], self.sums.q[i])
        return dqkv

    def _embed_backward(self, tokens: Tensor, dx: Tensor, saved: None, B: int) -> None:
        g = self.state.gradients
        self._add_rows("wte.weight", tokens, dx)
        positions = dx.view(B, -1, self.config.n_embd).sum(0, dtype=torch.float32)
        g["wpe.weight"][: len(positions)] += positions

    def _complete(self, i: int) -> None:
        g, norms, block = self.state.gradients, self.sums.norms, f"h.{i}."
        g[block + "mlp.c_fc.bias"].copy_(self.sums.fc[i].sum(0))
        # The norms behind the two projections have summed up the gradients of their biases.
        after = norms[2 * i + 1 : 2 * i + 3, 2].sum(1)
        g[block + "attn.c_proj.bias"].copy_(after[0])
        self._attention_bias(i, after[0])
        g[block + "mlp.c_proj.bias"].copy_(after[1])
        for k, name in ((2 * i, "ln_1"), (2 * i + 1, "ln_2")):
            weight, bias = norms[k, :2].sum(1)
            g[f"{block}{name}.weight"].copy_(weight)
            g[f"{block}{name}.bias"].copy_(bias)
        self.state.begin_reduce(i)

    def _attention_bias(self, i: int, projection: Tensor) -> None:
        """The gradient of block `i`'s query, key and value biases; `projection` is that of the projection's bias.

        Attention's weights add up to 1 for every query: a constant added to all values is one added to the output,
        and a constant added to all keys changes nothing. So only the queries' gradient has to be added up.
        """
        q, k, v = self.state.gradients[f"h.{i}.attn.c_attn.bias"].view(3, -1)
        q.copy_(self.sums.q[i].sum(0))
        k.zero_()
        v.copy_(projection @ self.blocks[i].projection.weight.float())

    def _complete_rest(self) -> None:
        g, (weight, bias) = self.state.gradients, self.sums.norms[-1, :2].sum(1)
        g["ln_f.weight"].copy_(weight)
        g["ln_f.bias"].copy_(bias)
        self.state.begin_reduce(self.embeddings)
