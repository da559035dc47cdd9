"""The family `modern` in plain PyTorch, after nanochat: RMSNorm without weights (also after the embedding), rotary
positions, normed queries and keys (Dehghani et al. 2023), ReLU² (So et al. 2021), no biases, soft-capped logits.

At the start every block adds nothing: projections into the residual stream are 0. Other weights are those of nanochat:
embedding normal 0.8, head normal 0.001, queries, keys and values uniform up to sqrt(3/C), which has the deviation
1/sqrt(C), and the MLP's first matrix 0.4 of that. Value embeddings are drawn as values are, and the gates' weights
uniform up to 0.02. The residual stream's weights begin at 1.15 and fall to 1.05 in the last block, those of the
embedding from 0.20 to 0.05.

The options, each off by default, are those of nanochat's gpt.py (2026), which has them from modded-nanogpt's records:
weights of the residual stream and of the embedding, value embeddings with a gate (after Zhou et al. 2024), short
layers, smear (a token's embedding gets a gated part of the one before it, none at the start), and backout (the last
block's output loses a part, first 0.2, of the middle one's, whose features the head does not need).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.model_config import ModelConfig
from trainer.models.language_model import Context, Embedding, LanguageModel, UninitializedLinear
from trainer.models.modern import GATE_SCALE, GATE_WIDTH, SMEAR_WIDTH, SOFTCAP, ModernConfig
from trainer.models.rotary import RotaryAttention, rms_norm, waves

# First values, in the first and in the last block.
SCALARS = {
    "resid_lambdas": (1.15, 1.05),
    "x0_lambdas": (0.2, 0.05),
    "smear_lambda": (0.0, 0.0),
    "backout_lambda": (0.2, 0.2),
}


class Attention(RotaryAttention):
    """Attention that norms the queries and keys of each head; with embedded values and a window if a block has them."""

    def __init__(self, config: ModernConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.epsilon, self.qk_scale = config.epsilon, config.qk_scale
        if config.contexts[layer] < config.block_size:
            self.window = config.contexts[layer]
        if layer in config.value_layers:
            self.ve_gate = UninitializedLinear(min(GATE_WIDTH, config.n_embd), config.kv_heads, bias=False)

    def gated(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Value embeddings (B, T, kv_heads · D) times a weight of 0 to 3 for each token and head, 1.5 at first."""
        weight = GATE_SCALE * torch.sigmoid(self.ve_gate(x[..., :GATE_WIDTH]))
        return weight[..., None] * embedded.view(*weight.shape, -1)

    def placed(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # The other sense of rotation, as nanochat and transformers' NanoChat turn.
        q, k = super().placed(q, k, cos, -sin)
        q, k = rms_norm(q, self.epsilon), rms_norm(k, self.epsilon)
        return (q, k) if self.qk_scale == 1 else (q * self.qk_scale, k * self.qk_scale)


class MLP(nn.Module):
    """Two linear layers around a squared ReLU, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.up_proj = UninitializedLinear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down_proj = UninitializedLinear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModernConfig, layer: int) -> None:
        super().__init__()
        self.epsilon = config.epsilon
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: Context | None = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        normed = rms_norm(x, self.epsilon)
        more = None if embedded is None else self.attn.gated(normed, embedded)
        x = x + self.attn(normed, cos, sin, context, more)
        return x + self.mlp(rms_norm(x, self.epsilon))


class Modern(LanguageModel):
    """nanochat's transformer."""

    config: ModernConfig

    def __init__(self, config: ModernConfig) -> None:
        super().__init__(config)
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        width = config.kv_heads * config.head_size
        self.ve = nn.ModuleDict({str(i): Embedding(config.padded_vocab_size, width) for i in config.value_layers})
        if config.residual_lambdas:
            self.resid_lambdas, self.x0_lambdas = (nn.Parameter(torch.empty(config.n_layer)) for _ in range(2))
        if config.smear:
            self.smear_gate = nn.Parameter(torch.empty(min(SMEAR_WIDTH, config.n_embd)))
            self.smear_lambda = nn.Parameter(torch.empty(1))
        if config.backout:
            self.backout_lambda = nn.Parameter(torch.empty(1))
        self.lm_head = UninitializedLinear(config.n_embd, config.padded_vocab_size, bias=False)

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """The last layer's output after its norm."""
        cos, sin = waves(self.positions(tokens, context), self.config.head_size, self.config.rope_base)
        x = rms_norm(self.wte(tokens), self.config.epsilon)
        if self.config.smear:
            x = self.smeared(x, context)
        first = middle = x
        for i, block in enumerate(self.h):
            if self.config.residual_lambdas:
                x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * first
            embedded = self.ve[str(i)](tokens) if str(i) in self.ve else None
            x = block(x, cos, sin, context, embedded)
            middle = x if i == self.config.n_layer // 2 else middle
        if self.config.backout:
            x = x - self.backout_lambda * middle
        return rms_norm(x, self.config.epsilon)

    def smeared(self, x: Tensor, context: Context | None) -> Tensor:
        """Embeddings (B, T, C) with a part of the one before each."""
        before = context.previous(x) if context else F.pad(x[:, :-1], (0, 0, 1, 0))
        gate = torch.sigmoid((x[..., :SMEAR_WIDTH] * self.smear_gate).sum(-1, keepdim=True))
        return x + self.smear_lambda * gate * before

    @property
    def head_weight(self) -> Tensor:
        return self.lm_head.weight

    def logits(self, products: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(products.float() / SOFTCAP)

    @staticmethod
    def initial(name: str, p: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
        bound = math.sqrt(3 / config.n_embd)
        if name in SCALARS:
            p.copy_(torch.linspace(*SCALARS[name], len(p)))
        elif name == "smear_gate" or name.endswith("ve_gate.weight"):
            p.uniform_(0.0, 0.02, generator=generator)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            p.zero_()
        elif name == "wte.weight":
            p.normal_(0.0, 0.8, generator=generator)
        elif name == "lm_head.weight":
            p.normal_(0.0, 0.001, generator=generator)
        else:
            bound *= 0.4 if name.endswith("up_proj.weight") else 1.0
            p.uniform_(-bound, bound, generator=generator)
