"""Causal attention with its backward pass called by hand, on packed queries, keys and values.

FLOPs a layer, counted in full: forward 4·T·C a token (QKᵀ and PV), backward 2.5 times that (both again, and three
gradients); the causal half is really done. Nothing of size T² reaches memory. The kernels are cuDNN's (6% of a
124M step ahead of FlashAttention-2 on an H200) or FlashAttention-2's, where cuDNN does not serve or additions must
come in a fixed order; on a CPU plain PyTorch in float32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATEN = torch.ops.aten


@dataclass
class Saved:
    """What the backward pass needs besides the packed input."""

    output: Tensor  # (B, H, T, D)
    rest: tuple[Any, ...]  # of the kernel that ran: log-sum-exp, random state


class Attention:
    """Attention of `n_head` heads over (B·T, 3C) packed projections -> (B·T, C)."""

    def __init__(self, n_head: int, width: int, device: torch.device, deterministic: bool) -> None:
        self.n_head, self.width, self.head = n_head, width, width // n_head
        self.kernel = "math" if device.type != "cuda" else "flash" if deterministic else self._quickest(device)

    def _quickest(self, device: torch.device) -> str:
        q = torch.empty(1, self.n_head, 128, self.head, dtype=torch.bfloat16, device=device)
        asked = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
        return "cudnn" if torch.backends.cuda.can_use_cudnn_attention(asked) else "flash"

    def forward(self, qkv: Tensor, B: int) -> tuple[Tensor, Saved]:
        q, k, v = self._heads(qkv, B)
        if self.kernel == "cudnn":
            output, *rest = ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False)
        elif self.kernel == "flash":
            output, *rest = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        else:
            q, k, v = inputs = [t.detach().float().requires_grad_() for t in (q, k, v)]
            with torch.enable_grad():
                exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            output, rest = exact.detach().to(qkv.dtype), [exact, inputs]
        return self._rows(output), Saved(output, tuple(rest))

    def backward(self, gradient: Tensor, qkv: Tensor, B: int, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, (B·T, C) each."""
        q, k, v = self._heads(qkv, B)
        g = gradient.view(B, -1, self.n_head, self.head).transpose(1, 2)
        if self.kernel == "cudnn":
            lse, cum_q, cum_k, max_q, max_k, seed, offset = saved.rest[:7]
            gradients = ATEN._scaled_dot_product_cudnn_attention_backward(
                g, q, k, v, saved.output, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
            )
        elif self.kernel == "flash":
            lse, cum_q, cum_k, max_q, max_k, seed, offset = saved.rest[:7]
            gradients = ATEN._scaled_dot_product_flash_attention_backward(
                g, q, k, v, saved.output, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
            )
        else:
            exact, inputs = saved.rest
            gradients = torch.autograd.grad(exact, inputs, g.float())
        dq, dk, dv = (self._rows(t.to(gradient.dtype)) for t in gradients)
        return dq, dk, dv

    def _heads(self, qkv: Tensor, B: int) -> list[Tensor]:
        """Views (B, H, T, D) of the packed queries, keys and values."""
        return [t.transpose(1, 2) for t in qkv.view(B, -1, 3, self.n_head, self.head).unbind(2)]

    def _rows(self, heads: Tensor) -> Tensor:
        """(B, H, T, D) -> (B·T, C): a view, as the kernels keep their inputs' order in memory."""
        return heads.transpose(1, 2).reshape(-1, self.width)
