"""The kernels of GPT-2's fused step on a GPU: their correctness, and their speed compared with the memory's.

`python -m benchmarks.kernels [NAME…]` with a CUDA GPU takes less than a minute. For each kernel and size it first
compares the results with float64 on new random inputs (the norm of the error relative to the result's norm, and the
worst element's error; it stops at the first that is too large). Then it checks that a second run gives the same bits.
Then it prints the median time, the bytes that have to move, and TB/s. `--launch` tries another launch shape.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import median_ms
from trainer.engines.fused import kernels

GPU = torch.device("cuda")
BF16 = torch.bfloat16
VOCAB, WIDTH = 50257, 50304
ROUNDS = 12
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The error of rounding to bf16 is at most 2^-8 and 0.0017 on average, to fp8 2^-4 (2^-3) and 0.026 (0.053); stochastic
# rounding has a larger one. Sums in float32 and losses have a much smaller one.
BOUND = {BF16: 0.003, E4M3: 0.03, E5M2: 0.12, torch.float32: 5e-5}
Kind = tuple[kernels.Activation | None, bool]  # an activation, or its gradient
Results = dict[str, Tensor]
Expected = dict[str, tuple[Tensor | slice, Tensor]]  # the rows that were computed, and their exact values


@dataclass
class Case:
    """One kernel at one size."""

    name: str
    size: str
    run: Callable[[], Results]  # from the same inputs every time
    time: Callable[[], object]  # the launch alone
    expected: Callable[[], Expected]
    bytes: int
    prepare: Callable[[], object] = lambda: None  # before each launch, not timed


def fresh(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device=GPU)).to(BF16)


def all_rows(**exact: Tensor) -> Expected:
    return {name: (slice(None), tensor) for name, tensor in exact.items()}


def leaf(tensor: Tensor) -> Tensor:
    return tensor.double().requires_grad_()


def norm_cases(M: int, C: int) -> Iterator[Case]:
    size = f"{M} x {C}"
    x, delta, dy = fresh(M, C), fresh(M, C), fresh(M, C)
    weight, bias, delta_bias = 1 + fresh(C, scale=0.1), fresh(C, scale=0.1), fresh(C)
    norm = kernels.NormWeights(weight, bias, 1e-5)

    def add() -> Results:
        total, y, statistics = kernels.add_norm(x, delta, delta_bias, norm)
        assert torch.equal(kernels.norm_again(total, statistics, norm), y)
        return {"x": total, "y": y, "rstd": statistics[1]}

    def added() -> Expected:
        total = (x.double() + delta.double() + delta_bias.double()).to(BF16).double()
        rstd = (total.var(1, correction=0) + 1e-5).rsqrt()
        y = F.layer_norm(total, (C,), weight.double(), bias.double())
        return all_rows(x=total, y=y, rstd=rstd)

    launch = partial(kernels.add_norm, x, delta, delta_bias, norm)
    yield Case("add_norm", size, add, launch, added, 8 * M * C)

    T = 1024 if M % 1024 == 0 else M
    wte, wpe, tokens = fresh(WIDTH, C), fresh(T, C), torch.randint(VOCAB, (M,), device=GPU)

    def embedded() -> Expected:
        total = (wte[tokens].double() + wpe.repeat(M // T, 1).double()).to(BF16).double()
        return all_rows(x=total, y=F.layer_norm(total, (C,), weight.double(), bias.double()))

    embed = partial(kernels.embed_norm, tokens, wte, wpe, norm)
    yield Case("embed_norm", size, lambda: dict(zip("xy", embed()[:2], strict=True)), embed, embedded, 6 * M * C)

    _, _, statistics = kernels.add_norm(x, torch.zeros_like(x), None, norm)
    again = partial(kernels.norm_again, x, statistics, norm)
    y = F.layer_norm(x.double(), (C,), weight.double(), bias.double())
    yield Case("norm_again", size, lambda: {"y": again()}, again, lambda: all_rows(y=y), 4 * M * C)

    def empty_sums() -> Tensor:
        return torch.zeros(3, kernels.norm_partials(C, GPU), C, device=GPU)

    def backward() -> Results:
        sums = empty_sums()
        dx, _ = kernels.norm_backward(dy, x, statistics, weight, delta, sums)
        return {"dx": dx, "dweight": sums[0].sum(0), "dbias": sums[1].sum(0), "sums": sums}

    def gradient() -> Expected:
        exact = [leaf(t) for t in (x, weight, bias)]
        F.layer_norm(exact[0], (C,), exact[1], exact[2]).backward(dy.double())
        dx, dweight, dbias = (t.grad for t in exact)
        assert dx is not None and dweight is not None and dbias is not None
        return all_rows(dx=dx + delta.double(), dweight=dweight, dbias=dbias)

    sums: dict[int, Tensor] = {}

    def launch_backward() -> Tensor:
        P = kernels.norm_partials(C, GPU)  # depends on the launch shape
        return kernels.norm_backward(dy, x, statistics, weight, delta, sums.setdefault(P, empty_sums()))[0]

    yield Case("norm_backward", size, backward, launch_backward, gradient, 8 * M * C)


def column_cases(M: int, C: int) -> Iterator[Case]:
    N, size = 4 * C, f"{M} x {4 * C}"
    h, sums = fresh(M, N), torch.zeros(kernels.column_partials(GPU), N, device=GPU)

    def activation() -> Expected:
        return all_rows(a=F.gelu(h.double(), approximate="tanh"))

    yield Case("gelu", size, lambda: {"a": kernels.gelu(h)}, lambda: kernels.gelu(h), activation, 4 * M * N)

    def summed() -> Results:
        fresh_sums = torch.zeros_like(sums)
        kernels.column_sums(h, fresh_sums)
        return {"sum": fresh_sums.sum(0)}

    yield Case(
        "column_sums",
        size,
        summed,
        partial(kernels.column_sums, h, sums),
        lambda: all_rows(sum=h.double().sum(0)),
        2 * M * N,
    )


def cross_entropy_cases(M: int) -> Iterator[Case]:
    """Logits of a whole micro-batch are more than 2^31 elements; 300 of its rows are compared with float64."""
    source = fresh(M, WIDTH, scale=2)
    targets, scale = torch.randint(VOCAB, (M,), device=GPU), torch.full((1,), 1 / M, device=GPU)
    logits, losses = source.clone(), torch.empty(M, device=GPU)
    rows = torch.randint(M, (300,), device=GPU)
    rows[0], rows[-1] = 0, M - 1

    def both() -> Results:
        logits.copy_(source)
        kernels.cross_entropy(logits, targets, VOCAB, scale, losses, backward=True)
        return {"losses": losses, "dlogits": logits}

    def exact() -> Expected:
        inputs = leaf(source[rows, :VOCAB])
        loss = F.cross_entropy(inputs, targets[rows], reduction="none")
        (loss.sum() / M).backward()
        assert inputs.grad is not None
        return {"losses": (rows, loss.detach()), "dlogits": (rows, F.pad(inputs.grad, (0, WIDTH - VOCAB)))}

    # Each launch gets new logits: values that are nearly constant, or NaN, switch fewer transistors. The card, which is
    # limited by its power, then looks faster than it is.
    launch = partial(kernels.cross_entropy, logits, targets, VOCAB, scale, losses, backward=True)
    yield Case("cross_entropy", f"{M} x {WIDTH}", both, launch, exact, 4 * M * WIDTH, lambda: logits.copy_(source))


def fp8_cases(M: int, C: int) -> Iterator[Case]:
    """The expected values are scaled. All bytes of transposes are compared: Triton 3.6 got some wrong."""
    N = 4 * C
    x, h, da, dy = fresh(M, C), fresh(M, N), fresh(M, N), fresh(M, C)
    weight, bias = 1 + fresh(C, scale=0.1), fresh(C, scale=0.1)
    up, down = (kernels.Fp8Out(torch.full((1,), s, device=GPU), torch.zeros(1, device=GPU)) for s in (40.0, 3000.0))
    column_sums = torch.zeros(kernels.column_partials(GPU), N, device=GPU)
    activations: dict[kernels.Activation, Callable[[Tensor], Tensor]] = {
        "gelu": partial(F.gelu, approximate="tanh"),
        "relu2": lambda x: F.relu(x).square(),
    }
    exact: dict[Kind, Tensor] = {(None, False): h.double()}
    for name, of in activations.items():
        exact[name, False] = of(h.double())
        through = leaf(h)
        of(through).backward(da.double())
        assert through.grad is not None
        exact[name, True] = through.grad
        del through

    def cast(kind: Kind, transposed: bool) -> tuple[Tensor, Tensor | None]:
        activation, backward = kind
        if backward:
            return kernels.cast8(da, down, transposed, activation, h, column_sums, gradient=True)
        return kernels.cast8(h, up, transposed, activation)

    def both(kind: Kind) -> Results:
        column_sums.zero_()
        x8, x8t = cast(kind, True)
        sums = column_sums.sum(0)
        assert x8t is not None
        wrong = (x8.view(torch.uint8).t() != x8t.view(torch.uint8)).float().mean().item()
        assert wrong == 0, f"{kind}: {100 * wrong:.1f}% of the transposed bytes are wrong"
        assert torch.equal(cast(kind, False)[0].view(torch.uint8), x8.view(torch.uint8)), f"{kind}: depends on the tile"
        return {"x8": x8, "sum": sums}

    def expected(kind: Kind) -> Expected:
        return all_rows(x8=(3000 if kind[1] else 40) * exact[kind])

    for kind in exact:
        for transposed in (False, True):
            size = f"{M} x {N}" + (" T" if transposed else "")
            yield Case(
                f"cast8 {kind[0] or 'plain'}{' gradient' if kind[1] else ''}",
                size,
                partial(both, kind),
                partial(cast, kind, transposed),
                partial(expected, kind),
                (3 + transposed + (2 + transposed if kind[1] else 0)) * M * N,
            )
    x8 = h.to(E4M3)
    yield Case(
        "transpose8",
        f"{M} x {N}",
        lambda: {"x8t": kernels.transpose8(x8)},
        lambda: kernels.transpose8(x8),
        lambda: all_rows(x8t=x8.float().double().t()),
        2 * M * N,
    )

    normal = leaf(x)
    y = F.layer_norm(normal, (C,), weight.double(), bias.double())
    y.backward(dy.double())
    dx = normal.grad
    assert dx is not None
    nothing = torch.zeros_like(x)
    norm = kernels.NormWeights(weight, bias, 1e-5)
    _, _, statistics = kernels.add_norm(x, nothing, None, norm)
    yield Case(
        "add_norm, fp8",
        f"{M} x {C}",
        lambda: {"y8": kernels.add_norm(x, nothing, None, norm, up)[1]},
        lambda: kernels.add_norm(x, nothing, None, norm, up),
        lambda: all_rows(y8=40 * y.detach()),
        7 * M * C,
    )

    residual, sums = da[:, :C].contiguous(), torch.zeros(3, 1056, C, device=GPU)

    def backward8() -> Results:
        sums = torch.zeros(3, kernels.norm_partials(C, GPU), C, device=GPU)
        dx, dx8 = kernels.norm_backward(dy, x, statistics, weight, residual, sums, down)
        assert dx8 is not None
        return {"dx": dx, "dx8": dx8, "sums": sums}

    yield Case(
        "norm_backward, fp8",
        f"{M} x {C}",
        backward8,
        partial(kernels.norm_backward, dy, x, statistics, weight, residual, sums, down),
        lambda: all_rows(dx=dx + residual.double(), dx8=3000 * (dx + residual.double())),
        9 * M * C,
    )


def cross_entropy8_cases(M: int) -> Iterator[Case]:
    logits, targets = fresh(M, WIDTH, scale=2), torch.randint(VOCAB, (M,), device=GPU)
    scale, q = torch.full((1,), 1 / M, device=GPU), torch.full((1,), 28672.0 * M, device=GPU)
    losses = torch.empty(M, device=GPU)
    seed, rows = torch.tensor([12345], device=GPU, dtype=torch.int32), torch.randint(M, (300,), device=GPU)

    def launch() -> Tensor:
        return kernels.cross_entropy8(logits, targets, VOCAB, scale, losses, q, seed)

    def exact() -> Expected:
        p = logits[rows, :VOCAB].double().softmax(1)
        loss = -p.gather(1, targets[rows, None]).log().squeeze(1)
        p.scatter_add_(1, targets[rows, None], torch.full_like(loss, -1.0)[:, None])
        return {"losses": (rows, loss), "dlogits8": (rows, 28672 * F.pad(p, (0, WIDTH - VOCAB)))}

    yield Case(
        "cross_entropy8",
        f"{M} x {WIDTH}",
        lambda: {"dlogits8": launch(), "losses": losses},
        launch,
        exact,
        3 * M * WIDTH,
    )


def adamw_cases(n: int) -> Iterator[Case]:
    w, g, m, v = (torch.randn(n, device=GPU) for _ in range(4))
    v = v.square()
    numbers = torch.tensor([1e-3, 1 / (1 - 0.9**3), 1 / (1 - 0.95**3), 0.5, 1.0], device=GPU)
    state, weights16 = [w.clone(), m.clone(), v.clone()], torch.empty(n, device=GPU, dtype=BF16)

    def step() -> Results:
        for current, start in zip(state, (w, m, v), strict=True):
            current.copy_(start)
        kernels.adamw(weights16, state[0], state[1], state[2], g, numbers, 0.1, 0.9, 0.95, 1e-8)
        assert torch.equal(weights16, state[0].to(BF16))
        return {"master": state[0], "exp_avg": state[1], "exp_avg_sq": state[2]}

    def by_torch() -> Expected:
        parameter = w.double().requires_grad_()
        parameter.grad = g.double() * 0.5
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        optimizer.state[parameter] = {"step": torch.tensor(2.0), "exp_avg": m.double(), "exp_avg_sq": v.double()}
        optimizer.step()
        after = optimizer.state[parameter]
        return all_rows(master=parameter.detach(), exp_avg=after["exp_avg"], exp_avg_sq=after["exp_avg_sq"])

    launch = partial(kernels.adamw, weights16, state[0], state[1], state[2], g, numbers, 0.1, 0.9, 0.95, 1e-8)
    yield Case("adamw", f"{n}", step, launch, by_torch, 30 * n)


def same(one: Tensor, other: Tensor) -> bool:
    if one.element_size() == 1:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def errors(case: Case, expected: Expected) -> str:
    """The error of the least exact result of each dtype. Asserts that it is small enough, and that runs are alike."""
    first = {name: tensor.clone() for name, tensor in case.run().items()}
    second = case.run()
    assert all(same(first[name], second[name]) for name in first), f"{case.name}: two runs differ"
    del second
    worst: dict[torch.dtype, float] = {}
    for name, (rows, exact) in expected.items():
        result = first[name].float() if first[name].element_size() == 1 else first[name]
        off = (result[rows].double() - exact).abs()
        error = (off.norm() / exact.norm()).item()
        dtype = first[name].dtype
        excess = ((off - 2**-8 * exact.abs()).max() / exact.abs().max()).item() if dtype == BF16 else 0.0
        assert error < BOUND[dtype] and excess < 1e-3, f"{case.name} {case.size} {name}: error {error}, {excess}"
        worst[dtype] = max(worst.get(dtype, 0.0), error)
    return " ".join(f"{worst[dtype]:.1e}" if dtype in worst else "   -   " for dtype in BOUND)


def measure(case: Case) -> None:
    """Each launch follows a matrix product of a millisecond or more, as in a training step: the power limit sets the
    clock, the caches hold other data, and the CPU, which takes up to 0.1 ms a launch, runs ahead."""
    operand = torch.randn(8192, 8192, device=GPU, dtype=BF16)
    product = torch.empty_like(operand)

    def before() -> None:
        case.prepare()
        torch.mm(operand, operand, out=product)

    error = errors(case, case.expected())
    (ms,) = median_ms([case.time], ROUNDS, before=before)
    rate = f"{case.bytes / 1e6:9.1f} MB {case.bytes / ms / 1e9:6.2f} TB/s"
    print(f"{case.name:<18} {case.size:<14} {error}  {ms:8.4f} ms {rate}", flush=True)


def all_cases() -> Iterator[Case]:
    for M, C in ((1000, 768), (1001, 1600), (1999, 4096), (999, 8192), (65536, 768), (16384, 1600)):
        for cases in (norm_cases, column_cases, fp8_cases):
            yield from cases(M, C)
            torch.cuda.empty_cache()
    for large in (cross_entropy_cases(1000), cross_entropy_cases(65536), cross_entropy8_cases(16384)):
        yield from large
        torch.cuda.empty_cache()
    yield from adamw_cases(124_475_904)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels: there is no CUDA device")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="kernels [all]")
    parser.add_argument("--launch", metavar="FUNCTION=N,N,…", help="a launch shape to try, such as _gelu_shape=2048,4")
    options = parser.parse_args()
    tried: AbstractContextManager[object] = nullcontext()
    if options.launch:
        function, _, numbers = options.launch.partition("=")
        tried = mock.patch.object(kernels, function, return_value=tuple(map(int, numbers.split(","))))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {kernels.triton.__version__}")
    print("kernel             size           error bf16, e4m3, e5m2, fp32")
    with tried:
        for case in all_cases():
            if not options.names or case.name in options.names:
                measure(case)


if __name__ == "__main__":
    main()
