"""Every kernel of the fused step agrees with the same arithmetic in float64, on sizes that no block divides.

The kernels run on a GPU if there is one, else in Triton's interpreter.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import BF16, DEVICE, SIZES, fresh, near
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip)")

from trainer.engines.fused import kernels  # noqa: E402
from trainer.optim import muon  # noqa: E402


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8, device=DEVICE, dtype=BF16).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def a_norm(kind: str, C: int) -> kernels.NormWeights:
    weight, bias = fresh(C) if kind != "plain" else None, fresh(C) if kind == "layer" else None
    return kernels.NormWeights(weight, bias, 1e-5)


def exact_norm(x: Tensor, norm: kernels.NormWeights, *parameters: Tensor | None) -> Tensor:
    """The norm of x in float64, with its parameters (by default those of `norm`)."""
    C = (x.shape[1],)
    weight, bias = parameters or (None if t is None else t.double() for t in (norm.weight, norm.bias))
    if norm.bias is not None:
        return F.layer_norm(x.double(), C, weight, bias, norm.epsilon)
    return F.rms_norm(x.double(), C, weight, norm.epsilon)


@pytest.mark.parametrize("kind", ["layer", "rms", "plain"])
@pytest.mark.parametrize(("M", "C"), SIZES)
def test_norms_and_their_gradients_agree_with_float64(M: int, C: int, kind: str) -> None:
    x, delta, delta_bias, dy, beside = fresh(M, C, scale=3), fresh(M, C), fresh(C), fresh(M, C), fresh(M, C)
    norm = a_norm(kind, C)
    total, y, statistics = kernels.add_norm(x, delta, delta_bias, norm)
    near(total, x.double() + delta.double() + delta_bias.double(), absolute=1e-7)
    exact = [
        total.double().requires_grad_(),
        *(t.double().requires_grad_() for t in (norm.weight, norm.bias) if t is not None),
    ]
    parameters = (*exact[1:], None, None)[:2]
    out = exact_norm(exact[0], norm, *parameters)
    near(y, out.detach())
    assert torch.equal(kernels.norm_again(total, statistics, norm), y)
    assert torch.equal(kernels.add_norm(x, delta, None, norm)[0], (x.float() + delta.float()).to(BF16))

    out.backward(dy.double())
    count = {"layer": 3, "rms": 1, "plain": 0}[kind]
    sums = torch.ones(count, kernels.norm_partials(C, DEVICE), C, device=DEVICE) if count else None
    for residual in (None, beside):
        dx, _ = kernels.norm_backward(dy, total, statistics, norm.weight, residual, sums)
        assert exact[0].grad is not None
        near(dx, exact[0].grad + (0 if residual is None else residual.double()))
    if sums is not None:
        added = (sums.double().sum(1) - sums.shape[1]) / 2  # they were 1 before, and two passes have added to them
        for found, parameter in zip(added, exact[1:], strict=False):
            assert parameter.grad is not None
            near(found, parameter.grad, 0, 1e-4)
    if kind == "layer":
        near(added[2], (2 * dx.double() - beside.double()).sum(0) / 2, 0, 1e-2)


def test_embeddings_wrap_at_the_length_of_a_sequence() -> None:
    T, C, V = 11, 72, 50
    wte, wpe, norm = fresh(V, C), fresh(T, C), a_norm("layer", C)
    tokens = torch.randint(V, (3 * T,), device=DEVICE)
    x, y, _, _ = kernels.embed_norm(tokens, wte, wpe, norm)
    assert torch.equal(x, (wte[tokens].float() + wpe.repeat(3, 1).float()).to(BF16))
    near(y, exact_norm(x, norm))


@pytest.mark.parametrize(("M", "N"), SIZES)
def test_gelu_agrees_with_float64(M: int, N: int) -> None:
    h = fresh(M, N, scale=2)
    near(kernels.gelu(h), F.gelu(h.double(), approximate="tanh"), absolute=2**-10)


@pytest.mark.parametrize(("M", "N", "V"), [(77, 40, 5), (1, 72, 9), (200, 264, 1), (130, 200, 400)])
def test_rows_are_added_to_those_of_their_tokens(M: int, N: int, V: int) -> None:
    rows, tokens, table = fresh(M, N), torch.randint(V, (M,), device=DEVICE), fresh(V, N).float()
    expected = table.double().index_add_(0, tokens, rows.double())
    kernels.add_rows(table, *torch.sort(tokens), rows)
    near(table, expected, 1e-6, 1e-6)


@pytest.mark.parametrize(("M", "C"), SIZES)
def test_column_sums_also_work_on_columns_of_a_wider_tensor(M: int, C: int) -> None:
    wide = fresh(M, 3 * C)
    for part in (wide, wide[:, C : 2 * C]):
        sums = torch.ones(kernels.column_partials(DEVICE), part.shape[1], device=DEVICE)
        kernels.column_sums(part, sums)
        near(sums.double().sum(0) - sums.shape[0], part.double().sum(0), 0, 1e-4)


@pytest.mark.parametrize(
    ("M", "vocab_size", "V"),
    [(77, 300, 320), (33, 1000, 1024), (5, 512, 512), pytest.param(2, 50257, 50304, marks=pytest.mark.gpu)],
)
def test_cross_entropy_and_its_gradient_agree_with_float64(M: int, vocab_size: int, V: int) -> None:
    around = fresh(M + 2, V, scale=8)
    around[:, vocab_size:] = float("nan")  # padding may hold anything
    logits = around[1:-1]
    targets = torch.randint(vocab_size, (M,), device=DEVICE)
    targets[0], targets[-1] = 0, vocab_size - 1
    scale = torch.rand(1, device=DEVICE)
    before = around.clone()

    exact = logits[:, :vocab_size].double().requires_grad_()
    loss = F.cross_entropy(exact, targets, reduction="none")
    (loss.sum() * scale.double()).backward()
    assert exact.grad is not None

    losses = torch.empty(M, device=DEVICE)
    kernels.cross_entropy(logits, targets, vocab_size, scale, losses, backward=False)
    assert torch.equal(around.nan_to_num(7), before.nan_to_num(7))
    near(losses, loss.detach(), 1e-5)
    again = torch.empty(M, device=DEVICE)
    kernels.cross_entropy(logits, targets, vocab_size, scale, again, backward=True)
    assert torch.equal(again, losses)
    # If softmax is near 1, the gradient is a small difference, with float32's rounding error of 1.
    near(logits[:, :vocab_size], exact.grad, absolute=1e-6)
    assert (logits[:, vocab_size:] == 0).all()
    assert torch.equal(around[:: M + 1].nan_to_num(7), before[:: M + 1].nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_adamw_equals_torchs_and_skips_a_step(dtype: torch.dtype) -> None:
    n, around = 1003, 8
    inside = slice(around, around + n)
    buffers = [torch.full((n + 2 * around,), 9.0, device=DEVICE) for _ in range(3)]
    master, exp_avg, exp_avg_sq = (buffer[inside] for buffer in buffers)
    master.copy_(fresh(n))
    exp_avg.zero_(), exp_avg_sq.zero_()
    weights16 = torch.full((n + 2 * around,), 9.0, device=DEVICE, dtype=BF16)
    parameter = master.double().requires_grad_()
    optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 4):
        grad = fresh(n).to(dtype)
        numbers = torch.tensor([0.01, 1 / (1 - 0.9**step), 1 / (1 - 0.95**step), 0.5, 1.0], device=DEVICE)
        kernels.adamw(weights16[inside], master, exp_avg, exp_avg_sq, grad, numbers, 0.1, 0.9, 0.95, 1e-8)
        parameter.grad = grad.double() * 0.5
        optimizer.step()
    near(master, parameter.detach(), 1e-5)
    assert torch.equal(weights16[inside], master.to(BF16))
    assert all((t[:around] == 9).all() and (t[-around:] == 9).all() for t in (*buffers, weights16))
    before = [t.clone() for t in (*buffers, weights16)]
    for grad_scale, apply in ((0.5, 0.0), (torch.nan, 1.0), (torch.inf, 1.0)):
        numbers[3:] = torch.tensor([grad_scale, apply])
        kernels.adamw(weights16[inside], master, exp_avg, exp_avg_sq, grad, numbers, 0.1, 0.9, 0.95, 1e-8)
        assert all(torch.equal(now, then) for now, then in zip((*buffers, weights16), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_muons_kernels_equal_its_module_and_skip_a_step(dtype: torch.dtype) -> None:
    n, around = 1003, 8
    inside = slice(around, around + n)
    buffers = [torch.full((n + 2 * around,), 9.0, device=DEVICE) for _ in range(2)]
    narrow = [torch.full((n + 2 * around,), 9.0, device=DEVICE, dtype=BF16) for _ in range(2)]
    momentum, master = (buffer[inside] for buffer in buffers)
    ahead, weights16 = (buffer[inside] for buffer in narrow)
    for state in (momentum, master):
        state.copy_(fresh(n))
    grad, directions = fresh(n).to(dtype), fresh(n).to(BF16)
    exact, exact_master, exact_grad = momentum.double(), master.double(), grad.double() * 0.5
    muon.look_ahead(exact, exact_grad, 0.9)
    muon.move_(exact_master, directions, 0.02, 0.3)
    numbers = torch.tensor([0.02, 1.0, 1.0, 0.5, 1.0], device=DEVICE)
    kernels.look_ahead(ahead, momentum, grad, numbers, 0.9)
    kernels.move(weights16, master, directions, numbers, 0.3)
    near(momentum, exact, 1e-6)
    near(ahead, exact_grad.lerp(exact, 0.9))
    near(master, exact_master, 1e-6)
    assert torch.equal(weights16, master.to(BF16))
    assert all((t[:around] == 9).all() and (t[-around:] == 9).all() for t in (*buffers, *narrow))
    before = momentum.clone(), master.clone(), weights16.clone()
    numbers[3:] = torch.tensor([torch.nan, 0.0])
    kernels.look_ahead(ahead, momentum, torch.full_like(grad, torch.nan), numbers, 0.9)
    kernels.move(weights16, master, directions, numbers, 0.3)
    assert all(torch.equal(now, then) for now, then in zip((momentum, master, weights16), before, strict=True))
    assert torch.equal(ahead, momentum.to(BF16))


def fp8_out(scale: float) -> kernels.Fp8Out:
    return kernels.Fp8Out(torch.tensor([scale], device=DEVICE), torch.tensor([0.125], device=DEVICE))


def cast_by_torch(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize(("gradient", "dtype"), [(False, torch.float8_e4m3fn), (True, torch.float8_e5m2)])
@pytest.mark.parametrize(("M", "N"), SIZES)
def test_fp8_casts_and_transposes_equal_torchs(M: int, N: int, gradient: bool, dtype: torch.dtype) -> None:
    x = fresh(M, N) * torch.exp2(6 * fresh(M, N))  # from underflow to saturation
    x[0, :4] = torch.tensor([0.0, 1e6, -1e6, 1e-7])
    out, sums = fp8_out(3.0), torch.ones(kernels.column_partials(DEVICE), N, device=DEVICE)
    x8, x8t = kernels.cast8(x, out, transposed=True, sums=sums, gradient=gradient)
    expected = cast_by_torch(x, 3.0, dtype)
    assert x8.dtype == dtype and torch.equal(x8.float(), expected.float())
    assert x8t is not None and torch.equal(x8t.view(torch.uint8), x8.t().view(torch.uint8))
    assert out.amax.item() == x.abs().max().float().item()
    near(sums.double().sum(0) - sums.shape[0], x.double().sum(0), 0, 1e-4)
    assert torch.equal(kernels.transpose8(x8).view(torch.uint8), x8t.view(torch.uint8))


def agree(x8: Tensor, expected: Tensor, out: kernels.Fp8Out, relative: float, smallest: float) -> None:
    """The error is at most half of the format's precision, 2^-4 or 2^-3, or of its smallest number, 2^-9 or 2^-16."""
    error = (x8.double() / out.scale.double() - expected).abs()
    assert (error <= (relative + 0.001) * expected.abs() + smallest / out.scale.double() + 1e-3).all()
    assert out.amax.item() == pytest.approx(max(0.125, expected.abs().max().item()), rel=2**-8)


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
@pytest.mark.parametrize(("M", "N"), SIZES)
def test_activations_and_their_gradients_in_fp8_are_rounded_once(
    M: int, N: int, activation: kernels.Activation
) -> None:
    h, da = fresh(M, N, scale=2), fresh(M, N)
    exact = h.double().requires_grad_()
    result = F.gelu(exact, approximate="tanh") if activation == "gelu" else F.relu(exact).square()
    result.backward(da.double())
    assert exact.grad is not None
    out = fp8_out(5.0)
    agree(kernels.cast8(h, out, activation=activation)[0], result.detach(), out, 2**-4, 2**-10)
    out, sums = fp8_out(500.0), torch.zeros(kernels.column_partials(DEVICE), N, device=DEVICE)
    dh8, dh8t = kernels.cast8(da, out, transposed=True, activation=activation, h=h, sums=sums, gradient=True)
    agree(dh8, exact.grad, out, 2**-3, 2**-17)
    assert dh8t is not None and torch.equal(dh8t.t().view(torch.uint8), dh8.view(torch.uint8))
    near(sums.double().sum(0), exact.grad.sum(0), 0, 1e-3)


@pytest.mark.parametrize("kind", ["layer", "plain"])
@pytest.mark.parametrize(("M", "N"), SIZES)
def test_norms_in_fp8_are_the_exact_ones_rounded_once(M: int, N: int, kind: str) -> None:
    h, da, norm, out = fresh(M, N, scale=2), fresh(M, N), a_norm(kind, N), fp8_out(30.0)
    _, y8, statistics = kernels.add_norm(h, None, None, norm, out)
    agree(y8, exact_norm(h, norm), out, 2**-4, 2**-10)
    out = fp8_out(500.0)
    sums = [torch.zeros(3, kernels.norm_partials(N, DEVICE), N, device=DEVICE) for _ in range(2 * (kind == "layer"))]
    both, alone = (*sums, None, None)[:2]
    dx, dx8 = kernels.norm_backward(da, h, statistics, norm.weight, da, both, out)
    near(dx, kernels.norm_backward(da, h, statistics, norm.weight, da, alone)[0].double())
    assert dx8 is not None
    agree(dx8, dx.double(), out, 2**-3 + 2**-8, 2**-17)
    if both is not None and alone is not None:
        near(both.sum(1).double(), alone.sum(1).double(), 0, 1e-3)


def test_the_fp8_gradient_of_the_logits_is_right_on_average() -> None:
    """Over many tokens with the same logits, whose probabilities reach far below e5m2's smallest number."""
    M, vocab_size, V = 1500, 120, 128
    logits = (4 * torch.randn(V)).to(DEVICE, BF16).repeat(M, 1)
    targets = torch.full((M,), 7, device=DEVICE)
    scale, q = torch.tensor([1 / M], device=DEVICE), torch.tensor([4.0 * M], device=DEVICE)
    losses, before = torch.empty(M, device=DEVICE), logits.clone()

    def gradient(seed: int) -> Tensor:
        number = torch.tensor([seed], device=DEVICE, dtype=torch.int32)
        return kernels.cross_entropy8(logits, targets, vocab_size, scale, losses, q, number)

    first = gradient(-5)
    assert torch.equal(logits, before)
    exact = logits[0, :vocab_size].double().softmax(0)
    near(losses, -exact[7].log().expand(M), 1e-5)
    exact[7] -= 1
    exact = F.pad(4 * exact, (0, V - vocab_size))
    step = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2**-14))) - 2)
    values = first.double()
    assert ((values - exact).abs() <= 1.0001 * step).all() and (values[:, vocab_size:] == 0).all()
    # A value is one of two neighbours: its deviation is half a step at most. (1e-6: `exact` itself comes from float32.)
    odds = (exact.abs() / step) % 1
    deviation = step * (odds * (1 - odds)).sqrt()
    assert ((values.mean(0) - exact).abs() <= 6 * deviation / M**0.5 + 1e-6 * exact.abs() + 1e-3 * step).all()
    assert not torch.equal(first.view(torch.uint8), gradient(6).view(torch.uint8))
