"""The base of every section of a configuration, and the section `model` as all families share it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainer.config.extensions import FUSED_STEPS, names


class Section(BaseModel):
    """A strict, frozen part of a configuration. Unknown fields and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


# Columns of a row that a program of the fused norm kernels holds: the backward pass in fp8 then has 32 warps, CUDA's
# limit.
WIDEST_NORM = 8192
ALONE_ONCE = "gpt2"  # the family that no fingerprint names
LAYERS = 10_000  # at most: the names of all tensors are in memory
HEAD_ROWS = 2048  # tokens whose logits are held at once: for GPT-2 1 GiB with copies in float32


class ModelConfig(Section, ABC):
    """The architecture and its size. The fields of all families; each adds its own (trainer/models/)."""

    family: str = Field(default="gpt2", description="Architecture")
    n_layer: int = Field(ge=1, le=LAYERS, description="Number of transformer blocks")
    n_head: int = Field(ge=1, description="Number of attention heads; must divide n_embd")
    n_embd: int = Field(
        ge=1, description="Width of the residual stream; a multiple of n_head, unless head_dim is given"
    )
    block_size: int = Field(ge=1, description="Length of a training sequence, T, and of the context [tokens]")
    vocab_size: int = Field(
        default=50_257,
        ge=2,
        lt=2**31,
        description="Number of token ids; shards hold uint16, and uint32 above 65,536 ids. The embedding is padded to "
        "a multiple of 128 rows",
    )

    title: ClassVar[str]  # of the architecture, for people
    module: ClassVar[str]  # the plain module, a LanguageModel, as "PACKAGE.MODULE:CLASS": it imports torch
    added: ClassVar[tuple[str, ...]] = ()  # fields that are in no fingerprint while they have their default
    # As Hugging Face's transformers has it: the model_type of its config.json, and fields that have one of a few values
    # there; an absent one has the first.
    hf_model_types: ClassVar[tuple[str, ...]] = ()
    hf_constants: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @property
    def why_not_fused(self) -> str | None:
        """Why the fused engine has no step for this model; None if it has one."""
        if self.family not in names(FUSED_STEPS):
            return f"it has no step for model.family {self.family}"
        if self.head_size % 8 or self.head_size > 128:
            return f"the head size {self.head_size} is not a multiple of 8 up to 128"
        if self.n_embd > WIDEST_NORM:
            return f"model.n_embd {self.n_embd} is more than {WIDEST_NORM}, the widest row of its norm kernels"
        return None

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.n_embd % self.n_head and getattr(self, "head_dim", None) is None:
            raise ValueError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}; "
                f"{self.n_embd - self.n_embd % self.n_head or self.n_head} would be"
            )
        return self

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 128, which suits tensor cores (50257 -> 50304)."""
        return -(-self.vocab_size // 128) * 128

    @property
    def head_size(self) -> int:
        """The width of a head."""
        return self.n_embd // self.n_head

    @property
    def attention_width(self) -> int:
        """The width of all heads of queries together."""
        return self.n_head * self.head_size

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.n_head

    @property
    def vocabulary_rows(self) -> tuple[str, ...]:
        """The parameters with a row for each token id."""
        return ("wte.weight",)

    @property
    def implied(self) -> dict[str, Any]:
        """The values that fields of null stand for, by field."""
        return {}

    @property
    @abstractmethod
    def details(self) -> str:
        """The architecture in words, without its sizes."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, in the order of the plain module, without the padding of the vocabulary."""

    @property
    def parameters(self) -> int:
        """All parameters, without the padding of the vocabulary; a tied head is counted once."""
        return _parameters(self)

    @property
    def matrix_parameters(self) -> int:
        """Those of the blocks' matrices, which Muon moves."""
        return sum(prod(shape) for name, shape in self.shapes.items() if name.startswith("h.") and len(shape) == 2)

    @property
    def reach(self) -> int | None:
        """The longest text whose positions the model has; None: any."""
        return self.block_size

    @property
    def attention_scale(self) -> float:
        """The factor of the products of queries and keys."""
        return self.head_size**-0.5

    @property
    def constants(self) -> dict[str, Any]:
        """What the family's code decides of the weights, for fingerprints."""
        return {}

    @property
    def contexts(self) -> list[int]:
        """The tokens that each layer's attention reaches, the token's own among them."""
        return [self.block_size] * self.n_layer

    @property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward: 6N + 12·L·C·T, N without embeddings that only are looked up, and with the
        padded vocabulary of the head, whose rows are computed too. A layer with a window has that for T.

        Source: PaLM (Chowdhery et al. 2022), appendix B. Attention is counted in full, not by its causal half.
        """
        tied = "lm_head.weight" not in self.shapes
        looked_up = ("wpe.", "ve.") if tied else ("wpe.", "ve.", "wte.")
        n = sum(prod(shape) for name, shape in self.shapes.items() if not name.startswith(looked_up))
        n += (self.padded_vocab_size - self.vocab_size) * self.n_embd
        return 6 * n + 12 * self.attention_width * sum(self.contexts)

    # --- as Hugging Face's transformers has it

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """The fields of a config.json that describe this model to transformers."""

    @classmethod
    @abstractmethod
    def hf_name(cls, name: str) -> str:
        """The name of a parameter in a checkpoint of transformers."""

    @classmethod
    @abstractmethod
    def own_name(cls, theirs: str, fields: Mapping[str, Any]) -> str | None:
        """The reverse of `hf_name`, for a model with these fields; None for a tensor that is not a parameter."""

    @classmethod
    def hf_transposed(cls, name: str) -> bool:
        """Whether a checkpoint of transformers has the transpose of a parameter."""
        return False

    @classmethod
    @abstractmethod
    def fields_of_hf(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The fields of this section that a config.json with its `hf_constants` tells, unchecked. UserError if it is of
        another model."""


def identity_of_model(model: ModelConfig) -> dict[str, Any]:
    """The section as it decides the weights, without added fields that have their default."""
    defaults = {name: type(model).model_fields[name].default for name in model.added} | {"family": ALONE_ONCE}
    values = {name: value for name, value in model.model_dump().items() if (name, value) not in defaults.items()}
    return values | model.constants


@lru_cache
def _parameters(model: ModelConfig) -> int:
    # A plan asks for hundreds of offers.
    return sum(prod(shape) for shape in model.shapes.values())
