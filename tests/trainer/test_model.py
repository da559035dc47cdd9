"""The reference model, held against Hugging Face's GPT-2, counted FLOPs and its own promises."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import trainer_runs
from torch.utils.flop_counter import FlopCounterMode

from trainer.models.family import from_hf, to_hf
from trainer.models.gpt2 import Gpt2Config
from trainer.models.gpt2_module import GPT

SMALL = Gpt2Config(n_layer=3, n_head=4, n_embd=48, block_size=40, vocab_size=300)


_one_thread = trainer_runs._one_thread


def small_model(config: Gpt2Config = SMALL, seed: int = 1, recompute: bool = False) -> GPT:
    """Weights larger than at the start of training, so that every part of the model matters."""
    model = GPT(config, recompute=recompute)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
        model.wte.weight[config.vocab_size :] = 0.0
    return model


def some_tokens(rows: int, length: int, vocab_size: int = SMALL.vocab_size, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def hf_model(config: Gpt2Config) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip)")
    torch.manual_seed(3)
    shape = transformers.GPT2Config(
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        n_positions=config.block_size,
        vocab_size=config.vocab_size,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(shape).eval()


@dataclass(frozen=True)
class Size:
    """A GPT-2 as OpenAI released it; `parameters` counts 50,257 rows of vocabulary."""

    n_layer: int
    n_head: int
    n_embd: int
    parameters: int


RELEASED = [
    Size(12, 12, 768, 124_439_808),
    Size(24, 16, 1024, 354_823_168),
    Size(36, 20, 1280, 774_030_080),
    Size(48, 25, 1600, 1_557_611_200),
]


def released(size: Size) -> Gpt2Config:
    return Gpt2Config(n_layer=size.n_layer, n_head=size.n_head, n_embd=size.n_embd, block_size=1024)


@pytest.mark.parametrize(
    ("shape", "rows", "length"),
    [
        ({}, 3, 40),
        ({}, 1, 1),
        ({}, 2, 17),
        ({"n_head": 1, "n_layer": 1}, 2, 9),
        ({"vocab_size": 257, "block_size": 7, "n_embd": 20, "n_head": 5}, 4, 7),
        ({"vocab_size": 128}, 2, 33),
    ],
)
def test_logits_and_loss_equal_those_of_transformers(shape: dict[str, int], rows: int, length: int) -> None:
    config = SMALL.model_copy(update=shape)
    ours = small_model(config).eval()
    theirs = hf_model(config)
    # lm_head.weight is tied to wte: the only name that may be absent.
    missing, unexpected = theirs.load_state_dict(to_hf(ours.state_dict(), config), strict=False)
    assert (missing, unexpected) in ((["lm_head.weight"], []), ([], []))
    theirs.tie_weights()

    tokens = some_tokens(rows, length, config.vocab_size)
    logits = ours(tokens)
    theirs_logits = theirs(tokens).logits
    assert logits.shape == (rows, length, config.padded_vocab_size)
    torch.testing.assert_close(logits[..., : config.vocab_size], theirs_logits, atol=1e-5, rtol=1e-5)
    if length > 1:
        loss = ours(tokens[:, :-1], tokens[:, 1:])
        torch.testing.assert_close(loss, theirs(tokens, labels=tokens).loss, atol=1e-5, rtol=1e-5)


def test_weights_of_transformers_load_and_give_the_same_logits() -> None:
    theirs = hf_model(SMALL)
    ours = GPT(SMALL)
    ours.load_state_dict(from_hf(theirs.state_dict(), SMALL), strict=True)
    tokens = some_tokens(2, 23)
    torch.testing.assert_close(ours(tokens)[..., : SMALL.vocab_size], theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    assert not ours.wte.weight[SMALL.vocab_size :].any()


def test_conversion_there_and_back_changes_no_bit() -> None:
    state = small_model().state_dict()
    converted = to_hf(state, SMALL)
    assert converted["transformer.wte.weight"].shape == (300, 48)
    assert converted["transformer.h.0.attn.c_attn.weight"].shape == (48, 3 * 48)
    back = from_hf(converted, SMALL)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_the_head_is_the_token_embedding() -> None:
    model = small_model()
    assert not any("head" in name for name in model.state_dict())
    tokens = some_tokens(2, 8)
    expected = model.hidden(tokens) @ model.wte.weight[: SMALL.vocab_size].T
    torch.testing.assert_close(model(tokens)[..., : SMALL.vocab_size], expected)


def test_initial_weights_have_gpt2s_spread() -> None:
    config = Gpt2Config(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=1000)
    model = GPT(config)
    model.initialize(0)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif ".ln_" in f".{name}":
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            rows = p[: config.vocab_size] if name == "wte.weight" else p
            expected = 0.02 / math.sqrt(2 * 4) if name.endswith("c_proj.weight") else 0.02
            # The spread of a sample of n normals is off by about 1/sqrt(2n): 0.8% for 8,192, here 5 of these.
            assert abs(rows.std().item() / expected - 1) < 5 / math.sqrt(2 * rows.numel()), name
            assert abs(rows.mean().item()) < 5 * expected / math.sqrt(rows.numel()), name


def test_a_seed_decides_the_initial_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = GPT(SMALL)
        torch.manual_seed(seed + 17)  # the global generator has no effect
        model.initialize(seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(5), weights(5))
    assert not torch.equal(weights(5), weights(6))
    assert weights(2**63 - 1).isfinite().all()


def test_the_loss_without_gradients_holds_the_logits_of_few_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = small_model(), list[int]()
    tokens, targets = some_tokens(5, 40), some_tokens(5, 40, seed=1)
    whole = model(tokens, targets).detach()
    head = GPT.head

    def counted(model: GPT, x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return head(model, x)

    monkeypatch.setattr(GPT, "head", counted)
    monkeypatch.setattr("trainer.models.language_model.HEAD_ROWS", 64)
    loss = model.loss(tokens, targets)
    assert rows == [64, 64, 64, 8] and not loss.requires_grad
    assert float(loss) == pytest.approx(float(whole), rel=1e-6)


def test_padding_rows_get_no_probability_and_no_gradient() -> None:
    model = small_model()
    tokens = some_tokens(2, 9)
    assert (model(tokens)[..., SMALL.vocab_size :] == -math.inf).all()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    gradient = model.wte.weight.grad
    assert gradient is not None and gradient.isfinite().all()
    assert not gradient[SMALL.vocab_size :].any()
    assert gradient[: SMALL.vocab_size].any()


def test_no_position_depends_on_a_later_one() -> None:
    model = small_model().eval()
    tokens = some_tokens(1, 30)
    before = model(tokens)
    for position in (0, 11, 29):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % SMALL.vocab_size
        after = model(changed)
        assert torch.equal(after[0, :position], before[0, :position])
        assert not torch.equal(after[0, position], before[0, position])


def test_a_sequence_longer_than_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match="41 tokens do not fit into block_size 40"):
        small_model()(some_tokens(1, 41))


@pytest.mark.parametrize("size", RELEASED, ids=lambda size: f"d{size.n_layer}")
def test_parameters_are_counted_as_openai_released_them(size: Size) -> None:
    config = released(size)
    assert config.parameters == size.parameters
    padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(config).parameters()) == config.parameters + padding


@pytest.mark.parametrize("size", RELEASED, ids=lambda size: f"d{size.n_layer}")
def test_the_flops_formula_agrees_with_counted_operations(size: Size) -> None:
    config = released(size)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(1, config.block_size, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            x = model.hidden(tokens)
            loss = model.head(x).float().logsumexp(-1).sum()
            loss.backward()
    counted = counter.get_total_flops() / config.block_size
    # The formula also counts biases and norms, which are no matrix products: 0.1% of the parameters.
    assert abs(config.flops_per_token / counted - 1) < 0.005


def test_recomputing_activations_changes_no_gradient() -> None:
    tokens = some_tokens(4, 33)

    def gradients(recompute: bool) -> list[torch.Tensor]:
        model = small_model(recompute=recompute).train()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, recomputed = gradients(False), gradients(True)
    assert len(plain) == len(recomputed) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
