"""The part of llama and modern in a fused step: RMSNorm, rotary positions, grouped keys and values, SwiGLU or ReLU², no
biases.

Queries, keys and values are one product, as are the gate and the other half of SwiGLU: their weights lie side by side
in the flat buffers. Rotary positions and the norm of queries and keys work on the packed projections in place, and the
backward pass undoes them from the result. A block saves 12·C bf16 numbers a token, and 14·C with an inner width of
8/3·C and a gate: the MLP on one side of its activation. SwiGLU keeps its input, and the backward pass makes the output
again in the pass that makes the gradient.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from trainer.fused import kernels, rotary
from trainer.fused.attention import Attention, SavedAttention
from trainer.fused.flat import FlatState
from trainer.fused.kernels import Fp8Out
from trainer.fused.products import Linear, Normed, Operand, Products, ResidualGrad
from trainer.fused.step import FusedStep
from trainer.models.grouped import GroupedHeads
from trainer.models.model_config import ModelConfig
from trainer.models.rotary import waves

QKV, OUT = ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "attn.o_proj"


@dataclass(frozen=True)
class Norm:
    """An RMSNorm and its place in the model."""

    index: int  # in the order of the forward pass: two norms a block, then the head's
    name: str | None  # of its weight; None: it has none
    weight: Tensor | None  # (C,)
    writer: Linear | None  # the layer whose output is added to the residual stream just before the norm
    reader: Linear  # the layer whose input is the norm's output
    sums: Tensor | None  # (P, C) partial sums of the weight's gradient


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
    rstd: Tensor  # of queries and keys
    attention: SavedAttention
    attended: Operand
    x_mid: Tensor  # (M, C), after attention
    norm2: Normed[Operand]
    mlp: SavedMlp[Operand]


class RotaryStep(FusedStep[Operand]):
    """The step of a family with rotary positions. A family names its layers, its epsilon and what it norms."""

    UP: ClassVar[tuple[str, ...]]
    DOWN: ClassVar[str] = "mlp.down_proj"
    BLOCK_LAYERS = ("attn.qkv", OUT, "mlp.up", "mlp.down_proj")
    EPSILON: ClassVar[float]
    SENSE: ClassVar[int] = 1  # of the rotation
    norms_heads = False  # queries and keys, after their rotation
    norms_embedding = False
    config: GroupedHeads

    def __init__(self, config: GroupedHeads, state: FlatState, products: Products[Any], deterministic: bool) -> None:
        super().__init__(config, state, products, deterministic)
        shape = (config.n_head, config.n_embd, self.device, deterministic, config.kv_heads)
        reaches = {reach: None if reach == config.block_size else reach for reach in config.contexts}
        kinds = {reach: Attention(*shape, window) for reach, window in reaches.items()}
        self.attentions = list(kinds.values())
        self.attention_of = [kinds[reach] for reach in config.contexts]  # each block's
        self.turning = config.n_head + config.kv_heads  # heads with positions
        P = kernels.norm_partials(config.n_embd, self.device)
        self.sums = torch.zeros(2 * config.n_layer + 1, P, config.n_embd, device=self.device)
        self.head = self._linear(self.head_name(config))
        self.blocks = self._blocks()
        last = self._norm(self.norm_name(None), 2 * self.n_blocks, self.blocks[-1].down, self.head)
        self.norms = [norm for block in self.blocks for norm in (block.norm_1, block.norm_2)] + [last]
        self.waves: dict[int, tuple[Tensor, Tensor]] = {}  # by length of a sequence

    # --- of a family

    @classmethod
    def head_name(cls, config: ModelConfig) -> str:
        return "lm_head"

    def norm_name(self, place: str | None) -> str | None:
        """The name of the norm's weight before `place` ("h.3.attn", "h.3.mlp"; None: the head); None: it has none."""
        return None

    def mlp(self, p: Products[Operand], block: Block, y: Operand) -> tuple[Operand, SavedMlp[Operand]]:
        """The input of the MLP's last layer, from that of its first one."""
        raise NotImplementedError

    def mlp_backward(
        self, p: Products[Operand], block: Block, dy: Operand, saved: SavedMlp[Operand], add: bool
    ) -> Operand:
        """The output gradient of the MLP's first layer from that of its last one, whose weight's gradient is made."""
        raise NotImplementedError

    def add_rms(self, norm: Norm, x: Tensor, delta: Tensor | None, out: Fp8Out | None) -> tuple[Tensor, Tensor, Tensor]:
        """The norm's input, from the residual stream x to which `delta` is added; its output, and its statistic."""
        return rotary.add_rms(x, delta, norm.weight, self.EPSILON, out)

    def rms_backward(
        self, norm: Norm, dy: Tensor, x: Tensor, rstd: Tensor, residual: Tensor | None, out: Fp8Out | None
    ) -> tuple[Tensor, Tensor | None]:
        """From the gradient of the norm's output, and that which skips the norm, to that of the residual stream."""
        return rotary.rms_backward(dy, x, rstd, norm.weight, residual, norm.sums, out)

    def add_values(self, i: int, qkv: Tensor, x: Tensor, norm: Normed[Operand]) -> None:
        """Add to block `i`'s values in `qkv`, in place; `norm` is that of the block's input x."""

    def add_values_backward(self, i: int, dqkv: Tensor, x: Tensor, norm: Normed[Operand], dinput: Tensor) -> None:
        """Add the gradients of what was added to those of its parameters and, in place, of the norm's output."""

    # --- layers

    def _packed(self, name: str, parts: tuple[str, ...]) -> Linear:
        """Several layers with the same input as one: their weights lie side by side in the flat buffers."""
        own = [f"{part}.weight" for part in parts]
        weights, gradients = self.state.weights, self.state.gradients
        return Linear(name, side_by_side([weights[n] for n in own]), side_by_side([gradients[n] for n in own]), None)

    def _norm(self, name: str | None, index: int, writer: Linear | None, reader: Linear) -> Norm:
        weight = None if name is None else self.state.weights[f"{name}.weight"]
        return Norm(index, name, weight, writer, reader, None if name is None else self.sums[index])

    def _blocks(self) -> list[Block]:
        blocks: list[Block] = []
        writer: Linear | None = None
        for i in range(self.n_blocks):
            qkv = self._packed(f"h.{i}.attn.qkv", tuple(f"h.{i}.{name}" for name in QKV))
            up = self._packed(f"h.{i}.mlp.up", tuple(f"h.{i}.{name}" for name in self.UP))
            out, down = self._linear(f"h.{i}.{OUT}"), self._linear(f"h.{i}.{self.DOWN}")
            norm_1 = self._norm(self.norm_name(f"h.{i}.attn"), 2 * i, writer, qkv)
            norm_2 = self._norm(self.norm_name(f"h.{i}.mlp"), 2 * i + 1, out, up)
            blocks.append(Block(norm_1, qkv, out, norm_2, up, down))
            writer = down
        return blocks

    def _zero(self) -> None:
        self.sums.zero_()
        if self.head.name != "wte":  # a tied head's first product overwrites it
            self.state.gradients["wte.weight"].zero_()

    def _waves(self, T: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of all positions, (T, D/2) fp32."""
        if T not in self.waves:
            positions = torch.arange(T, device=self.device)
            cos, sin = waves(positions, self.config.head_size, self.config.rope_base)
            self.waves[T] = cos.reshape(T, -1).contiguous(), (self.SENSE * sin).reshape(T, -1).contiguous()
        return self.waves[T]

    # --- forward

    def _embed(
        self, p: Products[Operand], tokens: Tensor, B: int
    ) -> tuple[Tensor, Normed[Operand], tuple[Tensor, Tensor]]:
        self.state.ready(self.embeddings)
        self.state.ready(0)
        norm, table = self.norms[0], self.state.weights["wte.weight"]

        def kernel(out: Fp8Out | None) -> tuple[Tensor, ...]:
            x, y, embedded, rstd = rotary.embed_rms(tokens, table, norm.weight, self.EPSILON, self.norms_embedding, out)
            return x, y, rstd, embedded

        x, normed = p.norm(norm.reader, kernel)
        rstd, embedded = normed.statistics
        normed.statistics = (rstd,)
        return x, normed, (x, embedded)

    def _forward(
        self, p: Products[Operand], i: int, x: Tensor, norm: Normed[Operand], B: int
    ) -> tuple[Tensor, Normed[Operand], Saved[Operand]]:
        block, norm1 = self.blocks[i], norm
        assert norm1.y is not None
        qkv = p.linear(block.qkv, norm1.y)
        self.add_values(i, qkv, x, norm1)
        cos, sin = self._waves(len(x) // B)
        rstd = rotary.rotate(qkv, cos, sin, self.turning, self.norms_heads, self.EPSILON)
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

    def _join(self, p: Products[Operand], norm: Norm, x: Tensor, delta: Tensor) -> tuple[Tensor, Normed[Operand]]:
        """The residual stream with `delta` added, and the norm of it."""

        def kernel(out: Fp8Out | None) -> tuple[Tensor, ...]:
            return self.add_rms(norm, x, delta, out)

        return p.norm(norm.reader, kernel)

    # --- backward

    def _backward(
        self, p: Products[Operand], i: int, grad: ResidualGrad[Operand], saved: Saved[Operand], B: int
    ) -> ResidualGrad[Operand]:
        block, add, s = self.blocks[i], not self.first, saved
        dup = self.mlp_backward(p, block, grad.dy, s.mlp, add)
        p.weight_grad(block.up, dup, self._normed(p, block.norm_2, s.x_mid, s.norm2), add)
        dinput = p.input_grad(block.up, dup)
        del dup
        grad = self._norm_backward(p, block.norm_2, dinput, s.x_mid, s.norm2, grad.dx)
        p.weight_grad(block.out, grad.dy, s.attended, add)
        dinput = p.input_grad(block.out, grad.dy)
        packed = self.attention_of[i].backward(dinput, s.qkv, B, s.attention)
        cos, sin = self._waves(len(packed) // B)
        rotary.rotate_back(packed, s.qkv, cos, sin, s.rstd, self.norms_heads)
        dqkv = p.output_grad(block.qkv, packed)
        p.weight_grad(block.qkv, dqkv, self._normed(p, block.norm_1, s.x, s.norm1), add)
        dinput = p.input_grad(block.qkv, dqkv)
        self.add_values_backward(i, packed, s.x, s.norm1, dinput)
        return self._norm_backward(p, block.norm_1, dinput, s.x, s.norm1, grad.dx)

    def _last_norm_backward(
        self, p: Products[Operand], dy: Tensor, x: Tensor, norm: Normed[Operand]
    ) -> ResidualGrad[Operand]:
        return self._norm_backward(p, self.norms[-1], dy, x, norm, None)

    def _normed(self, p: Products[Operand], norm: Norm, x: Tensor, normed: Normed[Operand]) -> Operand:
        """A norm's output, made again where it was not saved."""
        if normed.y is not None:
            return normed.y
        (rstd,) = normed.statistics
        return p.input(norm.reader, rotary.rms_again(x, rstd, norm.weight))

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
        (rstd,) = normed.statistics

        def kernel(out: Fp8Out | None) -> tuple[Tensor, Tensor | None]:
            return self.rms_backward(norm, dy, x, rstd, residual, out)

        return p.norm_backward(norm.writer, kernel)

    def _embed_backward(self, tokens: Tensor, dx: Tensor, saved: tuple[Tensor, Tensor], B: int) -> None:
        if self.norms_embedding:
            dx, _ = rotary.rms_backward(dx, *saved, None, None, None, normed=True)
        self._add_rows("wte.weight", tokens, dx)

    def _complete(self, i: int) -> None:
        for norm in self.norms[2 * i : 2 * i + 2]:
            self._complete_norm(norm)
        self.state.begin_reduce(i)

    def _complete_norm(self, norm: Norm) -> None:
        if norm.sums is not None:
            self.state.gradients[f"{norm.name}.weight"].copy_(norm.sums.sum(0))

    def _complete_rest(self) -> None:
        self._complete_norm(self.norms[-1])
        self.state.begin_reduce(self.embeddings)


def side_by_side(parts: list[Tensor]) -> Tensor:
    """Matrices (N_i, K) that follow one another in memory as one (sum of N_i, K), without a copy."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        assert part.is_contiguous() and part.storage_offset() == end and part.shape[1] == first.shape[1], "apart"
        end += part.numel()
    return first.as_strided((sum(len(part) for part in parts), first.shape[1]), (first.shape[1], 1))
