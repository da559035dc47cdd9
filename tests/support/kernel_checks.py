"""Comparing a kernel with the same arithmetic in float64: on a GPU if there is one, else in Triton's interpreter."""

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
SIZES = [(77, 40), (1, 72), (130, 200)]  # that no block divides
ROUNDED = 2.0**-8  # half the distance of two bf16 numbers, at most, relative to the smaller


def fresh(*shape: int, scale: float = 1.0) -> Tensor:
    torch.seed()
    return (scale * torch.randn(shape)).to(DEVICE, BF16)


def near(actual: Tensor, expected: Tensor, relative: float = ROUNDED, absolute: float = 1e-5) -> None:
    """`absolute` is relative to the largest: float32 sums cancel, and the GPU's tanh has an error of 2^-11."""
    error = (actual.double() - expected).abs()
    allowed = relative * expected.abs() + absolute * expected.abs().max()
    assert (error <= allowed).all(), (error - allowed).max()
