"""The plain module of the family: it imports torch, so it is a file of its own."""

import torch.nn.functional as F
from torch import Tensor

from trainer.config.model_config import ModelConfig
from trainer.models.gpt2_module import GPT, MLP


class SquaredMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Squared(GPT):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        for block in self.h:
            block.mlp = SquaredMLP(config)
