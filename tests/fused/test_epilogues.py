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


@pytest.mark.parametrize(("M", "K", "N"), [(80, 48, 80), (16, 80, 48), (304, 208, 528)])
def test_relu2_in_fp8_and_its_gradient_are_rounded_once(M: int, K: int, N: int) -> None:
    x, w, dy, back = (fresh(*shape) for shape in ((M, K), (N, K), (M, K), (N, K)))
    x, w, back, dy = *(t.to(torch.float8_e4m3fn) for t in (x, w, back)), dy.to(torch.float8_e5m2)
    inverses = torch.full((1,), 0.5, device=DEVICE), torch.full((1,), 0.25, device=DEVICE)

    def check(results: tuple[torch.Tensor, torch.Tensor], exact: torch.Tensor, relative: float) -> None:
        x8, x8t = results
        near(x8.float() / 4, exact, relative + 1e-2, 2e-3)  # the tensor cores' sums have fewer bits
        assert torch.equal(x8t.t().view(torch.uint8), x8.view(torch.uint8))
        assert float(out.amax) == pytest.approx(float(exact.abs().max()), rel=1e-2)

    def scaled() -> kernels.Fp8Out:
        return kernels.Fp8Out(torch.full((1,), 4.0, device=DEVICE), torch.zeros(1, device=DEVICE))

    out, product = scaled(), x.double() @ w.double().T / 8
    pre, act8, act8t = epilogues.relu2_linear8(x, w, inverses, out)
    near(pre, product, ROUNDED, 2e-3)
    check((act8, act8t), F.relu(product).square(), 2**-4)
    out = scaled()
    results = epilogues.relu2_input_grad8(dy, back, inverses, pre, out)
    check(results, dy.double() @ back.double().T / 8 * 2 * F.relu(pre.double()), 2**-3)


def test_fp8_products_whose_columns_tma_cannot_write_do_not_fit() -> None:
    w = fresh(80, 48).to(torch.float8_e4m3fn)
    assert [epilogues.fit(fresh(M, 48).to(w.dtype), w) for M in (80, 77)] == [True, False]
