"""Triton's products with an epilogue agree with the same arithmetic in float64, on odd sizes.

They run on a GPU if there is one, else in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, ROUNDED, fresh, near

pytest.importorskip("triton", reason="needs triton (pip)")

from trainer.fused import epilogues, gemm, kernels  # noqa: E402


@pytest.mark.parametrize("fit", [True, False])
@pytest.mark.parametrize(("M", "K", "N"), [(77, 40, 72), (1, 72, 40), (300, 200, 520)])
def test_relu2_of_a_product_and_its_gradient_agree_with_float64(
    M: int, K: int, N: int, fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epilogues, "fit", lambda *_: fit)
    x, w, dy, back = fresh(M, K), fresh(N, K), fresh(M, K), fresh(K, N)
    act = epilogues.relu2_linear(x, w)
    near(act, F.relu(x.double() @ w.double().T).square(), ROUNDED if fit else 3 * ROUNDED)
    dpre = epilogues.relu2_input_grad(dy, back, act)
    product = dy.double() @ back.double() if fit else gemm.input_grad(dy, back).double()
    near(dpre, product * 2 * act.double().sqrt(), ROUNDED, 1e-4 if fit else 0.0)  # one pass, which rounds once


@pytest.mark.parametrize(("M", "K", "N"), [(77, 48, 80), (1, 80, 48), (300, 208, 528)])
def test_the_gradient_of_relu2_in_fp8_is_rounded_once(M: int, K: int, N: int) -> None:
    dy, w, pre = fresh(M, K).to(torch.float8_e5m2), fresh(N, K).to(torch.float8_e4m3fn), fresh(M, N)
    one, other = (torch.full((1,), factor, device=DEVICE) for factor in (0.5, 0.25))
    out = kernels.Fp8Out(torch.full((1,), 4.0, device=DEVICE), torch.zeros(1, device=DEVICE))
    dpre8, dpre8t = epilogues.relu2_input_grad8(dy, w, (one, other), pre, out)
    exact = dy.double() @ w.double().T / 8 * 2 * F.relu(pre.double())
    near(dpre8.float() / 4, exact, 2**-3 + 1e-2, 2e-3)  # the tensor cores' sums have fewer bits
    assert torch.equal(dpre8t.t().view(torch.uint8), dpre8.view(torch.uint8))
    assert float(out.amax) == pytest.approx(float(exact.abs().max()), rel=1e-2)
