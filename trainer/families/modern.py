"""The family `modern`: a transformer with what speedruns found since GPT-2. Its section of a recipe, and its layout in
Hugging Face's files. `modern_module.py` has the plain module.

The architecture is nanochat's (github.com/karpathy/nanochat, "d20" of October 2025), after modded-nanogpt
(github.com/KellerJordan/modded-nanogpt): transformers has it as NanoChatForCausalLM.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainer.errors import UserError, shown
from trainer.families.grouped import GroupedHeads

EPSILON = 1e-6  # of every RMSNorm
SOFTCAP = 15.0  # logits are SOFTCAP · tanh(z / SOFTCAP), as in Gemma 2 (2024)
# Ours in a block, and transformers'.
LAYER = {
    **{f"attn.{one}": f"self_attn.{one}" for one in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
}
OUTSIDE = {"wte": "model.embed_tokens", "lm_head": "lm_head"}
# What a model of this family is, in a config.json; absent fields have the first value.
HF_CONSTANTS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("relu2",),
    "attention_bias": (False,),
    "rms_norm_eps": (EPSILON,),
    "final_logit_softcapping": (SOFTCAP,),
    "tie_word_embeddings": (False,),
}


class ModernConfig(GroupedHeads):
    """nanochat's transformer."""

    family: Literal["modern"] = Field(
        default="modern",
        description="nanochat's: RMSNorm without weights, rotary positions, QK-norm, ReLU², no biases, capped logits",
    )
    rope_base: float = Field(
        default=100_000.0, gt=1, allow_inf_nan=False, description="Base of the rotary positions' wavelengths"
    )

    title: ClassVar[str] = "nanochat"
    hf_layer: ClassVar[Mapping[str, str]] = LAYER
    hf_outside: ClassVar[Mapping[str, str]] = OUTSIDE
    hf_constants: ClassVar[Mapping[str, tuple[Any, ...]]] = HF_CONSTANTS

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        c, kv = self.n_embd, self.kv_heads * self.head_size
        layer: dict[str, tuple[int, ...]] = {
            **{"attn.q_proj": (c, c), "attn.k_proj": (kv, c), "attn.v_proj": (kv, c), "attn.o_proj": (c, c)},
            **{"mlp.up_proj": (4 * c, c), "mlp.down_proj": (c, 4 * c)},
        }
        shapes: dict[str, tuple[int, ...]] = {"wte.weight": (self.vocab_size, c)}
        for i in range(self.n_layer):
            shapes |= {f"h.{i}.{name}.weight": shape for name, shape in layer.items()}
        return shapes | {"lm_head.weight": (self.vocab_size, c)}

    @property
    def details(self) -> str:
        return (
            f"{self.kv_heads} heads of keys and values, rotary positions with base {self.rope_base:g}, RMSNorm without "
            f"weights, QK-norm, ReLU², no biases, untied head, logits capped at {SOFTCAP:g}"
        )

    def hf_config(self) -> dict[str, Any]:
        return self.grouped_config() | {
            "architectures": ["NanoChatForCausalLM"],
            "model_type": "nanochat",
            "intermediate_size": 4 * self.n_embd,
            "hidden_act": "relu2",
            "rms_norm_eps": EPSILON,
            "attention_bias": False,
            "final_logit_softcapping": SOFTCAP,
            "tie_word_embeddings": False,
        }

    @classmethod
    def fields_of_hf(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        given = super().fields_of_hf(values, where)
        if values.get("intermediate_size") != 4 * given["n_embd"]:
            inner = shown(values.get("intermediate_size"))
            raise UserError(f"{where}: intermediate_size is {inner}; family modern here has 4 x hidden_size")
        return given
