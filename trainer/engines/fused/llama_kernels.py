"""Launchers of the kernels of llama and modern alone: rotary positions, value embeddings, smear and SwiGLU. kernels.py
has those of all families.

Bytes of one micro-batch of M tokens, bf16 activations of width C, an MLP of inner width I:

    rotate          4·M·(C + K) bytes   queries and keys (K columns) in place, with their norm; on sm_90, and for heads
                                        of 64 and 128, in the product's epilogue (`epilogues.rotary_linear`)
    rotate_back     6·M·(C + K)         their gradient in place; in fp8 5·M·(C + K) + 3·M·K, with the values' cast
    add_values      6·M·K               embedded values added to K columns in place; values_backward 6·M·K
    smear           4·M·C               each embedding and the one before it; smear_backward 6·M·C
    swiglu          6·M·I               forward; 12·M·I backward, which makes the activation again

The launch shapes are those that were fastest on an H200, smear's on an H100, at widths of 768 and 1536, with heads of
64 and 128. If rotate_back stored the transposed bytes, too, it would gain nothing: 0.34 to 0.40 ms on an H100, at best,
against 0.24 to 0.26 and 0.12 for a transpose after it; by TMA 0.40 and more.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from trainer.engines.fused.kernels import Fp8Out, _check, norm_warps
from trainer.engines.fused.llama_triton import (
    add_values_kernel,
    rotary_kernel,
    smear_backward_kernel,
    smear_kernel,
    swiglu_kernel,
    values_backward_kernel,
)


class Turn(NamedTuple):
    """What `rotate` does to a row: its first `heads` heads turn, and with `norm` each is then RMS-normed.

    cos and sin (T, D/2) fp32: those of a sequence's positions, for heads of width D, whose pairs are (i, i + D/2).
    """

    cos: Tensor
    sin: Tensor
    heads: int
    norm: bool
    epsilon: float


def rotate(qkv: Tensor, turn: Turn) -> Tensor:
    """Turn packed projections (M, N) bf16, in place. Returns 1 / the root mean squares (M, heads) fp32, not written
    without a norm."""
    rstd = qkv.new_empty(len(qkv), turn.heads, dtype=torch.float32)
    _rotate(qkv, turn.cos, turn.sin, rstd, None, turn.norm, turn.epsilon)
    return rstd


def rotate_back(
    gradient: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, norm: bool, fp8: Fp8Out | None = None
) -> tuple[Tensor, Tensor | None]:
    """From the gradient of `rotate`'s result (M, N), in place, to that of its input. `qkv`: the result. With `fp8` the
    gradient stays, and the second result is that of the input, the other heads' too, as (M, N) e5m2."""
    assert qkv.shape == gradient.shape
    dx8 = None if fp8 is None else torch.empty_like(gradient, dtype=torch.float8_e5m2)
    _rotate(gradient, cos, sin, rstd, qkv, norm, 0.0, dx8, fp8)
    return gradient, dx8


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    rstd: Tensor,
    saved: Tensor | None,
    norm: bool,
    epsilon: float,
    x8: Tensor | None = None,
    fp8: Fp8Out | None = None,
) -> None:
    (M, N), (T, half), turning = x.shape, cos.shape, rstd.shape[1]
    assert sin.shape == cos.shape and 2 * half * turning <= N and cos.dtype == sin.dtype == rstd.dtype == torch.float32
    _check(x, cos, sin, rstd, saved)
    heads, scale, amax = (N // (2 * half), fp8.scale, fp8.amax) if fp8 else (turning, None, None)
    R, H, programs, warps = _rotary_shape(heads, fp8 is not None, x.device)
    groups = triton.cdiv(M, R)
    rotary_kernel[(min(groups, programs), triton.cdiv(heads, H))](
        x, cos, sin, rstd, saved, x8, scale, amax, M, T, turning, heads, N, groups, epsilon,
        NORM=norm, BACKWARD=saved is not None, R=R, H=H, HALF=half, D2=triton.next_power_of_2(half), num_warps=warps,
    )  # fmt: skip


def add_values(qkv: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, tokens: Tensor, table: Tensor) -> None:
    """Add 3·sigmoid(weight · front) · table[token] to the values of packed projections (M, N) bf16, in place: the value
    embeddings of nanochat, with a gate for each head.

    front: the first G numbers of x·rstd, the norm of x (M, C) bf16; weight (kv_heads, G) bf16, tokens (M,) int64, table
    (V, kv_heads·D) bf16. The values are the last kv_heads·D columns of qkv.
    """
    values, shape = _values(qkv, x, rstd, weight, tokens, table)
    (M, C), heads = x.shape, len(weight)
    R, _, warps = _values_shape(x.device)
    add_values_kernel[(triton.cdiv(M, R),)](
        values, x, rstd, weight, tokens, table, M, C, heads, qkv.shape[1], R=R, **shape, num_warps=warps
    )


def values_backward(
    dinput: Tensor, dqkv: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, tokens: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the table's rows (M, kv_heads·D) bf16 and of the gate's weight (kv_heads, G) fp32. That of the
    norm's output is added to `dinput` (M, C), in place. `dqkv`: that of the result of `add_values`, which is also the
    gradient of its input.
    """
    values, shape = _values(dqkv, x, rstd, weight, tokens, table)
    _check(x, dinput)
    (M, C), heads = x.shape, len(weight)
    R, programs, warps = _values_shape(x.device)
    groups = triton.cdiv(M, R)
    programs = min(programs, groups)
    drows, sums = x.new_empty(M, table.shape[1]), rstd.new_empty(programs, *weight.shape)
    values_backward_kernel[(programs,)](
        values, x, rstd, weight, tokens, table, drows, dinput, sums, M, C, heads, dqkv.shape[1], groups,
        R=R, **shape, num_warps=warps,
    )  # fmt: skip
    return drows, sums.sum(0)


def _values(
    qkv: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, tokens: Tensor, table: Tensor
) -> tuple[Tensor, dict[str, int]]:
    """The values of packed projections, a view, and the sizes of the kernels' blocks."""
    (heads, G), K, M = weight.shape, table.shape[1], len(x)
    assert len(qkv) == len(rstd) == len(tokens) == M and K % heads == 0 and x.shape[1] >= G
    _check(qkv, x, rstd, weight, tokens, table)
    D = K // heads
    blocks = {name: triton.next_power_of_2(size) for name, size in (("H", heads), ("G", G), ("D", D))}
    return qkv[:, -K:], {**blocks, "WIDTH": G, "HEAD": D}


def smear(x: Tensor, weight: Tensor, strength: Tensor, T: int) -> Tensor:
    """x + strength · sigmoid(front · weight) · the row before, none at the start of a sequence: nanochat's smear.

    x (M, C) bf16, sequences of T rows. front: the first G numbers of x; weight (G,) and strength (1,) fp32.
    """
    out = torch.empty_like(x)
    R, _, warps = _smear_shape(x)
    smear_kernel[(triton.cdiv(len(x), R),)](
        x, weight, strength, out, len(x), T, x.shape[1], R=R, **_smear_blocks(x, weight, strength), num_warps=warps
    )
    return out


def smear_backward(grad: Tensor, x: Tensor, weight: Tensor, strength: Tensor, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient (M, C) of `smear`'s result to those of x (bf16), of the weight and of the strength (fp32)."""
    assert grad.shape == x.shape
    dx, (R, programs, warps) = torch.empty_like(x), _smear_shape(x)
    groups = triton.cdiv(len(x), R)
    sums = weight.new_empty(min(programs, groups), len(weight) + 1)
    smear_backward_kernel[(len(sums),)](
        x, weight, strength, grad, dx, sums, len(x), T, x.shape[1], groups,
        R=R, **_smear_blocks(x, weight, strength, grad), num_warps=warps,
    )  # fmt: skip
    total = sums.sum(0)
    return dx, total[:-1], total[-1:]


def _smear_blocks(x: Tensor, weight: Tensor, strength: Tensor, *more: Tensor) -> dict[str, int]:
    assert weight.dtype == strength.dtype == torch.float32 and strength.shape == (1,)
    _check(x, weight, strength, *more)
    G = len(weight)
    return {"BC": triton.next_power_of_2(x.shape[1]), "G": triton.next_power_of_2(G), "WIDTH": G}


def swiglu(pre: Tensor) -> Tensor:
    """silu(gate) · up of pre (M, 2I) = [gate, up], (M, I) bf16 (Shazeer 2020)."""
    act = pre.new_empty(len(pre), pre.shape[1] // 2)
    _swiglu(pre, act, None, None)
    return act


def swiglu_backward(dact: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (M, 2I) of `pre` from that of swiglu(pre), (M, I); and swiglu(pre)."""
    act, dpre = torch.empty_like(dact), torch.empty_like(pre)
    _swiglu(pre, act, dact, dpre)
    return dpre, act


def _swiglu(pre: Tensor, act: Tensor, dact: Tensor | None, dpre: Tensor | None) -> None:
    _check(pre, act, dact, dpre)
    M, N = act.shape
    BM, BN, warps = _swiglu_shape(pre.device)
    tiles = triton.cdiv(M, BM)
    swiglu_kernel[(triton.cdiv(N, BN), tiles)](pre, act, dact, dpre, M, N, tiles, BM=BM, BN=BN, num_warps=warps)


# ── launch shapes, as in `trainer/engines/fused/kernels.py`
# ──────────────────────────────────────────────────────────────


def _rotary_shape(heads: int, fp8: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Rows and heads of a tile, programs for all rows at most, warps. In fp8 each program adds to one maximum."""
    if device.type != "cuda":
        return 64, min(4, triton.next_power_of_2(heads)), 1, 4
    return (16, 4, 264, 4) if fp8 else (2, min(32, triton.next_power_of_2(heads)), 1 << 30, 4)


def _values_shape(device: torch.device) -> tuple[int, int, int]:
    """Rows that a program handles at a time, programs of the backward pass, warps."""
    return (2, 2112, 2) if device.type == "cuda" else (64, 2, 4)


def _smear_shape(x: Tensor) -> tuple[int, int, int]:
    """Rows that a program handles at a time, programs of the backward pass, warps."""
    return (1, 2112, norm_warps(x.shape[1], 32)) if x.is_cuda else (64, 2, 4)


def _swiglu_shape(device: torch.device) -> tuple[int, int, int]:
    """Rows and columns of a tile, warps."""
    return (8, 512, 8) if device.type == "cuda" else (64, 256, 4)
