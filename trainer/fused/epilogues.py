"""Products of the MLP with ReLU² in their epilogue, which cuBLASLt has not: in Triton and Gluon, launched here.

At M = 65536 and C = 768 the first product writes 403 MB; ReLU² as a pass of its own moves 806 MB more, its derivative
1208 MB, in fp8 with both casts 1409 MB. In the epilogue the derivative reads the result of ReLU², whose root is the
input where that has a gradient, and the others cost nothing. Milliseconds on a hot H100, at M = 65536, C = 768 and at
32768, 1536: in bf16, product and pass | one kernel, forward 0.654 | 0.495 and 1.144 | 0.972, backward 0.777 | 0.556
and 1.170 | 0.995 (cuBLASLt's product alone 0.498 and 0.934); in fp8 forward 0.352 and 0.565, which was 0.484 and 0.696
with its input in bf16 for the backward pass, and backward 0.501 and 0.723.

Not used, as they were slower: rotary positions in the epilogue of the projections (0.542 and 0.925 against 0.436 and
0.707 for product and pass); here tiles of 128 x 128, two a multiprocessor, and quarters of a tile for halves. In Triton
the backward product in bf16 took 0.65 to 0.70 and 1.13, since its epilogue waits for `act`; in Gluon the forward one
in bf16 and both in fp8 gained nothing.

Programs, one a multiprocessor, walk over the tiles in groups that share operands in the L2 cache. Elsewhere than on
sm_90, where tiles of this size spill or were not measured, each pass is a kernel of its own.
"""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia import hopper as gluon
from triton.tools.tensor_descriptor import TensorDescriptor

from trainer.fused import gemm, gluon_kernels
from trainer.fused.gluon_kernels import relu2_input_grad_kernel
from trainer.fused.kernels import Fp8Out
from trainer.fused.triton_kernels import relu2_kernel, relu2_product_kernel


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

    def described(matrix: Tensor, *tile: gl.constexpr) -> gluon.TensorDescriptor:
        return gluon.TensorDescriptor.from_tensor(matrix, [length.value for length in tile], gluon_kernels.SWIZZLED)

    ROWS, BN, BK, COLS = gluon_kernels.ROWS, gluon_kernels.BN, gluon_kernels.BK, gluon_kernels.COLS
    tiles = described(dy, ROWS, BK), described(w, BK, BN), described(act, ROWS, COLS)
    relu2_input_grad_kernel[(_programs(M, N, dy.device),)](*tiles, act, dpre, M, N, K, num_warps=4)
    return dpre


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
