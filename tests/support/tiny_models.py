"""Small models with random weights."""

from typing import Any

import pytest
import torch

from trainer.config.model_config import ModelConfig
from trainer.models.family import plain_model, to_hf
from trainer.models.language_model import LanguageModel


def model_of(config: ModelConfig, seed: int = 0) -> Any:
    """The plain model, initial weights with noise: no two tokens are about equally likely."""
    model = plain_model(config)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


@torch.no_grad()
def greedy(model: LanguageModel, row: list[int], tokens: int) -> list[int]:
    """The likeliest tokens after a row, without a cache."""
    ids = list(row)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(row) :]


def transformers_copy(model: LanguageModel) -> Any:
    """The same weights in transformers' model."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip)")
    c = model.config
    config = transformers.GPT2Config(
        **{"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "n_positions": c.block_size},
        vocab_size=c.vocab_size,
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    lacking = theirs.load_state_dict(to_hf(model.state_dict(), c), strict=False)
    assert set(lacking.missing_keys) <= {"lm_head.weight"} and not lacking.unexpected_keys
    theirs.tie_weights()
    return theirs
