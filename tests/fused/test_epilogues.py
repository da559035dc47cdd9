"""Products with an epilogue agree with the same arithmetic in float64, on odd sizes.

They run on a GPU if there is one, else in Triton's interpreter; it does not know Gluon, whose kernel is only compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, ROUNDED, fresh, near

pytest.importorskip("triton", reason="needs triton (pip)")

from trainer.fused import epilogues, gemm, kernels  # noqa: E402


@pytest.mark.parametrize("fit", [True, False])
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [
        *((77, 40, 72), (1, 72, 40), (300, 200, 520)),
        pytest.param(
            20_013, 72, 520, marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: many tiles a program")
        ),
    ],
)
def test_relu2_of_a_product_and_its_gradient_agree_with_float64(
    M: int, K: int, N: int, fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epilogues, "fit", lambda *_: fit)
    x, w, dy, back = fresh(M, K), fresh(N, K), fresh(M, K), fresh(K, N)
    act = epilogues.relu2_linear(x, w)
    near(act, F.relu(x.double() @ w.double().T).square(), ROUNDED if fit else 3 * ROUNDED)
    dpre = epilogues.relu2_input_grad(dy, back, act)
    once = fit and dy.is_cuda  # in one pass, which rounds once
    product = dy.double() @ back.double() if once else gemm.input_grad(dy, back).double()
    near(dpre, product * 2 * act.double().sqrt(), ROUNDED, 1e-4 if once else 0.0)


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
    act8, act8t = epilogues.relu2_linear8(x, w, inverses, out, transposed=True)
    assert act8t is not None
    check((act8, act8t), F.relu(product).square(), 2**-4)
    alone, nothing = epilogues.relu2_linear8(x, w, inverses, out, transposed=False)
    assert torch.equal(alone.view(torch.uint8), act8.view(torch.uint8)) and nothing is None
    out, slope = scaled(), 2 * (act8.double() / 4).sqrt()
    results = epilogues.relu2_input_grad8(dy, back, inverses, act8, torch.full((1,), 0.25, device=DEVICE), out)
    check(results, dy.double() @ back.double().T / 8 * slope, 2**-3)


def test_fp8_products_whose_columns_tma_cannot_write_do_not_fit() -> None:
    w = fresh(80, 48).to(torch.float8_e4m3fn)
    assert [epilogues.fit(fresh(M, 48).to(w.dtype), w) for M in (80, 77)] == [True, False]


COMPILING = """
import subprocess, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from trainer.fused import gluon_kernels

tile = "tensordesc<bf16[{}, {}],{!r}>".format
operands = {name: tile(64, width, gluon_kernels.SWIZZLED) for name, width in (("dy", 64), ("w", 256), ("act", 64))}
pointers, sizes = dict.fromkeys(("act_ptr", "out_ptr"), "*bf16"), dict.fromkeys("MNK", "i32")
aligned = {(number,): [["tt.divisibility", 16]] for number in range(3, 8)}
source = GluonASTSource(gluon_kernels.relu2_input_grad_kernel, operands | pointers | sizes, {}, aligned)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
subprocess.run([tools / "cuobjdump", "-res-usage", "kernel.cubin"], check=True)
print("SHARED", kernel.metadata.shared)
"""


def test_gluons_kernel_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILING]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " STACK:0 " in done.stdout and " LOCAL:0 " in done.stdout
    assert int(done.stdout.split()[-1]) <= 227 << 10  # shared memory of a program
