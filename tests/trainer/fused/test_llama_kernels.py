"""Every kernel of the families with rotary positions agrees with the same arithmetic in float64, on odd sizes.

The kernels run on a GPU if there is one, else in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import DEVICE, SIZES, fresh, near
from torch import Tensor

pytest.importorskip("triton", reason="needs triton (pip)")

from trainer.engines.fused import kernels, llama_kernels  # noqa: E402
from trainer.engines.fused.kernels import NormWeights  # noqa: E402
from trainer.models.rotary import turned, waves  # noqa: E402

EPSILON = 1e-6
PLAIN = NormWeights(None, None, EPSILON)


def leaf(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("keep", [1.25, -0.5, 0.0])
@pytest.mark.parametrize(("M", "C"), SIZES)
def test_a_norm_of_a_mixed_stream_and_its_gradients_agree_with_float64(M: int, C: int, keep: float) -> None:
    x, delta, other, dy = (fresh(M, C) for _ in range(4))
    beside = x + delta + other + fresh(M, C)  # so that the sums over all numbers do not cancel
    numbers = torch.tensor([keep, 0.25], device=DEVICE)
    mix = kernels.Mix(numbers, other)
    total, y, statistics = kernels.add_norm(x, delta, None, PLAIN, mix=mix)
    stream, mixed, weights = leaf(x), leaf(other), leaf(numbers)
    exact = weights[0] * (stream + delta.double()) + weights[1] * mixed
    out = F.rms_norm(exact, (C,), None, EPSILON)
    near(total, exact.detach(), absolute=1e-6)
    near(y, out.detach(), 2**-7, 2**-8)  # the mix was rounded
    assert torch.equal(kernels.norm_again(total, statistics, PLAIN), y)

    (out * dy.double() + exact * beside.double()).sum().backward()
    gradients = kernels.MixGradient(numbers[:1], torch.zeros(kernels.norm_partials(C, DEVICE), device=DEVICE))
    dx, _ = kernels.norm_backward(dy, total, statistics, None, beside, None, mix=gradients)
    near(dx, gradient(stream), 2**-7, 2**-7)
    dother, dadd = kernels.mixed_in([dx], numbers[None], other)
    if not keep:  # the gradient of the norm's input is lost
        assert not dx.any() and not dother.any()
        return
    near(dother, gradient(mixed), 2**-7, 2**-7)
    dkeep = kernels.keep_gradients(numbers[None], gradients.sums[None], dadd)
    size = float(exact.detach().norm() * (dy.double().norm() + beside.double().norm()))
    of_keep, of_add = gradient(weights).tolist()
    assert float(dadd) == pytest.approx(of_add, rel=0.01, abs=1e-3 * size)
    assert float(dkeep) == pytest.approx(of_keep, rel=0.02, abs=1e-3 * size)
    assert min(abs(of_keep), abs(of_add)) > 0.02 * size


@pytest.mark.parametrize(("M", "C"), SIZES)
def test_the_gradient_of_what_several_mixes_share_agrees_with_float64(M: int, C: int) -> None:
    other, *gradients = (fresh(M, C) for _ in range(4))
    wide = torch.tensor([[1.15, 0.2, 9.0], [0.9, -0.1, 9.0], [-0.5, 0.05, 9.0]], device=DEVICE)
    numbers = wide[:, :2]
    residual = fresh(M, C)
    dother, dadd = kernels.mixed_in(gradients, numbers, other, residual)
    of_norms = [given.double() / keep for given, keep in zip(gradients, wide[:, 0].double(), strict=True)]
    near(dother, residual.double() + sum(add * du for du, add in zip(of_norms, wide[:, 1].double(), strict=True)))
    exact = torch.stack([(du * other.double()).sum() for du in of_norms])
    sizes = torch.stack([du.norm() for du in of_norms]) * other.double().norm()
    assert ((dadd - exact).abs() < 1e-3 * sizes).all()


@pytest.mark.parametrize(("B", "T", "C", "G"), [(3, 67, 48, 12), (2, 1, 8, 8), (1, 130, 136, 24)])
def test_smear_and_its_gradients_agree_with_float64(B: int, T: int, C: int, G: int) -> None:
    x, dy = fresh(B * T, C), fresh(B * T, C)
    weight, strength = torch.randn(G, device=DEVICE), torch.tensor([0.7], device=DEVICE)
    plain, of_weight, of_strength = leaf(x), leaf(weight), leaf(strength)
    before = F.pad(plain.view(B, T, C)[:, :-1], (0, 0, 1, 0)).reshape(B * T, C)
    gates = torch.sigmoid(plain[:, :G] @ of_weight)[:, None]
    exact = plain + of_strength * gates * before
    exact.backward(dy.double())
    near(llama_kernels.smear(x, weight, strength, T), exact.detach())
    dx, dweight, dstrength = llama_kernels.smear_backward(dy, x, weight, strength, T)
    near(dx, gradient(plain))
    near(dweight, gradient(of_weight), 1e-4, 1e-3)
    near(dstrength, gradient(of_strength), 1e-4, 1e-3)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_embedding_and_its_norms_agree_with_float64(norm_first: bool) -> None:
    V, C, M = 50, 72, 33
    wte, tokens, dx = fresh(V, C), torch.randint(V, (M,), device=DEVICE), fresh(M, C)
    x, y, _, embedded = kernels.embed_norm(tokens, wte, None, PLAIN, norm_first)
    rows = leaf(wte[tokens])
    exact = F.rms_norm(rows, (C,), None, EPSILON) if norm_first else rows
    near(x, exact.detach())
    near(y, F.rms_norm(x.double(), (C,), None, EPSILON))
    if embedded is not None:
        exact.backward(dx.double())
        back, _ = kernels.norm_backward(dx, x, (None, embedded), None, None, None, normed=True)
        near(back, gradient(rows), absolute=2**-8)  # the norm's output was rounded


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sense", [1, -1])
@pytest.mark.parametrize(("heads", "kv", "D"), [(6, 2, 24), (3, 3, 16), (1, 1, 128)])
def test_rotary_positions_and_their_gradient_agree_with_float64(
    heads: int, kv: int, D: int, sense: int, norm: bool
) -> None:
    B, T = 3, 13
    qkv, dy = fresh(B * T, (heads + 2 * kv) * D), fresh(B * T, (heads + 2 * kv) * D)
    cos, sin = (t.view(T, D // 2).to(DEVICE) for t in waves(torch.arange(T), D, 10_000.0))
    exact = leaf(qkv)
    turning = exact[:, : (heads + kv) * D].view(B, T, heads + kv, D).transpose(1, 2)
    c, s = cos.double(), sense * sin.double()
    a, b = turning.chunk(2, -1)
    out = torch.cat((a * c - b * s, b * c + a * s), -1)
    assert torch.allclose(turned(turning.float(), cos, sense * sin).double(), out.detach(), atol=1e-5)
    if norm:
        out = F.rms_norm(out, (D,), None, EPSILON)
    whole = torch.cat((out.transpose(1, 2).reshape(B * T, -1), exact[:, (heads + kv) * D :]), 1)

    after, back = qkv.clone(), dy.clone()
    rstd = llama_kernels.rotate(after, llama_kernels.Turn(cos, sense * sin, heads + kv, norm, EPSILON))
    near(after, whole.detach())
    whole.backward(dy.double())
    llama_kernels.rotate_back(back, after, cos, sense * sin, rstd, norm)
    near(back, gradient(exact), absolute=2**-8 if norm else 1e-5)  # the norm's output was rounded

    out8 = kernels.Fp8Out(torch.full((1,), 3.0, device=DEVICE), torch.zeros(1, device=DEVICE))
    kept, dx8 = llama_kernels.rotate_back(dy.clone(), after, cos, sense * sin, rstd, norm, out8)
    assert dx8 is not None and torch.equal(kept, dy)
    near(dx8.float() / 3, gradient(exact), 2**-3 + 2**-7, 2**-8)
    assert float(out8.amax) == pytest.approx(float(gradient(exact).abs().max()), rel=0.01)


@pytest.mark.parametrize(("M", "N"), SIZES)
def test_swiglu_and_its_gradient_agree_with_float64(M: int, N: int) -> None:
    pre, dact = fresh(M, 2 * N, scale=2), fresh(M, N)
    exact = leaf(pre)
    gate, up = exact.chunk(2, 1)
    out = F.silu(gate) * up
    out.backward(dact.double())
    near(llama_kernels.swiglu(pre), out.detach())
    dpre, act = llama_kernels.swiglu_backward(dact, pre)
    near(dpre, gradient(exact))
    assert torch.equal(act, llama_kernels.swiglu(pre))


def test_capped_logits_have_the_losses_and_the_gradient_of_float64() -> None:
    M, vocab_size, V, cap = 33, 300, 320, 15.0
    logits = fresh(M, V, scale=20)
    targets = torch.randint(vocab_size, (M,), device=DEVICE)
    scale = torch.rand(1, device=DEVICE)
    exact = leaf(logits[:, :vocab_size])
    losses = F.cross_entropy(cap * torch.tanh(exact / cap), targets, reduction="none")
    (losses.sum() * scale.double()).backward()
    found = torch.empty(M, device=DEVICE)
    q, seed = torch.ones(1, device=DEVICE) * 1024, torch.ones(1, dtype=torch.int32, device=DEVICE)
    d8 = kernels.cross_entropy8(logits, targets, vocab_size, scale, found, q, seed, cap=cap)
    near(found, losses.detach(), 1e-4, 2**-10)
    near(d8.float() / 1024, F.pad(gradient(exact), (0, V - vocab_size)), 2**-2, 2**-10)
    kernels.cross_entropy(logits, targets, vocab_size, scale, found, backward=True, cap=cap)
    near(logits, F.pad(gradient(exact), (0, V - vocab_size)), absolute=2**-9)


@pytest.mark.parametrize(("M", "C", "heads", "D", "G"), [(77, 40, 3, 8, 12), (1, 24, 1, 72, 24), (130, 72, 6, 16, 12)])
def test_embedded_values_and_their_gradients_agree_with_float64(M: int, C: int, heads: int, D: int, G: int) -> None:
    K, V = heads * D, 50
    qkv, x, table, dqkv, dinput = fresh(M, K + 16), fresh(M, C), fresh(V, K), fresh(M, K + 16), fresh(M, C)
    weight, tokens, rstd = fresh(heads, G, scale=0.1), torch.randint(V, (M,), device=DEVICE), fresh(M).float().exp()
    front = (x[:, :G].double() * rstd[:, None].double()).requires_grad_()
    exact_weight, rows = leaf(weight), leaf(table[tokens])
    gate = 3 * torch.sigmoid(front @ exact_weight.T)
    added = (gate[..., None] * rows.unflatten(1, (heads, D))).flatten(1)
    added.backward(dqkv[:, -K:].double())

    after = qkv.clone()
    llama_kernels.add_values(after, x, rstd, weight, tokens, table)
    assert torch.equal(after[:, :-K], qkv[:, :-K])
    near(after[:, -K:], qkv[:, -K:].double() + added.detach())
    before = dinput.clone()
    drows, dweight = llama_kernels.values_backward(dinput, dqkv, x, rstd, weight, tokens, table)
    near(drows, gradient(rows))
    near(dweight, gradient(exact_weight), 0, 1e-4)
    assert torch.equal(dinput[:, G:], before[:, G:])
    near(dinput[:, :G], before[:, :G].double() + gradient(front), absolute=1e-4)
