"""Products of the MLP with ReLU² in their epilogue, which cuBLASLt has not: in Triton, launched here.

At M = 65536 and C = 768 the first product writes 403 MB; ReLU² as a pass of its own moves 806 MB more, its derivative
1208 MB, in fp8 with both casts 1409 MB. In the epilogue the derivative reads 403 MB, and the others cost nothing.
Milliseconds, product and pass | in one kernel, at M = 65536, C = 768 and at 32768, 1536; on a hot H100 in bf16: forward
0.654 | 0.495 and 1.144 | 0.972, backward 0.777 | 0.645 and 1.170 | 1.134; on a hot H200 in fp8: forward 0.500 | 0.437
and 0.677 | 0.655, backward 0.612 | 0.490 and 0.827 | 0.700. Of a whole step of modern-124m in bf16 that is 3.4%.

Not used, as they were slower: rotary positions in the epilogue of the projections (0.542 and 0.925 against 0.436 and
0.707 for product and pass); here tiles of 128 x 128, two a multiprocessor (0.490 and 0.726 backward, 0.616 and 0.938
forward), quarters of a tile for halves (0.564, 0.765), and `other` prefetched into the L2 cache (0.514, 0.76).

Programs, one a multiprocessor, walk over the tiles in groups that share operands in the L2 cache; loads and stores go
by TMA. Elsewhere than on sm_90, where tiles of this size spill or were not measured, each pass is a kernel of its own.
"""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trainer.fused import gemm
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
    _launch(x, w, act, None, False)
    return act


def relu2_input_grad(dy: Tensor, w: Tensor, act: Tensor) -> Tensor:
    """(dy (M, N) @ w (N, K)) · 2·√act -> (M, K), bf16; act (M, K): of `relu2_linear`."""
    if not fit(dy, w):
        return _pass(act, gemm.input_grad(dy, w))
    dpre = torch.empty_like(act)
    _launch(dy, w, dpre, act, True)
    return dpre


def relu2_linear8(x: Tensor, w: Tensor, inverses: gemm.Inverses, fp8: Fp8Out) -> tuple[Tensor, Tensor, Tensor]:
    """pre = x (M, K) e4m3 @ w (N, K)ᵀ e4m3, times both `inverses`, (1,) fp32 -> (M, N) bf16. Also returns relu(pre)²,
    of the product before pre was rounded: (M, N) e4m3, and the same bytes as (N, M)."""
    pre = x.new_empty(len(x), len(w), dtype=torch.bfloat16)
    act8, act8t = x.new_empty(pre.shape), x.new_empty(pre.shape[::-1])
    _launch(x, w, act8, pre, False, act8t, *inverses, fp8.scale, fp8.amax)
    return pre, act8, act8t


def relu2_input_grad8(
    dy: Tensor, w_t: Tensor, inverses: gemm.Inverses, pre: Tensor, fp8: Fp8Out
) -> tuple[Tensor, Tensor]:
    """(dy (M, N) e5m2 @ w_t (K, N)ᵀ e4m3, times both `inverses`, (1,) fp32) · 2·relu(pre (M, K) bf16), rounded once:
    (M, K) e5m2, and the same bytes as (K, M). The tensor cores keep the sum, over the width of the model."""
    dpre8 = torch.empty_like(pre, dtype=torch.float8_e5m2)
    dpre8t = dpre8.new_empty(pre.shape[::-1])
    _launch(dy, w_t, dpre8, pre, True, dpre8t, *inverses, fp8.scale, fp8.amax)
    return dpre8, dpre8t


def _pass(x: Tensor, gradient: Tensor | None = None) -> Tensor:
    """relu(x)², in place; with a `gradient`, of that result x, the gradient of the input, in its place. Both bf16."""
    block = 2048 if x.is_cuda else 65536
    relu2_kernel[(triton.cdiv(x.numel(), block),)](x, gradient, x.numel(), BLOCK=block)
    return x if gradient is None else gradient


def _launch(
    a: Tensor, b: Tensor, out: Tensor, other: Tensor | None, backward: bool, out_t: Tensor | None = None, *more: Tensor
) -> None:
    (M, K), N, device = a.shape, out.shape[1], a.device
    turned = bool(more) or not backward
    assert b.shape == ((N, K) if turned else (K, N)) and (other is None or other.shape == out.shape)
    assert all(t is None or (t.is_contiguous() and t.device == device) for t in (a, b, out, other, out_t, *more))
    BM, BN, BK, warps, stages = 128, 256, 128 // a.itemsize, 8, 3
    programs = torch.cuda.get_device_properties(device).multi_processor_count if a.is_cuda else 1

    def described(matrix: Tensor | None, *tile: int) -> TensorDescriptor | None:
        return None if matrix is None else TensorDescriptor.from_tensor(matrix, list(tile))

    relu2_product_kernel[(min(programs, triton.cdiv(M, BM) * triton.cdiv(N, BN)),)](
        described(a, BM, BK), described(b, BN, BK) if turned else described(b, BK, BN), described(out, BM, BN // 2),
        described(other, BM, BN // 2), described(out_t, BN // 2, BM), *(more or [None] * 4), M, N, K,
        BACKWARD=backward, BM=BM, BN=BN, BK=BK, GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip
