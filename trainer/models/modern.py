"""The family `modern`: a transformer with what speedruns found since GPT-2. Its section of a recipe, and its layout in
Hugging Face's files. `modern_module.py` has the plain module.

The architecture is nanochat's (github.com/karpathy/nanochat, "d20" of October 2025), after modded-nanogpt
(github.com/KellerJordan/modded-nanogpt): transformers has it as NanoChatForCausalLM.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainer.config.errors import UserError, shown
from trainer.models.grouped import GroupedHeads

GATE_WIDTH = 12  # the first numbers of the residual stream decide how much of a value embedding is added
GATE_SCALE = 3.0  # the largest weight of a value embedding
SMEAR_WIDTH = 24  # the first numbers of an embedding decide how much of the one before it is added
SOFTCAP = 15.0  # logits are SOFTCAP · tanh(z / SOFTCAP), as in Gemma 2 (2024)
REMOTE_CODE = "modeling_skytrain"  # the module of an export with options, pipelines/extras/formats/modeling_skytrain.py
# Of remote code, which has no numbers of its own.
CODE_NUMBERS = ("layer_windows", "value_layers", "gate_width", "gate_scale", "smear_width", "backout_layer")


class ModernConfig(GroupedHeads):
    """nanochat's transformer."""

    family: Literal["modern"] = Field(
        default="modern",
        description="nanochat's: RMSNorm without weights, rotary positions, QK-norm, ReLU², no biases, capped logits",
    )
    rope_base: float = Field(default=100_000.0, gt=1, description="Base of the rotary positions' wavelengths")
    epsilon: float = Field(default=1e-6, gt=0, lt=1, description="Added to the mean square in every RMSNorm")

    residual_lambdas: bool = Field(
        default=False,
        description="A learned weight for the residual stream and one for the embedding before each block (nanochat, "
        "after modded-nanogpt); exported as remote code",
    )
    value_embeddings: bool = Field(
        default=False,
        description="Every second block, the last among them, adds an embedding of the token to its values (nanochat, "
        "after modded-nanogpt); exported as remote code",
    )

    window: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that a token sees in a short layer, the last of which is itself; of four layers three are "
        "short, and the last of all is not; null: none; exported as remote code",
    )

    smear: bool = Field(
        default=False,
        description="Adds a gated part of the previous token's embedding to each token's (nanochat, after "
        "modded-nanogpt); exported as remote code",
    )
    backout: bool = Field(
        default=False,
        description="Takes a learned part of the middle block's output from the last one's (nanochat, after "
        "modded-nanogpt); exported as remote code",
    )

    qk_scale: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="Factor of queries and keys after their norms: nanochat has 1.2 since 2026; transformers' class 1",
    )

    options: ClassVar[tuple[str, ...]] = (
        *("residual_lambdas", "value_embeddings", "window", "smear", "backout", "qk_scale"),
    )
    added: ClassVar[tuple[str, ...]] = (*GroupedHeads.added, *options)
    title: ClassVar[str] = "nanochat"
    module: ClassVar[str] = "trainer.models.modern_module:Modern"
    hf_model_types: ClassVar[tuple[str, ...]] = ("nanochat", "skytrain")
    hf_layer: ClassVar[Mapping[str, str]] = {
        **{f"attn.{one}": f"self_attn.{one}" for one in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{"attn.ve_gate": "self_attn.ve_gate", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    }
    hf_outside: ClassVar[Mapping[str, str]] = {"wte": "model.embed_tokens", "lm_head": "lm_head"}
    hf_constants: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("relu2",),
        "attention_bias": (False,),
        "final_logit_softcapping": (SOFTCAP,),
        "tie_word_embeddings": (False,),
    }

    @property
    def vocabulary_rows(self) -> tuple[str, ...]:
        return (*super().vocabulary_rows, *(f"ve.{i}.weight" for i in self.value_layers))

    @property
    def value_layers(self) -> list[int]:
        """The blocks with embedded values."""
        return [i for i in range(self.n_layer) if i % 2 == (self.n_layer - 1) % 2] if self.value_embeddings else []

    @model_validator(mode="after")
    def _windows_fit(self) -> Self:
        if self.window is not None and self.window > self.block_size:
            raise ValueError(f"window {self.window} is longer than block_size {self.block_size}; use at most that")
        return self

    @property
    def constants(self) -> dict[str, Any]:
        return {"gate_width": GATE_WIDTH} if self.value_embeddings else {}

    @property
    def attention_scale(self) -> float:
        return self.qk_scale**2 * super().attention_scale

    @property
    def contexts(self) -> list[int]:
        if self.window is None:
            return super().contexts
        short = [self.window, self.window, self.window, self.block_size]  # nanochat's SSSL
        return [short[i % 4] for i in range(self.n_layer - 1)] + [self.block_size]

    @property
    def used(self) -> str:
        """The options that are on, in words."""
        fields = type(self).model_fields
        return " and ".join(f"model.{name}" for name in self.options if getattr(self, name) != fields[name].default)

    @property
    def why_not_fused(self) -> str | None:
        if self.backout and self.n_layer < 3:
            return "it has no step for model.backout with fewer than 3 layers"
        return super().why_not_fused

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        c, kv, heads = self.n_embd, self.kv_heads * self.head_size, self.attention_width
        layer: dict[str, tuple[int, ...]] = {
            **{"attn.q_proj": (heads, c), "attn.k_proj": (kv, c), "attn.v_proj": (kv, c), "attn.o_proj": (c, heads)},
            **{"mlp.up_proj": (4 * c, c), "mlp.down_proj": (c, 4 * c)},
        }
        shapes: dict[str, tuple[int, ...]] = {}
        if self.residual_lambdas:
            shapes |= {"resid_lambdas": (self.n_layer,), "x0_lambdas": (self.n_layer,)}
        if self.smear:
            shapes |= {"smear_gate": (min(SMEAR_WIDTH, c),), "smear_lambda": (1,)}
        if self.backout:
            shapes["backout_lambda"] = (1,)
        shapes["wte.weight"] = (self.vocab_size, c)
        for i in range(self.n_layer):
            shapes |= {f"h.{i}.{name}.weight": shape for name, shape in layer.items() if name.startswith("attn.")}
            if i in self.value_layers:
                shapes[f"h.{i}.attn.ve_gate.weight"] = (self.kv_heads, min(GATE_WIDTH, c))
            shapes |= {f"h.{i}.{name}.weight": shape for name, shape in layer.items() if name.startswith("mlp.")}
        shapes |= {f"ve.{i}.weight": (self.vocab_size, kv) for i in self.value_layers}
        return shapes | {"lm_head.weight": (self.vocab_size, c)}

    @property
    def details(self) -> str:
        return (
            f"{self.kv_heads} heads of keys and values, rotary positions with base {self.rope_base:g}, RMSNorm without "
            f"weights, QK-norm, ReLU², no biases, untied head, logits capped at {SOFTCAP:g}"
            + (", weighted residual stream" if self.residual_lambdas else "")
            + (", value embeddings" if self.value_embeddings else "")
            + (f", windows of {self.window} tokens (SSSL)" if self.window else "")
            + (", smear" if self.smear else "")
            + (", backout" if self.backout else "")
            + (f", queries and keys times {self.qk_scale:g}" if self.qk_scale != 1 else "")
        )

    def hf_config(self) -> dict[str, Any]:
        config = self.grouped_config() | {
            "architectures": ["NanoChatForCausalLM"],
            "model_type": "nanochat",
            "intermediate_size": 4 * self.n_embd,
            "hidden_act": "relu2",
            "attention_bias": False,
            "final_logit_softcapping": SOFTCAP,
            "tie_word_embeddings": False,
            **({"head_dim": self.head_dim} if self.head_dim else {}),
        }
        if not self.used:
            return config
        classes = {"AutoConfig": "SkytrainConfig", "AutoModelForCausalLM": "SkytrainForCausalLM"}
        return config | {
            "architectures": ["SkytrainForCausalLM"],
            "model_type": "skytrain",
            "auto_map": {auto: f"{REMOTE_CODE}.{name}" for auto, name in classes.items()},
            "head_dim": self.head_size,
            **{name: getattr(self, name) for name in self.options},
            "layer_windows": [context if context < self.block_size else None for context in self.contexts],
            "value_layers": self.value_layers,
            "gate_width": min(GATE_WIDTH, self.n_embd),
            "gate_scale": GATE_SCALE,
            "smear_width": min(SMEAR_WIDTH, self.n_embd),
            "backout_layer": self.n_layer // 2,
        }

    @classmethod
    def hf_name(cls, name: str) -> str:
        return f"model.{name}" if name.startswith("ve.") or "." not in name else super().hf_name(name)

    @classmethod
    def own_name(cls, theirs: str, fields: Mapping[str, Any]) -> str | None:
        name = theirs.removeprefix("model.")
        return name if name.startswith("ve.") or "." not in name else super().own_name(theirs, fields)

    @classmethod
    def fields_of_hf(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        given = super().fields_of_hf(values, where)
        if values.get("intermediate_size") != 4 * given["n_embd"]:
            inner = shown(values.get("intermediate_size"))
            raise UserError(f"{where}: intermediate_size is {inner}; skytrain's modern has 4 x hidden_size")
        if values.get("model_type") != "skytrain":
            return given
        given |= {name: values[name] for name in cls.options if name in values}
        expected = cls.model_validate(given).hf_config()
        for name in CODE_NUMBERS:
            if values.get(name) != expected[name]:
                raise UserError(f"{where}: {name} is {shown(values.get(name))}; skytrain's modern has {expected[name]}")
        return given
