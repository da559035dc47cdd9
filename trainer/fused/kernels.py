"""The memory-bound kernels of the fused step, in Triton: norms, GELU, cross-entropy, column sums, AdamW.

Next to the matrix products these do almost no arithmetic: what each costs is the bytes it moves, at about 4.2 TB/s on
an H200 that sustains 400 to 600 TFLOP/s in the products. So each reads every operand once, writes every result once, 16
bytes a thread at a time, and does while it is there whatever else needs the same numbers. Of one micro-batch of
M tokens, bf16 activations of width C and V logits a token:

    add_norm        8·M·C bytes   residual sum and LayerNorm: 2 reads, 2 writes
    norm_backward   8·M·C         dy, x and the residual gradient in, dx out; dweight, dbias and the next bias's
                                  gradient come along as column sums
    gelu            16·M·C        of 4C columns
    column_sums     2·M·C         of what a product or cuDNN made: gradients of biases
    cross_entropy   4·M·V         the gradient takes the logits' place; the second read of a row is from the L2 cache
    adamw           30 a parameter, once a step: master, both moments (read and written), gradient, bf16 weight
    cast8           3·M·N, or 4·M·N with the transpose; cross_entropy8 3·M·V; transpose8 2·M·N

At GPT-2's 124M and 65,536 tokens that is 0.1 ms a norm and 3.1 ms of cross-entropy. Measured
on an H200: 3.4 to 4.1 TB/s, and 2.5 in cross_entropy8, which is bound by its random numbers.

Column sums over M rows are made by P programs, each adding into its own row of `sums`; the caller adds the P rows once
a step. There are no floating-point atomics but a maximum, so the same input gives the same bits again.

fp8 halves the bytes and the time of a matrix product. Values are multiplied by a scale before the cast (e4m3 for
weights and activations, up to 448; e5m2 for gradients, up to 57,344) and saturate; the largest magnitude before scaling
is kept in `amax`, from which the caller makes the next scale. Its products want both operands with the summed index
innermost, hence the transposes.

What a product wrote last is still in the L2 cache (50 MB), so kernels begin with the last rows, and what they write
last, the first rows, is there for the next product.

Row counts may be anything. Widths may be any multiple of 8; multiples of 16 are the fast ones. On a CPU everything
runs in Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported), which is for tests on small shapes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
EPSILON = tl.constexpr(1e-5)  # of every LayerNorm of GPT-2
LOG2E = tl.constexpr(1.4426950408889634)
# The tanh form of GELU: 0.5·x·(1 + tanh(x·(ROOT + CUBE·x²))), ROOT = sqrt(2/pi), CUBE = 0.044715·ROOT.
ROOT = tl.constexpr(0.7978845608028654)
CUBE = tl.constexpr(0.035677408136300125)
# Smaller than any logit, and finite: a difference of two of them is 0 and not NaN.
LOWEST = tl.constexpr(-1.0e30)

# ── arithmetic that kernels share ────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _bf16(x):
    """fp32 to bf16, to nearest, ties to even. The interpreter by itself cuts the low bits off."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (bits & -65536).to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@triton.jit
def _fp8(x, GRADIENT: tl.constexpr):
    """fp32 to e5m2 or e4m3, to nearest; larger numbers become the largest."""
    if GRADIENT:
        if INTERPRETED:
            x = _on_grid(x, 57344.0, 2.0**-14, 4)
        return x.to(tl.float8e5)
    else:
        if INTERPRETED:
            x = _on_grid(x, 448.0, 2.0**-6, 8)
        return x.to(tl.float8e4nv)


@triton.jit
def _on_grid(x, LARGEST: tl.constexpr, SMALLEST_NORMAL: tl.constexpr, STEPS: tl.constexpr):
    """What the GPU's cast does by itself and the interpreter's does not: saturate, and round to nearest even."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, SMALLEST_NORMAL) / STEPS
    # Above 1.5·2^23 neighbours in float32 are whole numbers.
    return ((x / step + 12582912.0) - 12582912.0) * step


@triton.jit
def _stochastic(x, random):
    """x rounded to e5m2's grid, up or down with odds that make it right on average. random: uint32, uniform.

    21 bits lie below the two that e5m2 keeps: adding 21 random ones and cutting carries with just those odds. Numbers
    below 2^-14 lie on an even grid; adding 2^-14 brings them to where float32 has the same one.
    """
    size = tl.abs(x)
    lift = tl.where(size < 2.0**-14, 2.0**-14, 0.0)
    bits = (size + lift).to(tl.int32, bitcast=True) + (random >> 11).to(tl.int32)
    size = (bits & -2097152).to(tl.float32, bitcast=True) - lift
    return tl.where(x < 0, -size, size)


@triton.jit
def _mixed(x):
    """Bits of a uint32 spread over all of it (the middle of MurmurHash3's finalizer)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    return x ^ (x >> 13)


@triton.jit
def _tanh(x):
    """One instruction on the GPU, its error at most 2^-11: below bf16's rounding."""
    if INTERPRETED:
        e = tl.exp(-2.0 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x < 0, -t, t)
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _gelu_of(x):
    half = 0.5 * x
    return half * _tanh(x * (ROOT + CUBE * x * x)) + half


@triton.jit
def _gelu_slope(x):
    square = x * x
    t = _tanh(x * (ROOT + CUBE * square))
    return 0.5 + 0.5 * t + 0.5 * x * (1.0 - t * t) * (ROOT + 3 * CUBE * square)


@triton.jit
def _add_into(sums_ptr, values, mask):
    tl.store(sums_ptr, tl.load(sums_ptr, mask=mask, other=0.0) + values, mask=mask)


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _norm_kernel(
    x_ptr, tokens_ptr, delta_ptr, delta_bias_ptr, weight_ptr, bias_ptr,
    sum_ptr, y_ptr, mean_ptr, rstd_ptr, scale_ptr, amax_ptr,
    M, T, C, groups,
    KNOWN: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Groups of R whole rows, the last first. With tokens, x is the token table and delta the position table."""
    cols = tl.arange(0, BC)
    used = cols < C
    weight = tl.load(weight_ptr + cols, mask=used, other=0.0)[None, :]
    bias = tl.load(bias_ptr + cols, mask=used, other=0.0)[None, :]
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
        largest = tl.zeros([BC], tl.float32)
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), num_stages=STAGES):
        rows = ((groups - 1 - group) * R + tl.arange(0, R)).to(tl.int64)
        inside = rows < M
        mask = inside[:, None] & used[None, :]
        at = rows[:, None] * C + cols[None, :]
        if tokens_ptr is not None:
            tokens = tl.load(tokens_ptr + rows, mask=inside, other=0)
            x = tl.load(x_ptr + tokens[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            x += tl.load(delta_ptr + (rows % T)[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if delta_ptr is not None:
                x += tl.load(delta_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if delta_bias_ptr is not None:
                x += tl.load(delta_bias_ptr + cols, mask=used, other=0.0).to(tl.float32)[None, :]
        if sum_ptr is not None:
            rounded = _bf16(x)
            tl.store(sum_ptr + at, rounded, mask=mask)
            x = rounded.to(tl.float32)
        if KNOWN:
            centred = x - tl.load(mean_ptr + rows, mask=inside, other=0.0)[:, None]
            rstd = tl.load(rstd_ptr + rows, mask=inside, other=0.0)
        else:
            mean = tl.sum(x, 1) / C
            centred = tl.where(used[None, :], x - mean[:, None], 0.0)
            rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + EPSILON)
            tl.store(mean_ptr + rows, mean, mask=inside)
            tl.store(rstd_ptr + rows, rstd, mask=inside)
        y = centred * rstd[:, None] * weight.to(tl.float32) + bias.to(tl.float32)
        if scale_ptr is not None:
            tl.store(y_ptr + at, _fp8(y * scale, False), mask=mask)
            largest = tl.maximum(largest, tl.max(tl.where(mask, tl.abs(y), 0.0), 0))
        else:
            tl.store(y_ptr + at, _bf16(y), mask=mask)
    if scale_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(largest, 0))


@triton.jit
def _norm_backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, residual_ptr, dx_ptr, dx8_ptr, scale_ptr, amax_ptr, sums_ptr,
    M, C, P, groups,
    R: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes groups of R rows far apart, the last first; its column sums stay in registers to the end."""
    cols = tl.arange(0, BC)
    used = cols < C
    weight = tl.load(weight_ptr + cols, mask=used, other=0.0)[None, :]
    dweight = tl.zeros([BC], tl.float32)
    dbias = tl.zeros([BC], tl.float32)
    dx_sum = tl.zeros([BC], tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
        largest = tl.zeros([BC], tl.float32)
    for group in tl.range(tl.program_id(0), groups, tl.num_programs(0), num_stages=STAGES):
        rows = ((groups - 1 - group) * R + tl.arange(0, R)).to(tl.int64)
        inside = rows < M
        mask = inside[:, None] & used[None, :]
        at = rows[:, None] * C + cols[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + at, mask=mask, other=0.0)
        mean = tl.load(mean_ptr + rows, mask=inside, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=inside, other=0.0)[:, None]
        normal = (x - mean) * rstd
        g = dy * weight.to(tl.float32)
        # Both sums in one reduction. Unused columns have g = 0, so they add nothing to either.
        sum_g, sum_gx = tl.split(tl.sum(tl.join(g, g * normal), 1))
        dx = g * rstd - (normal * (sum_gx[:, None] * rstd / C) + sum_g[:, None] * rstd / C)
        if residual_ptr is not None:
            dx += residual.to(tl.float32)
        rounded = _bf16(dx)
        tl.store(dx_ptr + at, rounded, mask=mask)
        dweight += tl.sum(dy * normal, 0)
        dbias += tl.sum(dy, 0)
        dx_sum += tl.sum(rounded.to(tl.float32), 0)
        if scale_ptr is not None:
            tl.store(dx8_ptr + at, _fp8(dx * scale, True), mask=mask)
            largest = tl.maximum(largest, tl.max(tl.where(mask, tl.abs(dx), 0.0), 0))
    if scale_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(largest, 0))
    sums_ptr += tl.program_id(0) * C + cols
    _add_into(sums_ptr, dweight, used)
    _add_into(sums_ptr + P * C, dbias, used)
    _add_into(sums_ptr + 2 * P * C, dx_sum, used)


# ── GELU ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _gelu_kernel(h_ptr, a_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(a_ptr + at, _bf16(_gelu_of(tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32))), mask=mask)


# ── column sums ──────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _column_sums_kernel(x_ptr, sums_ptr, M, N, stride, tiles, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    used = cols < N
    total = tl.zeros([BM, BN], tl.float32)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        rows = ((tiles - 1 - tile) * BM + tl.arange(0, BM)).to(tl.int64)
        mask = (rows < M)[:, None] & used[None, :]
        total += tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    _add_into(sums_ptr + tl.program_id(1) * N + cols, tl.sum(total, 0), used)


# ── cross-entropy ────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, targets_ptr, scale_ptr, losses_ptr, dlogits8_ptr, q_ptr, seed_ptr,
    M, V, width,
    BACKWARD: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """R rows a program, the last first, in tiles of BLOCK columns, of which a thread holds G neighbours.

    The first pass keeps a maximum and a sum of exponentials for every G columns of the tile, so that rescaling costs
    one exponential in G: with one a column, all three a logit would take the special function units 2.8 ms of the
    3.1 ms that the memory takes. The second pass goes backwards, since the end of the row is what caches still hold.
    """
    rows = ((tl.num_programs(0) - 1 - tl.program_id(0)) * R + tl.arange(0, R)).to(tl.int64)
    inside = rows < M
    target = tl.load(targets_ptr + rows, mask=inside, other=0)
    # Loaded before any reduction: other warps may overwrite the row only after the barriers that those bring.
    chosen = tl.load(logits_ptr + rows * width + target, mask=inside, other=0.0).to(tl.float32)
    lanes = (tl.arange(0, BLOCK // G) * G)[None, :, None] + tl.arange(0, G)[None, None, :]
    row_ptr = logits_ptr + rows[:, None, None] * width + lanes
    mask = inside[:, None, None]
    whole = V // BLOCK * BLOCK
    top = tl.full([R, BLOCK // G], LOWEST, tl.float32)
    total = tl.zeros([R, BLOCK // G], tl.float32)
    for first in range(0, whole, BLOCK):
        x = tl.load(row_ptr + first, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        peak = tl.maximum(top, tl.max(x, 2))
        powers = tl.exp2(x * LOG2E - (peak * LOG2E)[:, :, None])
        total = total * tl.exp2((top - peak) * LOG2E) + tl.sum(powers, 2)
        top = peak
    for first in range(whole, V, BLOCK):
        # The load's mask goes by the width, a multiple of 8, and so keeps 16 bytes a thread; V chooses among them.
        real = first + lanes < V
        x = tl.load(row_ptr + first, mask=mask & (first + lanes < width), other=0.0).to(tl.float32)
        x = tl.where(real, x, LOWEST)
        peak = tl.maximum(top, tl.max(x, 2))
        powers = tl.where(real, tl.exp2(x * LOG2E - (peak * LOG2E)[:, :, None]), 0.0)
        total = total * tl.exp2((top - peak) * LOG2E) + tl.sum(powers, 2)
        top = peak
    highest = tl.max(top, 1)
    total_row = tl.sum(total * tl.exp2((top - highest[:, None]) * LOG2E), 1)
    tl.store(losses_ptr + rows, highest + tl.log(total_row) - chosen, mask=inside)
    if BACKWARD:
        scale = tl.load(scale_ptr)
        random = rows
        if dlogits8_ptr is not None:
            scale *= tl.load(q_ptr)
            random = _mixed(rows.to(tl.uint32) * 0x9E3779B1 + tl.load(seed_ptr).to(tl.uint32))
        # scale·softmax is one power of two: 2^(x·log2(e) + shift).
        shift = tl.log2(scale / total_row) - highest * LOG2E
        shifts, row, dice = shift[:, None, None], rows[:, None, None], random[:, None, None]
        for first in range(whole, width, BLOCK):
            columns = first + lanes
            given = mask & (columns < width)
            x = tl.load(row_ptr + first, mask=given, other=0.0).to(tl.float32)
            p = tl.where(columns < V, tl.exp2(x * LOG2E + shifts), 0.0)
            _store_dlogits(logits_ptr, dlogits8_ptr, p, row, columns, dice, width, given)
        for done in range(0, whole, BLOCK):
            first = whole - BLOCK - done
            x = tl.load(row_ptr + first, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            _store_dlogits(logits_ptr, dlogits8_ptr, tl.exp2(x * LOG2E + shifts), row, first + lanes, dice, width, mask)
        # The target's is stored once more, less the scale: to look for it in every column cost 71 of 163 instructions.
        tl.debug_barrier()
        p = tl.exp2(chosen * LOG2E + shift) - scale
        _store_dlogits(logits_ptr, dlogits8_ptr, p, rows, target, random, width, inside)


@triton.jit
def _store_dlogits(logits_ptr, dlogits8_ptr, p, rows, columns, random, width, mask):
    at = rows * width + columns
    if dlogits8_ptr is not None:
        dice = _mixed((columns.to(tl.uint32) * 0x9E3779B1) ^ random)
        tl.store(dlogits8_ptr + at, _fp8(_stochastic(p, dice), True), mask=mask)
    else:
        tl.store(logits_ptr + at, _bf16(p), mask=mask)


# ── AdamW ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _adamw_kernel(
    weights16_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, grad_ptr, numbers_ptr,
    n, weight_decay, one_minus_beta1, one_minus_beta2, epsilon,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lr = tl.load(numbers_ptr)
    correction1 = tl.load(numbers_ptr + 1)
    correction2 = tl.load(numbers_ptr + 2)
    grad_scale = tl.load(numbers_ptr + 3)
    # Not a number is below nothing.
    if (tl.load(numbers_ptr + 4) != 0.0) & (tl.abs(grad_scale) < float("inf")):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        g = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32) * grad_scale
        m = tl.load(exp_avg_ptr + at, mask=mask, other=0.0)
        v = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0)
        w = tl.load(master_ptr + at, mask=mask, other=0.0)
        m += (g - m) * one_minus_beta1
        v += (g * g - v) * one_minus_beta2
        w -= lr * weight_decay * w
        w -= lr * (m * correction1) / (tl.sqrt(v * correction2) + epsilon)
        tl.store(exp_avg_ptr + at, m, mask=mask)
        tl.store(exp_avg_sq_ptr + at, v, mask=mask)
        tl.store(master_ptr + at, w, mask=mask)
        if weights16_ptr is not None:
            tl.store(weights16_ptr + at, _bf16(w), mask=mask)


# ── fp8 ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _cast8_kernel(
    x_ptr, h_ptr, x8_ptr, x8t_ptr, sums_ptr, scale_ptr, amax_ptr,
    M, N, tiles,
    GELU: tl.constexpr, GRADIENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BN columns a program, BM rows at a time. With h, what is cast is x·gelu'(h)."""
    cols = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    used = cols < N
    scale = tl.load(scale_ptr)
    largest = tl.zeros([BM, BN], tl.float32)
    total = tl.zeros([BM, BN], tl.float32)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        rows = ((tiles - 1 - tile) * BM + tl.arange(0, BM)).to(tl.int64)
        mask = (rows < M)[:, None] & used[None, :]
        at = rows[:, None] * N + cols[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if GELU:
            x = _gelu_of(x)
        if h_ptr is not None:
            slope = _gelu_slope(tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32))
            x *= slope
        x8 = _fp8(x * scale, GRADIENT)
        tl.store(x8_ptr + at, x8, mask=mask)
        if x8t_ptr is not None:
            tl.store(x8t_ptr + cols[:, None] * M + rows[None, :], tl.trans(x8), mask=tl.trans(mask))
        largest = tl.maximum(largest, tl.abs(x))
        if sums_ptr is not None:
            total += x
    tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0))
    if sums_ptr is not None:
        _add_into(sums_ptr + tl.program_id(1) * N + cols, tl.sum(total, 0), used)


@triton.jit
def _transpose8_kernel(x_ptr, xt_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    cols = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0)
    tl.store(xt_ptr + cols[:, None] * M + rows[None, :], tl.trans(x), mask=tl.trans(mask))


# ── launchers ────────────────────────────────────────────────────────────────────────────────────────────────────
# Each checks what a wrong call would turn into a wrong number, allocates its results, and never waits for the GPU.


@dataclass(frozen=True)
class Fp8Out:
    """How a result is written in fp8, and what is noted meanwhile; both (1,) fp32 on the device."""

    scale: Tensor  # what every number is multiplied by
    amax: Tensor  # raised to the largest magnitude before that


def norm_partials(C: int, device: torch.device) -> int:
    """The P of norm_backward's sums (3, P, C)."""
    return max(_norm_backward_shape(C, fp8, device)[1] for fp8 in (False, True))


def column_partials(device: torch.device) -> int:
    """The P of the sums (P, N) of column_sums and cast8."""
    return 64 if device.type == "cuda" else 2


def embed_norm(
    tokens: Tensor, wte: Tensor, wpe: Tensor, weight: Tensor, bias: Tensor, fp8: Fp8Out | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x[i] = wte[tokens[i]] + wpe[i % T], and its LayerNorm y.

    tokens (M,) int64, wte (V, C), wpe (T, C) with T the length of a sequence, weight and bias (C,), all bf16.
    Returns x and y (M, C) bf16, mean and rstd (M,) fp32. With `fp8` y is e4m3, here and in the norms below.
    """
    T, C = wpe.shape
    return _norm(wte, weight, bias, fp8, tokens=tokens, delta=wpe, M=tokens.numel(), T=T, C=C)


def add_norm(
    x: Tensor, delta: Tensor, delta_bias: Tensor | None, weight: Tensor, bias: Tensor, fp8: Fp8Out | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + delta (+ delta_bias), rounded to bf16, and the LayerNorm y of that. x and delta (M, C), the rest (C,).

    Returns x_new and y (M, C) bf16, mean and rstd (M,) fp32.
    """
    M, C = x.shape
    assert delta.shape == x.shape
    return _norm(x, weight, bias, fp8, delta=delta, delta_bias=delta_bias, M=M, C=C)


def norm_again(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The y of a norm whose statistics were kept, bit for bit."""
    M, C = x.shape
    return _norm(x, weight, bias, None, statistics=(mean, rstd), M=M, C=C)[1]


def _norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    fp8: Fp8Out | None,
    *,
    M: int,
    C: int,
    T: int = 1,
    tokens: Tensor | None = None,
    delta: Tensor | None = None,
    delta_bias: Tensor | None = None,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, delta, delta_bias, weight, bias, tokens)
    total = x.new_empty(M, C) if delta is not None else None
    y = x.new_empty(M, C, dtype=x.dtype if fp8 is None else torch.float8_e4m3fn)
    scale, amax = (None, None) if fp8 is None else (fp8.scale, fp8.amax)
    mean, rstd = statistics or (x.new_empty(M, dtype=torch.float32), x.new_empty(M, dtype=torch.float32))
    R, programs, warps, stages = _norm_shape(C, fp8 is not None, x.device)
    groups = triton.cdiv(M, R)
    _norm_kernel[(min(groups, programs),)](
        x, tokens, delta, delta_bias, weight, bias, total, y, mean, rstd, scale, amax, M, T, C, groups,
        KNOWN=statistics is not None, R=R, BC=triton.next_power_of_2(C), STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return x if total is None else total, y, mean, rstd


def norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    sums: Tensor,
    fp8: Fp8Out | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, (M, C) bf16, through its LayerNorm, plus `residual`: the gradient that arrives beside it.

    With `fp8`, the second result is the same as (M, C) e5m2. Adds to sums (3, P, C) fp32: the gradient of weight, that
    of bias, and the column sums of the result, which are the gradient of the bias of the projection before.
    P: norm_partials(C, device).
    """
    M, C = dy.shape
    R, programs, warps, stages = _norm_backward_shape(C, fp8 is not None, dy.device)
    P = sums.shape[1]
    assert x.shape == dy.shape and sums.shape == (3, P, C) and sums.dtype == torch.float32 and programs <= P
    _check(dy, x, mean, rstd, weight, residual, sums)
    dx, dx8, scale, amax = torch.empty_like(dy), None, None, None
    if fp8:
        dx8, scale, amax = torch.empty_like(dy, dtype=torch.float8_e5m2), fp8.scale, fp8.amax
    _norm_backward_kernel[(programs,)](
        dy, x, mean, rstd, weight, residual, dx, dx8, scale, amax, sums, M, C, P, triton.cdiv(M, R),
        R=R, BC=triton.next_power_of_2(C), STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dx, dx8


def gelu(h: Tensor) -> Tensor:
    """The tanh form of GELU, bf16 in and out, any shape."""
    _check(h)
    a = torch.empty_like(h)
    block, warps = _gelu_shape(h.device)
    _gelu_kernel[(triton.cdiv(h.numel(), block),)](h, a, h.numel(), BLOCK=block, num_warps=warps)
    return a


def column_sums(x: Tensor, sums: Tensor) -> None:
    """Adds the column sums of x (M, N) bf16, which may be some columns of a wider one, to sums (P, N) fp32."""
    M, N = x.shape
    assert x.stride(1) == 1 and x.dtype == torch.bfloat16
    _check(sums)
    grid, tiles, block = _column_grid(M, N, sums, _column_sums_shape(N, x.device))
    _column_sums_kernel[grid](x, sums, M, N, x.stride(0), tiles, **block)


def cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, scale: Tensor, losses: Tensor, backward: bool
) -> None:
    """losses[i] = -log softmax(logits[i, :vocab_size])[targets[i]], (M,) fp32.

    logits (M, V) bf16, targets (M,) int64, scale (1,) fp32 and positive. With `backward` the logits are overwritten by
    their gradient, scale · (softmax - onehot), 0 in the V - vocab_size padding columns.
    """
    _cross_entropy(logits, targets, vocab_size, scale, losses, None, None, None, backward)


def cross_entropy8(
    logits: Tensor, targets: Tensor, vocab_size: int, scale: Tensor, losses: Tensor, q: Tensor, seed: Tensor
) -> Tensor:
    """cross_entropy whose gradient, times q, is returned as (M, V) e5m2; the logits stay.

    q (1,) fp32, seed (1,) int32. It is rounded up or down at random so that sums over tokens stay right: most of it is
    far below what e5m2 keeps beside the largest. The same seed gives the same bits.
    """
    dlogits8 = torch.empty_like(logits, dtype=torch.float8_e5m2)
    _cross_entropy(logits, targets, vocab_size, scale, losses, dlogits8, q, seed, True)
    return dlogits8


def _cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    scale: Tensor,
    losses: Tensor,
    dlogits8: Tensor | None,
    q: Tensor | None,
    seed: Tensor | None,
    backward: bool,
) -> None:
    M, V = logits.shape
    assert 0 < vocab_size <= V and targets.shape == losses.shape == (M,)
    _check(logits, targets, scale, losses)
    R, block, group, warps = _cross_entropy_shape(dlogits8 is not None, logits.device)
    _cross_entropy_kernel[(triton.cdiv(M, R),)](
        logits, targets, scale, losses, dlogits8, q, seed, M, vocab_size, V,
        BACKWARD=backward, R=R, BLOCK=block, G=group, num_warps=warps,
    )  # fmt: skip


def cast8(
    x: Tensor,
    fp8: Fp8Out,
    transposed: bool = False,
    kind: Literal["plain", "gelu", "dgelu"] = "plain",
    h: Tensor | None = None,
    sums: Tensor | None = None,
    gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """x, gelu(x) or x · gelu'(h), (M, N) bf16, in fp8, and with `transposed` the same bytes as (N, M).

    e4m3, or e5m2 for a `gradient`. Adds the column sums of what is cast to sums (P, N) fp32.
    """
    M, N = x.shape
    assert (h is not None) == (kind == "dgelu") and (h is None or h.shape == x.shape)
    _check(x, h, sums, fp8.scale, fp8.amax)
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    x8 = torch.empty_like(x, dtype=dtype)
    # Triton 3.6 stores a quarter of a transposed e5m2 tile's bytes wrong; as bytes it transposes them right.
    x8t = x.new_empty(N, M, dtype=dtype) if transposed and not gradient else None
    BM, BN, warps, stages = _cast8_shape(x8t is not None, x.device)
    tiles = triton.cdiv(M, BM)
    assert sums is None or (sums.dtype == torch.float32 and sums.shape[1] == N)
    _cast8_kernel[(triton.cdiv(N, BN), min(tiles, 128) if sums is None else sums.shape[0])](
        x, h, x8, x8t, sums, fp8.scale, fp8.amax, M, N, tiles,
        GELU=kind == "gelu", GRADIENT=gradient, BM=BM, BN=BN, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return x8, transpose8(x8) if transposed and gradient else x8t


def transpose8(x8: Tensor) -> Tensor:
    """(M, N) of a one-byte type as (N, M) without gaps."""
    M, N = x8.shape
    _check(x8)
    x8t = x8.new_empty(N, M)
    BM, BN, warps = _transpose8_shape(x8.device)
    _transpose8_kernel[(triton.cdiv(N, BN), triton.cdiv(M, BM))](
        x8.view(torch.uint8), x8t.view(torch.uint8), M, N, BM=BM, BN=BN, num_warps=warps
    )
    return x8t


def adamw(
    weights16: Tensor | None,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    numbers: Tensor,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """One step of torch.optim.AdamW over flat slices of n elements, in place.

    master, exp_avg, exp_avg_sq (n,) fp32; grad (n,) fp32 or bf16; weights16 (n,) bf16 is given the new master, rounded.
    numbers (5,) fp32, on the device so that nothing waits for it: learning rate, 1/(1 - beta1^t), 1/(1 - beta2^t),
    what the gradient is multiplied by (clipping), and 1 or 0: whether to change anything. Nothing is changed either
    where the multiplier is not finite.
    """
    n = master.numel()
    assert numbers.shape == (5,) and numbers.dtype == master.dtype == exp_avg.dtype == exp_avg_sq.dtype == torch.float32
    assert all(t is None or t.shape == (n,) for t in (weights16, master, exp_avg, exp_avg_sq, grad))
    _check(weights16, master, exp_avg, exp_avg_sq, grad, numbers)
    block, warps = _adamw_shape(master.device)
    _adamw_kernel[(triton.cdiv(n, block),)](
        weights16, master, exp_avg, exp_avg_sq, grad, numbers,
        n, weight_decay, 1 - beta1, 1 - beta2, epsilon, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _check(*tensors: Tensor | None) -> None:
    """The kernels trust what they get: rows without gaps, on one device."""
    given = [tensor for tensor in tensors if tensor is not None]
    assert all(tensor.is_contiguous() and tensor.device == given[0].device for tensor in given)


# ── launch shapes, as measured by benchmarks/kernels.py on an H200 ───────────────────────────────────────────────
# On a CPU a program costs the interpreter milliseconds and its size next to nothing: few and large.


def _norm_shape(C: int, fp8: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Rows a program at a time, programs, warps, stages of the load pipeline."""
    if device.type != "cuda":
        return 64, 2, 4, 1
    if C <= 1024:
        return 2, 1056, 1 if fp8 else 2, 3
    return 2, 528, _warps(C, 16), 3


def _norm_backward_shape(C: int, fp8: bool, device: torch.device) -> tuple[int, int, int, int]:
    """The same. A thread has to hold the same columns of all R rows, so that summing over them needs no exchange.

    For that a row must have 8 columns a thread at least, and with fp8, whose stores want 16 side by side, R is 1: with
    more threads, or 2 rows in fp8, it took 5 to 20 times as long.
    """
    if device.type != "cuda":
        return 32, 2, 4, 1
    stages = 4 if C <= 2048 else 2
    if fp8:
        return 1, 660 if C <= 1024 else 264, _warps(C, 8), stages
    return (2, 528, _warps(C, 8), stages) if C <= 1024 else (1, 396, _warps(C, 16), stages)


def _warps(C: int, columns: int) -> int:
    """As many as give each thread that many columns of a row."""
    return max(1, triton.next_power_of_2(C) // (32 * columns))


def _gelu_shape(device: torch.device) -> tuple[int, int]:
    """Elements a program, warps."""
    return (4096, 8) if device.type == "cuda" else (65536, 4)


def _adamw_shape(device: torch.device) -> tuple[int, int]:
    """Elements a program, warps."""
    return (1024, 4) if device.type == "cuda" else (65536, 4)


def _column_sums_shape(N: int, device: torch.device) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps, stages of the load pipeline."""
    return (32, 128, 4, 5) if device.type == "cuda" else (64, 256, 4, 1)


def _column_grid(
    M: int, N: int, sums: Tensor, shape: tuple[int, int, int, int]
) -> tuple[tuple[int, int], int, dict[str, int]]:
    """(column blocks, P), how many tiles of rows there are, and the tile."""
    assert sums.dtype == torch.float32 and sums.dim() == 2 and sums.shape[1] == N
    BM, BN, warps, stages = shape
    block = {"BM": BM, "BN": BN, "STAGES": stages, "num_warps": warps}
    return (triton.cdiv(N, BN), sums.shape[0]), triton.cdiv(M, BM), block


def _cross_entropy_shape(fp8: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Rows a program, columns of a tile, columns a thread holds together, warps."""
    if device.type != "cuda":
        return 128, 128, 8, 4
    return (1, 4096, 16, 8) if fp8 else (1, 8192, 8, 32)


def _cast8_shape(transposed: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps, stages of the load pipeline."""
    if device.type != "cuda":
        return 64, 256, 4, 1
    return (64, 64, 4, 1) if transposed else (16, 128, 4, 3)


def _transpose8_shape(device: torch.device) -> tuple[int, int, int]:
    """Rows and columns of a tile, warps."""
    return (128, 128, 8) if device.type == "cuda" else (256, 256, 4)
