"""Products with ReLU² or rotary positions in the epilogue, which cuBLASLt has not; launched here, in Triton and Gluon.

At M = 65536 and C = 768 the first product writes 403 MB; ReLU² as a pass of its own moves 806 MB more, its derivative
1208 MB, in fp8 with both casts 1409 MB. In the epilogue the derivative reads the result of ReLU², whose root is the
input where that has a gradient, and the others cost nothing. Milliseconds on a hot H100, at M = 65536, C = 768 and at
32768, 1536: in bf16, product and pass | one kernel, forward 0.654 | 0.495 and 1.144 | 0.972, backward 0.777 | 0.556
and 1.170 | 0.995 (cuBLASLt's product alone 0.498 and 0.934); in fp8 forward 0.352 and 0.565, which was 0.484 and 0.696
with its input in bf16 for the backward pass, and backward 0.501 and 0.723.

Rotary positions as a pass of their own read and write queries and keys, 403 MB. Product and pass | one kernel, on a hot
H100 with heads of 64: 0.476 | 0.419 in bf16, 0.346 | 0.263 in fp8; at 32768, 1536 with heads of 128 0.501 | 0.436 in
fp8. The products alone take 0.323, 0.192 and 0.331. In bf16 with heads of 128 the kernel is tested, but was not timed.

Not used, as they were slower: here tiles of 128 x 128, two a multiprocessor, and quarters of a tile for halves. In
Triton ReLU²'s backward product in bf16 took 0.65 to 0.70 and 1.13, since its epilogue waits for `act`, and that of the
positions 0.542 and 0.925; in Gluon ReLU²'s forward product in bf16 and both in fp8 gained nothing. For the positions, a
tile of 128 x 128 for each warpgroup in turn (0.438), and stores from registers (0.446).

Programs, one a multiprocessor, walk over the tiles in groups that share operands in the L2 cache. Elsewhere than on
sm_90, where tiles of this size spill or were not measured, each pass is a kernel of its own.
"""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia import hopper as gluon
from triton.tools.tensor_descriptor import TensorDescriptor

from trainer.engines.fused import gemm, gluon_kernels
from trainer.engines.fused.gluon_kernels import relu2_input_grad_kernel, rotary_linear_kernel
from trainer.engines.fused.kernels import Fp8Out
from trainer.engines.fused.llama_kernels import Turn, rotate
from trainer.engines.fused.triton_kernels import relu2_kernel, relu2_product_kernel


def fit(*operands: Tensor) -> bool:
    """True if the kernel is for the operands' device (or its interpreter for the CPU), and TMA reads their rows and
    writes their columns."""
    device = operands[0].device
    runs = device.type == "cpu" or torch.cuda.get_device_capability(device) == (9, 0)
    described = all(gemm.is_supported((t.dtype, t.shape, t.stride())) for t in operands)
    return runs and described and (operands[0].itemsize > 1 or len(operands[0]) % gemm.ALIGNMENT_BYTES == 0)


def relu2_linear(x: Tensor, w: Tensor) -> Tensor:
    """relu(x (M, K) @ w (N, K)ᵀ)² -> (M, N), bf16 (So et al. 2021, Primer)."""
    if not fit(x, w):
        return _pass(gemm.linear(x, w))
    act = x.new_empty(len(x), len(w))
    _launch(x, w, act)
    return act


def relu2_input_grad(dy: Tensor, w: Tensor, act: Tensor) -> Tensor:
    """(dy (M, N) @ w (N, K)) · 2·√act -> (M, K), bf16; act (M, K): of `relu2_linear`."""
    if not (dy.is_cuda and fit(dy, w)):
        return _pass(act, gemm.input_grad(dy, w))
    (M, K), N, dpre = dy.shape, w.shape[1], torch.empty_like(act)
    assert len(w) == K and act.shape == (M, N)
    assert all(t.is_contiguous() and t.device == dy.device for t in (dy, w, act))
    ROWS, BN, BK = gluon_kernels.ROWS, gluon_kernels.BN, gluon_kernels.BK
    tiles = _described(dy, ROWS), _described(w, BK, BN), _described(act, ROWS)
    relu2_input_grad_kernel[(_programs(M, N, dy.device),)](*tiles, act, dpre, M, N, K, num_warps=4)
    return dpre


def rotary_linear(x: Tensor, w: Tensor, turn: Turn, inverses: gemm.Inverses | None = None) -> tuple[Tensor, Tensor]:
    """x (M, K) @ w (N, K)ᵀ, in bf16, or in e4m3 times both `inverses`, (1,) fp32 -> (M, N) bf16, with
    `llama_kernels.rotate` of the first heads; and the result of that."""
    cos, sin, heads, norm, epsilon = turn
    (M, K), N, (T, half) = x.shape, len(w), cos.shape
    assert w.shape[1] == K and sin.shape == cos.shape and 2 * half * heads <= N
    assert all(t.is_contiguous() and t.device == x.device for t in (x, w, cos, sin, *(inverses or ())))
    if not (x.is_cuda and fit(x, w) and half in (32, 64)):
        qkv = gemm.linear(x, w) if inverses is None else gemm.linear8(x, w, *inverses)
        return qkv, rotate(qkv, turn)
    out, rstd = x.new_empty(M, N, dtype=torch.bfloat16), cos.new_empty(M, heads)
    tiles = _described(x, gluon_kernels.ROWS), _described(w, gluon_kernels.BN), _described(out, gluon_kernels.ROWS)
    rotary_linear_kernel[(_programs(M, N, x.device),)](
        *tiles, cos, sin, rstd, *(inverses or (None, None)), M, N, K, T, heads, epsilon,
        HALF=half, NORM=norm, num_warps=4,
    )  # fmt: skip
    return out, rstd


def relu2_linear8(
    x: Tensor, w: Tensor, inverses: gemm.Inverses, fp8: Fp8Out, transposed: bool
) -> tuple[Tensor, Tensor | None]:
    """relu(x (M, K) e4m3 @ w (N, K)ᵀ e4m3, times both `inverses`, (1,) fp32)², rounded once -> (M, N) e4m3, and the
    same bytes as (N, M) if they are asked for."""
    act8 = x.new_empty(len(x), len(w))
    act8t = x.new_empty(act8.shape[::-1]) if transposed else None
    _launch(x, w, act8, act8t, None, *inverses, None, fp8.scale, fp8.amax)
    return act8, act8t


def relu2_input_grad8(
    dy: Tensor, w_t: Tensor, inverses: gemm.Inverses, act8: Tensor, act_inverse: Tensor, fp8: Fp8Out
) -> tuple[Tensor, Tensor]:
    """(dy (M, N) e5m2 @ w_t (K, N)ᵀ e4m3, times both `inverses`, (1,) fp32) · 2·√(act8 (M, K) · act_inverse), rounded
    once: (M, K) e5m2, and the same bytes as (K, M). The tensor cores keep the sum, over the width of the model.

    act8 of `relu2_linear8` has 4 bits, its root 5, and e5m2 keeps 3 of the result."""
    dpre8 = torch.empty_like(act8, dtype=torch.float8_e5m2)
    dpre8t = dpre8.new_empty(act8.shape[::-1])
    _launch(dy, w_t, dpre8, dpre8t, act8, *inverses, act_inverse, fp8.scale, fp8.amax)
    return dpre8, dpre8t


def _described(matrix: Tensor, rows: gl.constexpr, cols: gl.constexpr | None = None) -> gluon.TensorDescriptor:
    """A matrix for TMA, in tiles of `rows` x `cols`, by default as wide as TMA's swizzle."""
    layout = gluon_kernels.SWIZZLED[8 * matrix.itemsize]
    width = cols.value if cols is not None else 128 // matrix.itemsize
    return gluon.TensorDescriptor.from_tensor(matrix, [rows.value, width], layout)


def _pass(x: Tensor, gradient: Tensor | None = None) -> Tensor:
    """relu(x)², in place; with a `gradient`, of that result x, the gradient of the input, in its place. Both bf16."""
    block = 2048 if x.is_cuda else 65536
    relu2_kernel[(triton.cdiv(x.numel(), block),)](x, gradient, x.numel(), BLOCK=block)
    return x if gradient is None else gradient


def _launch(
    a: Tensor, b: Tensor, out: Tensor, out_t: Tensor | None = None, act: Tensor | None = None, *scales: Tensor | None
) -> None:
    (M, K), N, device = a.shape, len(b), a.device
    assert b.shape == (N, K) and out.shape == (M, N) and (act is None or act.shape == out.shape)
    assert all(t is None or (t.is_contiguous() and t.device == device) for t in (a, b, out, out_t, act, *scales))
    BM, BN, BK, warps, stages = 128, 256, 128 // a.itemsize, 8, 3

    def described(matrix: Tensor | None, *tile: int) -> TensorDescriptor | None:
        return None if matrix is None else TensorDescriptor.from_tensor(matrix, list(tile))

    relu2_product_kernel[(_programs(M, N, device),)](
        described(a, BM, BK), described(b, BN, BK), described(out, BM, BN // 2), described(out_t, BN // 2, BM),
        described(act, BM, BN // 2), *(scales or [None] * 5), M, N, K,
        BM=BM, BN=BN, BK=BK, GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _programs(M: int, N: int, device: torch.device) -> int:
    """One a multiprocessor, at most one a tile of 128 x 256."""
    most = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return min(most, triton.cdiv(M, 128) * triton.cdiv(N, 256))
