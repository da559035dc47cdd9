"""Every family: its plain module against transformers' class, its counts, its scores, its sampling, its bad input."""

import math
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainer.__main__ import read_config
from trainer.checkpoint.pieces import Piece
from trainer.checkpoint.weights import StoredTensor, from_hub_layout
from trainer.config.config import Recompute
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig
from trainer.models import language_model
from trainer.models.decoder import Decoder
from trainer.models.family import plain_model, section_of, section_of_hf, to_hf
from trainer.models.gpt2 import Gpt2Config
from trainer.models.language_model import ChunkedLoss, LanguageModel, causal_attention
from trainer.models.llama import LlamaConfig
from trainer.models.modern import ModernConfig

SIZES: dict[str, Any] = {"n_layer": 3, "n_head": 6, "n_embd": 36, "block_size": 40, "vocab_size": 300}
CONFIGS = {
    "gpt2": Gpt2Config(**SIZES),
    "llama": LlamaConfig(**SIZES),
    "llama, grouped, tied": LlamaConfig(**SIZES, n_kv_head=2, tied_head=True, rope_base=500.0),
    "llama, QK-norm": LlamaConfig(**SIZES, n_kv_head=3, qk_norm=True, n_inner=50),
    "llama, QK-norm, tied": LlamaConfig(**{**SIZES, "n_embd": 84}, n_kv_head=1, qk_norm=True, tied_head=True),
    "llama, own heads and epsilon": LlamaConfig(**SIZES, n_kv_head=3, head_dim=10, epsilon=1e-2),
    "modern": ModernConfig(**SIZES),
    "modern, grouped": ModernConfig(**{**SIZES, "n_embd": 84, "vocab_size": 257}, n_kv_head=3, rope_base=777.0),
    "modern, own heads and epsilon": ModernConfig(**{**SIZES, "n_embd": 50}, head_dim=12, epsilon=1e-2),
}
WITH_OUR_CODE = {
    "modern, weighted": ModernConfig(**SIZES, residual_lambdas=True),
    "modern, values": ModernConfig(**{**SIZES, "n_layer": 4, "vocab_size": 257}, n_kv_head=2, value_embeddings=True),
    "modern, both": ModernConfig(**SIZES, residual_lambdas=True, value_embeddings=True),
    "modern, windows": ModernConfig(**SIZES, n_kv_head=2, window=6, qk_scale=1.5),
    "modern, smear": ModernConfig(**SIZES, smear=True),
    "modern, backout": ModernConfig(**SIZES, backout=True),
    "modern, all": ModernConfig(
        **SIZES, residual_lambdas=True, value_embeddings=True, window=6, smear=True, backout=True, qk_scale=1.2
    ),
}
CONFIGS = {**CONFIGS, **WITH_OUR_CODE}
ALL = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def made(config: ModelConfig, seed: int = 1, recompute: Recompute = False) -> LanguageModel:
    """Weights larger than at the start of training, so that every part of the model matters."""
    model = plain_model(config, recompute)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
            if name in config.vocabulary_rows:
                p[config.vocab_size :] = 0.0
    return model


def some_tokens(rows: int, length: int, config: ModelConfig) -> Tensor:
    return torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


def theirs_of(config: ModelConfig, state: dict[str, Tensor]) -> Any:
    """transformers' class with our weights, built from the config.json that we export."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip)")
    values = config.hf_config()
    if values["model_type"] == "skytrain":
        from pipelines.extras.formats import modeling_skytrain

        theirs = modeling_skytrain.SkytrainForCausalLM(modeling_skytrain.SkytrainConfig(**values)).eval()
    else:
        theirs = getattr(transformers, values["architectures"][0])(transformers.AutoConfig.for_model(**values)).eval()
    lacking = theirs.load_state_dict(to_hf(state, config), strict=False)
    assert set(lacking.missing_keys) <= {"lm_head.weight"} and not lacking.unexpected_keys
    theirs.tie_weights()
    return theirs


# --- against transformers


@ALL
@pytest.mark.parametrize(("rows", "length"), [(3, 40), (1, 1), (2, 17)])
def test_logits_equal_those_of_transformers_class(config: ModelConfig, rows: int, length: int) -> None:
    ours = made(config).eval()
    theirs = theirs_of(config, ours.state_dict())
    tokens = some_tokens(rows, length, config)
    with torch.no_grad():
        logits, expected = ours(tokens)[..., : config.vocab_size], theirs(tokens).logits
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@ALL
def test_the_config_and_weights_of_transformers_give_the_section_and_the_weights_back(config: ModelConfig) -> None:
    ours = made(config)
    theirs = theirs_of(config, ours.state_dict())
    read = section_of(section_of_hf(theirs.config.to_dict(), "config.json"))
    assert {**read.model_dump(), **read.implied} == {**config.model_dump(), **config.implied}
    stored = {name: StoredTensor("hf", tuple(t.shape), lambda t=t: t) for name, t in theirs.state_dict().items()}  # type: ignore[misc]
    back = from_hub_layout("hf", theirs.config.to_json_string(), stored)
    back.check(config)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(
            back.tensors[name].read(), tensor[: config.vocab_size] if name in config.vocabulary_rows else tensor
        )


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_model_of_transformers_defaults_is_read_with_its_logits(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip)")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"vocab_size": 300, "intermediate_size": 96, "max_position_embeddings": 40}
    theirs = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes, **more)).eval()
    values = theirs.config.to_dict()
    for given in (values, {key: value for key, value in values.items() if value != 1e-6 and key != "head_dim"}):
        config = section_of(section_of_hf(given, "config.json"))
        assert config.model_dump()["epsilon"] == 1e-6 and config.head_size == (128 if name == "Qwen3" else 16)
    stored = {key: StoredTensor("hf", tuple(t.shape), lambda t=t: t) for key, t in theirs.state_dict().items()}  # type: ignore[misc]
    found = from_hub_layout("hf", theirs.config.to_json_string(), stored)
    ours, tokens = plain_model(config), some_tokens(2, 30, config)
    found.fill({f"model.{key}": Piece.whole(p) for key, p in ours.state_dict().items()}, config)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens)[..., :300], theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    scaled = values | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_parameters": None}
    with pytest.raises(UserError, match="its rotary positions are scaled .*llama3.*, as Llama 3.1's are"):
        section_of_hf(scaled, "config.json")


# --- counts and initial weights


@ALL
def test_shapes_parameters_and_flops_are_those_of_the_module(config: ModelConfig) -> None:
    model = made(config)
    found = {
        name: (config.vocab_size if name in config.vocabulary_rows else len(p), *p.shape[1:])
        for name, p in model.named_parameters()
    }
    assert list(config.shapes.items()) == list(found.items())
    assert config.parameters == sum(math.prod(shape) for shape in found.values())
    tokens = some_tokens(1, config.block_size, config)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    vectors = sum(math.prod(shape) for shape in found.values() if len(shape) == 1)
    attention = 12 * config.attention_width * sum(config.contexts)  # torch counts none of a CPU's
    assert counter.get_total_flops() == (config.flops_per_token - 6 * vectors - attention) * config.block_size


def test_initial_weights_have_gpt2s_spread() -> None:
    config = Gpt2Config(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=1000)
    model = plain_model(config)
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


def test_modern_begins_as_nanochat_does() -> None:
    options: Any = dict.fromkeys(("residual_lambdas", "value_embeddings", "smear", "backout"), True)
    config = ModernConfig(n_layer=3, n_head=2, n_embd=64, block_size=16, vocab_size=1000, **options)
    model = plain_model(config)
    model.initialize(5)
    state, c = model.state_dict(), config.n_embd
    for name in ("attn.o_proj", "mlp.down_proj"):
        assert not state[f"h.0.{name}.weight"].any()
    assert state["wte.weight"][:1000].std() == pytest.approx(0.8, rel=0.02)
    assert state["lm_head.weight"][:1000].std() == pytest.approx(0.001, rel=0.02)
    assert not state["lm_head.weight"][1000:].any()
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = state[f"h.1.attn.{name}.weight"]
        assert weight.abs().max() <= math.sqrt(3 / c) and weight.std() == pytest.approx(1 / math.sqrt(c), rel=0.05)
    assert state["h.1.mlp.up_proj.weight"].std() == pytest.approx(0.4 / math.sqrt(c), rel=0.05)
    for name in ("smear_gate", "h.2.attn.ve_gate.weight"):
        assert state[name].min() >= 0 and 0.01 < state[name].max() <= 0.02
    scalars = {"resid_lambdas": [1.15, 1.1, 1.05], "x0_lambdas": [0.2, 0.125, 0.05], "smear_lambda": [0.0]}
    for name, values in (scalars | {"backout_lambda": [0.2]}).items():
        torch.testing.assert_close(state[name], torch.tensor(values))
    again = plain_model(config)
    again.initialize(5)
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


@ALL
def test_the_loss_in_chunks_has_the_gradients_of_the_whole_one(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "HEAD_ROWS", 7)  # 3 chunks and a rest
    model = made(config).double()
    tokens = torch.randint(0, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(3))
    targets = tokens.roll(1, 1)
    targets[0, 5] = -100
    whole = model(tokens, targets)
    expected = torch.autograd.grad(3 * whole, list(model.parameters()))
    x = model.hidden(tokens).flatten(0, 1)
    found = ChunkedLoss.apply(x, model.head_weight, targets.flatten(), model.summed_loss)
    torch.testing.assert_close(found.double(), whole.double(), rtol=1e-6, atol=0.0)
    for one, other in zip(torch.autograd.grad(3 * found, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_a_window_on_a_gpu_sees_what_the_mask_allows(kv_heads: int) -> None:
    """Of bf16 numbers, by FlashAttention's kernel, against the mask in float64."""
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 6, 300, 64), (2, kv_heads, 300, 64), (2, kv_heads, 300, 64)
    exact = [torch.randn(shape, generator=generator).bfloat16().double().requires_grad_() for shape in shapes]
    ours = [t.detach().cuda().bfloat16().requires_grad_() for t in exact]
    expected, found = (causal_attention(q, k, v, window=17) for q, k, v in (exact, ours))
    gradient = torch.randn(expected.shape, generator=generator).bfloat16()
    gradients = torch.autograd.grad(found, ours, gradient.cuda())
    pairs = zip((found, *gradients), (expected, *torch.autograd.grad(expected, exact, gradient.double())), strict=True)
    for one, other in pairs:
        error = (one.detach().cpu().double() - other.detach()).norm() / other.norm()
        assert error < 0.01


# --- with the rest of the trainer


@ALL
def test_recomputed_activations_give_the_same_gradients(config: ModelConfig) -> None:
    tokens = some_tokens(2, 21, config)
    gradients = []
    for recompute in (False, True, "selective"):
        model = made(config, recompute=recompute)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, *others in zip(*gradients, strict=True):
        for other in others:
            torch.testing.assert_close(one, other)


@ALL
def test_the_cached_decoder_gives_the_logits_of_the_module(config: ModelConfig) -> None:
    model = made(config).eval()
    decoder, rows = Decoder(model), some_tokens(2, 30, config).tolist()
    logits = decoder.begin(rows, room=4)
    for step in range(4):
        with torch.no_grad():
            for row, got in zip(rows, logits, strict=True):
                expected = model(torch.tensor([row]))[0, -1, : config.vocab_size]
                torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        for row in rows:
            row.append(7 * step + len(row))
        logits = decoder.step([row[-1] for row in rows])
    likeliest = model(torch.tensor(rows))[0, :-1, : config.vocab_size].log_softmax(-1).max(-1).values
    found = [max(scores.values()) for scores in decoder.score(rows[0], 1)]
    assert found == pytest.approx(likeliest.tolist(), abs=2e-5)


# --- bad input


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"family": "lama"}, "model.family: unknown family 'lama'; installed are llama, "),
    ({"family": 3}, "model.family: unknown family '3'; installed are "),
    ({"n_kv_head": 2}, "model.n_kv_head: unknown field; did you mean 'n_head'?"),
    ({"family": "llama", "n_kv_heads": 2}, "model.n_kv_heads: unknown field; did you mean 'n_kv_head'?"),
    ({"family": "llama", "n_kv_head": 4}, "model: n_kv_head 4 does not divide n_head 6; 3 would"),
    ({"family": "llama", "n_kv_head": 12}, "model: n_kv_head 12 does not divide n_head 6; 6 would"),
    ({"family": "modern", "n_head": 12}, "model: n_head 12 gives heads of the odd width 3, and rotary positions"),
    ({"family": "modern", "n_head": 5}, "model: n_embd 36 is not divisible by n_head 5; 35 would be"),
    ({"family": "modern", "window": 41}, "model: window 41 is longer than block_size 40; use at most that"),
    ({"family": "llama", "rope_base": "x"}, "model.rope_base: must be a valid number (got 'x')"),
]


@pytest.mark.parametrize(("model", "message"), MISTAKES)
def test_a_wrong_field_of_a_family_is_one_line_that_names_it(
    model: dict[str, Any], message: str, tmp_path: Any
) -> None:
    path = tmp_path / "recipe.yaml"
    train = {"batch_tokens": 80, "max_steps": 1, "learning_rate": 1e-3}
    path.write_text(yaml.safe_dump({"model": SIZES | model, "train": train}))
    with pytest.raises(UserError) as error:
        read_config(path)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{path}: {message}")
