"""Llama: its section of a recipe, and its layout in Hugging Face's files. `llama_module.py` has the plain module.

With `qk_norm` it is the architecture that transformers calls Qwen3, else the one that it calls Llama. vLLM and the
converters to GGUF know both.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainer.models.grouped import GroupedHeads

QWEN3_HEAD = 128  # head_dim of a Qwen3 whose config.json has none


class LlamaConfig(GroupedHeads):
    """Llama (Touvron et al. 2023)."""

    family: Literal["llama"] = Field(
        default="llama", description="RMSNorm with weights, rotary positions, SwiGLU, no biases (Touvron et al. 2023)"
    )
    n_inner: int | None = Field(
        default=None,
        ge=1,
        description="Width of the MLP; null: 8/3 x n_embd, rounded up to a multiple of 128: three matrices are then "
        "about as large as GPT-2's two",
    )
    qk_norm: bool = Field(
        default=False,
        description="Norm queries and keys of each head (Dehghani et al. 2023); the export is then a Qwen3ForCausalLM",
    )
    tied_head: bool = Field(default=False, description="The head is the token embedding")

    title: ClassVar[str] = "Llama"
    module: ClassVar[str] = "trainer.models.llama_module:Llama"
    hf_model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen3")
    hf_layer: ClassVar[Mapping[str, str]] = {
        "attn_norm": "input_layernorm",
        **{f"attn.{one}": f"self_attn.{one}" for one in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
        "mlp_norm": "post_attention_layernorm",
        **{f"mlp.{one}": f"mlp.{one}" for one in ("gate_proj", "up_proj", "down_proj")},
    }
    hf_outside: ClassVar[Mapping[str, str]] = {"wte": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
    hf_constants: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
    }

    @property
    def inner(self) -> int:
        """The width of the MLP."""
        return self.n_inner or -(-8 * self.n_embd // (3 * 128)) * 128

    @property
    def why_not_fused(self) -> str | None:
        if self.qk_norm:
            return "its norm of queries and keys has no weights, and model.qk_norm's has"
        return f"model.n_inner {self.inner} is not a multiple of 8" if self.inner % 8 else super().why_not_fused

    @property
    def implied(self) -> dict[str, Any]:
        return super().implied | {"n_inner": self.inner}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        c, kv, inner, d = self.n_embd, self.kv_heads * self.head_size, self.inner, self.head_size
        heads = self.attention_width
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (c,),
            **{"attn.q_proj": (heads, c), "attn.k_proj": (kv, c), "attn.v_proj": (kv, c), "attn.o_proj": (c, heads)},
            **({"attn.q_norm": (d,), "attn.k_norm": (d,)} if self.qk_norm else {}),
            "mlp_norm": (c,),
            **{"mlp.gate_proj": (inner, c), "mlp.up_proj": (inner, c), "mlp.down_proj": (c, inner)},
        }
        shapes: dict[str, tuple[int, ...]] = {"wte.weight": (self.vocab_size, c)}
        for i in range(self.n_layer):
            shapes |= {f"h.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes["norm.weight"] = (c,)
        return shapes if self.tied_head else shapes | {"lm_head.weight": (self.vocab_size, c)}

    @property
    def details(self) -> str:
        norm, head = ", QK-norm" if self.qk_norm else "", "tied" if self.tied_head else "untied"
        return (
            f"{self.kv_heads} heads of keys and values, rotary positions with base {self.rope_base:g}, RMSNorm{norm}, "
            f"SwiGLU of width {self.inner}, no biases, {head} head"
        )

    def hf_config(self) -> dict[str, Any]:
        return self.grouped_config() | {
            "architectures": ["Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM"],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "intermediate_size": self.inner,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": self.tied_head,
            **({} if self.qk_norm else {"mlp_bias": False}),
        }

    @classmethod
    def fields_of_hf(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        if values.get("model_type") == "qwen3":
            values = {"head_dim": QWEN3_HEAD, **values}
        return super().fields_of_hf(values, where) | {
            "n_inner": values["intermediate_size"],
            "qk_norm": values.get("model_type") == "qwen3",
            "tied_head": values.get("tie_word_embeddings") is True,
        }
