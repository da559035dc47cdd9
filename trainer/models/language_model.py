"""What the plain modules of all families share: losses, the head in chunks, initial weights, and whole layers without
initial weights.

A plain module reads like its paper. It is the reference for every faster implementation, and what a CPU runs. The
vocabulary is padded to a multiple of 128. Loss and sampling mask the padding rows, so these have no probability and no
gradient.

Names tell an optimizer what a parameter is: `h.N.…` are the blocks, `wte.weight` and `wpe.weight` embeddings,
`lm_head.weight` a head of its own. Vectors have one dimension.
"""

import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.config.config import Recompute
from trainer.config.model_config import HEAD_ROWS, ModelConfig

# Products and attention, whose results a selective recomputation keeps, as torchtitan does.
PRODUCTS = (
    *("mm", "addmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)


class Context(Protocol):
    """What the tokens of a forward pass see, where that is not: all tokens before them in their row."""

    positions: Tensor  # (B, T), of each token in its own sequence

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Attention of (B, H, T, D) queries, with keys and values that may have fewer heads; in a window of this many
        tokens, the last of which is the query's own."""

    def previous(self, x: Tensor) -> Tensor:
        """What `x` (B, T, C) has for the token before each one in its sequence; 0 for a first token."""


def band(length: int, window: int, device: torch.device) -> Tensor:
    """The mask (length, length) of causal attention in a window of this many tokens, the last of which is the query's
    own: sliding windows (Beltagy et al. 2020)."""
    order = torch.arange(length, device=device)
    behind = order[:, None] - order
    return (behind >= 0) & (behind < window)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Attention of (B, H, T, D) queries; keys and values may have fewer heads, each of which then serves several."""
    grouped = k.size(1) != q.size(1)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention of (B, H, T, D) queries, in a window of this many tokens, see `band`.

    In bf16 on a GPU a window takes FlashAttention's kernel, which leaves out what no token sees: a mask (T, T) would
    lead to a slower kernel that computes all of it.
    """
    B, H, T, D = q.shape
    if window is None or window >= T:
        return attention(q, k, v, causal=True)
    # With a mask, CUDA's attention in little memory takes no grouped keys.
    k, v = (heads.repeat_interleave(H // heads.size(1), 1) for heads in (k, v))
    if v.is_cuda and v.dtype == torch.bfloat16 and D % 8 == 0:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (heads.transpose(1, 2).reshape(B * T, H, D).to(v.dtype) for heads in (q, k, v))
        starts = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=q.device)
        y: Tensor = varlen_attn(q, k, v, starts, starts, T, T, window_size=(window - 1, 0))  # type: ignore[assignment]
        return y.view(B, T, H, D).transpose(1, 2)
    return attention(q, k, v, band(T, window, q.device))


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy of hidden states, whose gradients the forward pass computes, HEAD_ROWS tokens at a time.

    So the logits of a whole micro-batch never exist, and none is computed twice. (Method: Liger Kernel's fused linear
    cross-entropy, Hsu et al. 2024, without its kernels.) The gradient of the head's matrix adds up in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, summed: Callable[..., Tensor]) -> Tensor:
        """`x` (N, C), `weight` (V, C), `targets` (N,); `summed(x, weight, targets)` is the sum over some tokens."""
        count = (targets >= 0).sum().clamp(min=1)
        total = torch.zeros((), device=x.device)
        dx, dweight = torch.empty_like(x), torch.zeros(weight.shape, device=x.device)
        matrix = weight.detach().requires_grad_()
        for rows, y, out in zip(x.split(HEAD_ROWS), targets.split(HEAD_ROWS), dx.split(HEAD_ROWS), strict=True):
            rows = rows.detach().requires_grad_()
            with torch.enable_grad():
                loss = summed(rows, matrix, y)
            gradients = torch.autograd.grad(loss, (rows, matrix))
            total += loss.detach()
            out.copy_(gradients[0])
            dweight += gradients[1]
        ctx.save_for_backward(dx, dweight, count)
        ctx.dtype = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx, dweight, count = ctx.saved_tensors
        scale = gradient / count
        return dx * scale.to(dx.dtype), (dweight * scale).to(ctx.dtype), None, None


class UninitializedLinear(nn.Linear):
    """nn.Linear without initial weights: `initialize` or a checkpoint fills them."""

    def reset_parameters(self) -> None:
        pass  # for 1558M it would take as long as `draw` on one core


class Embedding(nn.Embedding):
    """nn.Embedding without initial weights."""

    def reset_parameters(self) -> None:
        pass


def recomputed(forward: Callable[..., Tensor], recompute: Recompute) -> Callable[..., Tensor]:
    """A block's forward pass that keeps its inputs alone, or also the results of its products, for the backward pass,
    which computes the rest again (Chen et al. 2016)."""
    options: dict[str, Any] = {}
    if recompute == "selective":
        kept = [getattr(torch.ops.aten, name).default for name in PRODUCTS]
        if torch.cuda.is_available():
            importlib.import_module("torch.nn.attention.varlen")  # registers the operator, in 2 s
            kept.append(torch.ops.torch_attn._varlen_attn.default)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)

    def again(*inputs: object) -> Tensor:
        out: Tensor = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
        return out

    return again


class LanguageModel(nn.Module):
    """A language model: token ids (B, T) in, logits (B, T, padded_vocab_size) or a mean loss out.

    Its matrices are not initialized before `initialize` or `load_state_dict`. A family implements `hidden`, and
    `initial`; it may change `logits`.
    """

    tokens_at_once: int | None = None  # as many as the device has memory for
    wte: Embedding
    h: nn.ModuleList  # the blocks

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    # --- of a family

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """The input of the head: (B, T) token ids -> (B, T, n_embd). Without a context, a row is one sequence."""
        raise NotImplementedError

    @staticmethod
    def initial(name: str, p: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
        """Fill a contiguous float32 parameter on the CPU with its initial values."""
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """The matrix of the head, (padded_vocab_size, n_embd); tied to the token embedding unless there is another."""
        return self.wte.weight

    def logits(self, products: Tensor) -> Tensor:
        """The logits of the head's products."""
        return products

    # --- of all

    def initialize(self, seed: int) -> None:
        """Draw all weights from `seed`: the same ones on every device and at every world size."""
        self.draw({name: p.data for name, p in self.named_parameters()}, self.config, seed)

    @classmethod
    def draw(cls, parameters: Mapping[str, Tensor], config: ModelConfig, seed: int) -> None:
        """Fill float32 parameters with their initial values, which depend on seed and name only, not on the device.

        torch draws 80M normal numbers a second on one core, with any number of threads: 1558M took 13 s. It releases
        the GIL meanwhile. So each parameter has its own generator, and threads divide the parameters.
        """

        def fill(name: str) -> None:
            # torch's generator uses 32 bits of its seed: two of 1558M's 194 streams are equal with a probability of
            # 4e-6.
            generator = torch.Generator().manual_seed(int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:4]))
            p = parameters[name]
            drawn = p if p.device.type == "cpu" else torch.empty(p.shape)
            cls.initial(name, drawn, config, generator)
            if name in config.vocabulary_rows:
                drawn[config.vocab_size :] = 0.0
            p.copy_(drawn)

        with ThreadPoolExecutor() as pool:
            list(pool.map(fill, sorted(parameters, key=lambda name: -parameters[name].numel())))  # the longest first

    def positions(self, tokens: Tensor, context: Context | None) -> Tensor:
        """The positions of tokens (B, T): (T,), or (B, T) with a context."""
        if context is not None:
            return context.positions
        T = tokens.size(1)
        if self.config.reach is not None and self.config.reach < T:
            raise ValueError(f"{T} tokens do not fit into block_size {self.config.reach}")
        return torch.arange(T, device=tokens.device)

    def head(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Logits of hidden states (..., n_embd) -> (..., padded_vocab_size), padding at -inf. `weight`: the head's
        matrix, if not `head_weight`."""
        logits = self.logits(F.linear(x, self.head_weight if weight is None else weight))
        if self.config.padded_vocab_size > self.config.vocab_size:
            padding = torch.arange(self.config.padded_vocab_size, device=x.device) >= self.config.vocab_size
            logits = logits.masked_fill(padding, float("-inf"))
        return logits

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), or with `targets` (B, T) the mean cross-entropy in nats."""
        x = self.hidden(tokens)
        return self.head(x) if targets is None else self.loss_of(x, targets)

    def loss_of(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats of hidden states (B, T, n_embd)."""
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())

    def summed_loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropies in nats of hidden states (N, n_embd), for `ChunkedLoss`."""
        return F.cross_entropy(self.head(x, weight).float(), targets, reduction="sum")

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
