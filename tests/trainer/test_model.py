"""The reference model, held against Hugging Face's GPT-2, counted FLOPs and its own promises."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import trainer_runs
from torch.utils.flop_counter import FlopCounterMode

from trainer.models.family import to_hf
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
