"""The choice between the model families: the section of a recipe, the plain module, and files of weights.

All else uses the members of `ModelConfig` and `LanguageModel`, so a new family is its two files and its place here.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from trainer.config.config_errors import explain
from trainer.config.errors import UserError, shown
from trainer.config.model_config import ModelConfig
from trainer.models.gpt2 import Gpt2Config
from trainer.models.llama import LlamaConfig
from trainer.models.modern import ModernConfig

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config.config import Recompute
    from trainer.models.language_model import LanguageModel

SECTIONS: dict[str, type[ModelConfig]] = {"gpt2": Gpt2Config, "llama": LlamaConfig, "modern": ModernConfig}
# The families of a config.json's model_type.
MODEL_TYPES = {"gpt2": "gpt2", "llama": "llama", "qwen3": "llama", "nanochat": "modern", "skytrain": "modern"}


def family_in(section: Any) -> Any:
    """The family of a section, given as a mapping or as an object."""
    return section.get("family", "gpt2") if isinstance(section, Mapping) else getattr(section, "family", "gpt2")


AnyModel = Annotated[
    Annotated[Gpt2Config, Tag("gpt2")] | Annotated[LlamaConfig, Tag("llama")] | Annotated[ModernConfig, Tag("modern")],
    Discriminator(family_in),
]
ANY_MODEL: TypeAdapter[Gpt2Config | LlamaConfig | ModernConfig] = TypeAdapter(AnyModel)


def plain_model(config: ModelConfig, recompute: "Recompute" = False) -> "LanguageModel":
    """The plain module of a section, without initial weights; its blocks compute their inner values again in the
    backward pass as `recompute` says."""
    from trainer.models.language_model import recomputed

    model = module_of(config)
    for block in model.h if recompute else ():
        block.forward = recomputed(block.forward, recompute)
    return model


def module_of(config: ModelConfig) -> "LanguageModel":
    if isinstance(config, LlamaConfig):
        from trainer.models.llama_module import Llama

        return Llama(config)
    if isinstance(config, ModernConfig):
        from trainer.models.modern_module import Modern

        return Modern(config)
    from trainer.models.gpt2_module import GPT

    return GPT(config)


def section_of_hf(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of `model` that a config.json tells. UserError for another architecture, or values that are wrong."""
    model_type = values.get("model_type", "gpt2")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise UserError(f"{where}: model_type is {shown(model_type)}; these can be read: {known}")
    family = MODEL_TYPES[model_type]
    for name, allowed in SECTIONS[family].hf_constants.items():
        if (value := values.get(name, allowed[0])) not in allowed:
            raise UserError(f"{where}: {name} is {shown(value)}; skytrain's {family} has {allowed[0]!r}")
    try:
        fields = SECTIONS[family].fields_of_hf(values, where)
        SECTIONS[family].model_validate(fields)
    except ValidationError as error:
        raise explain(error, SECTIONS[family], where) from error
    return fields


def to_hf(state: "Mapping[str, Tensor]", config: ModelConfig) -> "dict[str, Tensor]":
    """The state dict with the names and shapes of transformers' class, without padding rows."""
    hf = {}
    for name, tensor in state.items():
        if name in config.vocabulary_rows:
            tensor = tensor[: config.vocab_size]
        hf[config.hf_name(name)] = (tensor.t() if config.hf_transposed(name) else tensor).contiguous()
    return hf
