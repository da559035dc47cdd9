"""A training step of GPT-2 with its backward pass written out: what `loss.backward()` would do, with less traffic.

The arithmetic, a token: 2 FLOPs a weight forward and 4 backward, and attention (`trainer/attention.py`): 6N + 12·L·C·T
in all. The matrix products reach 700 TFLOP/s and more on an H200; the rest of the step only moves bytes, and all of it
draws on one power budget, so every pass over memory that is left out counts twice. Left out here:

- float32 copies: weights and activations are bf16 (the float32 masters live in `trainer/flat.py`), statistics float32;
- passes of their own for bias, GELU and its derivative, which ride on the products (`trainer/gemm.py`), and for
  residual sums, which ride on the norms (`trainer/kernels.py`);
- zeroing gradients: the first micro-batch of a step overwrites, the others add, in float32 inside the product;
- float32 logits, and gradients of logits beside them: loss and gradient are made in place, some rows at a time
  (whole, the logits of 64 x 1024 tokens would be 6.6 GB in bf16);
- autograd's graph: what a block saves is listed in `Block`, and freed as soon as its backward pass is done.

A block saves 16·C bf16 numbers a token (x, norm, qkv 3, attention, x, norm, MLP 4 + 4); `recompute` leaves out the
norms' and the GELU's outputs (6·C) and makes them again. llm.c's train_gpt2.cu (Karpathy et al. 2024) showed how
far this goes; the parameters' names, their shapes and the mathematics are those of `trainer/model.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import ModelConfig
from trainer.fused import gemm, kernels
from trainer.fused.attention import Attention, Saved
from trainer.fused.flat import FlatState
from trainer.pieces import Piece

LOGIT_BYTES = 1 << 31  # of a chunk of rows: the matrix products are at full speed from about 8,192 rows


@dataclass
class Norm:
    """A LayerNorm's output and what its backward pass needs; `y` is made again where it was not kept."""

    y: Tensor | None
    mean: Tensor
    rstd: Tensor


@dataclass
class Block:
    """What the forward pass of a block leaves for its backward pass."""

    x: Tensor
    norm1: Norm
    qkv: Tensor
    attention: Saved
    attended: Tensor
    x_mid: Tensor
    norm2: Norm
    pre: Tensor  # the MLP before its GELU
    act: Tensor | None  # and after it


class Sums:
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


class FusedStep:
    """Forward and backward of micro-batches over the weights and into the gradients of a FlatState."""

    def __init__(self, config: ModelConfig, state: FlatState, recompute: bool, deterministic: bool) -> None:
        self.config, self.state, self.recompute = config, state, recompute
        self.device = state.world.device
        self.attention = Attention(config.n_head, config.n_embd, self.device, deterministic)
        self.sums = Sums(config, self.device)
        self.one = torch.ones(1, device=self.device)
        blocks = [f"h.{i}." for i in range(config.n_layer)]
        self.weights = [{n.removeprefix(b): w for n, w in state.weights.items() if n.startswith(b)} for b in blocks]
        self.gradients = [{n.removeprefix(b): g for n, g in state.gradients.items() if n.startswith(b)} for b in blocks]
        self.last = len(blocks)  # the bucket of what is in no block
        self.first = True

    def begin(self, number: int) -> None:
        """Now the micro-batches of update `number` follow (from 1; 0: a rehearsal, whose gradients nobody uses)."""
        self.first = True
        self.sums.zero_()
        self.state.gradients["wpe.weight"].zero_()

    def backward(self, tokens: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        """Add the gradients of `scale` · (sum of the losses) of one micro-batch, (B, T) tokens; that number.

        The first one of a step overwrites what is there, the `last` hands each bucket on as soon as it is complete.
        """
        B = tokens.size(0)
        tokens, targets = tokens.flatten(), targets.flatten()
        factor = torch.full((1,), scale, device=self.device)
        x, norm = self._embed(tokens, B)
        saved = []
        for i in range(self.last):
            x, norm, block = self._forward(i, x, norm, B)
            saved.append(block)
        losses, dy = self._head(norm.y, targets, factor)
        dx = self._norm_backward(2 * self.last, dy, x, norm, None)
        del dy, x, norm, block
        for i in reversed(range(self.last)):
            dx = self._backward(i, dx, saved.pop(), B)
            if last:
                self._complete(i)
        self._embed_backward(tokens, dx, B)
        if last:
            self._complete_rest()
        self.first = False
        return losses.sum() * scale

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats of (B, T) tokens; no gradients."""
        B = tokens.size(0)
        x, norm = self._embed(tokens.flatten(), B)
        for i in range(self.last):
            x, norm, _ = self._forward(i, x, norm, B)
        losses, _ = self._head(norm.y, targets.flatten(), None)
        return losses.mean()

    # --- forward

    def _embed(self, tokens: Tensor, B: int) -> tuple[Tensor, Norm]:
        self.state.ready(self.last)
        self.state.ready(0)
        w = self.state.weights
        positions = w["wpe.weight"][: len(tokens) // B]
        x, y, mean, rstd = kernels.embed_norm(tokens, w["wte.weight"], positions, *self._norm_weights(0))
        return x, Norm(y, mean, rstd)

    def _forward(self, i: int, x: Tensor, norm1: Norm, B: int) -> tuple[Tensor, Norm, Block]:
        """Block `i` from its input and that input's norm; the output, its norm, and what to save."""
        w = self.weights[i]
        assert norm1.y is not None
        qkv = gemm.linear(norm1.y, w["attn.c_attn.weight"], w["attn.c_attn.bias"])
        attended, attention = self.attention.forward(qkv, B)
        delta = gemm.linear(attended, w["attn.c_proj.weight"])
        x_mid, norm2 = self._join(2 * i + 1, x, delta, w["attn.c_proj.bias"])
        assert norm2.y is not None
        pre, act = gemm.linear_gelu(norm2.y, w["mlp.c_fc.weight"], w["mlp.c_fc.bias"])
        delta = gemm.linear(act, w["mlp.c_proj.weight"])
        if i + 1 < self.last:
            self.state.ready(i + 1)
        out, norm = self._join(2 * i + 2, x_mid, delta, w["mlp.c_proj.bias"])
        block = Block(x, norm1, qkv, attention, attended, x_mid, norm2, pre, act)
        if self.recompute:
            norm1.y = norm2.y = block.act = None
        return out, norm, block

    def _head(self, y: Tensor | None, targets: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Losses (M,), and with a `scale` the gradient of `y`; that of the embedding is added up."""
        assert y is not None
        wte = self.state.weights["wte.weight"]
        losses = torch.empty(len(y), device=self.device)
        dy = torch.empty_like(y)
        for part in self._chunks(len(y)):
            logits = gemm.linear(y[part], wte)
            vocab, factor = self.config.vocab_size, self.one if scale is None else scale
            kernels.cross_entropy(logits, targets[part], vocab, factor, losses[part], scale is not None)
            if scale is not None:
                gemm.input_grad(logits, wte, out=dy[part])
                into = self.state.gradients["wte.weight"]
                gemm.weight_grad(logits, y[part], into, accumulate=not self.first or part.start > 0)
        return losses, dy

    def _chunks(self, rows: int) -> Iterator[slice]:
        """Parts of some rows, about equal, whose logits take hardly more than LOGIT_BYTES.

        Their lengths are multiples of 16 as far as `rows` is one: what fp8's products sum over has to be.
        """
        count = -(-rows * 2 * self.config.padded_vocab_size // LOGIT_BYTES)
        size = 16 * -(-rows // (16 * count))
        return (slice(start, min(start + size, rows)) for start in range(0, rows, size))

    # --- backward

    def _backward(self, i: int, dx: Tensor, s: Block, B: int) -> Tensor:
        """From the gradient of block `i`'s output to that of its input."""
        w, g = self.weights[i], self.gradients[i]
        add = not self.first
        act = s.act if s.act is not None else kernels.gelu(s.pre)
        gemm.weight_grad(dx, act, g["mlp.c_proj.weight"], add)
        del act
        dpre = gemm.input_grad_gelu(dx, w["mlp.c_proj.weight"], s.pre)
        kernels.column_sums(dpre, self.sums.fc[i])
        gemm.weight_grad(dpre, self._normed(2 * i + 1, s.x_mid, s.norm2), g["mlp.c_fc.weight"], add)
        dy = gemm.input_grad(dpre, w["mlp.c_fc.weight"])
        del dpre
        dx = self._norm_backward(2 * i + 1, dy, s.x_mid, s.norm2, dx)
        gemm.weight_grad(dx, s.attended, g["attn.c_proj.weight"], add)
        dy = gemm.input_grad(dx, w["attn.c_proj.weight"])
        dqkv = self._attention_backward(i, dy, s.qkv, B, s.attention)
        gemm.weight_grad(dqkv, self._normed(2 * i, s.x, s.norm1), g["attn.c_attn.weight"], add)
        dy = gemm.input_grad(dqkv, w["attn.c_attn.weight"])
        return self._norm_backward(2 * i, dy, s.x, s.norm1, dx)

    def _attention_backward(self, i: int, dy: Tensor, qkv: Tensor, B: int, saved: Saved) -> Tensor:
        """The gradient of the packed projections (M, 3C). The queries' is added up here, see `_attention_bias`."""
        dqkv = self.attention.backward(dy, qkv, B, saved)
        kernels.column_sums(dqkv[:, : self.config.n_embd], self.sums.q[i])
        return dqkv

    def _embed_backward(self, tokens: Tensor, dx: Tensor, B: int) -> None:
        g = self.state.gradients
        g["wte.weight"].index_add_(0, tokens, dx.float())
        positions = dx.view(B, -1, self.config.n_embd).sum(0, dtype=torch.float32)
        g["wpe.weight"][: len(positions)] += positions

    def _complete(self, i: int) -> None:
        """Block `i`'s gradients from the partial sums; then nobody here needs its bucket any more."""
        g, norms = self.gradients[i], self.sums.norms
        g["mlp.c_fc.bias"].copy_(self.sums.fc[i].sum(0))
        # The norms behind the two projections have summed up the gradients of their biases.
        after = norms[2 * i + 1 : 2 * i + 3, 2].sum(1)
        g["attn.c_proj.bias"].copy_(after[0])
        self._attention_bias(i, after[0])
        g["mlp.c_proj.bias"].copy_(after[1])
        for k, name in ((2 * i, "ln_1"), (2 * i + 1, "ln_2")):
            weight, bias = norms[k, :2].sum(1)
            g[f"{name}.weight"].copy_(weight)
            g[f"{name}.bias"].copy_(bias)
        self.state.begin_reduce(i)

    def _attention_bias(self, i: int, projection: Tensor) -> None:
        """The gradient of block `i`'s query, key and value biases; `projection` is that of the projection's bias.

        Attention's weights add up to 1 for every query: a constant added to all values is one added to the output,
        and a constant added to all keys changes nothing. So only the queries' gradient has to be added up.
        """
        q, k, v = self.gradients[i]["attn.c_attn.bias"].view(3, -1)
        q.copy_(self.sums.q[i].sum(0))
        k.zero_()
        v.copy_(projection @ self.weights[i]["attn.c_proj.weight"].float())

    def _complete_rest(self) -> None:
        g, (weight, bias) = self.state.gradients, self.sums.norms[2 * self.last, :2].sum(1)
        g["ln_f.weight"].copy_(weight)
        g["ln_f.bias"].copy_(bias)
        self.state.begin_reduce(self.last)

    # --- what a step has beyond the flat state, for the steps that have it

    def pieces(self) -> dict[str, Piece]:
        return {}

    def loaded(self) -> None:
        """The pieces have been filled."""

    def measures(self) -> dict[str, float]:
        """What else there is to log of the last step."""
        return {}

    # --- norms, numbered in the order of the forward pass: two a block, then ln_f

    def _norm_weights(self, k: int) -> tuple[Tensor, Tensor]:
        if k == 2 * self.last:
            return self.state.weights["ln_f.weight"], self.state.weights["ln_f.bias"]
        w, name = self.weights[k // 2], f"ln_{k % 2 + 1}"
        return w[f"{name}.weight"], w[f"{name}.bias"]

    def _join(self, k: int, x: Tensor, delta: Tensor, bias: Tensor) -> tuple[Tensor, Norm]:
        """The residual stream with `delta` and `bias` added, and norm number `k` of it. (In the product's epilogue the
        sum cost 1% of a step of 1558M on an H200, and gained 0.2% at 124M.)"""
        x, y, mean, rstd = kernels.add_norm(x, delta, bias, *self._norm_weights(k))
        return x, Norm(y, mean, rstd)

    def _normed(self, k: int, x: Tensor, norm: Norm) -> Tensor:
        """A norm's output, made again where it was not kept."""
        return kernels.norm_again(x, norm.mean, norm.rstd, *self._norm_weights(k)) if norm.y is None else norm.y

    def _norm_backward(self, k: int, dy: Tensor, x: Tensor, norm: Norm, residual: Tensor | None) -> Tensor:
        weight, _ = self._norm_weights(k)
        return kernels.norm_backward(dy, x, norm.mean, norm.rstd, weight, residual, self.sums.norms[k])
