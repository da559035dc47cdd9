"""Causal self-attention with rotary positions (Su et al. 2021) and grouped keys and values (Ainslie et al. 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.grouped import GroupedHeads
from trainer.models.language_model import Context, UninitializedLinear, causal_attention


def waves(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of `positions` (T,) or (B, T) for heads of `width`: (1 or B, 1, T, width / 2) in
    float32. Pair i turns by base^(-2i / width) a position."""
    speeds = base ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = positions.float()[..., None] * speeds
    angles = angles[:, None] if positions.dim() == 2 else angles[None, None]
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (B, H, T, D) whose pairs (i, i + D/2) turn by the angles; in the dtype of `x`."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class RotaryAttention(nn.Module):
    """Attention over (B, T, C) with positions as angles. A family adds its norms of queries and keys, and windows."""

    window: int | None = None  # the tokens that a token sees, itself the last; None: all before it

    def __init__(self, config: GroupedHeads, layer: int) -> None:
        super().__init__()
        self.n_head, self.kv_heads, self.layer = config.n_head, config.kv_heads, layer
        kv = config.kv_heads * config.head_size
        self.q_proj = UninitializedLinear(config.n_embd, config.attention_width, bias=False)
        self.k_proj = UninitializedLinear(config.n_embd, kv, bias=False)
        self.v_proj = UninitializedLinear(config.n_embd, kv, bias=False)
        self.o_proj = UninitializedLinear(config.attention_width, config.n_embd, bias=False)

    def placed(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, T, D) with their positions."""
        return turned(q, cos, sin), turned(k, cos, sin)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: Context | None = None,
        more: Tensor | None = None,
    ) -> Tensor:
        """`more` (B, T, kv_heads, head_size) is added to the values."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.n_head, -1).transpose(1, 2)
        k, v = (made(x).view(B, T, self.kv_heads, -1).transpose(1, 2) for made in (self.k_proj, self.v_proj))
        q, k = self.placed(q, k, cos, sin)
        v = v if more is None else v + more.transpose(1, 2).type_as(v)
        y = context.attention(self.layer, q, k, v, self.window) if context else causal_attention(q, k, v, self.window)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


def rms_norm(x: Tensor, epsilon: float) -> Tensor:
    """RMSNorm without weights (Zhang & Sennrich 2019), over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=epsilon)


class RMSNorm(nn.Module):
    """RMSNorm with weights, over the last dimension; computed in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * rms_norm(x.float(), self.epsilon)).type_as(x)
