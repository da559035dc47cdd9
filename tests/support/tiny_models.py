"""Small models with random weights."""

import torch

from trainer.config import ModelConfig
from trainer.model import GPT


def model_of(config: ModelConfig, seed: int = 0, spread: float = 0.2) -> GPT:
    """Initial weights with noise of `spread`, so that no two tokens are about equally likely."""
    model = GPT(config)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(spread * torch.randn(p.shape, generator=generator))
    return model
