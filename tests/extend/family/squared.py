"""A model family: GPT-2 with squared ReLU. Its section of a recipe."""

from typing import Any, Literal

from pydantic import Field

from trainer.models.gpt2 import Gpt2Config


class SquaredConfig(Gpt2Config):
    """GPT-2 with squared ReLU (So et al. 2021)."""

    family: Literal["squared"] = Field(default="squared", description="GPT-2 with squared ReLU")  # type: ignore[assignment]

    title = "GPT-2 with squared ReLU"
    module = "squared_module:Squared"
    hf_model_types = ()  # of the config.json that train.init_from reads

    def hf_config(self) -> dict[str, Any]:
        return super().hf_config() | {"activation_function": "relu2"}
