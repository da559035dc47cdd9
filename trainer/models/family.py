"""The model families by name: the section of a recipe, the plain module, and files of weights.

All else uses the members of `ModelConfig` and `LanguageModel`, so a family is its two files and an entry point.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    PlainValidator,
    SerializeAsAny,
    Tag,
    TypeAdapter,
    ValidationError,
)

from trainer.config.config_errors import explain
from trainer.config.errors import UserError, shown
from trainer.config.extensions import FAMILIES, check_installed, extension, names
from trainer.config.model_config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config.config import Recompute
    from trainer.models.language_model import LanguageModel


class Named(BaseModel):
    """The field of a section `model` that decides the others."""

    family: Annotated[Any, AfterValidator(lambda name: check_installed(FAMILIES, str(name)))] = "gpt2"


def family_of(values: Any) -> type[ModelConfig]:
    """The section's class of a mapping with its fields. ValidationError if no package declares its family."""
    section: type[ModelConfig] = extension(FAMILIES, Named.model_validate(values).family)
    return section


def section_of(values: Any) -> ModelConfig:
    """A section `model` as an object of its family's class. Its errors name the family before the field."""
    if isinstance(values, ModelConfig):
        return values
    section: Any = family_of(values)
    tagged: Any = Annotated[Annotated[section, Tag(section.__name__)], Discriminator(lambda _: section.__name__)]
    adapter: TypeAdapter[ModelConfig] = TypeAdapter(tagged)
    return adapter.validate_python(values)


AnyModel = Annotated[SerializeAsAny[ModelConfig], PlainValidator(section_of)]


def plain_model(config: ModelConfig, recompute: "Recompute" = False) -> "LanguageModel":
    """The plain module of a section, without initial weights; its blocks compute their inner values again in the
    backward pass as `recompute` says."""
    from trainer.models.language_model import recomputed

    model: LanguageModel = resolve_name(config.module)(config)
    for block in model.h if recompute else ():
        block.forward = recomputed(block.forward, recompute)
    return model


def section_of_hf(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of `model` that a config.json tells. UserError for another architecture, or values that are wrong."""
    sections: dict[str, type[ModelConfig]] = {}
    for name in reversed(names(FAMILIES)):  # ours last: a package's does not replace them
        sections |= dict.fromkeys((one := extension(FAMILIES, name)).hf_model_types, one)
    model_type = values.get("model_type", "gpt2")
    if not isinstance(model_type, str) or model_type not in sections:
        known = ", ".join(sorted(sections))
        raise UserError(f"{where}: model_type is {shown(model_type)}; these can be read: {known}")
    section = sections[model_type]
    family = section.model_fields["family"].default
    for name, allowed in section.hf_constants.items():
        if (value := values.get(name, allowed[0])) not in allowed:
            raise UserError(f"{where}: {name} is {shown(value)}; skytrain's {family} has {allowed[0]!r}")
    try:
        fields = {"family": family, **section.fields_of_hf(values, where)}
        section.model_validate(fields)
    except ValidationError as error:
        raise explain(error, section, where) from error
    return fields


def to_hf(state: "Mapping[str, Tensor]", config: ModelConfig) -> "dict[str, Tensor]":
    """The state dict with the names and shapes of transformers' class, without padding rows."""
    hf = {}
    for name, tensor in state.items():
        if name in config.vocabulary_rows:
            tensor = tensor[: config.vocab_size]
        hf[config.hf_name(name)] = (tensor.t() if config.hf_transposed(name) else tensor).contiguous()
    return hf
