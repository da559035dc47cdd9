"""What the sections of `llama` and `modern` share: grouped keys and values (Ainslie et al. 2023), rotary positions, and
the names of their sizes in Hugging Face's files."""

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from trainer.config.errors import UserError, shown
from trainer.config.model_config import ModelConfig

# Ours, and transformers'.
HF_SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_kv_head": "num_key_value_heads",
}
HF_EPSILON = 1e-6  # of a config.json without rms_norm_eps


class GroupedHeads(ModelConfig, ABC):
    """A section with `n_kv_head`, RMSNorm and rotary positions."""

    n_kv_head: int | None = Field(
        default=None, ge=1, description="Number of heads of keys and values; must divide n_head; null: n_head"
    )
    rope_base: float = Field(default=10_000.0, gt=1, description="Base of the rotary positions' wavelengths")
    head_dim: int | None = Field(default=None, ge=2, description="Width of a head; null: n_embd / n_head")
    epsilon: float = Field(default=1e-5, gt=0, lt=1, description="Added to the mean square in every RMSNorm")

    added: ClassVar[tuple[str, ...]] = ("head_dim", "epsilon")
    hf_layer: ClassVar[Mapping[str, str]]  # modules of a block: ours, and transformers'
    hf_outside: ClassVar[Mapping[str, str]]  # the others

    @property
    def reach(self) -> int | None:
        return None

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        return self.head_dim or super().head_size

    @property
    def vocabulary_rows(self) -> tuple[str, ...]:
        return ("wte.weight", "lm_head.weight")

    @property
    def implied(self) -> dict[str, Any]:
        return {"n_kv_head": self.kv_heads, "head_dim": self.head_size}

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.n_head % self.kv_heads:
            near = next(n for n in range(min(self.kv_heads, self.n_head), 0, -1) if self.n_head % n == 0)
            raise ValueError(f"n_kv_head {self.kv_heads} does not divide n_head {self.n_head}; {near} would")
        if (self.head_dim or self.n_embd % self.n_head == 0) and self.head_size % 2:
            given = f"head_dim {self.head_dim}" if self.head_dim else f"n_head {self.n_head}"
            raise ValueError(
                f"{given} gives heads of the odd width {self.head_size}, and rotary positions turn pairs; "
                f"use another n_head, n_embd or head_dim"
            )
        return self

    def grouped_config(self) -> dict[str, Any]:
        """The fields of a config.json that both families have."""
        sizes = {theirs: getattr(self, ours) for ours, theirs in HF_SIZES.items()}
        return sizes | {
            "num_key_value_heads": self.kv_heads,
            # transformers 5 reads rope_parameters, older versions read rope_theta.
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_base},
            "rope_theta": self.rope_base,
            "rms_norm_eps": self.epsilon,
            "attention_dropout": 0.0,
        }

    @classmethod
    def hf_name(cls, name: str) -> str:
        part, _, last = name.rpartition(".")
        if not part.startswith("h."):
            return f"{cls.hf_outside[part]}.{last}"
        _, block, part = part.split(".", 2)
        return f"model.layers.{block}.{cls.hf_layer[part]}.{last}"

    @classmethod
    def own_name(cls, theirs: str, fields: Mapping[str, Any]) -> str | None:
        part, _, last = theirs.rpartition(".")
        if last == "inv_freq" or (part == "lm_head" and fields.get("tied_head")):
            return None
        names = {other: ours for ours, other in cls.hf_outside.items()}
        if not part.startswith("model.layers."):
            return f"{names.get(part, part)}.{last}"
        names = {other: ours for ours, other in cls.hf_layer.items()}
        block, _, part = part.removeprefix("model.layers.").partition(".")
        return f"h.{block}.{names.get(part, part)}.{last}"

    @classmethod
    def fields_of_hf(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        family = cls.model_fields["family"].default
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UserError(
                f"{where}: its rotary positions are scaled ({shown(rope)}), as Llama 3.1's are; family {family} here "
                "has plain ones (rope_type 'default')"
            )
        given = {ours: values.get(theirs) for ours, theirs in HF_SIZES.items()}
        return given | {
            "n_kv_head": given["n_kv_head"] or given["n_head"],
            "family": family,
            "rope_base": rope.get("rope_theta", values.get("rope_theta", cls.model_fields["rope_base"].default)),
            "head_dim": values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
            "epsilon": values.get("rms_norm_eps", HF_EPSILON),
        }
