"""GPT-2: its section of a recipe, and its layout in Hugging Face's files. `gpt2_module.py` has the plain module."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainer.config.errors import UserError, shown
from trainer.config.model_config import ModelConfig

# The released GPT-2 has Conv1D layers: their weights are the transpose of those of nn.Linear.
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # of attention, which old files hold, in other dtypes
# Fields of transformers' GPT2Config: ours, and its default.
HF_FIELDS = {
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "n_positions": ("block_size", 1024),
    "vocab_size": ("vocab_size", 50_257),
}


class Gpt2Config(ModelConfig):
    """GPT-2. 124M/350M/774M/1558M have n_layer 12/24/36/48."""

    family: Literal["gpt2"] = Field(
        default="gpt2", description="learned positions, LayerNorm, tanh GELU, biases, a tied head"
    )

    title: ClassVar[str] = "GPT-2"
    module: ClassVar[str] = "trainer.models.gpt2_module:GPT"
    hf_model_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    hf_constants: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "model_type": ("gpt2",),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
    }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.n_embd
        shapes: dict[str, tuple[int, ...]] = {"wte.weight": (self.vocab_size, c), "wpe.weight": (self.block_size, c)}
        layer = {
            **{"ln_1.weight": (c,), "ln_1.bias": (c,), "attn.c_attn.weight": (3 * c, c), "attn.c_attn.bias": (3 * c,)},
            **{"attn.c_proj.weight": (c, c), "attn.c_proj.bias": (c,), "ln_2.weight": (c,), "ln_2.bias": (c,)},
            **{"mlp.c_fc.weight": (4 * c, c), "mlp.c_fc.bias": (4 * c,)},
            **{"mlp.c_proj.weight": (c, 4 * c), "mlp.c_proj.bias": (c,)},
        }
        for i in range(self.n_layer):
            shapes |= {f"h.{i}.{name}": shape for name, shape in layer.items()}
        return shapes | {"ln_f.weight": (c,), "ln_f.bias": (c,)}

    @property
    def details(self) -> str:
        return "learned positions, LayerNorm, tanh GELU, tied head"

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_positions": self.block_size,
            "n_ctx": self.block_size,
            "n_embd": self.n_embd,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "activation_function": "gelu_new",  # the tanh approximation
            "layer_norm_epsilon": 1e-5,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": True,
        }

    @classmethod
    def hf_name(cls, name: str) -> str:
        return f"transformer.{name}"

    @classmethod
    def own_name(cls, theirs: str, fields: Mapping[str, Any]) -> str | None:
        tied_or_mask = theirs == "lm_head.weight" or theirs.endswith(MASKS)
        return None if tied_or_mask else theirs.removeprefix("transformer.")

    @classmethod
    def hf_transposed(cls, name: str) -> bool:
        return name.endswith(TRANSPOSED)

    @classmethod
    def fields_of_hf(cls, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        given = {ours: values.get(theirs, default) for theirs, (ours, default) in HF_FIELDS.items()}
        if values.get("n_inner") not in (None, 4 * given["n_embd"]):
            raise UserError(f"{where}: n_inner is {shown(values['n_inner'])}; skytrain's gpt2 has 4 x n_embd")
        return given
