"""The choice between the steps of the families."""

from typing import Any

from trainer.config.model_config import ModelConfig
from trainer.engines.fused.gpt2_step import Gpt2Step
from trainer.engines.fused.llama_step import LlamaStep
from trainer.engines.fused.modern_step import ModernStep
from trainer.engines.fused.step import FusedStep
from trainer.models.llama import LlamaConfig
from trainer.models.modern import ModernConfig


def step_of(config: ModelConfig) -> type[FusedStep[Any]]:
    """The step of a section of `model`."""
    if isinstance(config, LlamaConfig):
        return LlamaStep
    return ModernStep if isinstance(config, ModernConfig) else Gpt2Step
