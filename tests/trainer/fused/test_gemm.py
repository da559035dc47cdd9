"""Products with epilogues agree with the same formula in float64: on a CPU, and by cuBLASLt where there is a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from trainer.engines.fused import gemm

M, N, K = 67, 48, 40  # rows need not be a multiple of anything
DEVICES = ["cpu"] if gemm.why_not() else ["cpu", "cuda"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def random(device: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """A sum in fp32, rounded once, is float64's result rounded, except where that lies between two neighbours."""
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    wanted = exact.to(torch.bfloat16)
    assert (found != wanted).float().mean() < 0.01
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-5)


def test_a_linear_layer_adds_its_bias_before_it_rounds(device: str) -> None:
    x, w, bias = random(device, M, K), random(device, N, K), random(device, N)
    exact = x.double() @ w.double().t()
    assert_rounded_once(gemm.linear(x, w), exact)
    assert_rounded_once(gemm.linear(x, w, bias), exact + bias.double())


def test_gelu_and_its_derivative_are_those_of_the_tanh_form(device: str) -> None:
    x, w, bias, dy = random(device, M, K), random(device, N, K), random(device, N), random(device, M, K)
    pre, act = gemm.linear_gelu(x, w, bias)
    exact = x.double() @ w.double().t() + bias.double()
    assert_rounded_once(pre, exact)
    # tanh is approximate on a GPU: one part in 2^11, before the rounding.
    torch.testing.assert_close(act.double(), gelu(exact, approximate="tanh"), rtol=2**-7, atol=2e-3)

    back = random(device, K, N)
    leaf = pre.double().requires_grad_()
    (wanted,) = torch.autograd.grad(gelu(leaf, approximate="tanh"), leaf, dy.double() @ back.double())
    dpre = gemm.input_grad_gelu(dy, back, pre)
    torch.testing.assert_close(dpre.double(), wanted, rtol=2**-7, atol=2e-2)


def test_the_gradient_of_the_input_is_written_into_the_given_output(device: str) -> None:
    dy, w = random(device, M, N), random(device, N, K)
    exact = dy.double() @ w.double()
    assert_rounded_once(gemm.input_grad(dy, w), exact)
    whole = torch.full((2 * M, K), 7.0, dtype=torch.bfloat16, device=device)
    assert gemm.input_grad(dy, w, out=whole[M:]).data_ptr() == whole[M:].data_ptr()
    assert_rounded_once(whole[M:], exact)
    assert (whole[:M] == 7).all()


def test_gradients_of_a_weight_add_up_in_fp32(device: str) -> None:
    """A hundred small ones on top of a large one: in bf16 each would vanish."""
    dy, x = random(device, M, N), random(device, M, K)
    exact = dy.double().t() @ x.double()
    into = torch.full((N, K), float("nan"), device=device)
    gemm.weight_grad(dy, x, into, accumulate=False)
    torch.testing.assert_close(into.double(), exact, rtol=1e-5, atol=1e-4)
    small = x * 2**-12
    for _ in range(100):
        gemm.weight_grad(dy, small, into, accumulate=True)
    torch.testing.assert_close(into.double(), exact * (1 + 100 / 2**12), rtol=1e-5, atol=1e-3)


def random8(device: str, dtype: torch.dtype, inverse: float, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """A random matrix in fp8, the numbers that it represents in float64, and the factor between the two."""
    stored = random(device, *shape).to(dtype)
    return stored, stored.double() * inverse, torch.full((1,), inverse, device=device)


def test_fp8_products_are_those_of_the_numbers_that_are_stored(device: str) -> None:
    """Only the operands lose digits: sums and bias are added before the one rounding."""
    M, N, K = 64, 48, 80  # multiples of 16, as the tensor cores need
    x, exact_x, x_inverse = random8(device, torch.float8_e4m3fn, 2**-3, M, K)
    w, exact_w, w_inverse = random8(device, torch.float8_e4m3fn, 2**-7, N, K)
    dy, exact_dy, dy_inverse = random8(device, torch.float8_e5m2, 2**-12, M, N)
    bias = random(device, N)
    exact = exact_x @ exact_w.t()
    assert_rounded_once(gemm.linear8(x, w, x_inverse, w_inverse, bias, fast=False), exact + bias.double())
    fast = gemm.linear8(x, w, x_inverse, w_inverse, bias)
    torch.testing.assert_close(fast.double(), exact + bias.double(), rtol=2**-7, atol=1e-3)

    exact = exact_dy @ exact_w
    out = torch.empty(M, K, dtype=torch.bfloat16, device=device)
    assert gemm.input_grad8(dy, w.t().contiguous(), dy_inverse, w_inverse, out=out) is out
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=2**-20)

    exact, into = exact_dy.t() @ exact_x, torch.full((N, K), float("nan"), device=device)
    for times in (1, 2, 3):
        gemm.weight_grad8(dy.t().contiguous(), x.t().contiguous(), dy_inverse, x_inverse, into, accumulate=times > 1)
        torch.testing.assert_close(into.double(), times * exact, rtol=1e-3, atol=1e-6)
