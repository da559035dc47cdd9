"""GPT-2 in plain PyTorch: the reference for every faster implementation.

Learned positions, pre-LayerNorm blocks, tanh GELU, a head tied to the token embedding, no dropout
(Radford et al. 2019; initialization as in OpenAI's released code: normal 0.02, projections into the
residual stream scaled by 1/sqrt(2·n_layer)). The vocabulary is padded to a multiple of 128. Loss and
sampling mask the padding rows, so these have no probability and no gradient.

Parameter names are Hugging Face's (`wte`, `wpe`, `h.0.attn.c_attn`, …) with plain `nn.Linear`
weights: `from_hf` and `to_hf` only transpose and pad.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.config import ModelConfig
from trainer.weights import TRANSPOSED

HEAD_ROWS = 2048  # tokens whose logits are held at once without gradients: 1 GiB with copies in float32


class Branches:
    """Rows of several sequences that share their beginning: the beginning once, then the rest of each, one after the
    other. A rest sees the beginning and itself, so all get the numbers that they get alone.

    `positions` and `branch` are (B, T): the position of each token in its own sequence, and 0 in a beginning, 1, 2, …
    in the rests, -1 in padding. The first `causal` tokens of every row belong to beginnings: they need no mask.
    """

    def __init__(self, positions: Tensor, branch: Tensor, causal: int) -> None:
        self.positions, self.causal = positions, causal
        T = branch.size(1)
        order = torch.arange(T, device=branch.device)
        rest = branch[:, causal:, None]
        own = (branch[:, None] == 0) | (branch[:, None] == rest)
        self.mask = (own & (order <= order[causal:, None]))[:, None]  # (B, 1, T - causal, T)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (B, H, T, D) queries, keys and values."""
        n = self.causal
        rest = F.scaled_dot_product_attention(q[:, :, n:], k, v, attn_mask=self.mask)
        if not n:
            return rest
        first = F.scaled_dot_product_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], is_causal=True)
        return torch.cat((first, rest), 2)


class Linear(nn.Linear):
    """nn.Linear without initial weights: GPT.initialize or a checkpoint fills them."""

    def reset_parameters(self) -> None:
        pass  # for 1558M it would take as long as `draw` on one core


class Embedding(nn.Embedding):
    """nn.Embedding without initial weights."""

    def reset_parameters(self) -> None:
        pass


class Attention(nn.Module):
    """Causal multi-head self-attention, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, branches: Branches | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        y = branches.attention(q, k, v) if branches else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two linear layers around a tanh GELU, (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, branches: Branches | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), branches)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The language model: token ids (B, T) in, logits (B, T, padded_vocab_size) or a mean loss out.

    Its matrices are not initialized before `initialize` or `load_state_dict`.
    """

    branching = True  # `hidden` takes branches
    tokens_at_once: int | None = None  # as many as the device has memory for

    def __init__(self, config: ModelConfig, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def initialize(self, seed: int) -> None:
        """Draw all weights from `seed`: the same ones on every device and at every world size."""
        draw({name: p.data for name, p in self.named_parameters()}, self.config, seed)

    def hidden(self, tokens: Tensor, branches: Branches | None = None) -> Tensor:
        """The last layer's output after ln_f: (B, T) token ids -> (B, T, n_embd). With `branches` a row is several
        sequences that share their beginning."""
        T = tokens.size(1)
        if self.config.block_size < T and not branches:
            raise ValueError(f"{T} tokens do not fit into block_size {self.config.block_size}")
        x = self.wte(tokens) + self.wpe(branches.positions if branches else torch.arange(T, device=tokens.device))
        for block in self.h:
            again = self.recompute and self.training
            x = checkpoint(block, x, use_reentrant=False) if again else block(x, branches)
        return self.ln_f(x)

    def head(self, x: Tensor) -> Tensor:
        """Logits of hidden states (..., n_embd) -> (..., padded_vocab_size), padding at -inf."""
        logits = F.linear(x, self.wte.weight)
        if self.config.padded_vocab_size > self.config.vocab_size:
            padding = torch.arange(self.config.padded_vocab_size, device=x.device) >= self.config.vocab_size
            logits = logits.masked_fill(padding, float("-inf"))
        return logits

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), or with `targets` (B, T) the mean cross-entropy in nats."""
        logits = self.head(self.hidden(tokens))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy in nats of each token (B, T), without gradients, in as little memory as `loss`."""
        chunks = zip(*(part.flatten(0, 1).split(HEAD_ROWS) for part in (self.hidden(tokens), targets)), strict=True)
        parts = [F.cross_entropy(self.head(x).float(), y, reduction="none") for x, y in chunks]
        return torch.cat(parts).view(targets.shape)

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats of (B, T) tokens, without gradients. It never holds more than the logits of
        HEAD_ROWS tokens: those of 64 x 1024 would take 30 GiB with their copies in float32."""
        chunks = zip(*(part.flatten(0, 1).split(HEAD_ROWS) for part in (self.hidden(tokens), targets)), strict=True)
        sums = [F.cross_entropy(self.head(x).float(), y, reduction="sum") for x, y in chunks]
        return torch.stack(sums).sum() / targets.numel()


def draw(parameters: Mapping[str, Tensor], config: ModelConfig, seed: int) -> None:
    """Fill float32 parameters with their initial values, which depend on seed and name only, not on the device.

    torch draws 80M normal numbers a second on one core, with any number of threads: 1558M took 13 s. It releases the
    GIL meanwhile. So each parameter has its own generator, and threads divide the parameters.
    """
    residual_std = 0.02 / math.sqrt(2 * config.n_layer)

    def fill(name: str) -> None:
        p = parameters[name]
        if p.dim() == 1:
            p.fill_(1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0)
            return
        # torch's generator uses 32 bits of its seed: two of 1558M's 194 streams are equal with a probability of 4e-6.
        generator = torch.Generator().manual_seed(int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:4]))
        std = residual_std if name.endswith("c_proj.weight") else 0.02
        p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))
        if name == "wte.weight":
            p[config.vocab_size :] = 0.0

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, sorted(parameters, key=lambda name: -parameters[name].numel())))  # the longest first


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state dict with names and shapes of Hugging Face's GPT2LMHeadModel, without padding rows."""
    hf = {}
    for name, tensor in state.items():
        if name == "wte.weight":
            tensor = tensor[: config.vocab_size]
        hf[f"transformer.{name}"] = (tensor.t() if name.endswith(TRANSPOSED) else tensor).contiguous()
    return hf


def from_hf(hf: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face GPT-2 weights with the names and shapes of GPT; padding rows are zero.

    Accepts names with and without the prefix `transformer.`. Ignores the attention-mask buffers and the tied
    `lm_head.weight` of some files.
    """
    state = {}
    for name, tensor in hf.items():
        name = name.removeprefix("transformer.")
        if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        state[name] = (tensor.t() if name.endswith(TRANSPOSED) else tensor).contiguous()
    wte = state["wte.weight"]
    state["wte.weight"] = F.pad(wte, (0, 0, 0, config.padded_vocab_size - wte.size(0)))
    return state
