"""Products with an epilogue agree with the same arithmetic in float64, on odd sizes.

They run on a GPU if there is one, or in Triton's interpreter. It does not know Gluon: such kernels are compiled only.
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

from trainer.engines.fused import epilogues, gemm, kernels, llama_kernels  # noqa: E402
from trainer.models.rotary import waves  # noqa: E402


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


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv", "D", "B", "T", "C"), [(3, 1, 64, 3, 32, 80), (4, 2, 128, 2, 200, 48)])
def test_positions_of_a_product_agree_with_float64(
    heads: int, kv: int, D: int, B: int, T: int, C: int, dtype: torch.dtype, norm: bool
) -> None:
    x, w = fresh(B * T, C).to(dtype), fresh((heads + 2 * kv) * D, C).to(dtype)
    cos, sin = (t.view(T, D // 2).to(DEVICE) for t in waves(torch.arange(T), D, 10_000.0))
    inverses = torch.full((1,), 0.5, device=DEVICE), torch.full((1,), 0.25, device=DEVICE)
    turn = llama_kernels.Turn(cos, sin, heads + kv, norm, 1e-5)
    qkv, rstd = epilogues.rotary_linear(x, w, turn, None if dtype == torch.bfloat16 else inverses)

    product = x.double() @ w.double().T / (1 if dtype == torch.bfloat16 else 8)
    turning, values = product.split([(heads + kv) * D, kv * D], 1)
    a, b = turning.view(B, T, heads + kv, D).chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    out = torch.cat((a * c - b * s, b * c + a * s), -1)
    exact_rstd = (out.square().mean(-1) + 1e-5).rsqrt().view(B * T, -1)
    if norm:
        out = F.rms_norm(out, (D,), None, 1e-5)
        near(rstd, exact_rstd, 1e-2)
    near(qkv, torch.cat((out.reshape(B * T, -1), values), 1), 2**-6, 2e-2)


COMPILING = """
import subprocess, sys, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from trainer.engines.fused import gluon_kernels

def tile(dtype, rows, cols):
    layout = gluon_kernels.SWIZZLED[16 if dtype == "bf16" else 8]
    return f"tensordesc<{dtype}[{rows}, {cols}],{layout!r}>"

name, dtype, half = sys.argv[1], sys.argv[2], int(sys.argv[3])
narrow, sizes, constants = tile("bf16", 64, 64), dict.fromkeys("MNK", "i32"), {}
if name == "relu2_input_grad_kernel":
    operands = {"dy": narrow, "w": tile("bf16", 64, 256), "act": narrow}
    signature = operands | {"act_ptr": "*bf16", "out_ptr": "*bf16"} | sizes
else:
    width, constants = 64 if dtype == "bf16" else 128, {"HALF": half, "NORM": True}
    operands = {"x": tile(dtype, 64, width), "w": tile(dtype, 256, width), "out": narrow}
    pointers = dict.fromkeys(("cos_ptr", "sin_ptr", "rstd_ptr", "x_inverse_ptr", "w_inverse_ptr"), "*fp32")
    signature = operands | pointers | sizes | {"T": "i32", "turning": "i32", "epsilon": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
aligned = {
    (place,): [["tt.divisibility", 16]]
    for place, (one, kind) in enumerate(signature.items())
    if kind.startswith("*") or one in sizes
}
source = GluonASTSource(getattr(gluon_kernels, name), signature, constants, aligned)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
Path("kernel.cubin").write_bytes(kernel.asm["cubin"])
tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
subprocess.run([tools / "cuobjdump", "-res-usage", "kernel.cubin"], check=True)
print("SHARED", kernel.metadata.shared)
"""


@pytest.mark.parametrize(
    "kernel",
    [
        "relu2_input_grad_kernel bf16 0",
        pytest.param("rotary_linear_kernel bf16 32", marks=pytest.mark.slow),
        "rotary_linear_kernel fp8e4nv 64",
    ],
)
def test_gluons_kernels_compile_for_hopper_without_spills(kernel: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILING, *kernel.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " STACK:0 " in done.stdout and " LOCAL:0 " in done.stdout
    assert int(done.stdout.split()[-1]) <= 227 << 10  # shared memory of a program
