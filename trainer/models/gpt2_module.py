"""GPT-2 in plain PyTorch.

Learned positions, pre-LayerNorm blocks, tanh GELU, a head tied to the token embedding, no dropout
(Radford et al. 2019; initialization as in OpenAI's released code: normal 0.02, projections into the
residual stream scaled by 1/sqrt(2·n_layer)).

Parameter names are Hugging Face's (`wte`, `wpe`, `h.0.attn.c_attn`, …) with plain `nn.Linear` weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.model_config import ModelConfig
from trainer.models.language_model import Context, Embedding, LanguageModel, UninitializedLinear, attention


class Attention(nn.Module):
    """Causal multi-head self-attention, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.n_head, self.layer = config.n_head, layer
        self.c_attn = UninitializedLinear(config.n_embd, 3 * config.n_embd)
        self.c_proj = UninitializedLinear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        y = context.attention(self.layer, q, k, v) if context else attention(q, k, v, causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """Two linear layers around a tanh GELU, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = UninitializedLinear(config.n_embd, 4 * config.n_embd)
        self.c_proj = UninitializedLinear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), context)
        return x + self.mlp(self.ln_2(x))


class GPT(LanguageModel):
    """GPT-2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """The last layer's output after ln_f."""
        x = self.wte(tokens) + self.wpe(self.positions(tokens, context))
        for block in self.h:
            x = block(x, context)
        return self.ln_f(x)

    @staticmethod
    def initial(name: str, p: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
        if p.dim() == 1:
            p.fill_(1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0)
            return
        std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
        p.normal_(0.0, std, generator=generator)
