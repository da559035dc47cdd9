"""The matrix products of a GPT-2 step: torch's, and ours by cuBLASLt with epilogues, compared and timed.

`python -m benchmarks.gemm` on a GPU takes a minute at most. For every product of a block and of the head of 124M (64
sequences of 1024 tokens) and of 1558M (16 of them), on random operands, it compares our result with torch's. Then the
ways to compute the product take turns, 21 rounds after 3 to warm up. It prints median ms and TFLOP/s, and the time of a
model's products in a micro-step; a whole step, unlike so short a run, meets the power limit. The same for the products
in fp8, against bf16 and torch._scaled_mm. It exits with 1 if a result is wrong or cuBLASLt lacks a product.
`tests/trainer/fused/test_gemm.py` compares small ones with float64.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from benchmarks import median_ms
from trainer.engines.fused import gemm

VOCAB, CHUNKS = 50_304, 4
WARM_UP, ROUNDS = 3, 21
ERROR = (
    1e-2  # of two results that are rounded to bf16, or summed by the tensor cores in fewer bits, at different places
)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Ways = dict[str, Callable[[], Tensor]]


class Shape(NamedTuple):
    name: str
    layers: int
    rows: int
    width: int


class Weight(NamedTuple):
    """A weight (N, K), the rows of its input, and the number of its products in a micro-step."""

    name: str
    rows: int
    n: int
    k: int
    products: int
    has_bias: bool = False


SHAPES = [Shape("124M", 12, 65_536, 768), Shape("1558M", 48, 16_384, 1600)]


class Times:
    """Milliseconds of a model's products, torch's and ours: the sum of count in a micro-step times median."""

    def __init__(self, name: str) -> None:
        self.name, self.totals, self.wrong = name, {"torch": 0.0, "ours": 0.0}, 0
        print(f"\n{name}; ms and TFLOP/s")

    def race(self, weight: Weight, kind: str, ways: Ways) -> None:
        """Compare `ours` with `torch`, time all ways in turns, and print the time of each."""
        expected, found = ways["torch"]().double(), ways["ours"]().double()
        error = ((found - expected).norm() / expected.norm()).item()
        self.wrong += not error < ERROR
        del expected, found
        medians = dict(zip(ways, median_ms(list(ways.values()), ROUNDS, WARM_UP), strict=True))
        rates = (2e-9 * weight.rows * weight.n * weight.k / ms for ms in medians.values())
        shown = (f"{way} {ms:.3f} ms {rate:.0f}" for (way, ms), rate in zip(medians.items(), rates, strict=True))
        case = f"{weight.name} {kind}"
        print(f"  {case:22} {' | '.join(shown)}; error {error:.1e}{'' if error < ERROR else ' WRONG'}", flush=True)
        for owner in self.totals:
            self.totals[owner] += weight.products * medians[owner]

    def close(self) -> int:
        """Print the sums. Returns the number of wrong results."""
        print(f"  a micro-step: {' | '.join(f'{owner} {ms:.1f} ms' for owner, ms in self.totals.items())}", flush=True)
        torch.cuda.empty_cache()
        return self.wrong


def weights(shape: Shape) -> Iterator[Weight]:
    m, c, layers = shape.rows, shape.width, shape.layers
    yield Weight("qkv", m, 3 * c, c, layers, has_bias=True)
    yield Weight("projection", m, c, c, layers)
    yield Weight("fc", m, 4 * c, c, layers, has_bias=True)
    yield Weight("fc projection", m, c, 4 * c, layers)
    yield Weight("head", m // CHUNKS, VOCAB, c, CHUNKS)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(scale)


def in_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x in half of the range of `dtype`, the same transposed, and the inverse of its scale."""
    inverse = (2 * x.abs().max().float() / torch.finfo(dtype).max).view(1)
    stored = (x.float() / inverse).to(dtype)
    return stored, stored.t().contiguous(), inverse


def added(product: Callable[..., None], *operands: Tensor, into: Tensor) -> Tensor:
    product(*operands, into, accumulate=True)
    return into


def time_all(shape: Shape) -> int:
    """The products in bf16, forward and both gradients. The norms after the projections add their biases."""
    times = Times(f"{shape.name}: M={shape.rows}, C={shape.width}")
    for weight in weights(shape):
        _, m, n, k, _, _ = weight
        x, w, dy, bias = random(m, k), random(n, k, scale=0.02), random(m, n), random(n)
        ways: Ways = {"torch": partial(torch.mm, x, w.t()), "ours": partial(gemm.linear, x, w)}
        if weight.has_bias:
            ways = {"torch": partial(torch.addmm, bias, x, w.t()), "ours": partial(gemm.linear, x, w, bias)}
        times.race(weight, "forward", gelu_ways(x, w, bias) if weight.name == "fc" else ways)
        ways = {"torch": partial(torch.mm, dy, w), "ours": partial(gemm.input_grad, dy, w)}
        times.race(weight, "input", dgelu_ways(dy, w, random(m, k)) if weight.name == "fc projection" else ways)
        into, sums = (torch.zeros(n, k, device="cuda") for _ in range(2))
        by_torch = partial(torch.ops.aten.addmm.dtype_out, into, dy.t(), x, torch.float32, out=into)
        times.race(weight, "weight", {"torch": by_torch, "ours": partial(added, gemm.weight_grad, dy, x, into=sums)})
    return times.close()


def gelu_ways(x: Tensor, w: Tensor, bias: Tensor) -> Ways:
    return {
        "torch": lambda: gelu(torch.addmm(bias, x, w.t()), approximate="tanh"),
        "separate": lambda: gelu(gemm.linear(x, w, bias), approximate="tanh"),
        "ours": lambda: gemm.linear_gelu(x, w, bias)[1],
    }


def dgelu_ways(dy: Tensor, w: Tensor, pre: Tensor) -> Ways:
    return {
        "torch": lambda: torch.ops.aten.gelu_backward(torch.mm(dy, w), pre, approximate="tanh"),
        "ours": lambda: gemm.input_grad_gelu(dy, w, pre),
    }


def time_all8(shape: Shape) -> int:
    """The same products in fp8. The forward ones sum `fast`: in the tensor cores, in fewer bits."""
    times = Times(f"{shape.name} in fp8: M={shape.rows}, C={shape.width}")
    for weight in weights(shape):
        _, m, n, k, _, has_bias = weight
        x, w, dy, bias = random(m, k), random(n, k, scale=0.02), random(m, n, scale=1e-4), random(n)
        (x8, x8t, x_inverse), (w8, w8t, w_inverse), (dy8, dy8t, dy_inverse) = (
            in_fp8(tensor, dtype) for tensor, dtype in ((x, E4M3), (w, E4M3), (dy, E5M2))
        )
        given = bias if has_bias else None
        ours = partial(gemm.linear8, x8, w8, x_inverse, w_inverse, given)
        ways: Ways = {
            "torch": partial(scaled_mm, x8, w8, x_inverse, w_inverse, fast=True, bias=given),
            "bf16": partial(gemm.linear, x, w, given),
            "not fast": partial(ours, False),
            "ours": partial(ours, True),
        }
        times.race(weight, "forward", ways)
        ours = partial(gemm.input_grad8, dy8, w8t, dy_inverse, w_inverse)
        ways = {
            "torch": partial(scaled_mm, dy8, w8t, dy_inverse, w_inverse),
            "bf16": partial(gemm.input_grad, dy, w),
            "fast": partial(ours, fast=True),
            "ours": ours,
        }
        times.race(weight, "input", ways)
        by_torch, sums, sums16 = (torch.zeros(n, k, device="cuda") for _ in range(3))
        scaled = partial(scaled_mm, dy8t, x8t, dy_inverse, x_inverse)
        ways = {
            "torch": partial(then_add, scaled, by_torch),
            "bf16": partial(added, gemm.weight_grad, dy, x, into=sums16),
            "ours": partial(added, gemm.weight_grad8, dy8t, x8t, dy_inverse, x_inverse, into=sums),
        }
        times.race(weight, "weight", ways)
    return times.close()


def then_add(product: Callable[[], Tensor], to: Tensor) -> Tensor:
    return to.add_(product())


def scaled_mm(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, fast: bool = False, bias: Tensor | None = None
) -> Tensor:
    scales = {"scale_a": a_inverse, "scale_b": b_inverse}
    return torch._scaled_mm(a, b.t(), **scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


def main() -> int:
    if obstacle := gemm.why_not():
        sys.exit(f"benchmarks.gemm: cuBLASLt cannot run here: {obstacle}")
    torch.manual_seed(1)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
    wrong = sum(time_all(shape) + time_all8(shape) for shape in SHAPES)
    for request in gemm.refused():
        print("no algorithm:", request)
    return 1 if wrong or gemm.refused() else 0


if __name__ == "__main__":
    sys.exit(main())
