"""Launchers of the memory-bound kernels of the fused step: norms, activations, cross-entropy, sums, AdamW, Muon, fp8.

Next to the matrix products these do almost no arithmetic. Each costs the bytes that it moves, at about 4.2 TB/s on an
H200 that sustains 400 to 600 TFLOP/s in the products. So each reads every operand once, writes every result once, 16
bytes a thread at a time, and in the same pass computes everything else that needs these numbers. Bytes of one
micro-batch of M tokens, bf16 activations of width C and V logits a token:

    add_norm        8·M·C bytes   residual sum and norm: 2 reads, 2 writes; with a mix 10·M·C
    norm_backward   8·M·C         dy, x and the residual gradient in, dx out; in the same pass column sums for the
                                  gradients of weight, bias and the next bias
    mixed_in        (2·N+4)·M·C   the gradient of what N mixes share
    gelu            16·M·C        of 4C columns
    column_sums     2·M·C         of the output of a product or of cuDNN: gradients of biases
    cross_entropy   4·M·V         the gradient overwrites the logits; the second read of a row is from the L2 cache
    adamw           30 a parameter, once a step: master, both moments (read and written), gradient, bf16 weight
    look_ahead      14 or 16 a parameter of Muon's, once a step; move 12
    add_rows        about 4·M·C   of an embedding's gradient; 14·M·C with index_add_ and a cast
    cast8           3·M·N, or 4·M·N with the transpose; cross_entropy8 3·M·V; transpose8 2·M·N

At GPT-2's 124M and 65,536 tokens that is 0.1 ms a norm and 3.1 ms of cross-entropy. Measured on an H200: 3.4 to
4.1 TB/s, and 2.5 in cross_entropy8, which is bound by its arithmetic.

Column sums over M rows are made by P programs, each adding into its own row of `sums`; the caller adds the P rows once
a step. The only floating-point atomic is a maximum, so results are reproducible bit for bit.

fp8 halves the bytes and the time of a matrix product. Values are multiplied by a scale before the cast (e4m3 for
weights and activations, up to 448; e5m2 for gradients, up to 57,344) and saturate. `amax` keeps the largest magnitude
before scaling, from which the caller makes the next scale. fp8 products need both operands with the summed index
innermost, hence the transposes.

Row counts may be anything. Widths may be any multiple of 8; multiples of 16 are the fast ones. The kernels are in
`trainer/engines/fused/triton_kernels.py`. Each launcher checks the arguments that could make results wrong without an
error, allocates its results, and never waits for the GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from trainer.engines.fused.triton_kernels import (
    SMALLEST_KEEP,
    adamw_kernel,
    add_rows_kernel,
    cast8_kernel,
    column_sums_kernel,
    cross_entropy_kernel,
    gelu_kernel,
    mixed_in_kernel,
    muon_look_ahead_kernel,
    muon_move_kernel,
    muon_squared_kernel,
    norm_backward_kernel,
    norm_kernel,
    transpose8_kernel,
)
from trainer.optim.muon import Polynomial

Activation = Literal["gelu", "relu2"]


@dataclass(frozen=True)
class Fp8Out:
    """The scale of a result in fp8, and the magnitude that its kernel measures; both (1,) fp32 on the device."""

    scale: Tensor  # the factor of every number
    amax: Tensor  # raised to the largest magnitude before scaling


def add_rows(table: Tensor, tokens: Tensor, order: Tensor, rows: Tensor) -> None:
    """table[tokens[i]] += rows[order[i]]: table (V, N) fp32, rows (M, N) bf16, sorted tokens and order (M,) int64.

    Sums of several programs meet in atomic additions: the last bits depend on their order. A number that is not finite
    also spoils the rows of neighbours.
    """
    (M, N), device = rows.shape, rows.device
    assert table.dtype == torch.float32 and table.shape[1] == N and tokens.shape == order.shape == (M,)
    _check(table, tokens, order, rows)
    BM, BN, warps = _add_rows_shape(device)
    add_rows_kernel[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        table, rows, tokens, order, M, N, BM=BM, BN=BN, num_warps=warps
    )


def norm_partials(C: int, device: torch.device) -> int:
    """The P of norm_backward's sums (3, P, C)."""
    return max(_norm_backward_shape(C, fp8, True, True, device)[1] for fp8 in (False, True))


def column_partials(device: torch.device) -> int:
    """The P of the sums (P, N) of column_sums and cast8."""
    return 64 if device.type == "cuda" else 2


@dataclass(frozen=True)
class Mix:
    """A norm's input is keep · s + add · other, with s the residual stream."""

    numbers: Tensor  # (2,) fp32: keep, add
    other: Tensor  # (M, C) bf16


@dataclass(frozen=True)
class MixGradient:
    """What `norm_backward` needs of a mix."""

    keep: Tensor  # (1,) fp32
    sums: Tensor  # (P,) fp32, P = norm_partials(C, device): du·u is added, u the norm's input


def mixed_in(
    gradients: Sequence[Tensor], numbers: Tensor, other: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of `other` (M, C) bf16, which N mixes share, and those of their numbers `add`, (N,) fp32.

    residual (M, C) bf16: another gradient of `other`, to which this one is added. gradients: N of (M, C) bf16, those of
    the residual streams, keep · du; where `keep` is 0, du is lost. numbers (N, 2) fp32: keep, add. One pass for all, as
    in the norms' own passes `other` and its gradient moved three times the bytes.
    """
    N, n = len(gradients), other.numel()
    assert numbers.shape == (N, 2) and numbers.stride(1) == 1 and numbers.dtype == torch.float32
    assert all(gradient.shape == other.shape for gradient in gradients)
    _check(other, residual, *gradients)
    block, warps = _mixed_in_shape(other.device)
    blocks = triton.cdiv(n, block)
    dother, dots = torch.empty_like(other), numbers.new_empty(blocks, N)
    mixed_in_kernel[(blocks,)](
        tuple(gradients), numbers, other, residual, dother, dots, n, numbers.stride(0),
        N=N, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return dother, dots.sum(0)


def keep_gradients(numbers: Tensor, sums: Tensor, of_add: Tensor) -> Tensor:
    """The gradients of `keep`, (N,) fp32, of N mixes: numbers (N, 2), the `sums` (N, P), the gradients of `add` (N,).

    That of `keep` is the sum of du·s, and s = (u - add·other) / keep, so s need not be saved. The rounding of u, which
    this divides by `keep`, shows where keep·s is a small part of u. Below 1/128 the division is damped.
    """
    keep, add = numbers.unbind(1)
    return (sums.sum(1) - add * of_add) * keep / keep.square().clamp(min=SMALLEST_KEEP.value)


@dataclass(frozen=True)
class NormWeights:
    """A norm's parameters, (C,): a LayerNorm's in bf16; without a bias it is an RMSNorm, a weight in fp32."""

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float


Statistics = tuple[Tensor | None, Tensor]  # (M,) fp32: the mean, of a LayerNorm, and 1 / the deviation of each row


def embed_norm(
    tokens: Tensor,
    wte: Tensor,
    wpe: Tensor | None,
    norm: NormWeights,
    norm_first: bool = False,
    fp8: Fp8Out | None = None,
) -> tuple[Tensor, Tensor, Statistics, Tensor | None]:
    """x[i] = wte[tokens[i]] (+ wpe[i % T]), with `norm_first` its RMSNorm without weights, and the norm y of x.

    tokens (M,) int64, wte (V, C), wpe (T, C) with T the length of a sequence, bf16. Returns x and y (M, C) bf16, the
    statistics of y, and with `norm_first` 1 / the root mean square of the table's rows, (M,) fp32. With `fp8` y is
    e4m3, here and in the norms below.
    """
    M, C = tokens.numel(), wte.shape[1]
    embedded = wte.new_empty(M, dtype=torch.float32) if norm_first else None
    return *_norm(wte, norm, fp8, M, C, tokens=tokens, delta=wpe, embedded=embedded), embedded


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    delta_bias: Tensor | None,
    norm: NormWeights,
    fp8: Fp8Out | None = None,
    mix: Mix | None = None,
) -> tuple[Tensor, Tensor, Statistics]:
    """x + delta (+ delta_bias), or the mix of it, rounded to bf16, and the norm y of that. x and delta (M, C).

    Returns the sum and y (M, C) bf16, and y's statistics.
    """
    assert delta is None or delta.shape == x.shape
    return _norm(x, norm, fp8, *x.shape, delta=delta, delta_bias=delta_bias, mix=mix)


def norm_again(x: Tensor, statistics: Statistics, norm: NormWeights) -> Tensor:
    """The y of a norm from its saved statistics, bit for bit."""
    return _norm(x, norm, None, *x.shape, statistics=statistics)[1]


def _norm(
    x: Tensor,
    norm: NormWeights,
    fp8: Fp8Out | None,
    M: int,
    C: int,
    *,
    tokens: Tensor | None = None,
    delta: Tensor | None = None,
    delta_bias: Tensor | None = None,
    statistics: Statistics | None = None,
    embedded: Tensor | None = None,
    mix: Mix | None = None,
) -> tuple[Tensor, Tensor, Statistics]:
    numbers, other = (mix.numbers, mix.other) if mix else (None, None)
    assert mix is None or (mix.other.shape == (M, C) and mix.numbers.shape == (2,))
    _check(x, tokens, delta, delta_bias, other, numbers, norm.weight, norm.bias)
    known, layer_norm = statistics is not None, norm.bias is not None
    total = None if known else x.new_empty(M, C)
    y = x.new_empty(M, C, dtype=x.dtype if fp8 is None else torch.float8_e4m3fn)
    scale, amax = (None, None) if fp8 is None else (fp8.scale, fp8.amax)
    if statistics is None:
        mean = x.new_empty(M, dtype=torch.float32) if layer_norm else None
        statistics = mean, x.new_empty(M, dtype=torch.float32)
    R, programs, warps, stages = _norm_shape(C, fp8 is not None, layer_norm, x.device)
    groups, T = triton.cdiv(M, R), M if delta is None else len(delta)
    norm_kernel[(min(groups, programs),)](
        x, tokens, delta, delta_bias, other, numbers, norm.weight, norm.bias, total, y, *statistics, embedded,
        scale, amax, M, T, C, groups, norm.epsilon,
        KNOWN=known, R=R, BC=triton.next_power_of_2(C), STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return x if total is None else total, y, statistics


def norm_backward(
    dy: Tensor,
    x: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    residual: Tensor | None,
    sums: Tensor | None,
    fp8: Fp8Out | None = None,
    normed: bool = False,
    mix: MixGradient | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, (M, C) bf16, through its norm, plus `residual`: the gradient that skips the norm.

    With `normed`, x is the norm's output (without weights) instead. With `fp8`, the second result is the gradient as
    (M, C) e5m2. Adds the gradient of the weight to sums[0] (P, C) fp32, P = norm_partials(C, device); of a LayerNorm,
    that of the bias to sums[1], and the column sums of the result, which are the gradient of the bias of the projection
    before, to sums[2]. With a mix, x is mixed, and the result is the gradient of the residual stream in it.
    """
    (M, C), (mean, rstd) = dy.shape, statistics
    R, programs, warps, stages = _norm_backward_shape(
        C, fp8 is not None, mean is not None, weight is not None, dy.device
    )
    P = 0 if sums is None else sums.shape[1]
    assert x.shape == dy.shape and (sums is None) == (weight is None)
    assert sums is None or (sums.shape == (1 if mean is None else 3, P, C) and sums.dtype == torch.float32)
    keep, dots = (mix.keep, mix.sums) if mix else (None, None)
    assert sums is None or programs <= P
    assert dots is None or (dots.dim() == 1 and dots.dtype == torch.float32 and programs <= len(dots))
    _check(dy, x, mean, rstd, weight, residual, keep, sums, dots)
    dx, dx8, scale, amax = torch.empty_like(dy), None, None, None
    if fp8:
        dx8, scale, amax = torch.empty_like(dy, dtype=torch.float8_e5m2), fp8.scale, fp8.amax
    norm_backward_kernel[(programs,)](
        dy, x, mean, rstd, weight, residual, keep, dx, dx8, scale, amax, sums, dots,
        M, C, P, triton.cdiv(M, R),
        NORMED=normed, R=R, BC=triton.next_power_of_2(C), STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dx, dx8


def gelu(h: Tensor) -> Tensor:
    """The tanh form of GELU, bf16 in and out, any shape."""
    _check(h)
    a = torch.empty_like(h)
    block, warps = _gelu_shape(h.device)
    gelu_kernel[(triton.cdiv(h.numel(), block),)](h, a, h.numel(), BLOCK=block, num_warps=warps)
    return a


def column_sums(x: Tensor, sums: Tensor) -> None:
    """Adds the column sums of x (M, N) bf16, which may be some columns of a wider one, to sums (P, N) fp32."""
    M, N = x.shape
    assert x.stride(1) == 1 and x.dtype == torch.bfloat16
    _check(sums)
    grid, tiles, block = _column_grid(M, N, sums, _column_sums_shape(x.device))
    column_sums_kernel[grid](x, sums, M, N, x.stride(0), tiles, **block)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    scale: Tensor,
    losses: Tensor,
    backward: bool,
    cap: float | None = None,
) -> None:
    """losses[i] = -log softmax(logits[i, :vocab_size])[targets[i]], (M,) fp32. With `cap`, the logits are
    cap · tanh(z / cap) of the products z that are given; the gradient is that of z.

    logits (M, V) bf16, targets (M,) int64, scale (1,) fp32 and positive. With `backward`, the gradient of the logits
    overwrites them: scale · (softmax - onehot), 0 in the V - vocab_size padding columns.
    """
    _cross_entropy(logits, targets, vocab_size, scale, losses, None, None, None, backward, cap)


def cross_entropy8(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    scale: Tensor,
    losses: Tensor,
    q: Tensor,
    seed: Tensor,
    cap: float | None = None,
) -> Tensor:
    """cross_entropy that returns its gradient, times q, as (M, V) e5m2; the logits stay.

    q (1,) fp32, seed (1,) int32. The gradient is rounded up or down at random, so that sums over tokens stay right:
    most of it is far below e5m2's precision at the scale of the largest. The same seed gives the same bits.
    """
    dlogits8 = torch.empty_like(logits, dtype=torch.float8_e5m2)
    _cross_entropy(logits, targets, vocab_size, scale, losses, dlogits8, q, seed, True, cap)
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
    cap: float | None,
) -> None:
    M, V = logits.shape
    assert 0 < vocab_size <= V and targets.shape == losses.shape == (M,)
    _check(logits, targets, scale, losses)
    R, block, group, warps = _cross_entropy_shape(dlogits8 is not None, logits.device)
    cross_entropy_kernel[(triton.cdiv(M, R),)](
        logits, targets, scale, losses, dlogits8, q, seed, M, vocab_size, V,
        BACKWARD=backward, CAP=cap or 0.0, R=R, BLOCK=block, G=group, num_warps=warps,
    )  # fmt: skip


def cast8(
    x: Tensor,
    fp8: Fp8Out,
    transposed: bool = False,
    activation: Activation | None = None,
    h: Tensor | None = None,
    sums: Tensor | None = None,
    gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """x, activation(x), or with h x · activation'(h), (M, N) bf16, in fp8; with `transposed` the same bytes as (N, M).

    e4m3, or e5m2 for a `gradient`. Adds the column sums of the tensor that is cast to sums (P, N) fp32.
    """
    M, N = x.shape
    assert h is None or (activation and h.shape == x.shape)
    _check(x, h, sums, fp8.scale, fp8.amax)
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    x8 = torch.empty_like(x, dtype=dtype)
    x8t = x.new_empty(N, M, dtype=dtype) if transposed else None
    BM, BN, warps, stages = _cast8_shape(x8t is not None, x.device)
    tiles = triton.cdiv(M, BM)
    assert sums is None or (sums.dtype == torch.float32 and sums.shape[1] == N)
    cast8_kernel[(triton.cdiv(N, BN), min(tiles, 128) if sums is None else sums.shape[0])](
        x, h, x8, x8t, sums, fp8.scale, fp8.amax, M, N, tiles,
        KIND=activation, GRADIENT=gradient, BM=BM, BN=BN, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return x8, x8t


def transpose8(x8: Tensor) -> Tensor:
    """(M, N) of a one-byte type as (N, M) without gaps."""
    M, N = x8.shape
    _check(x8)
    x8t = x8.new_empty(N, M)
    BM, BN, warps = _transpose8_shape(x8.device)
    transpose8_kernel[(triton.cdiv(N, BN), triton.cdiv(M, BM))](
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

    master, exp_avg, exp_avg_sq (n,) fp32; grad (n,) fp32 or bf16; weights16 (n,) bf16 becomes the new master, rounded.
    numbers (5,) fp32, on the device so that nothing waits for it: learning rate, 1/(1 - beta1^t), 1/(1 - beta2^t),
    the gradient's factor (clipping), and 1 to apply the step or 0 to skip it. A factor that is not finite skips it,
    too.
    """
    n = master.numel()
    assert numbers.shape == (5,) and numbers.dtype == master.dtype == exp_avg.dtype == exp_avg_sq.dtype == torch.float32
    assert all(t is None or t.shape == (n,) for t in (weights16, master, exp_avg, exp_avg_sq, grad))
    _check(weights16, master, exp_avg, exp_avg_sq, grad, numbers)
    block, warps = _adamw_shape(master.device)
    adamw_kernel[(triton.cdiv(n, block),)](
        weights16, master, exp_avg, exp_avg_sq, grad, numbers,
        n, weight_decay, 1 - beta1, 1 - beta2, epsilon, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def look_ahead(ahead: Tensor, momentum: Tensor, grad: Tensor, numbers: Tensor, m: float) -> None:
    """Muon's momentum m, and its look ahead (trainer/optim/muon.py), over flat slices of n elements.

    momentum (n,) fp32, in place; grad (n,) fp32 or bf16; ahead (n,) bf16 is overwritten. numbers as `adamw` takes them:
    if its last one is 0, the momentum stays, and `ahead` is the same.
    """
    n = momentum.numel()
    assert momentum.dtype == numbers.dtype == torch.float32 and ahead.dtype == torch.bfloat16
    assert all(t.shape == (n,) for t in (ahead, momentum, grad)) and numbers.shape == (5,)
    _check(ahead, momentum, grad, numbers)
    block, warps = _adamw_shape(momentum.device)
    muon_look_ahead_kernel[(triton.cdiv(n, block),)](ahead, momentum, grad, numbers, n, m, BLOCK=block, num_warps=warps)


def move(weights16: Tensor, master: Tensor, directions: Tensor, numbers: Tensor, decay: float) -> None:
    """Move flat slices of n weights along Muon's directions with cautious weight decay (trainer/optim/muon.py).

    master (n,) fp32, in place; directions (n,) bf16; weights16 (n,) bf16 becomes the new master, rounded. numbers as
    `adamw` takes them: the first is the rate, and if the last is 0, nothing changes.
    """
    n = master.numel()
    assert master.dtype == numbers.dtype == torch.float32 and weights16.dtype == directions.dtype == torch.bfloat16
    assert all(t.shape == (n,) for t in (weights16, master, directions)) and numbers.shape == (5,)
    _check(weights16, master, directions, numbers)
    block, warps = _adamw_shape(master.device)
    muon_move_kernel[(triton.cdiv(n, block),)](
        weights16, master, directions, numbers, n, decay, BLOCK=block, num_warps=warps
    )


def squared(x: Tensor, polynomial: Polynomial | None) -> Tensor:
    """muon.squared of x (N, n, m) bf16, with any strides -> (N, n, n) bf16; n = m with a polynomial.

    This one is bound by arithmetic. A result is symmetric, so only the tiles on and below the diagonal are computed: on
    an H100 in 0.6 to 0.9 of the time of cuBLAS's whole product. Sums are fp32, and rounded once.
    """
    N, n, m = x.shape
    assert x.dtype == torch.bfloat16 and (polynomial is None or n == m)
    out = x.new_empty(N, n, n)
    block, inner, warps, stages = _squared_shape(x.device)
    tiles = triton.cdiv(n, block)
    a, b, c = polynomial or (0.0, 0.0, 1.0)
    even = n % block == m % inner == 0
    muon_squared_kernel[(tiles, tiles, N)](
        x, out, n, m, *x.stride(), a, b, c,
        POLYNOMIAL=polynomial is not None, EVEN=even, BLOCK=block, INNER=inner, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _check(*tensors: Tensor | None) -> None:
    """The kernels rely on contiguous rows on one device."""
    given = [tensor for tensor in tensors if tensor is not None]
    assert all(tensor.is_contiguous() and tensor.device == given[0].device for tensor in given)


# ── launch shapes, as measured by `python -m benchmarks.kernels` on an H200 ───────────────────────────────────────────
# On a CPU each program costs the interpreter milliseconds, small or large: so there are few and large ones.


def _add_rows_shape(device: torch.device) -> tuple[int, int, int]:
    """Rows and columns of a tile, warps."""
    return (16, 256, 4) if device.type == "cuda" else (64, 256, 4)


def _norm_shape(C: int, fp8: bool, layer_norm: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Rows that a program handles at a time, programs, warps, stages of the load pipeline."""
    if device.type != "cuda":
        return 64, 2, 4, 1
    if layer_norm:
        return (2, 1056, 1 if fp8 else 2, 3) if C <= 1024 else (2, 528, norm_warps(C, 16), 3)
    if C <= 1024:
        return (2, 1056, 1, 1) if fp8 else (2, 528, 1, 3)
    return 1, 528 if fp8 else 1056, norm_warps(C, 64), 3


def _norm_backward_shape(
    C: int, fp8: bool, layer_norm: bool, weighted: bool, device: torch.device
) -> tuple[int, int, int, int]:
    """As `_norm_shape`; with a weight, or a mix, at most `norm_partials` programs.

    A thread has to hold the same columns of all R rows, so that their sum needs no exchange. For that a row needs at
    least 8 columns a thread. A LayerNorm with fp8, whose stores need 16 neighbours, has R = 1: with more threads, or 2
    rows in fp8, the kernel took 5 to 20 times as long.
    """
    if device.type != "cuda":
        return 32, 2, 4, 1
    if not layer_norm:
        if fp8:
            return 2, 528 if C <= 1024 and not weighted else 264, norm_warps(C, 16), 4
        return (1, 660, 2, 4) if weighted and C <= 1024 else (2, 264, norm_warps(C, 8), 4)
    stages = 4 if C <= 2048 else 2
    if fp8:
        return 1, 660 if C <= 1024 else 264, norm_warps(C, 8), stages
    return (2, 528, norm_warps(C, 8), stages) if C <= 1024 else (1, 396, norm_warps(C, 16), stages)


def norm_warps(C: int, columns: int) -> int:
    """The number of warps for which each thread has this number of `columns` of a row."""
    return max(1, triton.next_power_of_2(C) // (32 * columns))


def _mixed_in_shape(device: torch.device) -> tuple[int, int]:
    """Elements a program, warps."""
    return (512, 1) if device.type == "cuda" else (65536, 4)


def _gelu_shape(device: torch.device) -> tuple[int, int]:
    """Elements a program, warps."""
    return (4096, 8) if device.type == "cuda" else (65536, 4)


def _adamw_shape(device: torch.device) -> tuple[int, int]:
    """Elements a program, warps."""
    return (1024, 4) if device.type == "cuda" else (65536, 4)


def _squared_shape(device: torch.device) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, what it sums over at once, warps, stages."""
    return (128, 64, 4, 3) if device.type == "cuda" else (32, 16, 1, 1)


def _column_sums_shape(device: torch.device) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps, stages of the load pipeline."""
    return (32, 128, 4, 5) if device.type == "cuda" else (64, 256, 4, 1)


def _column_grid(
    M: int, N: int, sums: Tensor, shape: tuple[int, int, int, int]
) -> tuple[tuple[int, int], int, dict[str, int]]:
    """The grid (column blocks, P), the number of row tiles, and the tile."""
    assert sums.dtype == torch.float32 and sums.dim() == 2 and sums.shape[1] == N
    BM, BN, warps, stages = shape
    block = {"BM": BM, "BN": BN, "STAGES": stages, "num_warps": warps}
    return (triton.cdiv(N, BN), sums.shape[0]), triton.cdiv(M, BM), block


def _cross_entropy_shape(fp8: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Rows a program, columns of a tile, neighbours that share a maximum, warps."""
    if device.type != "cuda":
        return 128, 128, 8, 4
    return (1, 2048, 16, 8) if fp8 else (1, 8192, 8, 32)


def _cast8_shape(transposed: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps, stages of the load pipeline."""
    if device.type != "cuda":
        return 64, 256, 4, 1
    return (64, 64, 4, 1) if transposed else (16, 128, 4, 3)


def _transpose8_shape(device: torch.device) -> tuple[int, int, int]:
    """Rows and columns of a tile, warps."""
    return (64, 128, 4) if device.type == "cuda" else (256, 256, 4)
