"""Launchers of the kernels of families with RMSNorm and rotary positions, beside those of `trainer/fused/kernels.py`.

Bytes of one micro-batch of M tokens, bf16 activations of width C, an MLP of inner width I:

    add_rms         8·M·C bytes   residual sum and RMSNorm: 2 reads, 2 writes
    rms_backward    8·M·C         dy, x and the residual gradient in, dx out; with weights also their gradient
                                  with a mix 10·M·C and 14·M·C: what is mixed in, and its gradient in place
    rotate          4·M·(C + K)   queries and keys (K columns) in place, with their norm
    rotate_back     6·M·(C + K)   their gradient in place
    add_values      6·M·K         embedded values added to K columns in place; values_backward 6·M·K
    swiglu          6·M·I         forward; 12·M·I backward, which makes the activation again for the weight gradient

The launch shapes are those that were fastest on an H200 at widths of 768 and 1536, with heads of 64 and 128.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from trainer.fused.kernels import Fp8Out, _check, norm_warps
from trainer.fused.rotary_triton import (
    add_values_kernel,
    rms_backward_kernel,
    rms_kernel,
    rotary_kernel,
    swiglu_kernel,
    values_backward_kernel,
)


@dataclass(frozen=True)
class Mix:
    """A norm's input is keep · s + add · other, with s the residual stream."""

    numbers: Tensor  # (2,) fp32: keep, add
    other: Tensor  # (M, C) bf16


@dataclass(frozen=True)
class MixGradients:
    """The tensors to which `rms_backward` adds for a mix."""

    other: Tensor  # (M, C) bf16
    sums: Tensor  # (P, 2) fp32, P = norm_partials(C, device): of du·u and of du·other, u the norm's input


def mix_gradients(numbers: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `keep` and `add`, (N,) fp32, from the `numbers` (N, 2) and the `sums` (N, P, 2) of N mixes.

    That of `keep` is the sum of du·s, and s = (u - add·other) / keep, so s need not be saved. The rounding of u, which
    this divides by `keep`, shows where keep·s is a small part of u. Below 1/128 the division is damped.
    """
    keep, add = numbers.unbind(1)
    with_u, with_other = sums.sum(1).unbind(1)
    return (with_u - add * with_other) * keep / (keep.square() + 2.0**-14), with_other


def embed_rms(
    tokens: Tensor, wte: Tensor, weight: Tensor | None, epsilon: float, norm_first: bool, fp8: Fp8Out | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x[i] = wte[tokens[i]], with `norm_first` its RMSNorm without weights, and the RMSNorm y of x.

    tokens (M,) int64, wte (V, C) and weight (C,) bf16. Returns x and y (M, C) bf16, and two (M,) fp32: 1 / the root
    mean square of the table's rows (not written without `norm_first`), and that of x. With `fp8` y is e4m3, here and
    below.
    """
    M, C = tokens.numel(), wte.shape[1]
    embedded = wte.new_empty(M, dtype=torch.float32)
    x, y, rstd = _rms(
        wte, weight, epsilon, fp8, M, C, tokens=tokens, total=True, embedded=embedded if norm_first else None
    )
    return x, y, embedded, rstd


def add_rms(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    fp8: Fp8Out | None = None,
    mix: Mix | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta, or the mix of it, rounded to bf16, and the RMSNorm y of that; all (M, C). Returns both, and rstd (M,)
    fp32."""
    assert delta is None or delta.shape == x.shape
    return _rms(x, weight, epsilon, fp8, *x.shape, delta=delta, total=True, mix=mix)


def rms_again(x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    """The y of an RMSNorm from its saved statistic, bit for bit."""
    return _rms(x, weight, 0.0, None, *x.shape, rstd=rstd)[1]


def _rms(
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    fp8: Fp8Out | None,
    M: int,
    C: int,
    *,
    tokens: Tensor | None = None,
    delta: Tensor | None = None,
    total: bool = False,
    rstd: Tensor | None = None,
    embedded: Tensor | None = None,
    mix: Mix | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    other, numbers = _parts(mix, M, C)
    _check(x, tokens, delta, other, numbers, weight, rstd)
    known = rstd is not None
    added = x.new_empty(M, C) if total else None
    y = x.new_empty(M, C, dtype=x.dtype if fp8 is None else torch.float8_e4m3fn)
    rstd = x.new_empty(M, dtype=torch.float32) if rstd is None else rstd
    scale, amax = (None, None) if fp8 is None else (fp8.scale, fp8.amax)
    R, programs, warps, stages = _rms_shape(C, fp8 is not None, x.device)
    groups = triton.cdiv(M, R)
    rms_kernel[(min(groups, programs),)](
        x, tokens, delta, other, numbers, weight, added, y, rstd, embedded, scale, amax, M, C, groups, epsilon,
        KNOWN=known, R=R, BC=triton.next_power_of_2(C), STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return x if added is None else added, y, rstd


def rms_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    sums: Tensor | None,
    fp8: Fp8Out | None = None,
    normed: bool = False,
    mix: Mix | None = None,
    into: MixGradients | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, (M, C) bf16, through its RMSNorm, plus `residual`: the gradient that skips the norm.

    With `normed`, x is the norm's output (without weights) instead. With `fp8`, the second result is the gradient as
    (M, C) e5m2. Adds the gradient of the weight to sums (P, C) fp32, P = norm_partials(C, device). With a mix, x is
    mixed, and the result is the gradient of the residual stream in it; adds the others to `into`.
    """
    M, C = dy.shape
    R, programs, warps, stages = _rms_backward_shape(C, fp8 is not None, weight is not None, dy.device)
    assert x.shape == dy.shape and (sums is None) == (weight is None)
    assert sums is None or (sums.dtype == torch.float32 and sums.shape[1] == C and programs <= len(sums))
    other, numbers = _parts(mix, M, C)
    dother, dots = (into.other, into.sums) if into else (None, None)
    assert (mix is None) == (dots is None)
    assert dots is None or (dots.shape[1:] == (2,) and dots.dtype == torch.float32 and programs <= len(dots))
    _check(dy, x, rstd, weight, residual, other, dother, numbers, sums, dots)
    dx, dx8, scale, amax = torch.empty_like(dy), None, None, None
    if fp8:
        dx8, scale, amax = torch.empty_like(dy, dtype=torch.float8_e5m2), fp8.scale, fp8.amax
    rms_backward_kernel[(programs,)](
        dy, x, rstd, weight, residual, other, dother, numbers, dx, dx8, scale, amax, sums, dots,
        M, C, triton.cdiv(M, R),
        NORMED=normed, R=R, BC=triton.next_power_of_2(C), STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dx, dx8


def _parts(mix: Mix | None, M: int, C: int) -> tuple[Tensor | None, Tensor | None]:
    if mix is None:
        return None, None
    assert mix.other.shape == (M, C) and mix.numbers.shape == (2,) and mix.numbers.dtype == torch.float32
    return mix.other, mix.numbers


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, norm: bool, epsilon: float) -> Tensor:
    """Turn the first `heads` heads of packed projections (M, N) bf16, in place; with `norm` each is then RMS-normed.

    cos and sin (T, D/2) fp32: those of a sequence's positions, for heads of width D, whose pairs are (i, i + D/2).
    Returns 1 / the root mean squares (M, heads) fp32, not written without `norm`.
    """
    rstd = qkv.new_empty(len(qkv), heads, dtype=torch.float32)
    _rotate(qkv, cos, sin, rstd, None, norm, epsilon)
    return rstd


def rotate_back(gradient: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, norm: bool) -> None:
    """From the gradient of `rotate`'s result (M, N), in place, to that of its input. `qkv`: the result."""
    assert qkv.shape == gradient.shape
    _rotate(gradient, cos, sin, rstd, qkv, norm, 0.0)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, saved: Tensor | None, norm: bool, epsilon: float
) -> None:
    (M, N), (T, half), heads = x.shape, cos.shape, rstd.shape[1]
    assert sin.shape == cos.shape and 2 * half * heads <= N and cos.dtype == sin.dtype == rstd.dtype == torch.float32
    _check(x, cos, sin, rstd, saved)
    R, H, warps = _rotary_shape(heads, x.device)
    rotary_kernel[(triton.cdiv(M, R), triton.cdiv(heads, H))](
        x, cos, sin, rstd, saved, M, T, heads, N, epsilon,
        NORM=norm, BACKWARD=saved is not None, R=R, H=H, HALF=half, D2=triton.next_power_of_2(half), num_warps=warps,
    )  # fmt: skip


def add_values(qkv: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, tokens: Tensor, table: Tensor) -> None:
    """Add 2·sigmoid(weight · front) · table[token] to the values of packed projections (M, N) bf16, in place: the value
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


# ── launch shapes, as in `trainer/fused/kernels.py` ──────────────────────────────────────────────────────────────


def _rms_shape(C: int, fp8: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Rows that a program handles at a time, programs, warps, stages of the load pipeline."""
    if device.type != "cuda":
        return 64, 2, 4, 1
    if C <= 1024:
        return (2, 1056, 1, 1) if fp8 else (2, 528, 1, 3)
    return 1, 528 if fp8 else 1056, norm_warps(C, 64), 3


def _rms_backward_shape(C: int, fp8: bool, weighted: bool, device: torch.device) -> tuple[int, int, int, int]:
    """As `_rms_shape`; with a weight, or a mix, at most `norm_partials` programs."""
    if device.type != "cuda":
        return 32, 2, 4, 1
    if fp8:
        return 2, 528 if C <= 1024 and not weighted else 264, norm_warps(C, 16), 4
    return (1, 660, 2, 4) if weighted and C <= 1024 else (2, 264, norm_warps(C, 8), 4)


def _rotary_shape(heads: int, device: torch.device) -> tuple[int, int, int]:
    """Rows and heads of a tile, warps."""
    if device.type != "cuda":
        return 64, min(4, triton.next_power_of_2(heads)), 4
    return 2, min(32, triton.next_power_of_2(heads)), 4


def _values_shape(device: torch.device) -> tuple[int, int, int]:
    """Rows that a program handles at a time, programs of the backward pass, warps."""
    return (2, 2112, 2) if device.type == "cuda" else (64, 2, 4)


def _swiglu_shape(device: torch.device) -> tuple[int, int, int]:
    """Rows and columns of a tile, warps."""
    return (8, 512, 8) if device.type == "cuda" else (64, 256, 4)
