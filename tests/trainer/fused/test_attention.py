"""Attention with its explicit backward pass agrees with float64, on a GPU if there is one."""

import math

import pytest
import torch
from torch import Tensor

from trainer.engines.fused.attention import Attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def exact(qkv: Tensor, gradient: Tensor, B: int, heads: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Output and packed gradient in float64, from the definition."""
    qkv = qkv.double().requires_grad_()
    q, k, v = (t.transpose(1, 2) for t in qkv.view(B, -1, 3, heads, qkv.size(1) // 3 // heads).unbind(2))
    scores = q @ k.mT / math.sqrt(q.size(-1))
    visible = torch.ones_like(scores, dtype=torch.bool).tril()
    if window is not None:
        visible &= ~visible.tril(-window)
    output = (scores.masked_fill(~visible, -math.inf).softmax(-1) @ v).transpose(1, 2).reshape(gradient.shape)
    output.backward(gradient.double())
    assert qkv.grad is not None
    return output.detach(), qkv.grad


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "heads", "head", "window"),
    [(2, 100, 3, 64, None), (1, 77, 25, 64, None), (3, 37, 4, 16, None), (2, 200, 3, 64, 70), (2, 40, 3, 64, 70)],
)
def test_output_and_packed_gradients_agree_with_float64(
    B: int, T: int, heads: int, head: int, window: int | None, deterministic: bool
) -> None:
    C = heads * head
    qkv, gradient = (torch.randn(B * T, n, device=DEVICE).bfloat16() for n in (3 * C, C))
    attention = Attention(heads, C, DEVICE, deterministic, window=window)
    output, saved = attention.forward(qkv, B)
    packed = attention.backward(gradient, qkv, B, saved)
    expected_output, expected_packed = exact(qkv, gradient, B, heads, window)
    assert packed.shape == qkv.shape and packed.dtype == torch.bfloat16
    for actual, expected in (
        (output, expected_output),
        *zip(packed.split(C, 1), expected_packed.split(C, 1), strict=True),
    ):
        assert (actual.double() - expected).norm() < 0.005 * expected.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_deterministic_attention_is_cudnns_and_repeats_bit_for_bit() -> None:
    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
    qkv, gradient = (torch.randn(8 * 1000, n, device=DEVICE).bfloat16() for n in (3 * 768, 768))
    attention = Attention(12, 768, DEVICE, deterministic=True)
    _, saved = attention.forward(qkv, 8)
    assert list(attention.graphs) == [(8, 1000)] and None not in attention.graphs.values()
    first, *others = (attention.backward(gradient, qkv, 8, saved) for _ in range(10))
    assert all(torch.equal(first, other) for other in others)
