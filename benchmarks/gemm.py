"""The matrix products of a GPT-2 step: torch's, and ours by cuBLASLt with epilogues, checked and then timed.

`python -m benchmarks.gemm` on a GPU takes a minute at most. It compares every product of a block and of the head of
124M (64 sequences of 1024 tokens) and of 1558M (16 of them) with float64 on a part of its rows. Then the ways to
compute a product take turns, 21 rounds after 3 to warm up, on random operands. It prints median ms and TFLOP/s, and the
time of a model's products in a micro-step; a whole step, unlike so short a run, meets the power limit. The same for the
products in fp8, against bf16 and torch._scaled_mm. It exits with 1 if a result is wrong or cuBLASLt lacks a product.
"""

import functools
import statistics
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from trainer.fused import gemm

VOCAB, CHUNKS = 50_304, 4
WARM_UP, ROUNDS = 3, 21
BF16_ERROR, FP32_ERROR = 4e-3, 1e-4  # rounding to bf16 is 1.7e-3 in the mean; sums of 65,536 terms in fp32 are 1e-5
SUM8_ERROR, FAST_ERROR = 5e-4, 8e-3  # of products in fp8; `fast` sums in the tensor cores, in fewer bits
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Run = Callable[[], object]


class Shape(NamedTuple):
    name: str
    layers: int
    rows: int
    width: int


class Operands(NamedTuple):
    """A weight (N, K), its input and its output's gradient in fp8: as stored, transposed, and the inverse scale."""

    x: Tensor
    x_t: Tensor
    x_inverse: Tensor
    w: Tensor
    w_t: Tensor
    w_inverse: Tensor
    dy: Tensor
    dy_t: Tensor
    dy_inverse: Tensor

    def forward(self, bias: Tensor | None = None, fast: bool = True) -> Tensor:
        return gemm.linear8(self.x, self.w, self.x_inverse, self.w_inverse, bias, fast)

    def input_grad(self, fast: bool = False) -> Tensor:
        return gemm.input_grad8(self.dy, self.w_t, self.dy_inverse, self.w_inverse, fast=fast)

    def weight_grad(self, into: Tensor, accumulate: bool = True, fast: bool = False) -> None:
        gemm.weight_grad8(self.dy_t, self.x_t, self.dy_inverse, self.x_inverse, into, accumulate, fast)


SHAPES = [Shape("124M", 12, 65_536, 768), Shape("1558M", 48, 16_384, 1600)]


class Times:
    """Milliseconds of a model's products, torch's and ours: the sum of count in a micro-step times median."""

    def __init__(self, name: str) -> None:
        self.name, self.totals = name, dict.fromkeys(("torch", "ours"), 0.0)
        print(f"\n{name}")

    def race(self, case: str, flops: float, count: int, ways: dict[str, Run]) -> None:
        """Time the ways to compute the same product in turns, and print the time of each.

        The totals count the fastest way whose name begins with torch, and with ours; the others compute less or more.
        """
        medians = median_times(ways)
        shown = (f"{way} {ms:.3f} ms {flops / ms / 1e9:.0f}" for way, ms in medians.items())
        print(f"  {case:22} {' | '.join(shown)}", flush=True)
        for owner in self.totals:
            self.totals[owner] += count * min(ms for way, ms in medians.items() if way.split()[0] == owner)

    def close(self) -> None:
        shown = " | ".join(f"{owner} {ms:.1f} ms" for owner, ms in self.totals.items())
        print(f"  {self.name} a micro-step, the fastest way of each: {shown}", flush=True)


def median_times(ways: dict[str, Run]) -> dict[str, float]:
    times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {way: [] for way in ways}
    for _ in range(WARM_UP + ROUNDS):
        for way, run in ways.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            times[way].append((start, end))
    torch.cuda.synchronize()
    return {way: statistics.median(a.elapsed_time(b) for a, b in each[WARM_UP:]) for way, each in times.items()}


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16)).mul_(scale)


def check(name: str, result: Tensor, exact: Tensor, limit: float = BF16_ERROR) -> None:
    """Assert that the norm of the error is below `limit`, relative to the norm of `exact`."""
    error = ((result.double() - exact).norm() / exact.norm()).item()
    print(f"  {name:46} relative error {error:.1e}", flush=True)
    assert error < limit, f"{name}: {error} is above {limit}"


def in_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x in half of the range of `dtype`, the same transposed, and the inverse of its scale."""
    inverse = (2 * x.abs().max().float() / torch.finfo(dtype).max).view(1)
    stored = (x.float() / inverse).to(dtype)
    return stored, stored.t().contiguous(), inverse


def operands8(rows: int, n: int, k: int) -> Operands:
    x, w, dy = random(rows, k), random(n, k, scale=0.02), random(rows, n, scale=1e-4)
    return Operands(*in_fp8(x, E4M3), *in_fp8(w, E4M3), *in_fp8(dy, E5M2))


def dgelu(d: Tensor, pre: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(d, pre, approximate="tanh")


# --- correct


def check_products(rows: int, width: int, vocab: int) -> None:
    """Compare every function with float64, on the first 256 rows of its result."""
    print(f"\ncheck: M={rows}, C={width}")
    part = slice(0, 256)
    x, w, bias = random(rows, width), random(4 * width, width, scale=0.02), random(4 * width)
    back = random(width, 4 * width, scale=0.02)
    exact = x[part].double() @ w.double().t()
    check("linear", gemm.linear(x, w)[part], exact)
    check("linear + bias", gemm.linear(x, w, bias)[part], exact + bias.double())
    pre, act = gemm.linear_gelu(x, w, bias)
    check("linear_gelu: pre", pre[part], exact + bias.double())
    check("linear_gelu: act", act[part], gelu(exact + bias.double(), approximate="tanh"))
    check("linear, back", gemm.linear(act, back)[part], act[part].double() @ back.double().t())

    dy = random(rows, width)
    check("input_grad", gemm.input_grad(act, w)[part], act[part].double() @ w.double())
    exact = torch.ops.aten.gelu_backward(dy[part].double() @ back.double(), pre[part].double(), approximate="tanh")
    check("input_grad_gelu", gemm.input_grad_gelu(dy, back, pre)[part], exact)

    into = torch.full((4 * width, width), float("nan"), device="cuda")
    exact = pre[:, part].double().t() @ x.double()
    gemm.weight_grad(pre, x, into, accumulate=False)
    check("weight_grad, overwritten", into[part], exact, FP32_ERROR)
    gemm.weight_grad(pre, x, into, accumulate=True)
    check("weight_grad, added", into[part], 2 * exact, FP32_ERROR)
    del back, dy, pre, act, into

    rows, wte = rows // CHUNKS, random(vocab, width, scale=0.02)
    logits = gemm.linear(x[:rows], wte)
    check("head", logits[part], x[part].double() @ wte.double().t())
    check("head's input_grad", gemm.input_grad(logits, wte, out=x[-rows:])[part], logits[part].double() @ wte.double())
    into = torch.zeros(vocab, width, device="cuda")
    gemm.weight_grad(logits, x[:rows], into, accumulate=True)
    check("head's weight_grad", into[part], logits[:, part].double().t() @ x[:rows].double(), FP32_ERROR)


def check_products8(rows: int, n: int, k: int) -> None:
    print(f"\ncheck in fp8: M={rows}, N={n}, K={k}")
    part, o, bias = slice(0, 256), operands8(rows, n, k), random(n)
    w = o.w.double() * o.w_inverse
    exact = (o.x[part].double() * o.x_inverse) @ w.t()
    check("linear8", o.forward(fast=False)[part], exact)
    check("linear8, fast", o.forward()[part], exact, FAST_ERROR)
    check("linear8 + bias", o.forward(bias, fast=False)[part], exact + bias.double())
    exact = (o.dy[part].double() * o.dy_inverse) @ w
    check("input_grad8", o.input_grad()[part], exact)
    check("input_grad8, fast", o.input_grad(fast=True)[part], exact, FAST_ERROR)
    into = torch.full((n, k), float("nan"), device="cuda")
    exact = (o.dy_t[part].double() * o.dy_inverse) @ (o.x_t.double() * o.x_inverse).t()
    o.weight_grad(into, accumulate=False)
    check("weight_grad8, overwritten", into[part], exact, SUM8_ERROR)
    o.weight_grad(into)
    check("weight_grad8, added", into[part], 2 * exact, SUM8_ERROR)
    o.weight_grad(into, accumulate=False, fast=True)
    check("weight_grad8, fast", into[part], exact, FAST_ERROR)


def check_repeats(rows: int, width: int) -> None:
    """Two runs give the same bits."""
    dy, w, pre = random(rows, width), random(width, 4 * width, scale=0.02), random(rows, 4 * width)
    runs = [gemm.input_grad_gelu(dy, w, pre) for _ in range(3)]
    sums = [torch.empty(width, 4 * width, device="cuda") for _ in range(3)]
    for into in sums:
        gemm.weight_grad(dy, pre, into, accumulate=False)
    assert all(torch.equal(runs[0], dpre) for dpre in runs), "dpre differs from run to run"
    assert all(torch.equal(sums[0], into) for into in sums), "a weight gradient differs from run to run"
    print("  the same bits again")


# --- fast


def add_weight_grad(dy: Tensor, x: Tensor, into: Tensor) -> Tensor:
    return torch.ops.aten.addmm.dtype_out(into, dy.t(), x, torch.float32, out=into)


def bias_sums(dy: Tensor) -> Tensor:
    return dy.sum(0, dtype=torch.float32)


def forward_ways(x: Tensor, w: Tensor, bias: Tensor | None = None) -> dict[str, Run]:
    by_torch = functools.partial(torch.mm, x, w.t()) if bias is None else functools.partial(torch.addmm, bias, x, w.t())
    return {"torch": by_torch, "ours": functools.partial(gemm.linear, x, w, bias)}


def time_block(shape: Shape, times: Times) -> None:
    """The four products of a block, forward and both gradients. The norms after the projections add their biases."""
    m, c = shape.rows, shape.width
    x, wide = random(m, c), random(m, 4 * c)
    for name, n, bias in (("qkv", 3 * c, random(3 * c)), ("projection", c, None)):
        w = random(n, c, scale=0.02)
        times.race(f"{name} forward", 2 * m * c * n, shape.layers, forward_ways(x, w, bias))
        time_gradients(name, wide.view(-1)[: m * n].view(m, n), x, w, shape.layers, times)
    up, up_bias = random(4 * c, c, scale=0.02), random(4 * c)
    down = random(c, 4 * c, scale=0.02)
    pre, flops = random(m, 4 * c), 2 * m * c * 4 * c

    def torch_gelu() -> object:
        return gelu(torch.addmm(up_bias, x, up.t()), approximate="tanh")

    def separate_gelu() -> object:
        return gelu(gemm.linear(x, up, up_bias), approximate="tanh")

    ways: dict[str, Run] = {
        "torch": torch_gelu,
        "addmm alone": lambda: torch.addmm(up_bias, x, up.t()),
        "ours": lambda: gemm.linear_gelu(x, up, up_bias),
        "ours + torch gelu": separate_gelu,
    }
    times.race("fc, gelu forward", flops, shape.layers, ways)
    time_gradients("fc", wide, x, up, shape.layers, times)
    times.race("fc projection forward", flops, shape.layers, forward_ways(wide, down))
    ways = {
        "torch": lambda: bias_sums(dgelu(torch.mm(x, down), pre)),
        "mm and dgelu": lambda: dgelu(torch.mm(x, down), pre),
        "mm alone": lambda: torch.mm(x, down),
        "without sums, ours": lambda: gemm.input_grad_gelu(x, down, pre),
        "ours + torch sum": lambda: bias_sums(gemm.input_grad_gelu(x, down, pre)),
    }
    times.race("fc proj. input, dgelu", flops, shape.layers, ways)
    time_weight_grad("fc projection", x, wide, shape.layers, times)


def time_gradients(name: str, dy: Tensor, x: Tensor, w: Tensor, count: int, times: Times) -> None:
    ways: dict[str, Run] = {"torch": lambda: torch.mm(dy, w), "ours": lambda: gemm.input_grad(dy, w)}
    times.race(f"{name} input", 2 * dy.shape[0] * w.numel(), count, ways)
    time_weight_grad(name, dy, x, count, times)


def time_weight_grad(name: str, dy: Tensor, x: Tensor, count: int, times: Times) -> None:
    into = torch.zeros(dy.shape[1], x.shape[1], device="cuda")
    ways: dict[str, Run] = {
        "torch": lambda: add_weight_grad(dy, x, into),
        "mm bf16": lambda: torch.mm(dy.t(), x),
        "ours": lambda: gemm.weight_grad(dy, x, into, True),
        "overwritten, ours": lambda: gemm.weight_grad(dy, x, into, False),
    }
    times.race(f"{name} weight", 2 * dy.shape[0] * into.numel(), count, ways)


def time_head(shape: Shape, times: Times) -> None:
    m, c = shape.rows // CHUNKS, shape.width
    x, wte, flops = random(m, c), random(VOCAB, c, scale=0.02), 2 * m * c * VOCAB
    times.race("head forward", flops, CHUNKS, forward_ways(x, wte))
    time_gradients("head", random(m, VOCAB), x, wte, CHUNKS, times)


def time_all(shape: Shape) -> None:
    times = Times(f"{shape.name}: M={shape.rows}, C={shape.width}; ms and TFLOP/s")
    time_block(shape, times)
    time_head(shape, times)
    times.close()


def weights(shape: Shape) -> list[tuple[str, int, int, int, int]]:
    """Name, rows, N and K of a model's weights, and the number of their products in a micro-step."""
    m, c, layers = shape.rows, shape.width, shape.layers
    return [
        ("qkv", m, 3 * c, c, layers),
        ("projection", m, c, c, layers),
        ("fc", m, 4 * c, c, layers),
        ("fc projection", m, c, 4 * c, layers),
        ("head", m // CHUNKS, VOCAB, c, CHUNKS),
    ]


def scaled_mm(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], fast: bool, bias: Tensor | None) -> Tensor:
    return torch._scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


def then_add(product: Callable[[], Tensor], to: Tensor) -> Tensor:
    return to.add_(product())


def time_all8(shape: Shape) -> None:
    times = Times(f"{shape.name} in fp8: M={shape.rows}, C={shape.width}; ms and TFLOP/s")
    for name, m, n, k, count in weights(shape):
        o, x, w, dy = operands8(m, n, k), random(m, k), random(n, k, scale=0.02), random(m, n, scale=1e-4)
        flops, into = 2 * m * n * k, torch.zeros(n, k, device="cuda")
        bias = random(n) if name in ("qkv", "fc") else None

        ways: dict[str, Run] = {
            "torch": functools.partial(scaled_mm, o.x, o.w, (o.x_inverse, o.w_inverse), True, bias),
            "bf16": functools.partial(gemm.linear, x, w, bias),
            "not fast": functools.partial(o.forward, bias, False),
            "ours": functools.partial(o.forward, bias),
        }
        times.race(f"{name} forward", flops, count, ways)
        ways = {
            "torch": functools.partial(scaled_mm, o.dy, o.w_t, (o.dy_inverse, o.w_inverse), False, None),
            "bf16": functools.partial(gemm.input_grad, dy, w),
            "fast": functools.partial(o.input_grad, True),
            "ours": o.input_grad,
        }
        times.race(f"{name} input", flops, count, ways)
        scaled = functools.partial(scaled_mm, o.dy_t, o.x_t, (o.dy_inverse, o.x_inverse), False, None)
        ways = {
            "torch": functools.partial(then_add, scaled, into),
            "bf16": functools.partial(gemm.weight_grad, dy, x, into, True),
            "fast": functools.partial(o.weight_grad, into, True, True),
            "without the sum, torch": scaled,
            "ours": functools.partial(o.weight_grad, into),
        }
        times.race(f"{name} weight", flops, count, ways)
    times.close()


def attempt(work: Run) -> bool:
    """True if `work` raises nothing. Otherwise print the traceback: the rest still runs, as GPU time is expensive."""
    try:
        work()
        torch.cuda.synchronize()
        return True
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return False
    finally:
        torch.cuda.empty_cache()


def main() -> int:
    if obstacle := gemm.why_not():
        sys.exit(f"benchmarks.gemm: cuBLASLt cannot run here: {obstacle}")
    torch.manual_seed(1)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "CUDA", torch.version.cuda)
    works: list[Run] = []
    for shape in SHAPES:
        works.append(functools.partial(check_products, shape.rows, shape.width, VOCAB))
        works += [functools.partial(check_products8, *weight[1:4]) for weight in weights(shape)]
    works.append(functools.partial(check_products, 4 * 1023, 1600, 512))
    works += [functools.partial(check_repeats, 16_384, 768)]
    works += [functools.partial(time_products, shape) for shape in SHAPES for time_products in (time_all, time_all8)]
    passed = [attempt(work) for work in works]
    for request in gemm.refused():
        print("no algorithm:", request)
    return 0 if all(passed) and not gemm.refused() else 1


if __name__ == "__main__":
    sys.exit(main())
