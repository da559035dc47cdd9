"""Text from a model: batches of prompts, a token a step, with a cache of keys and values.

`Decoder` is the forward pass of the plain module over the new tokens alone; it keeps the keys and values of all tokens
before them. The rows of a batch have different lengths. Each row writes its keys at its own positions and sees no
position after them, so it overwrites the padding behind a short prompt before it would see it.

A step reads every weight once, and on a CPU little else takes time: the bytes of the weights decide the speed. The
products have four precisions. fp32 is the reference. bf16 rounds weights and inputs of the products, as training on a
GPU does; norms, residual stream and logits stay in float32. int8 (CPU only) stores the weights of the products as
whole numbers up to 127 with a scale for each row. Where the processor multiplies 8 bits (AVX-512 VNNI), it rounds the
inputs alike, with a scale for each token (dynamic quantization, as torchao's W8A8); elsewhere it multiplies in bf16.
int4 (CPU only) stores the weights of the blocks as 16 levels between the least and the greatest one of each GROUP, as
torchao's int4 weight-only; the head stays in int8, as llama.cpp keeps more bits for it.

A text that outgrows block_size slides: the model forgets all but the last half of its context, and reads that again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.errors import UserError
from trainer.family import plain_model
from trainer.model import LanguageModel, attention

PRECISIONS = ("fp32", "bf16", "int8", "int4")
TOP_K = 50
# Not cuDNN's: it plans 70 ms for every new length, and each step has one (H100, torch 2.11).
ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
GROUP = 32  # int4 weights of a row that share a scale
BEFORE_LAYERS = -1  # the cache's number of the layers' input
FEW_ROWS = 4  # of an input; with more, int8 weights are converted to bf16, which then costs less
SCORED_ROWS = 256  # tokens of a text whose logits are held at once


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


def multiplies_int8() -> bool:
    """Whether this CPU multiplies 8 bits. Without VNNI, oneDNN adds products of 8 bits in 16, which can saturate."""
    return bool(torch.cpu._is_vnni_supported())


def product(weight: Tensor, bias: Tensor | None, precision: str) -> nn.Module:
    """The module x (..., in) -> x W^T + b (..., out) in one of the PRECISIONS, for weights (out, in)."""
    weight = weight.detach()
    if precision == "int4" and Product4.takes(weight):
        return Product4(weight, bias)
    if precision in ("int4", "int8"):
        return Product8(weight, bias) if multiplies_int8() else Product8AsBf16(weight, bias)
    return Product(weight, bias, torch.float32 if precision == "fp32" else torch.bfloat16)


class Product(nn.Module):
    """A product in the type of its weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = weight.to(dtype), None if bias is None else bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = (*x.shape[:-1], -1), x.reshape(-1, x.size(-1)).to(self.weight.dtype)
        if len(x) > 1:
            return F.linear(x, self.weight, self.bias).view(shape)
        # One row: the product with a vector reads bf16 weights up to twice as fast on a CPU.
        if self.bias is None:
            return torch.mv(self.weight, x[0]).view(shape)
        return torch.addmv(self.bias, self.weight, x[0]).view(shape)


def rounded_to_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers up to 127 (out, in), and the scale of each row (out,) in bf16."""
    scale = (weight.abs().amax(1).clamp(min=1e-12) / 127).to(torch.bfloat16)
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


class Product8(nn.Module):
    """int8 weights and int8 inputs, multiplied by oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        whole, scale = rounded_to_8_bits(weight)
        self.packed = torch.ops.onednn.qlinear_prepack(whole, None)
        self.scale, self.zero = scale.float(), torch.zeros(len(scale), dtype=torch.int32)
        self.bias = None if bias is None else bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        shape, x = (*x.shape[:-1], -1), x.reshape(-1, x.size(-1)).float()
        scale = x.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 127
        whole = (x / scale).round_().add_(128).to(torch.uint8)  # around 128: oneDNN takes no negative inputs
        if len(x) == 1:  # oneDNN multiplies by a single scale itself, and adds the bias
            return self._onednn(whole, float(scale), self.bias).view(shape)
        y = self._onednn(whole, 1.0, None) * scale.to(torch.bfloat16)
        return (y if self.bias is None else y + self.bias.to(torch.bfloat16)).view(shape)

    def _onednn(self, whole: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        weight = (self.packed, self.scale, self.zero)
        rest = (1.0, 0, torch.bfloat16, "none", list[float](), "")  # of the result: scale, zero, type, nothing after it
        return torch.ops.onednn.qlinear_pointwise(whole, scale, 128, *weight, bias, *rest)


class Product8AsBf16(nn.Module):
    """int8 weights, converted to bf16 as they are read."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.scale = rounded_to_8_bits(weight)
        self.bias = None if bias is None else bias.detach().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = (*x.shape[:-1], -1), x.reshape(-1, x.size(-1)).to(torch.bfloat16)
        # torch's kernel for 8 bits reads beyond a row whose length is no multiple of 16.
        if len(x) > FEW_ROWS or x.size(-1) % 16:
            return F.linear(x, self.weight * self.scale[:, None], self.bias).view(shape)
        y = torch._weight_int8pack_mm(x, self.weight, self.scale)
        return (y if self.bias is None else y + self.bias).view(shape)


class Product4(nn.Module):
    """int4 weights, converted to bf16 as they are read."""

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether torch's kernel for 4 bits has the widths of weights (out, in)."""
        return weight.size(0) % 16 == 0 and weight.size(1) % GROUP == 0

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        groups = weight.float().unflatten(1, (-1, GROUP))
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).clamp(min=1e-12)
        whole = ((groups - low[..., None]) / scale[..., None]).round().to(torch.int32)
        self.packed = torch._convert_weight_to_int4pack_for_cpu(whole.flatten(1), 1)
        # The kernel's layout: for each group (in / GROUP, out, 2) the scale and the value of the whole number 8.
        self.groups = torch.stack((scale, low + 8 * scale), -1).transpose(0, 1).contiguous().to(torch.bfloat16)
        self.bias = None if bias is None else bias.detach().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = (*x.shape[:-1], -1), x.reshape(-1, x.size(-1)).to(torch.bfloat16)
        y = torch._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.groups)
        return (y if self.bias is None else y + self.bias).view(shape)


class Cache:
    """The keys and values of all tokens so far of a batch, by layer: the context of the tokens of one step."""

    def __init__(self, room: int) -> None:
        self.room = room  # positions
        self.layers: dict[int, tuple[Tensor, ...]] = {}  # of (rows, heads, room, width)
        self.positions = torch.zeros(0)  # (rows, T), of the tokens of this step
        self.seen = 0  # one more than the last of them
        self.mask: Tensor | None = None
        self.windowed: dict[int, Tensor] = {}  # masks of this step, by window

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        rows, T = q.size(0), q.size(2)
        keys, values = self.kept(layer, k, v)
        mask, first = self.mask, 0
        if window is not None and rows == T == 1:
            first = max(0, self.seen - window)
        elif window is not None:
            mask = self.in_window(window)
        keys, values = keys[:, :, first : self.seen], values[:, :, first : self.seen]
        return attention(q, keys, values, mask, causal=T > 1 and mask is None)

    def kept(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a layer (rows, heads, room, width), after those of this step (rows, heads, T, width)."""
        rows, T = self.positions.shape
        if layer not in self.layers:
            # Zeros: attention gives the weight 0 to a masked position, and 0 times nan is nan.
            self.layers[layer] = tuple(t.new_zeros((*t.shape[:2], self.room, t.size(3))) for t in new)
        row, at = torch.arange(rows, device=self.positions.device), self.positions[:, 0]
        for t, part in zip(self.layers[layer], new, strict=True):
            if rows == 1 or T > 1:
                t[:, :, self.seen - T : self.seen] = part
            else:
                t[row, :, at] = part[:, :, 0]
        return self.layers[layer]

    def previous(self, x: Tensor) -> Tensor:
        (past,) = self.kept(BEFORE_LAYERS, x[:, None])
        row = torch.arange(len(x), device=x.device)[:, None]
        return past[row, 0, (self.positions - 1).clamp(min=0)] * (self.positions > 0)[..., None]

    def in_window(self, window: int) -> Tensor:
        """Which positions a token of this step sees, (rows or 1, 1, T, seen): rows that begin have equal positions."""
        if window not in self.windowed:
            at = self.positions[: 1 if self.positions.size(1) > 1 else None, None, :, None]
            order = torch.arange(self.seen, device=at.device)
            self.windowed[window] = (order <= at) & (order > at - window)
        return self.windowed[window]

    def keep(self, rows: Tensor) -> None:
        self.layers = {layer: tuple(t[rows] for t in kept) for layer, kept in self.layers.items()}


def for_decoding(model: LanguageModel, precision: str) -> LanguageModel:
    """The model with its linear layers as products of a precision. It shares all other tensors with `model`."""
    with torch.device("meta"):
        copy = plain_model(model.config).eval()
    copy.load_state_dict(model.state_dict(), assign=True)
    for module in list(copy.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and name != "lm_head":
                setattr(module, name, product(layer.weight, layer.bias, precision))
    return copy


class Decoder:
    """The cached forward pass of a model, for one batch at a time. In fp32 it shares the model's weights.

    With `ids`, only the first ids of the vocabulary have logits: a tokenizer may have fewer ids than the model.
    """

    def __init__(self, model: LanguageModel, precision: str = "fp32", ids: int | None = None) -> None:
        assert precision in PRECISIONS, precision
        self.config, self.precision, self.device = model.config, precision, model.wte.weight.device
        self.model = for_decoding(model, precision)
        head = model.head_weight[: ids or self.config.vocab_size]
        self.head = product(head, None, "int8" if precision == "int4" else precision)
        self.lengths = torch.zeros(0, dtype=torch.long)  # positions that each row has filled
        self.cache = Cache(0)

    @torch.inference_mode()
    def begin(self, prompts: Sequence[Sequence[int]], room: int = 0) -> Tensor:
        """Logits (rows, vocab_size) of the token after each prompt, in float32. `step` may follow `room` times, and
        never beyond block_size."""
        assert prompts and all(0 < len(prompt) <= self.config.block_size for prompt in prompts)
        counts = [len(prompt) for prompt in prompts]
        self.cache = Cache(min(self.config.block_size, max(counts) + room))
        self.lengths = torch.zeros(len(prompts), dtype=torch.long)
        padded = torch.zeros((len(prompts), max(counts)), dtype=torch.long)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor(prompt)
        return self._forward(padded, torch.tensor(counts))

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Logits (rows, vocab_size) after one more token in each row."""
        return self._forward(torch.tensor(tokens)[:, None], torch.ones(len(tokens), dtype=torch.long))

    @torch.inference_mode()
    def score(self, ids: Sequence[int], top: int) -> list[tuple[float, list[tuple[int, float]]]]:
        """For each token behind the first: its log probability, and the `top` likeliest ids at its place with theirs.
        Of 1 to block_size tokens. It ends the batch before it."""
        assert 0 < len(ids) <= self.config.block_size
        self.cache, self.lengths = Cache(len(ids)), torch.zeros(1, dtype=torch.long)
        hidden = self._hidden(torch.tensor([ids], dtype=torch.long), torch.tensor([len(ids)]))[0, :-1]
        scores = []
        for x, answers in zip(hidden.split(SCORED_ROWS), torch.tensor(ids[1:]).split(SCORED_ROWS), strict=True):
            logprobs = self.model.logits(self.head(x)).float().log_softmax(-1).cpu()
            found, likeliest = logprobs.gather(1, answers[:, None])[:, 0], logprobs.topk(top)
            tops = (list(zip(*pair, strict=True)) for pair in zip(*(t.tolist() for t in likeliest), strict=True))
            scores += list(zip(found.tolist(), ([(i, p) for p, i in pairs] for pairs in tops), strict=True))
        return scores

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch alone."""
        at = torch.tensor(rows)
        self.lengths = self.lengths[at]
        self.cache.keep(at.to(self.device))

    def _forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The logits after the last token of each row, of tokens (rows, T) of which each row has `counts`: either a
        batch that begins, or one token a row."""
        x = self._hidden(tokens, counts)
        return self.model.logits(self.head(x[torch.arange(len(x)), counts - 1])).float()

    def _hidden(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The hidden states of the same tokens."""
        rows, T = tokens.shape
        at = self.lengths[:, None] + torch.arange(T)
        self.cache.seen = seen = int(at.max()) + 1
        single = rows > 1 and T == 1
        self.cache.mask = (torch.arange(seen) <= at)[:, None, None].to(self.device) if single else None
        self.lengths = self.lengths + counts
        self.cache.positions, self.cache.windowed = at.to(self.device), {}
        with sdpa_kernel(list(ATTENTION)):
            return self.model.hidden(tokens.to(self.device), self.cache)


def stream(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    seeds: Sequence[int],
    sampling: Sampling,
    ends: Callable[[int, int], bool] = lambda number, token: False,
) -> Iterator[list[tuple[int, int]]]:
    """The tokens that continue prompts (none empty or longer than block_size), step by step: pairs of a prompt's
    number and its next token.

    A prompt ends after `tokens` tokens, or with a token for which `ends` is true, which is not given. Each prompt has
    its own random numbers, so its text depends on its own seed and not on the batch, as far as rounding allows.
    UserError if the weights give no finite logits.
    """
    half = max(1, decoder.config.block_size // 2)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    contexts = [list(prompt) for prompt in prompts]
    rows = list(range(len(prompts)))
    logits = decoder.begin(contexts, tokens)
    for left in range(tokens - 1, -1, -1):
        drawn = [draw(row, sampling, generators[n]) for n, row in zip(rows, logits.cpu(), strict=True)]
        going = [i for i, token in enumerate(drawn) if not ends(rows[i], token)]
        yield [(rows[i], drawn[i]) for i in going]
        if not left or not going:
            return
        if len(going) < len(rows):
            decoder.keep(going)
        rows, drawn = [rows[i] for i in going], [drawn[i] for i in going]
        for n, token in zip(rows, drawn, strict=True):
            contexts[n].append(token)
        outgrown = [n for n in rows if len(contexts[n]) > decoder.config.block_size]
        for n in outgrown:
            contexts[n] = contexts[n][-half:]
        logits = decoder.begin([contexts[n] for n in rows], left) if outgrown else decoder.step(drawn)


@torch.inference_mode()
def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token id, drawn from logits (vocab_size,) of the CPU."""
    if not bool(logits.isfinite().all()):
        raise UserError("the weights give logits that are not finite; take those of another step")
    if sampling.temperature == 0:
        return int(logits.argmax())
    among = None  # ascending ids, not ranks: rounding then moves the choice as little as possible
    if sampling.top_k is not None and sampling.top_k < len(logits):
        among = (logits >= logits.topk(sampling.top_k).values[-1]).nonzero()[:, 0]
        logits = logits[among]
    # From the maximum: a division by a tiny temperature must not overflow.
    shares = ((logits - logits.max()).double() / sampling.temperature).softmax(0)
    if sampling.top_p < 1:
        shares = nucleus(shares, sampling.top_p)
    sums = shares.cumsum(0)
    point = torch.rand(1, dtype=torch.float64, generator=generator) * sums[-1]
    choice = min(int(torch.searchsorted(sums, point, right=True)), int(shares.nonzero()[-1]))
    return choice if among is None else int(among[choice])


def nucleus(shares: Tensor, top_p: float) -> Tensor:
    """The shares of the likeliest tokens that hold `top_p` together, 0 for the others (Holtzman et al. 2020)."""
    # Those below this bound hold less than 1 - top_p together, so none of them is wanted.
    bound = min((1 - top_p) / len(shares), float(shares.max()))
    candidates = shares[shares >= bound].sort(descending=True).values
    count = int(torch.searchsorted(candidates.cumsum(0), top_p)) + 1
    return shares.where(shares >= candidates[min(count, len(candidates)) - 1], 0.0)


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    tokens: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = TOP_K,
    ids: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """`tokens` token ids that continue `prompt` (not empty), in the model's own precision. Of a longer prompt the
    model sees the last block_size tokens. With `ids`, only the first ids of the vocabulary are drawn. `check` is called
    after each token; it may raise to end the generation."""
    assert prompt, "a prompt has at least one token, such as end-of-text"
    sampling = Sampling(temperature, top_k)
    context = list(prompt)[-model.config.block_size :]
    found: list[int] = []
    for step in stream(Decoder(model, ids=ids), [context], tokens, [seed], sampling):
        found += [token for _, token in step]
        check()
    return found
