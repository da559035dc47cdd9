"""A training step with a hand-written backward pass: the result of `loss.backward()` with less traffic.

The arithmetic, a token: 2 FLOPs a weight forward and 4 backward, and attention (`trainer/engines/fused/attention.py`):
6N + 12·L·C·T in all. The matrix products reach 700 TFLOP/s and more on an H200; the rest of the step only moves bytes.
All of it draws on one power budget, so every pass over memory that is left out counts twice. Left out here:

- float32 copies: weights and activations are bf16 (the float32 masters live in `trainer/engines/fused/flat.py`),
  statistics float32;
- separate passes for bias, GELU and its derivative, which ride on the products (`trainer/engines/fused/gemm.py`), and
  for residual sums, which ride on the norms (`trainer/engines/fused/kernels.py`);
- zeroing gradients: the first micro-batch of a step overwrites, the others add, in float32 inside the product;
- float32 logits, and separate gradients of logits: loss and gradient are made in place, a chunk of rows at a time
  (whole, the logits of 64 x 1024 tokens would be 6.6 GB in bf16);
- autograd's graph: each family lists the tensors that a block saves. Its backward pass frees them.

A products policy (`trainer/engines/fused/products.py`) makes operands and products in bf16 or fp8. `FusedStep` walks
through the model, forward and back. A subclass for each family (`gpt2_step.py`, `llama_step.py`, `modern_step.py`)
names its layers and adds what it has besides. Parameters have the names, the shapes and the mathematics of the plain
modules. Biases of products cost no pass of their own: the forward pass adds them in the products, or in the norm that
follows, and their gradients are column sums of tensors that a kernel writes
anyway. llm.c's train_gpt2.cu (Karpathy et al. 2024) showed how far this goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from trainer.config.model_config import ModelConfig
from trainer.engines.fused import kernels
from trainer.engines.fused.attention import Attention, SavedAttention
from trainer.engines.fused.flat import FlatState
from trainer.engines.fused.kernels import Activation, Fp8Out, Mix, MixGradient, NormWeights
from trainer.engines.fused.products import Linear, Normed, Operand, Products, ResidualGrad


@dataclass(frozen=True)
class Norm:
    """A norm and its place in the model."""

    index: int  # in the order of the forward pass: two norms a block, then the head's
    name: str | None  # of its parameters; None: it has none
    weights: NormWeights
    writer: Linear | None  # the layer whose output and bias are added to the residual stream just before the norm
    reader: Linear  # the layer whose input is the norm's output
    sums: (
        Tensor | None
    )  # (1, P, C) partial sums of the gradient of weight; (3, P, C) also of bias and the writer's bias


@dataclass(frozen=True)
class Block:
    """The layers of a block."""

    norm_1: Norm
    qkv: Linear
    out: Linear
    norm_2: Norm
    up: Linear  # with a gate: the gate's rows, then the others
    down: Linear


@dataclass
class SavedMlp(Generic[Operand]):
    """The tensors that an MLP saves for its backward pass."""

    kept: Tensor  # (M, I) or (M, 2·I): before the activation, or for ReLU² in bf16 after it
    act: Operand | None  # the input of the last layer; None: made again


@dataclass
class Saved(Generic[Operand]):
    """The tensors that the forward pass of a block saves for its backward pass. M tokens, width C."""

    x: Tensor  # (M, C)
    norm1: Normed[Operand]
    qkv: Tensor  # (M, (heads + 2·kv_heads)·D), with positions
    rstd: Tensor | None  # of normed queries and keys
    attention: SavedAttention
    attended: Operand
    x_mid: Tensor  # (M, C), after attention
    norm2: Normed[Operand]
    mlp: SavedMlp[Operand]


class FusedStep(Generic[Operand]):
    """Forward and backward of micro-batches over the weights and into the gradients of a FlatState.

    M is the number of tokens of a micro-batch of B sequences, C the width of the residual stream.
    """

    BLOCK_LAYERS: ClassVar[tuple[str, str, str, str]]  # before and after attention, the MLP's first and last
    PACKED: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # layers of several parameters, which lie side by side
    NORMS: ClassVar[tuple[str, str, str] | None]  # a block's two and the head's; None: they have no parameters
    ACTIVATION: ClassVar[Activation]
    norms_embedding = False
    cap: float | None = None  # logits are cap · tanh(z / cap) of the head's products z
    up_sums: Tensor | None = None  # (L, P, I) partial sums of the gradient of the MLP's first bias

    def __init__(self, config: ModelConfig, state: FlatState, products: Products[Any], deterministic: bool) -> None:
        self.config, self.state, self.products, self.deterministic = config, state, products, deterministic
        self.device = state.world.device
        self.n_blocks = config.n_layer
        self.embeddings = config.n_layer  # the bucket of the parameters that are in no block
        self.number = 0  # of the current update
        self.current = products  # the policy of the current update
        self.first = True  # the next micro-batch overwrites the gradients
        self.order: tuple[Tensor, Tensor] | None = None  # a micro-batch's tokens, sorted, and their places
        shape = (config.n_head, config.attention_width, self.device, deterministic, config.kv_heads)
        reaches = {reach: None if reach == config.block_size else reach for reach in config.contexts}
        kinds = {reach: Attention(*shape, window, config.attention_scale) for reach, window in reaches.items()}
        self.attentions = list(kinds.values())
        self.attention_of = [kinds[reach] for reach in config.contexts]  # each block's
        *layers, (head,) = self.layer_names(config)
        self.head = self._linear(head)
        self.blocks: list[Block] = []
        writer: Linear | None = None
        for i, names in enumerate(layers):
            qkv, out, up, down = (self._linear(name) for name in names)
            norms = self._norm(2 * i, writer, qkv), self._norm(2 * i + 1, out, up)
            self.blocks.append(Block(norms[0], qkv, out, norms[1], up, down))
            writer = down
        last = self._norm(2 * self.n_blocks, writer, self.head)
        self.norms = [norm for block in self.blocks for norm in (block.norm_1, block.norm_2)] + [last]

    @classmethod
    def layer_names(cls, config: ModelConfig) -> list[list[str]]:
        """The linear layers, group by group: each block's, and last the head."""
        blocks = [[f"h.{i}.{name}" for name in cls.BLOCK_LAYERS] for i in range(config.n_layer)]
        return [*blocks, ["lm_head" if "lm_head.weight" in config.shapes else "wte"]]

    # --- of a family

    @property
    def epsilon(self) -> float:
        """Of every norm."""
        return 1e-5

    def project(
        self, p: Products[Operand], i: int, x: Tensor, norm: Normed[Operand], B: int
    ) -> tuple[Tensor, Tensor | None]:
        """Block `i`'s queries, keys and values, with their positions, from the norm of its input x; and what the
        backward pass needs."""
        qkv = self.blocks[i].qkv
        assert norm.y is not None
        return p.linear(qkv, norm.y, qkv.bias), None

    def project_backward(self, p: Products[Operand], i: int, dqkv: Tensor, saved: Saved[Operand], B: int) -> Operand:
        """From the gradient of the result of `project` to the output gradient of its product. May change the columns of
        queries and keys in dqkv."""
        return p.output_grad(self.blocks[i].qkv, dqkv)

    def values_backward(self, i: int, dqkv: Tensor, saved: Saved[Operand], dinput: Tensor) -> None:
        """Add the gradients of what `project` added to the values: its parameters' and, in place, the norm's."""

    def mix(self, norm: Norm) -> Mix | None:
        """What is mixed into the residual stream before a norm."""
        return None

    def mix_gradient(self, norm: Norm) -> MixGradient | None:
        """What the backward pass of a norm needs of its mix."""
        return None

    def mlp(self, p: Products[Operand], block: Block, y: Operand) -> tuple[Operand, SavedMlp[Operand]]:
        """The input of the MLP's last layer, from the input of its first one."""
        kept, act = p.linear_activated(block.up, y, block.down, self.ACTIVATION)
        return act, SavedMlp(kept, None if p.recompute_activation else p.saved(act))

    def mlp_backward(self, p: Products[Operand], i: int, dy: Operand, saved: SavedMlp[Operand]) -> Operand:
        """The output gradient of the MLP's first layer from that of its last one, whose weight's gradient is made."""
        up, down = self.blocks[i].up, self.blocks[i].down
        act = p.activated(down, saved.kept, self.ACTIVATION) if saved.act is None else saved.act
        p.weight_grad(down, dy, act, not self.first)
        del act
        sums = None if self.up_sums is None else self.up_sums[i]
        return p.input_grad_activated(down, dy, saved.kept, up, self.ACTIVATION, sums)

    # --- layers

    def _linear(self, name: str) -> Linear:
        part = name.split(".", 2)[-1]
        own = [f"{name.removesuffix(part)}{one}.weight" for one in self.PACKED.get(part, (part,))]
        weights, gradients = self.state.weights, self.state.gradients
        weight, gradient = (side_by_side([values[one] for one in own]) for values in (weights, gradients))
        return Linear(name, weight, gradient, weights.get(f"{name}.bias"))

    def _norm(self, index: int, writer: Linear | None, reader: Linear) -> Norm:
        if self.NORMS is None:
            return Norm(index, None, NormWeights(None, None, self.epsilon), writer, reader, None)
        name = self.NORMS[2] if index == 2 * self.n_blocks else f"h.{index // 2}.{self.NORMS[index % 2]}"
        weight, bias = (self.state.weights.get(f"{name}.{part}") for part in ("weight", "bias"))
        C, count = self.config.n_embd, 1 if bias is None else 3
        sums = torch.zeros(count, kernels.norm_partials(C, self.device), C, device=self.device)
        return Norm(index, name, NormWeights(weight, bias, self.epsilon), writer, reader, sums)

    def _zero(self) -> None:
        """Zero the gradients and partial sums to which every micro-batch adds."""
        for norm in self.norms:
            if norm.sums is not None:
                norm.sums.zero_()
        if self.head.name != "wte":  # a tied head's first product overwrites it
            self.state.gradients["wte.weight"].zero_()

    # --- forward

    def _embed(
        self, p: Products[Operand], tokens: Tensor, B: int
    ) -> tuple[Tensor, Normed[Operand], tuple[Tensor, Tensor | None]]:
        """The residual stream (M, C) of tokens (M,), its norm, and what the backward pass needs: the embedding, and 1 /
        the root mean squares by which it was normed."""
        self.state.ready(self.embeddings)
        self.state.ready(0)
        norm, w = self.norms[0], self.state.weights
        positions = w["wpe.weight"][: len(tokens) // B] if "wpe.weight" in w else None

        def kernel(out: Fp8Out | None) -> tuple[Any, ...]:
            return kernels.embed_norm(tokens, w["wte.weight"], positions, norm.weights, self.norms_embedding, out)

        x, normed = p.norm(norm.reader, kernel)
        (normed.statistics, embedded) = normed.statistics
        return x, normed, (x, embedded)

    def _forward(
        self, p: Products[Operand], i: int, x: Tensor, norm: Normed[Operand], B: int
    ) -> tuple[Tensor, Normed[Operand], Saved[Operand]]:
        """Block `i` from its input and that input's norm; returns the output, its norm, and the tensors to save."""
        block, norm1 = self.blocks[i], norm
        qkv, rstd = self.project(p, i, x, norm1, B)
        output, attention = self.attention_of[i].forward(qkv, B)
        attended = p.input(block.out, output)
        delta = p.linear(block.out, attended)
        x_mid, norm2 = self._join(p, block.norm_2, x, delta)
        del delta
        assert norm2.y is not None
        act, mlp = self.mlp(p, block, norm2.y)
        delta = p.linear(block.down, act)
        del act
        if i + 1 < self.n_blocks:
            self.state.ready(i + 1)
        out, after = self._join(p, self.norms[2 * i + 2], x_mid, delta)
        saved = Saved(x, norm1, qkv, rstd, attention, p.saved(attended), x_mid, norm2, mlp)
        if p.recompute_norms:
            norm1.y = norm2.y = None
        return out, after, saved

    def _join(
        self, p: Products[Operand], norm: Norm, x: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, Normed[Operand]]:
        """The residual stream with `delta` and its bias added, and the norm of it. (In the product's epilogue the sum
        cost 1% of a step of 1558M on an H200, and gained 0.2% at 124M.)"""
        bias = None if norm.writer is None else norm.writer.bias

        def kernel(out: Fp8Out | None) -> tuple[Any, ...]:
            return kernels.add_norm(x, delta, bias, norm.weights, out, self.mix(norm))

        x, normed = p.norm(norm.reader, kernel)
        (normed.statistics,) = normed.statistics
        return x, normed

    # --- backward

    def _backward(
        self, p: Products[Operand], i: int, grad: ResidualGrad[Operand], saved: Saved[Operand], B: int
    ) -> ResidualGrad[Operand]:
        """From the gradient of block `i`'s output to that of its input."""
        block, add, s = self.blocks[i], not self.first, saved
        dup = self.mlp_backward(p, i, grad.dy, s.mlp)
        p.weight_grad(block.up, dup, self._normed(p, block.norm_2, s.x_mid, s.norm2), add)
        dinput = p.input_grad(block.up, dup)
        del dup
        grad = self._norm_backward(p, block.norm_2, dinput, s.x_mid, s.norm2, grad.dx)
        p.weight_grad(block.out, grad.dy, s.attended, add)
        dinput = p.input_grad(block.out, grad.dy)
        packed = self.attention_of[i].backward(dinput, s.qkv, B, s.attention)
        dqkv = self.project_backward(p, i, packed, s, B)
        p.weight_grad(block.qkv, dqkv, self._normed(p, block.norm_1, s.x, s.norm1), add)
        dinput = p.input_grad(block.qkv, dqkv)
        self.values_backward(i, packed, s, dinput)
        return self._norm_backward(p, block.norm_1, dinput, s.x, s.norm1, grad.dx)

    def _normed(self, p: Products[Operand], norm: Norm, x: Tensor, normed: Normed[Operand]) -> Operand:
        """A norm's output, made again where it was not saved."""
        if normed.y is not None:
            return normed.y
        return p.input(norm.reader, kernels.norm_again(x, normed.statistics, norm.weights))

    def _norm_backward(
        self,
        p: Products[Operand],
        norm: Norm,
        dy: Tensor,
        x: Tensor,
        normed: Normed[Operand],
        residual: Tensor | None,
    ) -> ResidualGrad[Operand]:
        """From the gradient `dy` (M, C) of a norm's output to that of its input, plus `residual` (M, C)."""

        def kernel(out: Fp8Out | None) -> tuple[Tensor, Tensor | None]:
            weight, mix = norm.weights.weight, self.mix_gradient(norm)
            return kernels.norm_backward(dy, x, normed.statistics, weight, residual, norm.sums, out, mix=mix)

        return p.norm_backward(norm.writer, kernel)

    def _embed_backward(self, tokens: Tensor, dx: Tensor, saved: tuple[Tensor, Tensor | None], B: int) -> None:
        """Add the gradients of the embeddings."""
        x, embedded = saved
        if embedded is not None:
            dx, _ = kernels.norm_backward(dx, x, (None, embedded), None, None, None, normed=True)
        self._add_rows("wte.weight", tokens, dx)

    def _complete(self, i: int) -> None:
        """Make block `i`'s gradients from the partial sums, and begin to reduce its bucket."""
        for norm in self.norms[2 * i : 2 * i + 2]:
            self._complete_norm(norm)
        self.state.begin_reduce(i)

    def _complete_norm(self, norm: Norm) -> None:
        if norm.sums is not None:
            parts = ("weight",) if norm.weights.bias is None else ("weight", "bias")
            for part, total in zip(parts, norm.sums[: len(parts)].sum(1), strict=True):
                self.state.gradients[f"{norm.name}.{part}"].copy_(total)

    def _complete_rest(self) -> None:
        """The same for the parameters that are in no block."""
        self._complete_norm(self.norms[-1])
        self.state.begin_reduce(self.embeddings)

    # --- of all

    def _add_rows(self, name: str, tokens: Tensor, rows: Tensor) -> None:
        """Add rows (M, N) bf16 to the gradient of the embedding `name`, at their tokens (M,)."""
        if self.order is None:
            self.state.gradients[name].index_add_(0, tokens, rows.float())
        else:
            kernels.add_rows(self.state.gradients[name], *self.order, rows)

    def begin(self, number: int) -> None:
        """Begin update `number` (from 1; 0: a rehearsal, whose gradients are not used): its micro-batches follow."""
        self.number = number
        self.first = True
        self._zero()
        self.current = self.products.begin(number)

    def backward(self, tokens: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        """Add the gradients of `scale` · (sum of the losses) of one micro-batch, (B, T) tokens; return that number.

        The first micro-batch of a step overwrites the gradients; the `last` begins to reduce each bucket as soon as it
        is complete.
        """
        if self.current.calibrating:
            self._micro_batch(self.current, tokens, targets, scale, last=False)
            self.begin(self.number)
        return self._micro_batch(self.current, tokens, targets, scale, last)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats of (B, T) tokens; no gradients."""
        p = self.products.for_loss
        losses, _ = self._head(p, self._last_norm(p, tokens), targets.flatten(), None)
        return losses.mean()

    def hidden(self, tokens: Tensor) -> Tensor:
        """The input of the head in bf16: (B, T) tokens -> (B, T, C)."""
        norm: Normed[Any] = self._last_norm(self.products.for_loss, tokens)
        assert norm.y is not None
        hidden: Tensor = norm.y.view(*tokens.shape, -1)
        return hidden

    def logits(self, x: Tensor) -> Tensor:
        """The logits in bf16 of (N, C) inputs of the head: (N, padded_vocab_size), padding at -inf."""
        logits: Tensor = self.products.for_loss.linear(self.head, x.contiguous())
        if self.cap:
            logits = (self.cap * torch.tanh(logits.float() / self.cap)).type_as(logits)
        logits[:, self.config.vocab_size :] = float("-inf")
        return logits

    def _last_norm(self, p: Products[Operand], tokens: Tensor) -> Normed[Operand]:
        """The forward pass of (B, T) tokens up to the head's input."""
        B = tokens.size(0)
        x, norm, _ = self._embed(p, tokens.flatten(), B)
        for i in range(self.n_blocks):
            x, norm, _ = self._forward(p, i, x, norm, B)
        return norm

    def _micro_batch(self, p: Products[Operand], tokens: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        B = tokens.size(0)
        tokens, targets = tokens.flatten(), targets.flatten()
        factor = torch.full((1,), scale, device=self.device)
        p.begin_micro_batch(scale)
        x, norm, embedded = self._embed(p, tokens, B)
        saved = []
        for i in range(self.n_blocks):
            x, norm, block = self._forward(p, i, x, norm, B)
            saved.append(block)
        losses, dy = self._head(p, norm, targets, factor)
        self.order = None if self.deterministic else torch.sort(tokens)
        norm.y = None  # from here on only its statistics are needed
        grad = self._norm_backward(p, self.norms[-1], dy, x, norm, None)
        del dy, x, norm, block
        for i in reversed(range(self.n_blocks)):
            grad = self._backward(p, i, grad, saved.pop(), B)
            if last:
                self._complete(i)
        self._embed_backward(tokens, grad.dx, embedded, B)
        if last:
            self._complete_rest()
        self.first = False
        loss = losses.sum() * scale
        p.end_micro_batch(last)
        return loss

    def _head(
        self, p: Products[Operand], norm: Normed[Operand], targets: Tensor, factor: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Losses (M,), and with a `factor` the gradient (M, C) of the norm's output."""
        assert norm.y is not None
        accumulate = not self.first
        return p.head(self.head, norm.y, targets, self.config.vocab_size, factor, accumulate, self.cap)


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Matrices (N_i, K) that follow one another in memory as one (sum of N_i, K), without a copy."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        assert part.is_contiguous() and part.storage_offset() == end and part.shape[1] == first.shape[1], "apart"
        end += part.numel()
    return first.as_strided((sum(len(part) for part in parts), first.shape[1]), (first.shape[1], 1))
