"""The part of llama and modern in a fused step: RMSNorm, rotary positions, grouped keys and values, no biases; and
llama's SwiGLU.

Queries, keys and values are one product, as are the gate and the other half of SwiGLU: their weights lie side by side
in the flat buffers. Rotary positions and the norm of queries and keys ride on that product, and the backward pass
undoes them from the result. A block saves 12·C bf16 numbers a token, and 14·C with an inner width of
8/3·C and a gate: the MLP on one side of its activation. SwiGLU keeps its input, and the backward pass makes the output
again in the pass that makes the gradient.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.engines.fused import llama_kernels
from trainer.engines.fused.flat import FlatState
from trainer.engines.fused.kernels import Fp8Out
from trainer.engines.fused.products import Normed, Operand, Products
from trainer.engines.fused.step import Block, FusedStep, Saved, SavedMlp
from trainer.models.grouped import GroupedHeads
from trainer.models.rotary import waves


class RotaryStep(FusedStep[Operand]):
    """The step of a family with rotary positions."""

    BLOCK_LAYERS = ("attn.qkv", "attn.o_proj", "mlp.up", "mlp.down_proj")
    QKV: ClassVar[tuple[str, ...]] = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
    SENSE: ClassVar[int] = 1  # of the rotation
    norms_heads = False  # queries and keys, after their rotation
    config: GroupedHeads

    def __init__(self, config: GroupedHeads, state: FlatState, products: Products[Any], deterministic: bool) -> None:
        super().__init__(config, state, products, deterministic)
        self.turning = config.n_head + config.kv_heads  # heads with positions
        self.waves: dict[int, tuple[Tensor, Tensor]] = {}  # by length of a sequence

    @property
    def epsilon(self) -> float:
        return self.config.epsilon

    def _waves(self, T: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of all positions, (T, D/2) fp32."""
        if T not in self.waves:
            positions = torch.arange(T, device=self.device)
            cos, sin = waves(positions, self.config.head_size, self.config.rope_base)
            self.waves[T] = cos.reshape(T, -1).contiguous(), (self.SENSE * sin).reshape(T, -1).contiguous()
        return self.waves[T]

    def project(
        self, p: Products[Operand], i: int, x: Tensor, norm: Normed[Operand], B: int
    ) -> tuple[Tensor, Tensor | None]:
        assert norm.y is not None
        turn = llama_kernels.Turn(*self._waves(len(x) // B), self.turning, self.norms_heads, self.epsilon)
        return p.linear_turned(self.blocks[i].qkv, norm.y, turn)

    def project_backward(self, p: Products[Operand], i: int, dqkv: Tensor, saved: Saved[Operand], B: int) -> Operand:
        cos, sin = self._waves(len(dqkv) // B)

        def kernel(out: Fp8Out | None) -> tuple[Tensor, Tensor | None]:
            assert saved.rstd is not None
            return llama_kernels.rotate_back(dqkv, saved.qkv, cos, sin, saved.rstd, self.norms_heads, out)

        return p.norm_backward(self.blocks[i].qkv, kernel).dy


class LlamaStep(RotaryStep[Operand]):
    """The step of the family llama."""

    PACKED = {"attn.qkv": RotaryStep.QKV, "mlp.up": ("mlp.gate_proj", "mlp.up_proj")}
    NORMS = ("attn_norm", "mlp_norm", "norm")

    def mlp(self, p: Products[Operand], block: Block, y: Operand) -> tuple[Operand, SavedMlp[Operand]]:
        pre = p.linear(block.up, y)
        return p.input(block.down, llama_kernels.swiglu(pre)), SavedMlp(pre, None)

    def mlp_backward(self, p: Products[Operand], i: int, dy: Operand, saved: SavedMlp[Operand]) -> Operand:
        up, down = self.blocks[i].up, self.blocks[i].down
        dpre, act = llama_kernels.swiglu_backward(p.input_grad(down, dy), saved.kept)
        p.weight_grad(down, dy, p.saved(p.input(down, act)), not self.first)
        del act
        return p.output_grad(up, dpre)
