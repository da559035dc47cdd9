"""The memory-bound kernels of the fused step, in Triton; `trainer/engines/fused/kernels.py` launches them.

The output that a product wrote last is still in the L2 cache (50 MB), so the kernels begin with the last rows. They
write the first rows last, and the next product finds those there.

On a CPU everything runs in Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported), which is for tests
on small shapes.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)
# The tanh form of GELU: 0.5·x·(1 + tanh(x·(ROOT + CUBE·x²))), ROOT = sqrt(2/pi), CUBE = 0.044715·ROOT.
ROOT = tl.constexpr(0.7978845608028654)
CUBE = tl.constexpr(0.035677408136300125)
# Smaller than any logit, and finite: the difference of two of them is 0, not NaN.
LOWEST = tl.constexpr(-1.0e30)
# The square of a mix's `keep` below which a division by it is damped.
SMALLEST_KEEP = tl.constexpr(2.0**-14)

# ── shared arithmetic ────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _bf16(x):
    """fp32 to bf16, to nearest, ties to even. The interpreter's own cast truncates."""
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
    """Saturate and round to nearest even, as the GPU's cast does and the interpreter's does not."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, SMALLEST_NORMAL) / STEPS
    # Above 1.5·2^23 neighbours in float32 are whole numbers.
    return ((x / step + 12582912.0) - 12582912.0) * step


@triton.jit
def _stochastic(x, random, SIGNED: tl.constexpr):
    """x rounded to e5m2's grid, up or down with the odds that make the mean exact. random: uint32, uniform. x is not
    negative unless SIGNED.

    21 bits lie below the two that e5m2 keeps: adding 21 random bits and truncating carries with exactly those odds. The
    grid of numbers below 2^-14 is even; float32 has the same grid after adding 2^-14.
    """
    size = tl.abs(x)
    lift = tl.where(size < 2.0**-14, 2.0**-14, 0.0)
    bits = (size + lift).to(tl.int32, bitcast=True) + (random >> 11).to(tl.int32)
    size = (bits & -2097152).to(tl.float32, bitcast=True) - lift
    if SIGNED:
        size = tl.where(x < 0, -size, size)
    return size


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


# ── embeddings ───────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def add_rows_kernel(
    table_ptr, rows_ptr, tokens_ptr, order_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """table[tokens[i]] += rows[order[i]], tokens sorted: the rows of equal ones of BM neighbours are summed first."""
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = at < M
    tokens = tl.load(tokens_ptr + at, mask=inside, other=-1)
    first = inside & (
        (tl.arange(0, BM) == 0) | (tl.load(tokens_ptr + at - 1, mask=inside & (at > 0), other=-1) != tokens)
    )
    source = tl.load(order_ptr + at, mask=inside, other=0)
    mask = inside[:, None] & (cols < N)[None, :]
    rows = tl.load(rows_ptr + source[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    equal = (tokens[:, None] == tokens[None, :]).to(tl.float32)
    sums = tl.dot(equal, rows, input_precision="tf32")  # exact products: 0 or 1 times bf16
    tl.atomic_add(table_ptr + tokens[:, None] * N + cols[None, :], sums, mask=mask & first[:, None], sem="relaxed")


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def norm_kernel(
    x_ptr, tokens_ptr, delta_ptr, delta_bias_ptr, other_ptr, mix_ptr, weight_ptr, bias_ptr,
    sum_ptr, y_ptr, mean_ptr, rstd_ptr, embedded_ptr, scale_ptr, amax_ptr,
    M, T, C, groups, epsilon,
    KNOWN: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Groups of R whole rows, the last first: a LayerNorm with mean_ptr, else an RMSNorm. With tokens, x is the token
    table and delta the position table; with embedded_ptr, the token's rows are normed first. With mix_ptr, the sum is
    mix[0] · (x + delta) + mix[1] · other."""
    cols = tl.arange(0, BC)
    used = cols < C
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=used, other=0.0)[None, :]
    if bias_ptr is not None:
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
            if embedded_ptr is not None:
                first = 1.0 / tl.sqrt(tl.sum(x * x, 1) / C + epsilon)
                tl.store(embedded_ptr + rows, first, mask=inside)
                x *= first[:, None]
            if delta_ptr is not None:
                x += tl.load(delta_ptr + (rows % T)[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if delta_ptr is not None:
                x += tl.load(delta_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if delta_bias_ptr is not None:
                x += tl.load(delta_bias_ptr + cols, mask=used, other=0.0).to(tl.float32)[None, :]
        if mix_ptr is not None:
            other = tl.load(other_ptr + at, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(mix_ptr) * x + tl.load(mix_ptr + 1) * other
        if sum_ptr is not None:
            rounded = _bf16(x)
            tl.store(sum_ptr + at, rounded, mask=mask)
            x = rounded.to(tl.float32)
        if mean_ptr is not None:
            if KNOWN:
                x -= tl.load(mean_ptr + rows, mask=inside, other=0.0)[:, None]
            else:
                mean = tl.sum(x, 1) / C
                tl.store(mean_ptr + rows, mean, mask=inside)
                x = tl.where(used[None, :], x - mean[:, None], 0.0)
        if KNOWN:
            rstd = tl.load(rstd_ptr + rows, mask=inside, other=0.0)
        else:
            rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / C + epsilon)
            tl.store(rstd_ptr + rows, rstd, mask=inside)
        y = x * rstd[:, None]
        if weight_ptr is not None:
            y *= weight.to(tl.float32)
        if bias_ptr is not None:
            y += bias.to(tl.float32)
        if scale_ptr is not None:
            tl.store(y_ptr + at, _fp8(y * scale, False), mask=mask)
            largest = tl.maximum(largest, tl.max(tl.where(mask, tl.abs(y), 0.0), 0))
        else:
            tl.store(y_ptr + at, _bf16(y), mask=mask)
    if scale_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(largest, 0))


@triton.jit
def norm_backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, residual_ptr, keep_ptr, dx_ptr, dx8_ptr,
    scale_ptr, amax_ptr, sums_ptr, dots_ptr,
    M, C, P, groups,
    NORMED: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes groups of R rows far apart, the last first. Its column sums stay in registers to the end. A
    LayerNorm with mean_ptr, else an RMSNorm. NORMED: x is the norm's output without its weight. With keep_ptr, the
    gradient goes on to `keep` of the residual stream, and its products with x are added up in dots_ptr."""
    cols = tl.arange(0, BC)
    used = cols < C
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=used, other=0.0)[None, :]
        dweight = tl.zeros([BC], tl.float32)
    if mean_ptr is not None:
        dbias = tl.zeros([BC], tl.float32)
        dx_sum = tl.zeros([BC], tl.float32)
    if keep_ptr is not None:
        keep = tl.load(keep_ptr)
        with_x = tl.zeros([BC], tl.float32)
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
        rstd = tl.load(rstd_ptr + rows, mask=inside, other=0.0)[:, None]
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + rows, mask=inside, other=0.0)[:, None]
        normal = x if NORMED else x * rstd
        g = dy
        if weight_ptr is not None:
            dweight += tl.sum(dy * normal, 0)
            g *= weight.to(tl.float32)
        if mean_ptr is not None:
            # Both sums in one reduction. Unused columns have g = 0, so they add nothing to either.
            sum_g, sum_gx = tl.split(tl.sum(tl.join(g, g * normal), 1))
            dx = g * rstd - (normal * (sum_gx[:, None] * rstd / C) + sum_g[:, None] * rstd / C)
        else:
            dx = rstd * (g - normal * (tl.sum(g * normal, 1) / C)[:, None])
        if residual_ptr is not None:
            dx += residual.to(tl.float32)
        if keep_ptr is not None:
            with_x += tl.sum(dx * x, 0)
            dx *= keep
        rounded = _bf16(dx)
        tl.store(dx_ptr + at, rounded, mask=mask)
        if mean_ptr is not None:
            dbias += tl.sum(dy, 0)
            dx_sum += tl.sum(rounded.to(tl.float32), 0)
        if scale_ptr is not None:
            tl.store(dx8_ptr + at, _fp8(dx * scale, True), mask=mask)
            largest = tl.maximum(largest, tl.max(tl.where(mask, tl.abs(dx), 0.0), 0))
    if scale_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(largest, 0))
    if weight_ptr is not None:
        sums_ptr += tl.program_id(0) * C + cols
        _add_into(sums_ptr, dweight, used)
        if mean_ptr is not None:
            _add_into(sums_ptr + P * C, dbias, used)
            _add_into(sums_ptr + 2 * P * C, dx_sum, used)
    if keep_ptr is not None:
        dots_ptr += tl.program_id(0)
        tl.store(dots_ptr, tl.load(dots_ptr) + tl.sum(with_x, 0))


@triton.jit
def mixed_in_kernel(
    gradients, numbers_ptr, other_ptr, residual_ptr, dother_ptr, dots_ptr, n, stride,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the gradient of `other`, which N mixes share, and of its products with the N gradients."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    other = tl.load(other_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(N):
        keep, add = tl.load(numbers_ptr + i * stride), tl.load(numbers_ptr + i * stride + 1)
        gradient = tl.load(gradients[i] + at, mask=mask, other=0.0).to(tl.float32) * (
            keep / tl.maximum(keep * keep, SMALLEST_KEEP)
        )
        total += add * gradient
        tl.store(dots_ptr + tl.program_id(0) * N + i, tl.sum(gradient * other, 0))
    tl.store(dother_ptr + at, _bf16(total), mask=mask)


# ── activations ──────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def gelu_kernel(h_ptr, a_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(a_ptr + at, _bf16(_gelu_of(tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32))), mask=mask)


@triton.jit
def relu2_kernel(x_ptr, gradient_ptr, n, BLOCK: tl.constexpr):
    """x becomes relu(x)², in place. With gradient_ptr, x is that result, and its gradient becomes that of the input."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if gradient_ptr is None:
        x = tl.maximum(x, 0.0)
        tl.store(x_ptr + at, _bf16(x * x), mask=mask)
    else:
        gradient = tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(gradient_ptr + at, _bf16(2.0 * tl.sqrt(x) * gradient), mask=mask)


# ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def relu2_product_kernel(
    a, b, out, out_t, act, a_inverse_ptr, b_inverse_ptr, act_inverse_ptr, scale_ptr, amax_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles of relu(a (M, K) @ b (N, K)ᵀ)². With `act`, the result of that in e4m3: (a @ bᵀ) · 2·√act, in e5m2.

    With scale_ptr operands and results are fp8; out_t, if it is asked for, is the result as (N, M).
    """
    rows, cols = tl.cdiv(M, BM), tl.cdiv(N, BN)
    inverse, act_inverse, scale = 1.0, 1.0, 1.0
    if scale_ptr is not None:
        inverse = tl.load(a_inverse_ptr) * tl.load(b_inverse_ptr)
        scale = tl.load(scale_ptr)
    if act is not None:
        act_inverse = tl.load(act_inverse_ptr)
    largest = tl.zeros((BM,), tl.float32)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * cols) * GROUP
        size = tl.minimum(rows - first, GROUP)
        m, n = (first + tile % size) * BM, tile % (GROUP * cols) // size * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            left, right = a.load([m, k]), b.load([n, k]).T
            if INTERPRETED:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total)
        if scale_ptr is not None:
            total *= inverse
        # In halves, so that their memory and that of three stages of loads fit.
        one, two = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        largest = _finish(one, largest, out, out_t, act, act_inverse, scale_ptr, scale, m, n)
        largest = _finish(two, largest, out, out_t, act, act_inverse, scale_ptr, scale, m, n + BN // 2)
    if scale_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(largest, 0))


@triton.jit
def _finish(x, largest, out, out_t, act, act_inverse, scale_ptr, scale, m, n):
    """The epilogue of a part of a tile, from row m and column n on. Returns each row's largest magnitude so far."""
    if act is None:
        x = tl.maximum(x, 0.0)
        x *= x
    else:
        x *= 2.0 * tl.sqrt(act.load([m, n]).to(tl.float32) * act_inverse)
    if scale_ptr is None:
        out.store([m, n], _bf16(x))
    else:
        x8 = _fp8(x * scale, act is not None)
        out.store([m, n], x8)
        if out_t is not None:
            out_t.store([n, m], tl.trans(x8))
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    return largest


# ── column sums ──────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def column_sums_kernel(x_ptr, sums_ptr, M, N, stride, tiles, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr):
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
def cross_entropy_kernel(
    logits_ptr, targets_ptr, scale_ptr, losses_ptr, dlogits8_ptr, q_ptr, seed_ptr,
    M, V, width,
    BACKWARD: tl.constexpr, CAP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """R rows a program, the last first, in tiles of BLOCK columns, of which G neighbours share a maximum. x is a
    product z, with CAP tanh(z / CAP); the logit times log2(e) is UNIT · x.

    The first pass keeps a maximum and a sum of exponentials for every G columns of the tile, so that rescaling costs
    one exponential in G. With one for every column, a logit would need three exponentials: 2.8 ms on the special
    function units, while the memory takes 3.1 ms. The second pass goes backwards, since the
    caches still hold the end of the row.
    """
    UNIT: tl.constexpr = CAP * LOG2E if CAP > 0 else LOG2E
    rows = ((tl.num_programs(0) - 1 - tl.program_id(0)) * R + tl.arange(0, R)).to(tl.int64)
    inside = rows < M
    target = tl.load(targets_ptr + rows, mask=inside, other=0)
    # Loaded before any reduction: other warps may overwrite the row only after the barriers of the reductions.
    chosen = _squashed(tl.load(logits_ptr + rows * width + target, mask=inside, other=0.0).to(tl.float32), CAP)
    lanes = (tl.arange(0, BLOCK // G) * G)[None, :, None] + tl.arange(0, G)[None, None, :]
    row_ptr = logits_ptr + rows[:, None, None] * width + lanes
    mask = inside[:, None, None]
    whole = V // BLOCK * BLOCK
    top = tl.full([R, BLOCK // G], LOWEST, tl.float32)
    total = tl.zeros([R, BLOCK // G], tl.float32)
    for first in range(0, whole, BLOCK):
        x = tl.load(row_ptr + first, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x = _squashed(x, CAP)
        peak = tl.maximum(top, tl.max(x, 2))
        powers = tl.exp2(x * UNIT - (peak * UNIT)[:, :, None])
        total = total * tl.exp2((top - peak) * UNIT) + tl.sum(powers, 2)
        top = peak
    for first in range(whole, V, BLOCK):
        # The load's mask follows the width, a multiple of 8, and so keeps 16 bytes a thread; `real` selects by V.
        real = first + lanes < V
        x = tl.load(row_ptr + first, mask=mask & (first + lanes < width), other=0.0).to(tl.float32)
        x = tl.where(real, _squashed(x, CAP), LOWEST)
        peak = tl.maximum(top, tl.max(x, 2))
        powers = tl.where(real, tl.exp2(x * UNIT - (peak * UNIT)[:, :, None]), 0.0)
        total = total * tl.exp2((top - peak) * UNIT) + tl.sum(powers, 2)
        top = peak
    highest = tl.max(top, 1)
    total_row = tl.sum(total * tl.exp2((top - highest[:, None]) * UNIT), 1)
    tl.store(losses_ptr + rows, (highest - chosen) * (UNIT / LOG2E) + tl.log(total_row), mask=inside)
    if BACKWARD:
        scale = tl.load(scale_ptr)
        random = rows
        if dlogits8_ptr is not None:
            scale *= tl.load(q_ptr)
            random = _mixed(rows.to(tl.uint32) * 0x9E3779B1 + tl.load(seed_ptr).to(tl.uint32))
        # scale·softmax is one power of two: 2^(UNIT·x + shift).
        shift = tl.log2(scale / total_row) - highest * UNIT
        shifts, row, noise = shift[:, None, None], rows[:, None, None], random[:, None, None]
        for first in range(whole, width, BLOCK):
            columns = first + lanes
            given = mask & (columns < width)
            x = _squashed(tl.load(row_ptr + first, mask=given, other=0.0).to(tl.float32), CAP)
            p = tl.where(columns < V, tl.exp2(x * UNIT + shifts) * _slope(x, CAP), 0.0)
            _store_dlogits(logits_ptr, dlogits8_ptr, p, row, columns, noise, width, given, False)
        for done in range(0, whole, BLOCK):
            first = whole - BLOCK - done
            x = tl.load(row_ptr + first, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x = _squashed(x, CAP)
            p = tl.exp2(x * UNIT + shifts) * _slope(x, CAP)
            _store_dlogits(logits_ptr, dlogits8_ptr, p, row, first + lanes, noise, width, mask, False)
        # The target's gradient is stored again, less the scale: comparing every column cost 71 of 163 instructions.
        tl.debug_barrier()
        p = (tl.exp2(chosen * UNIT + shift) - scale) * _slope(chosen, CAP)
        _store_dlogits(logits_ptr, dlogits8_ptr, p, rows, target, random, width, inside, True)


@triton.jit
def _squashed(z, CAP: tl.constexpr):
    if CAP > 0:
        z = _tanh(z / CAP)
    return z


@triton.jit
def _slope(x, CAP: tl.constexpr):
    """The derivative of a logit by its product."""
    slope = 1.0
    if CAP > 0:
        slope = 1.0 - x * x
    return slope


@triton.jit
def _store_dlogits(logits_ptr, dlogits8_ptr, p, rows, columns, random, width, mask, SIGNED: tl.constexpr):
    at = rows * width + columns
    if dlogits8_ptr is not None:
        # A Weyl sequence from the row's random number on: a column's bits are uniform over the rows, and a row's errors
        # cancel better than independent ones. Mixing the bits of each number took a tenth of the kernel.
        bits = columns.to(tl.uint32) * 0x9E3779B1 + random
        tl.store(dlogits8_ptr + at, _fp8(_stochastic(p, bits, SIGNED), True), mask=mask)
    else:
        tl.store(logits_ptr + at, _bf16(p), mask=mask)


# ── AdamW ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def adamw_kernel(
    weights16_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr, grad_ptr, numbers_ptr,
    n, weight_decay, one_minus_beta1, one_minus_beta2, epsilon,
    BLOCK: tl.constexpr,
):  # fmt: skip
    lr = tl.load(numbers_ptr)
    correction1 = tl.load(numbers_ptr + 1)
    correction2 = tl.load(numbers_ptr + 2)
    grad_scale = tl.load(numbers_ptr + 3)
    # False if grad_scale is NaN.
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


# ── Muon ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def muon_look_ahead_kernel(ahead_ptr, momentum_ptr, grad_ptr, numbers_ptr, n, m, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    momentum = tl.load(momentum_ptr + at, mask=mask, other=0.0)
    ahead = momentum
    if tl.load(numbers_ptr + 4) != 0.0:
        g = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32) * tl.load(numbers_ptr + 3)
        momentum += (g - momentum) * (1 - m)
        ahead = g + (momentum - g) * m
        tl.store(momentum_ptr + at, momentum, mask=mask)
    tl.store(ahead_ptr + at, _bf16(ahead), mask=mask)


@triton.jit
def muon_move_kernel(weights16_ptr, master_ptr, directions_ptr, numbers_ptr, n, decay, BLOCK: tl.constexpr):
    if tl.load(numbers_ptr + 4) != 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        w = tl.load(master_ptr + at, mask=mask, other=0.0)
        d = tl.load(directions_ptr + at, mask=mask, other=0.0).to(tl.float32)
        w -= tl.load(numbers_ptr) * tl.where(d * w >= 0, d + decay * w, d)
        tl.store(master_ptr + at, w, mask=mask)
        tl.store(weights16_ptr + at, _bf16(w), mask=mask)


@triton.jit
def muon_squared_kernel(
    x_ptr, out_ptr,
    n, m, of_matrix, of_row, of_column, a, b, c,
    POLYNOMIAL: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of xx' a program, and its mirror image. Above the diagonal a program does nothing."""
    if tl.program_id(1) <= tl.program_id(0):
        matrix = tl.program_id(2).to(tl.int64)
        x_ptr += matrix * of_matrix
        out_ptr += matrix * n * n
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inner = tl.arange(0, INNER)
        left = x_ptr + rows[:, None] * of_row + inner[None, :] * of_column
        right = x_ptr + cols[None, :] * of_row + inner[:, None] * of_column
        total = tl.zeros([BLOCK, BLOCK], tl.float32)
        for start in range(0, m, INNER):
            if EVEN:
                one, other = tl.load(left), tl.load(right)
            else:
                one = tl.load(left, mask=(rows < n)[:, None] & (start + inner < m)[None, :], other=0.0)
                other = tl.load(right, mask=(cols < n)[None, :] & (start + inner < m)[:, None], other=0.0)
            if INTERPRETED:
                one, other = one.to(tl.float32), other.to(tl.float32)
            total = tl.dot(one, other, total)
            left += INNER * of_column
            right += INNER * of_column
        mask = (rows < n)[:, None] & (cols < n)[None, :]
        if POLYNOMIAL:
            x = tl.load(x_ptr + rows[:, None] * of_row + cols[None, :] * of_column, mask=mask, other=0.0)
            total = c * total + b * x.to(tl.float32) + tl.where(rows[:, None] == cols[None, :], a, 0.0)
        tile = _bf16(total)
        tl.store(out_ptr + rows[:, None] * n + cols[None, :], tile, mask=mask)
        if tl.program_id(1) < tl.program_id(0):
            tl.store(out_ptr + cols[:, None] * n + rows[None, :], tl.trans(tile), mask=tl.trans(mask))


# ── fp8 ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def cast8_kernel(
    x_ptr, h_ptr, x8_ptr, x8t_ptr, sums_ptr, scale_ptr, amax_ptr,
    M, N, tiles,
    KIND: tl.constexpr, GRADIENT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BN columns a program, BM rows at a time. Casts x, KIND(x), or with h x·KIND'(h)."""
    cols = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    used = cols < N
    scale = tl.load(scale_ptr)
    again = tl.load(scale_ptr, volatile=True)
    largest = tl.zeros([BM, BN], tl.float32)
    total = tl.zeros([BM, BN], tl.float32)
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        rows = ((tiles - 1 - tile) * BM + tl.arange(0, BM)).to(tl.int64)
        mask = (rows < M)[:, None] & used[None, :]
        at = rows[:, None] * N + cols[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if h_ptr is not None:
            h = tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if KIND == "gelu":
                x *= _gelu_slope(h)
            else:
                x *= 2.0 * tl.maximum(h, 0.0)
        elif KIND == "gelu":
            x = _gelu_of(x)
        elif KIND == "relu2":
            x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
        x8 = _fp8(x * scale, GRADIENT)
        tl.store(x8_ptr + at, x8, mask=mask)
        if x8t_ptr is not None:
            if h_ptr is not None:
                # Rounded once more. Where both stores share the rounded numbers, ptxas 12.8 shifts a quarter of the
                # bytes of the transposed one into place before the F2FP that makes them.
                x8 = _fp8(x * again, GRADIENT)
            tl.store(x8t_ptr + cols[:, None] * M + rows[None, :], tl.trans(x8), mask=tl.trans(mask))
        largest = tl.maximum(largest, tl.abs(x))
        if sums_ptr is not None:
            total += x
    tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0))
    if sums_ptr is not None:
        _add_into(sums_ptr + tl.program_id(1) * N + cols, tl.sum(total, 0), used)


@triton.jit
def transpose8_kernel(x_ptr, xt_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    cols = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0)
    tl.store(xt_ptr + cols[:, None] * M + rows[None, :], tl.trans(x), mask=tl.trans(mask))
