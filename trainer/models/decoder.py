"""Text from a model: several continuations of one prompt, a token a step, with a cache of keys and values.

`Decoder` is the forward pass of the plain module over the new tokens alone; it keeps the keys and values of all tokens
before them. A step reads every weight once, and on a CPU little else takes time: the bytes of the weights decide the
speed. The products have three precisions. fp32 is the reference. bf16 rounds weights and inputs of the products, as
training on a GPU does; norms, residual stream and logits stay in float32. int8 (CPU only) stores the weights of the
products as whole numbers up to 127 with a scale for each row, and multiplies in bf16. Who wants more speed on a CPU
runs the GGUF of an export in llama.cpp.

A text that outgrows block_size slides: the model forgets all but the last half of its context, and reads that again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.config.errors import UserError
from trainer.models.family import plain_model
from trainer.models.language_model import LanguageModel, attention, band

PRECISIONS = ("fp32", "bf16", "int8")
TOP_K = 50
# Not cuDNN's: it plans 70 ms for every new length, and each step has one (H100, torch 2.11).
ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
FEW_ROWS = 32  # of an input; with more, int8 weights are converted to bf16, which then costs less
SCORED_ROWS = 256  # tokens of a text that have logits at once


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: among the `top_k` likeliest tokens (None: all), and of these among the likeliest ones that
    hold the share `top_p` of the probability, at a temperature. Temperature 0 takes the likeliest token."""

    temperature: float = 1.0
    top_k: int | None = TOP_K
    top_p: float = 1.0


def best_precision(device: torch.device) -> str:
    """bf16 where the device multiplies it, else fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


class Product(nn.Module):
    """x (..., in) -> x W^T + b (..., out) in one of the PRECISIONS, for weights (out, in)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: str) -> None:
        super().__init__()
        self.dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self.scale: Tensor | None = None  # of each row of int8 weights
        if precision == "int8":
            self.scale = (weight.detach().abs().amax(1).clamp(min=1e-12) / 127).to(self.dtype)
            self.weight = (weight.detach() / self.scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        else:
            self.weight = weight.detach().to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = (*x.shape[:-1], -1), x.reshape(-1, x.size(-1)).to(self.dtype)
        if self.scale is None and len(x) == 1:  # as a vector: a CPU reads bf16 weights up to twice as fast
            y = torch.mv(self.weight, x[0])
        elif self.scale is None:
            y = F.linear(x, self.weight)
        elif len(x) > FEW_ROWS or x.size(-1) % 16:  # torch's kernel reads beyond rows of other lengths
            y = F.linear(x, self.weight * self.scale[:, None])
        else:
            y = torch._weight_int8pack_mm(x, self.weight, self.scale)
        return (y if self.bias is None else y + self.bias).view(shape)


class Cache:
    """The keys and values of all tokens so far of rows that grow together: the context of the tokens of one step."""

    def __init__(self, room: int, device: torch.device) -> None:
        self.room, self.device = room, device  # positions
        self.seen = 0  # tokens of each row, with those of this step
        self.positions = torch.zeros(0)  # (T,), of the tokens of this step
        self.layers: dict[int, list[Tensor]] = {}  # keys and values (rows, heads, room, width)
        self.last: Tensor | None = None  # the token before this step's, as `previous` had it

    def extend(self, count: int) -> None:
        """Begin a step of this many tokens: any number for the first, then one."""
        self.positions = torch.arange(self.seen, self.seen + count, device=self.device)
        self.seen += count

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        T, mask, first = q.size(2), None, 0
        if layer not in self.layers:
            self.layers[layer] = [t.new_empty((*t.shape[:2], self.room, t.size(3))) for t in (k, v)]
        for kept, new in zip(self.layers[layer], (k, v), strict=True):
            kept[:, :, self.seen - T : self.seen] = new
        if window is not None and T == 1:
            first = max(0, self.seen - window)
        elif window is not None:
            mask = band(T, window, q.device)
        keys, values = (kept[:, :, first : self.seen] for kept in self.layers[layer])
        return attention(q, keys, values, mask, causal=T > 1 and mask is None)

    def previous(self, x: Tensor) -> Tensor:
        before = torch.zeros_like(x[:, :1]) if self.last is None else self.last
        self.last = x[:, -1:]
        return torch.cat((before, x[:, :-1]), 1)


class Decoder:
    """The cached forward pass of a model, for rows of equal length. In fp32 it shares the model's weights.

    With `ids`, only the first ids of the vocabulary have logits: a tokenizer may have fewer ids than the model.
    """

    def __init__(self, model: LanguageModel, precision: str = "fp32", ids: int | None = None) -> None:
        assert precision in PRECISIONS, precision
        self.config, self.precision, self.device = model.config, precision, model.wte.weight.device
        with torch.device("meta"):
            self.model = plain_model(model.config).eval()
        self.model.load_state_dict(model.state_dict(), assign=True)
        for module in list(self.model.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear) and name != "lm_head":
                    setattr(module, name, Product(layer.weight, layer.bias, precision))
        self.head = Product(model.head_weight[: ids or self.config.vocab_size], None, precision)
        self.cache = Cache(0, self.device)

    def begin(self, rows: Sequence[Sequence[int]], room: int = 0) -> Tensor:
        """Logits (rows, ids) of the token after each row, in float32. `step` may follow `room` times, and never beyond
        block_size."""
        self.cache = Cache(min(self.config.block_size, len(rows[0]) + room), self.device)
        return self._forward(torch.tensor(rows))

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Logits (rows, ids) after one more token in each row."""
        return self._forward(torch.tensor(tokens)[:, None])

    @torch.inference_mode()
    def score(self, ids: Sequence[int], top: int) -> list[dict[int, float]]:
        """For each of 1 to block_size tokens after the first: its own log probability and those of the `top` likeliest
        ids in its place, from one pass that leaves the cache alone. UserError if the weights give no finite logits."""
        with sdpa_kernel(list(ATTENTION)):
            hidden = self.model.hidden(torch.tensor([ids], device=self.device))[0, :-1]
        scores = []
        for first in range(0, len(hidden), SCORED_ROWS):
            logits = finite(self.model.logits(self.head(hidden[first : first + SCORED_ROWS])).float())
            for token, row in zip(ids[first + 1 :], logits.log_softmax(-1).cpu(), strict=False):
                scores.append({i: row[i].item() for i in [*row.topk(top).indices.tolist(), token]})
        return scores

    @torch.inference_mode()
    def _forward(self, tokens: Tensor) -> Tensor:
        self.cache.extend(tokens.size(1))
        with sdpa_kernel(list(ATTENTION)):
            hidden = self.model.hidden(tokens.to(self.device), self.cache)
        return self.model.logits(self.head(hidden[:, -1])).float()


def stream(
    decoder: Decoder,
    prompt: Sequence[int],
    tokens: int,
    seeds: Sequence[int],
    sampling: Sampling,
    ends: Callable[[int, int], bool] = lambda number, token: False,
) -> Iterator[list[tuple[int, int]]]:
    """The tokens that continue a prompt (of 1 to block_size tokens), once for each seed, step by step: pairs of the
    number of a text and its next token.

    A text ends after `tokens` tokens, or with a token for which `ends` is true, which is not given. Each has its own
    random numbers, so it depends on its own seed and not on the others, as far as rounding allows. UserError if the
    weights give no finite logits.
    """
    block_size = decoder.config.block_size
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    contexts = [list(prompt) for _ in seeds]
    going = list(range(len(seeds)))
    logits = decoder.begin(contexts, tokens)
    for left in range(tokens - 1, -1, -1):
        drawn = [draw(row, sampling, generators[n]) for n, row in enumerate(logits.cpu())]
        going = [n for n in going if not ends(n, drawn[n])]
        yield [(n, drawn[n]) for n in going]
        if not left or not going:
            return
        contexts = [[*context, token] for context, token in zip(contexts, drawn, strict=True)]
        if len(contexts[0]) > block_size:
            contexts = [context[-max(1, block_size // 2) :] for context in contexts]
            logits = decoder.begin(contexts, left)
        else:
            logits = decoder.step(drawn)


def finite(logits: Tensor) -> Tensor:
    """The same logits. UserError if one is not finite."""
    if not bool(logits.isfinite().all()):
        raise UserError("the weights give logits that are not finite; take the weights of another step")
    return logits


@torch.inference_mode()
def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token id, drawn from logits (vocab_size,) of the CPU."""
    logits = finite(logits)
    if sampling.temperature == 0:
        return int(logits.argmax())
    among = None  # ascending ids, not ranks: rounding then moves the choice as little as possible
    if sampling.top_k is not None and sampling.top_k < len(logits):
        among = (logits >= logits.topk(sampling.top_k).values[-1]).nonzero()[:, 0]
        logits = logits[among]
    # From the maximum: a division by a tiny temperature must not overflow.
    shares = ((logits - logits.max()).double() / sampling.temperature).softmax(0)
    if sampling.top_p < 1:  # the likeliest tokens that hold `top_p` together (Holtzman et al. 2020)
        order = shares.sort(descending=True)
        kept = max(1, int((order.values.cumsum(0) - order.values < sampling.top_p).sum()))
        shares[order.indices[kept:]] = 0.0
    sums = shares.cumsum(0)
    point = torch.rand(1, dtype=torch.float64, generator=generator) * sums[-1]
    choice = min(int(torch.searchsorted(sums, point, right=True)), int(shares.nonzero()[-1]))
    return choice if among is None else int(among[choice])
