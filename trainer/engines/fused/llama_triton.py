"""The kernels of llama and modern alone, in Triton: rotary positions, value embeddings, smear, SwiGLU. llama_kernels.py
launches them. They follow triton_kernels.py: the last rows first, whole rows in registers, sums in fp32."""

import triton
import triton.language as tl

from trainer.engines.fused.triton_kernels import _bf16, _fp8

# ── rotary positions ─────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, rstd_ptr, saved_ptr, x8_ptr, scale_ptr, amax_ptr,
    M, T, turning, heads, width, groups, epsilon,
    NORM: tl.constexpr, BACKWARD: tl.constexpr, R: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Groups of R rows, and H heads, of x, in place: pairs (i, i + HALF) turn by the angle of the row's position. NORM:
    then every head is normed. BACKWARD: x is a gradient, saved_ptr the result of the forward pass; both steps are
    undone. With x8_ptr the result is e5m2 there, and heads from `turning` on are only cast."""
    head = tl.program_id(1) * H + tl.arange(0, H)
    pair = tl.arange(0, D2)
    turns = head < turning
    largest = tl.zeros([R, H], tl.float32)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        rows = (group * R + tl.arange(0, R)).to(tl.int64)
        inside = (rows < M)[:, None] & turns[None, :]
        mask = ((rows < M)[:, None] & (head < heads)[None, :])[:, :, None] & (pair < HALF)[None, None, :]
        at = rows[:, None, None] * width + (head * 2 * HALF)[None, :, None] + pair[None, None, :]
        wave = (rows % T)[:, None, None] * HALF + pair[None, None, :]
        waves = (rows < M)[:, None, None] & (pair < HALF)[None, None, :]
        cos = tl.load(cos_ptr + wave, mask=waves, other=1.0)
        sin = tl.load(sin_ptr + wave, mask=waves, other=0.0)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x_half = tl.load(x_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
        a, b = x, x_half
        scales = rows[:, None] * turning + head[None, :]
        if BACKWARD:
            if NORM:
                normed = mask & turns[None, :, None]
                y = tl.load(saved_ptr + at, mask=normed, other=0.0).to(tl.float32)
                z = tl.load(saved_ptr + at + HALF, mask=normed, other=0.0).to(tl.float32)
                rstd = tl.load(rstd_ptr + scales, mask=inside, other=0.0)[:, :, None]
                mean = (tl.sum(a * y + b * z, 2) / (2 * HALF))[:, :, None]
                a = rstd * (a - y * mean)
                b = rstd * (b - z * mean)
            sin = -sin
        first = a * cos - b * sin
        second = b * cos + a * sin
        if NORM and not BACKWARD:
            rstd = 1.0 / tl.sqrt(tl.sum(first * first + second * second, 2) / (2 * HALF) + epsilon)
            tl.store(rstd_ptr + scales, rstd, mask=inside)
            first *= rstd[:, :, None]
            second *= rstd[:, :, None]
        if x8_ptr is not None:
            first = tl.where(turns[None, :, None], first, x)
            second = tl.where(turns[None, :, None], second, x_half)
            scale = tl.load(scale_ptr)
            tl.store(x8_ptr + at, _fp8(first * scale, True), mask=mask)
            tl.store(x8_ptr + at + HALF, _fp8(second * scale, True), mask=mask)
            largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 2))
        else:
            tl.store(x_ptr + at, _bf16(first), mask=mask)
            tl.store(x_ptr + at + HALF, _bf16(second), mask=mask)
    if x8_ptr is not None:
        tl.atomic_max(amax_ptr, tl.max(tl.max(largest, 1), 0))


# ── value embeddings ─────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _value_gate(x_ptr, rstd_ptr, weight_ptr, rows, M, C, heads, H: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr):
    """The first numbers of the norm's output (R, 1, G), the gate's weights (1, H, G), and the gates (R, H)."""
    head, col = tl.arange(0, H), tl.arange(0, G)
    mask = (rows < M)[:, None] & (col < WIDTH)[None, :]
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    front = tl.load(x_ptr + rows[:, None] * C + col[None, :], mask=mask, other=0.0).to(tl.float32) * rstd[:, None]
    used = (head < heads)[:, None] & (col < WIDTH)[None, :]
    weight = tl.load(weight_ptr + head[:, None] * WIDTH + col[None, :], mask=used, other=0.0).to(tl.float32)
    front, weight = front[:, None, :], weight[None, :, :]
    return front, weight, 3.0 / (1.0 + tl.exp(-tl.sum(front * weight, 2)))


@triton.jit
def add_values_kernel(
    values_ptr, x_ptr, rstd_ptr, weight_ptr, tokens_ptr, table_ptr, M, C, heads, width,
    R: tl.constexpr, H: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """R rows: values += gate · table[token], in place. `width`: of the rows in which the values lie."""
    rows = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    head, col = tl.arange(0, H), tl.arange(0, D)
    _, _, gate = _value_gate(x_ptr, rstd_ptr, weight_ptr, rows, M, C, heads, H, G, WIDTH)
    mask = (rows < M)[:, None, None] & (head < heads)[None, :, None] & (col < HEAD)[None, None, :]
    within = (head * HEAD)[None, :, None] + col[None, None, :]
    tokens = tl.load(tokens_ptr + rows, mask=rows < M, other=0)
    embedded = tl.load(table_ptr + (tokens * heads * HEAD)[:, None, None] + within, mask=mask, other=0.0)
    at = values_ptr + rows[:, None, None] * width + within
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, _bf16(values + gate[:, :, None] * embedded.to(tl.float32)), mask=mask)


@triton.jit
def values_backward_kernel(
    dvalues_ptr, x_ptr, rstd_ptr, weight_ptr, tokens_ptr, table_ptr, drows_ptr, dinput_ptr, sums_ptr,
    M, C, heads, width, groups,
    R: tl.constexpr, H: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Groups of R rows: gradients of the table's rows, of the gate's input (added), and partial sums of its weight."""
    head, col, front_col = tl.arange(0, H), tl.arange(0, D), tl.arange(0, G)
    within = (head * HEAD)[None, :, None] + col[None, None, :]
    dweight = tl.zeros([H, G], tl.float32)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        rows = (group * R + tl.arange(0, R)).to(tl.int64)
        inside = rows < M
        front, weight, gate = _value_gate(x_ptr, rstd_ptr, weight_ptr, rows, M, C, heads, H, G, WIDTH)
        mask = inside[:, None, None] & (head < heads)[None, :, None] & (col < HEAD)[None, None, :]
        tokens = tl.load(tokens_ptr + rows, mask=inside, other=0)
        embedded = tl.load(table_ptr + (tokens * heads * HEAD)[:, None, None] + within, mask=mask, other=0.0)
        at = rows[:, None, None] * width + within
        dvalues = tl.load(dvalues_ptr + at, mask=mask, other=0.0).to(tl.float32)
        drow = drows_ptr + (rows * heads * HEAD)[:, None, None] + within
        tl.store(drow, _bf16(gate[:, :, None] * dvalues), mask=mask)
        dgate = tl.sum(dvalues * embedded.to(tl.float32), 2)
        dlogit = (dgate * gate * (1.0 - gate / 3))[:, :, None]
        dweight += tl.sum(dlogit * front, 0)
        dfront = dinput_ptr + rows[:, None] * C + front_col[None, :]
        used = inside[:, None] & (front_col < WIDTH)[None, :]
        old = tl.load(dfront, mask=used, other=0.0).to(tl.float32)
        tl.store(dfront, _bf16(old + tl.sum(dlogit * weight, 1)), mask=used)
    used = (head < heads)[:, None] & (front_col < WIDTH)[None, :]
    partial = sums_ptr + tl.program_id(0) * heads * WIDTH + head[:, None] * WIDTH + front_col[None, :]
    tl.store(partial, dweight, mask=used)


# ── smear ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _smear_gate(x_ptr, weight_ptr, rows, M, T, C, G: tl.constexpr, WIDTH: tl.constexpr):
    """The first numbers of rows (R, G), and the gates (R,): 0 at the start of a sequence."""
    col = tl.arange(0, G)
    mask = (rows < M)[:, None] & (col < WIDTH)[None, :]
    front = tl.load(x_ptr + rows[:, None] * C + col[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=col < WIDTH, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-tl.sum(front * weight[None, :], 1)))
    return front, tl.where((rows < M) & (rows % T > 0), gate, 0.0)


@triton.jit
def smear_kernel(
    x_ptr, weight_ptr, strength_ptr, out_ptr, M, T, C,
    R: tl.constexpr, BC: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """R rows: x + strength · gate · the row before."""
    rows, cols = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64), tl.arange(0, BC)
    mask = (rows < M)[:, None] & (cols < C)[None, :]
    _, gate = _smear_gate(x_ptr, weight_ptr, rows, M, T, C, G, WIDTH)
    at = rows[:, None] * C + cols[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(x_ptr + at - C, mask=mask & (rows > 0)[:, None], other=0.0).to(tl.float32)
    tl.store(out_ptr + at, _bf16(x + (tl.load(strength_ptr) * gate)[:, None] * before), mask=mask)


@triton.jit
def smear_backward_kernel(
    x_ptr, weight_ptr, strength_ptr, grad_ptr, dx_ptr, sums_ptr, M, T, C, groups,
    R: tl.constexpr, BC: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Groups of R rows: the gradient of x, and partial sums of those of the gate's weight and of the strength."""
    cols, front_col = tl.arange(0, BC), tl.arange(0, G)
    strength = tl.load(strength_ptr)
    weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    dweight, dstrength = tl.zeros([G], tl.float32), tl.zeros([R], tl.float32)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        rows = (group * R + tl.arange(0, R)).to(tl.int64)
        mask = (rows < M)[:, None] & (cols < C)[None, :]
        front, gate = _smear_gate(x_ptr, weight_ptr, rows, M, T, C, G, WIDTH)
        _, after = _smear_gate(x_ptr, weight_ptr, rows + 1, M, T, C, G, WIDTH)
        at = rows[:, None] * C + cols[None, :]
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        following = tl.load(grad_ptr + at + C, mask=mask & (rows < M - 1)[:, None], other=0.0).to(tl.float32)
        before = tl.load(x_ptr + at - C, mask=mask & (rows > 0)[:, None], other=0.0).to(tl.float32)
        dscale = tl.sum(grad * before, 1)
        dstrength += dscale * gate
        dlogit = dscale * strength * gate * (1.0 - gate)
        dweight += tl.sum(dlogit[:, None] * front, 0)
        dx = grad + (strength * after)[:, None] * following + dlogit[:, None] * weight[None, :]
        tl.store(dx_ptr + at, _bf16(dx), mask=mask)
    sums_ptr += tl.program_id(0) * (WIDTH + 1)
    tl.store(sums_ptr + front_col, dweight, mask=front_col < WIDTH)
    tl.store(sums_ptr + WIDTH, tl.sum(dstrength, 0))


# ── activations ──────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def swiglu_kernel(pre_ptr, act_ptr, dact_ptr, dpre_ptr, M, N, tiles, BM: tl.constexpr, BN: tl.constexpr):
    """act = silu(gate) · up of pre = [gate, up], rows of 2N. With dact_ptr also dpre."""
    cols = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    rows = ((tiles - 1 - tl.program_id(1)) * BM + tl.arange(0, BM)).to(tl.int64)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    wide = rows[:, None] * 2 * N + cols[None, :]
    at = rows[:, None] * N + cols[None, :]
    gate = tl.load(pre_ptr + wide, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pre_ptr + wide + N, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    if act_ptr is not None:
        tl.store(act_ptr + at, _bf16(silu * up), mask=mask)
    if dact_ptr is not None:
        g = tl.load(dact_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dpre_ptr + wide, _bf16(g * up * (sigmoid + silu * (1.0 - sigmoid))), mask=mask)
        tl.store(dpre_ptr + wide + N, _bf16(g * silu), mask=mask)
