"""Llama in plain PyTorch (Touvron et al. 2023): RMSNorm before each part of a block, rotary positions, SwiGLU (Shazeer
2020), no biases. Initial weights as GPT-2's: normal 0.02, projections into the residual stream scaled by
1/sqrt(2·n_layer).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.model_config import ModelConfig
from trainer.models.language_model import Context, Embedding, LanguageModel, UninitializedLinear
from trainer.models.llama import LlamaConfig
from trainer.models.rotary import RMSNorm, RotaryAttention, waves


class Attention(RotaryAttention):
    """Attention that may norm the queries and keys of each head before their rotation."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_size, config.epsilon) for _ in range(2))

    def placed(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return super().placed(q, k, cos, sin)


class MLP(nn.Module):
    """SwiGLU, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = UninitializedLinear(config.n_embd, config.inner, bias=False)
        self.up_proj = UninitializedLinear(config.n_embd, config.inner, bias=False)
        self.down_proj = UninitializedLinear(config.inner, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.epsilon)
        self.attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.n_embd, config.epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: Context | None = None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, context)
        return x + self.mlp(self.mlp_norm(x))


class Llama(LanguageModel):
    """Llama; with `qk_norm` what transformers calls Qwen3."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.epsilon)
        if not config.tied_head:
            self.lm_head = UninitializedLinear(config.n_embd, config.padded_vocab_size, bias=False)

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """The last layer's output after its norm."""
        cos, sin = waves(self.positions(tokens, context), self.config.head_size, self.config.rope_base)
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, cos, sin, context)
        return self.norm(x)

    @property
    def head_weight(self) -> Tensor:
        return self.wte.weight if self.config.tied_head else self.lm_head.weight

    @staticmethod
    def initial(name: str, p: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
        if p.dim() == 1:
            p.fill_(1.0)
            return
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * config.n_layer) if into_residual else 0.02
        p.normal_(0.0, std, generator=generator)
