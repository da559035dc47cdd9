"""The fused step with its matrix products in fp8, for Hopper: e4m3 forward and weights, e5m2 gradients, sums in fp32.

A product of two fp8 matrices is up to twice as fast as one in bf16 (1,979 TFLOP/s dense on an H100 or H200) and reads
half the bytes; the casts cost some of it back: every operand is written twice, as it is and transposed, since these
products want both operands along the inner dimension. Residual stream, norms' statistics, attention, softmax, weights'
masters and gradients stay what they are in bf16's step.

Scaling (after Micikevicius et al. 2022, "FP8 formats for deep learning", and NVIDIA's Transformer Engine): one number
a tensor, *delayed*: the largest magnitude of the last HISTORY micro-batches, with a margin of 2 for activations and 4
for gradients, which vary more. Gradients are as small as their micro-batch's share of the step, and remembered without
that factor, as batch, ranks and micro-batches may change. Weights are scaled by their own largest magnitude at each
update. The gradient of the logits, whose size is known, is rounded at random (`precision: fp8_head`): to nearest, most
of it would vanish beside the target's. Sums in the backward pass are accumulated in full; in the forward pass cuBLAS
may add up in fewer bits.

A block saves 27·C bytes a token (x and the sum after attention 2 each, both norms 1 each, qkv 6, attention 2 + 1, the
MLP 8 before its GELU and 4 after it); `recompute` leaves out the last 4 and makes them again, to the bit.

The learning rate's warm-up is done in bf16: there the magnitudes move faster than their history. It recomputes what
bf16's step can, and so takes no more memory than what follows. Then the first micro-batch measures all magnitudes once,
which costs a pass. The history is part of the checkpoint, so that a resumed run scales as the undisturbed one does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ModelConfig
from trainer.fused import gemm, kernels
from trainer.fused.attention import Saved
from trainer.fused.flat import FlatState
from trainer.fused.kernels import Fp8Out
from trainer.fused.step import FusedStep
from trainer.pieces import Piece

HISTORY = 16  # micro-batches
MARGINS = {torch.float8_e4m3fn: 2.0, torch.float8_e5m2: 4.0}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LARGEST_BITS = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
# Of a block: inputs of its four products, the gradients of their outputs, and their weights.
INPUTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
SLOTS = [f"{kind}.{name}" for kind in ("input", "gradient", "weight") for name in INPUTS]
COUNT_EVERY = 100  # updates: how many numbers were cut off, and how many vanished

Made = TypeVar("Made", bound=tuple[Any, ...])


class Scales:
    """What each tensor is multiplied by before it is rounded, one slot a tensor; all on the device."""

    def __init__(self, n_layer: int, device: torch.device) -> None:
        names = [f"h.{i}.{slot}" for i in range(n_layer) for slot in SLOTS]
        names += ["input.head", "gradient.head", "weight.head"]
        self.slots = {name: slot for slot, name in enumerate(names)}
        self.scale = torch.ones(len(names), device=device)
        self.inverse = torch.ones(len(names), 4, device=device)  # cuBLASLt wants each at a multiple of 16 bytes
        self.amax = torch.zeros(len(names), device=device)
        self.history = torch.zeros(HISTORY, len(names), device=device)  # of magnitudes per `unit`
        self.gradients = torch.tensor(["gradient" in name for name in names], device=device)
        self.unit = torch.ones(len(names), device=device)
        self.factor = 1.0
        dtypes = [torch.float8_e5m2 if "gradient" in name else torch.float8_e4m3fn for name in names]
        self.aim = torch.tensor([LARGEST[dtype] / MARGINS[dtype] for dtype in dtypes], device=device)

    def out(self, name: str) -> Fp8Out:
        slot = self.slots[name]
        return Fp8Out(self.scale[slot : slot + 1], self.amax[slot : slot + 1])

    def inverse_of(self, name: str) -> Tensor:
        slot = self.slots[name]
        return self.inverse[slot, :1]

    def set(self, name: str, scale: Tensor | float) -> None:
        """Scale a tensor by what is known of it, not by its history."""
        slot = self.slots[name]
        self.scale[slot] = scale
        self.inverse[slot, 0] = 1 / scale

    def settle(self, name: str) -> None:
        """Scale a tensor by what was just seen of it."""
        slot = self.slots[name]
        part = slice(slot, slot + 1)
        self._scale_by(self.amax[part], part)

    def follow_factor(self, factor: float) -> None:
        """From now on the loss is multiplied by `factor`, and all gradients with it."""
        if factor != self.factor:
            self.factor = factor
            self.unit.masked_fill_(self.gradients, factor)
            self.follow_history()

    def roll(self) -> None:
        """A micro-batch is done: its magnitudes enter the history. An infinite one would ruin 16 more of them."""
        self.history[1:] = self.history[:-1].clone()
        self.history[0] = torch.where(self.amax.isfinite(), self.amax / self.unit, 0.0)
        self.amax.zero_()
        self.follow_history()

    def follow_history(self) -> None:
        self._scale_by(self.history.amax(0) * self.unit, slice(None))

    def _scale_by(self, amax: Tensor, part: slice) -> None:
        seen = amax > 0
        self.scale[part] = torch.where(seen, self.aim[part] / amax.clamp(min=1e-30), self.scale[part])
        self.inverse[part, 0] = 1 / self.scale[part]


@dataclass
class Cast:
    """A tensor in fp8: as it is, transposed if that was made, and the number that undoes its scaling."""

    x8: Tensor
    x8t: Tensor | None
    inverse: Tensor

    @property
    def transposed(self) -> Tensor:
        return kernels.transpose8(self.x8) if self.x8t is None else self.x8t


@dataclass
class Block8:
    """What the forward pass of a block leaves for its backward pass."""

    x: Tensor
    stats1: tuple[Tensor, Tensor]
    normed1: Cast
    qkv: Tensor
    attention: Saved
    attended_t: Tensor
    x_mid: Tensor
    stats2: tuple[Tensor, Tensor]
    normed2: Cast
    pre: Tensor
    act_t: Tensor | None  # None: to be made again


class Fp8Step(FusedStep):
    """FusedStep with the blocks' products in fp8, and the head's with `head`. `loss` is that of the bf16 weights."""

    def __init__(
        self, config: ModelConfig, state: FlatState, recompute: bool, deterministic: bool, head: bool, warmup_steps: int
    ) -> None:
        super().__init__(config, state, recompute=True, deterministic=deterministic)
        self.gelu_again = recompute
        self.with_head, self.warmup_steps = head, warmup_steps
        self.scales = Scales(config.n_layer, self.device)
        self.weights8: dict[str, Cast] = {}
        self.number = 0
        self.kept = torch.zeros_like(self.scales.history)  # for checkpoints
        self.known = False  # whether there is a history to scale by
        self.measuring = False  # in a pass that is done to find the scales
        self.counts: list[tuple[str, Tensor]] | None = None
        self.seed = torch.zeros(1, dtype=torch.int32, device=self.device)

    def begin(self, number: int) -> None:
        super().begin(number)
        self.number = number
        self.weights8.clear()
        self.measuring = False  # a rehearsal leaves no trace, though the memory ran out in it
        self.scales.amax.zero_()
        self.scales.follow_history()
        # What is rounded at random, a resumed run rounds alike, and no two ranks do.
        self.seed.fill_((number * 65_537 + self.state.world.rank) % (1 << 31))
        self.counts = [] if number and number % COUNT_EVERY == 0 else None

    def backward(self, tokens: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        if 0 < self.number <= self.warmup_steps:
            return super().backward(tokens, targets, scale, last)
        if not self.known or not self.number:
            first, self.measuring = self.first, True
            loss = self._micro_batch(tokens, targets, scale, last and not self.number)
            self.measuring = False
            if not self.number:
                return loss
            self.scales.roll()
            self.begin(self.number)
            self.known, self.first = True, first
        loss = self._micro_batch(tokens, targets, scale, last)
        self.scales.roll()
        if last and self.state.world.world_size > 1:
            dist.all_reduce(self.scales.history, op=dist.ReduceOp.MAX)
            self.scales.follow_history()
        return loss

    def _micro_batch(self, tokens: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        B = tokens.size(0)
        tokens, targets = tokens.flatten(), targets.flatten()
        factor = torch.full((1,), scale, device=self.device)
        self.scales.follow_factor(scale)
        x, normed, stats = self._embed8(tokens, B)
        saved = []
        for i in range(self.last):
            x, normed, stats, block = self._forward8(i, x, normed, stats, B)
            saved.append(block)
        if self.with_head:
            losses, dy = self._head8(normed, targets, factor, scale)
        else:
            losses, dy = self._head(normed.x8, targets, factor)
        del normed
        dx, dx8 = self._norm_backward8(2 * self.last, dy, x, stats, None)
        del dy, x, block
        for i in reversed(range(self.last)):
            dx, dx8 = self._backward8(i, dx, dx8, saved.pop(), B)
            if last:
                self._complete(i)
        self._embed_backward(tokens, dx, B)
        if last:
            self._complete_rest()
        self.first = False
        return losses.sum() * factor[0]

    # --- forward

    def _embed8(self, tokens: Tensor, B: int) -> tuple[Tensor, Cast, tuple[Tensor, Tensor]]:
        self.state.ready(self.last)
        self.state.ready(0)
        w = self.state.weights
        positions = w["wpe.weight"][: len(tokens) // B]

        def make(out: Fp8Out | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return kernels.embed_norm(tokens, w["wte.weight"], positions, *self._norm_weights(0), out)

        return self._normed8(self._input_of_norm(0), make)

    def _forward8(
        self, i: int, x: Tensor, normed1: Cast, stats1: tuple[Tensor, Tensor], B: int
    ) -> tuple[Tensor, Cast, tuple[Tensor, Tensor], Block8]:
        w, name = self.weights[i], f"h.{i}."
        qkv = self._linear8(i, "attn.c_attn", normed1, w["attn.c_attn.bias"])
        attended16, attention = self.attention.forward(qkv, B)
        attended = self._cast(f"{name}input.attn.c_proj", attended16)
        x_mid, normed2, stats2 = self._join8(
            2 * i + 1, x, self._linear8(i, "attn.c_proj", attended), w["attn.c_proj.bias"]
        )
        pre = self._linear8(i, "mlp.c_fc", normed2, w["mlp.c_fc.bias"])
        act = self._cast(f"{name}input.mlp.c_proj", pre, kind="gelu", transposed=not self.gelu_again)
        delta = self._linear8(i, "mlp.c_proj", act)
        if i + 1 < self.last:
            self.state.ready(i + 1)
        out, normed, stats = self._join8(2 * i + 2, x_mid, delta, w["mlp.c_proj.bias"])
        act_t = None if self.gelu_again else act.transposed
        block = Block8(x, stats1, normed1, qkv, attention, attended.transposed, x_mid, stats2, normed2, pre, act_t)
        return out, normed, stats, block

    def _join8(self, k: int, x: Tensor, delta: Tensor, bias: Tensor) -> tuple[Tensor, Cast, tuple[Tensor, Tensor]]:
        """The residual stream with `delta` and `bias` added, and its norm number `k`."""

        def make(out: Fp8Out | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return kernels.add_norm(x, delta, bias, *self._norm_weights(k), out)

        return self._normed8(self._input_of_norm(k), make)

    def _normed8(
        self, slot: str | None, make: Callable[[Fp8Out | None], tuple[Tensor, Tensor, Tensor, Tensor]]
    ) -> tuple[Tensor, Cast, tuple[Tensor, Tensor]]:
        """A norm whose output is wanted in fp8; without a slot (the head's, in bf16) as it is."""
        if slot is None:
            x, y, mean, rstd = make(None)
            return x, Cast(y, None, self.one), (mean, rstd)
        x, y, mean, rstd = self._rounded(slot, make, 1)
        return x, Cast(y, None, self.scales.inverse_of(slot)), (mean, rstd)

    def _input_of_norm(self, k: int) -> str | None:
        """The slot of a norm's output: of the product that reads it."""
        if k == 2 * self.last:
            return "input.head" if self.with_head else None
        return f"h.{k // 2}.input.{'mlp.c_fc' if k % 2 else 'attn.c_attn'}"

    def _head8(self, normed: Cast, targets: Tensor, factor: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        y8, w8 = normed.x8, self._weight8("weight.head", self.state.weights["wte.weight"])
        # The largest gradient of a logit is `scale`, that of a target which the model holds for impossible.
        self.scales.set("gradient.head", LARGEST[torch.float8_e5m2] / 2 / scale)
        q, inverse = self.scales.out("gradient.head").scale, self.scales.inverse_of("gradient.head")
        losses = torch.empty(len(y8), device=self.device)
        dy = torch.empty(y8.shape, dtype=torch.bfloat16, device=self.device)
        for part in self._chunks(len(y8)):
            self.seed.add_(1_013_904_223)
            logits = gemm.linear8(y8[part], w8.x8, normed.inverse, w8.inverse)
            vocab = self.config.vocab_size
            gradient = kernels.cross_entropy8(logits, targets[part], vocab, factor, losses[part], q, self.seed)
            del logits
            self._count("gradient.head", gradient)
            dy[part] = gemm.input_grad8(gradient, w8.transposed, inverse, w8.inverse)
            y8t, into = kernels.transpose8(y8[part]), self.state.gradients["wte.weight"]
            accumulate = not self.first or part.start > 0
            gemm.weight_grad8(kernels.transpose8(gradient), y8t, inverse, normed.inverse, into, accumulate)
        return losses, dy

    # --- backward

    def _backward8(self, i: int, dx: Tensor, dx8: Cast | None, s: Block8, B: int) -> tuple[Tensor, Cast | None]:
        name = f"h.{i}."
        assert dx8 is not None
        act_t = self._cast(f"{name}input.mlp.c_proj", s.pre, kind="gelu").transposed if s.act_t is None else s.act_t
        self._weight_grad8(i, "mlp.c_proj", dx8, act_t)
        del act_t
        dact = self._input_grad8(i, "mlp.c_proj", dx8)
        dpre = self._cast(f"{name}gradient.mlp.c_fc", dact, kind="dgelu", h=s.pre, sums=self.sums.fc[i])
        del dact
        self._weight_grad8(i, "mlp.c_fc", dpre, s.normed2.transposed)
        dy = self._input_grad8(i, "mlp.c_fc", dpre)
        del dpre
        dx, dx8 = self._norm_backward8(2 * i + 1, dy, s.x_mid, s.stats2, dx)
        assert dx8 is not None
        self._weight_grad8(i, "attn.c_proj", dx8, s.attended_t)
        dattended = self._input_grad8(i, "attn.c_proj", dx8)
        dqkv16 = self._attention_backward(i, dattended, s.qkv, B, s.attention)
        dqkv = self._cast(f"{name}gradient.attn.c_attn", dqkv16)
        del dqkv16
        self._weight_grad8(i, "attn.c_attn", dqkv, s.normed1.transposed)
        dy = self._input_grad8(i, "attn.c_attn", dqkv)
        return self._norm_backward8(2 * i, dy, s.x, s.stats1, dx)

    def _norm_backward8(
        self, k: int, dy: Tensor, x: Tensor, stats: tuple[Tensor, Tensor], residual: Tensor | None
    ) -> tuple[Tensor, Cast | None]:
        """The gradient of norm `k`'s input in bf16, and in fp8 for the product before it, if there is one."""
        weight, _ = self._norm_weights(k)
        if k == 0:
            return kernels.norm_backward(dy, x, *stats, weight, residual, self.sums.norms[k]), None
        slot = f"h.{(k - 1) // 2}.gradient.{'attn.c_proj' if k % 2 else 'mlp.c_proj'}"

        def make(out: Fp8Out) -> tuple[Tensor, Tensor]:
            return kernels.norm_backward8(dy, x, *stats, weight, residual, self.sums.norms[k], out)

        dx, dx8 = self._rounded(slot, make, 1)
        return dx, Cast(dx8, None, self.scales.inverse_of(slot))

    # --- fp8

    def _linear8(self, i: int, name: str, x: Cast, bias: Tensor | None = None) -> Tensor:
        w = self._weight8(f"h.{i}.weight.{name}", self.weights[i][f"{name}.weight"])
        return gemm.linear8(x.x8, w.x8, x.inverse, w.inverse, bias)

    def _input_grad8(self, i: int, name: str, dy: Cast) -> Tensor:
        w = self.weights8[f"h.{i}.weight.{name}"]
        return gemm.input_grad8(dy.x8, w.transposed, dy.inverse, w.inverse)

    def _weight_grad8(self, i: int, name: str, dy: Cast, x_t: Tensor) -> None:
        into, inverse = self.gradients[i][f"{name}.weight"], self.scales.inverse_of(f"h.{i}.input.{name}")
        gemm.weight_grad8(dy.transposed, x_t, dy.inverse, inverse, into, not self.first)

    def _weight8(self, slot: str, weight: Tensor) -> Cast:
        """A weight in fp8, scaled by its own largest magnitude: made once an update."""
        if slot not in self.weights8:
            largest = torch.linalg.vector_norm(weight, torch.inf, dtype=torch.float32)
            self.scales.set(slot, LARGEST[torch.float8_e4m3fn] / largest.clamp(min=1e-12))
            out = Fp8Out(self.scales.out(slot).scale, torch.zeros_like(largest).view(1))  # it needs no history
            x8, x8t = kernels.cast8(weight, out, transposed=True)
            self.weights8[slot] = Cast(x8, x8t, self.scales.inverse_of(slot))
        return self.weights8[slot]

    def _cast(
        self,
        slot: str,
        x: Tensor,
        kind: Literal["plain", "gelu", "dgelu"] = "plain",
        h: Tensor | None = None,
        sums: Tensor | None = None,
        transposed: bool = True,
    ) -> Cast:
        def make(out: Fp8Out) -> tuple[Tensor, Tensor | None]:
            return kernels.cast8(x, out, transposed, kind, h, sums, gradient=".gradient." in slot)

        x8, x8t = self._rounded(slot, make, 0)
        return Cast(x8, x8t, self.scales.inverse_of(slot))

    def _rounded(self, slot: str, make: Callable[[Fp8Out], Made], which: int) -> Made:
        """What `make` makes, its part number `which` in fp8; made twice while magnitudes are only measured."""
        made = make(self.scales.out(slot))
        if self.measuring:
            self.scales.settle(slot)
            made = make(self.scales.out(slot))
        self._count(slot, made[which])
        return made

    # --- what is told, and kept

    def _count(self, slot: str, x8: Tensor | None) -> None:
        """Note which parts of a tensor were cut off at the largest number, and rounded to nothing."""
        if self.counts is None or self.measuring or x8 is None:
            return
        bits = x8.view(torch.uint8) & 0x7F
        cut, gone = (bits == LARGEST_BITS[x8.dtype]).float().mean(), (bits == 0).float().mean()
        self.counts.append(("gradients" if "gradient" in slot else "activations", torch.stack([cut, gone])))

    def measures(self) -> dict[str, float]:
        counts, self.counts = self.counts or [], None
        told: dict[str, float] = {}
        for kind in {kind for kind, _ in counts}:
            cut, gone = torch.stack([both for of, both in counts if of == kind]).mean(0).tolist()
            told |= {f"fp8/{kind}_saturated": cut, f"fp8/{kind}_underflown": gone}
        return told

    def pieces(self) -> dict[str, Piece]:
        """The history as it is now: micro-batches add to it, and a checkpoint's copy is only done by the update."""
        self.kept.copy_(self.scales.history)
        return {"fp8.magnitudes": Piece.whole(self.kept)}

    def loaded(self) -> None:
        self.scales.history.copy_(self.kept)
        self.known = bool(self.scales.history.any())
        self.scales.follow_history()
