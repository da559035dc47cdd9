"""Products in fp8, for Hopper: e4m3 for inputs and weights, e5m2 for gradients, sums in fp32.

A product of two fp8 matrices is up to twice as fast as one in bf16 (1,979 TFLOP/s dense on an H100 or H200) and reads
half the bytes. The casts cost some of it back: every operand is written twice, as it is and transposed, since these
products need both operands contiguous along the inner dimension. The residual stream, the statistics of the norms,
attention, softmax, master weights and gradients stay as they are with `Bf16Products`.

Scaling (after Micikevicius et al. 2022, "FP8 formats for deep learning", and NVIDIA's Transformer Engine): one number
a tensor, *delayed*: the largest magnitude of the last HISTORY micro-batches, with a margin of 2 for activations and 4
for gradients, which vary more. A gradient is proportional to the factor of its micro-batch's loss. The history stores
it without that factor, as batch, ranks and micro-batches may change. Weights are scaled by their own largest magnitude
at each update. The size of the logits' gradient is known. It is rounded stochastically (`precision: fp8_head`): rounded
to nearest, most of it would become 0, far below the target's. Sums in the backward pass are accumulated in full; in the
forward pass cuBLAS may add up in fewer bits.

A block saves 27·C bytes a token (x and the sum after attention 2 each, both norms 1 each, qkv 6, attention 2 + 1, the
MLP 8 before its activation and 4 after it). `recompute` leaves out the last 4; the backward pass makes them again, bit
for bit. Of ReLU² the output is saved instead of the input, in 4 bytes for 8: its root is the input where that has a
gradient, but 0 below about 1/500 of the largest input, whose square underflows.

The learning rate's warm-up runs in bf16: there the magnitudes change faster than their history. It recomputes all that
`Bf16Products` can, so that it takes hardly more memory than the fp8 steps after it. Then the first micro-batch runs
twice: the first time measures all magnitudes. The history is part of the checkpoint, so that a resumed run scales as
an uninterrupted one.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.parallel import World
from trainer.checkpoint.pieces import Piece
from trainer.engines.fused import epilogues, gemm, kernels
from trainer.engines.fused.bf16 import Bf16Products
from trainer.engines.fused.kernels import Activation, Fp8Out
from trainer.engines.fused.llama_kernels import Turn
from trainer.engines.fused.products import (
    Linear,
    NormBackwardKernel,
    Normed,
    NormKernel,
    Products,
    ResidualGrad,
    head_chunks,
)

HISTORY = 16  # micro-batches
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MARGINS = {E4M3: 2.0, E5M2: 4.0}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
LARGEST_BITS = {E4M3: 0x7E, E5M2: 0x7B}
COUNT_EVERY = 100  # updates between two counts of the numbers that saturate and of those that underflow

Kind = Literal["input", "gradient", "weight"]
KINDS: tuple[Kind, ...] = ("input", "gradient", "weight")
Results = TypeVar("Results", bound=tuple[Any, ...])


@dataclass(frozen=True)
class TensorScale:
    """The scale of one tensor of a layer: its input, the gradient of its output, or its weight."""

    column: int  # in the buffers of Scales
    gradient: bool
    out: Fp8Out  # how a kernel writes the tensor
    inverse: Tensor  # (1,) fp32: the factor of the stored numbers in a product


class Scales:
    """The factors that tensors are multiplied by before they are rounded to fp8; all on the device.

    `layers` are names in groups (a block, or the head). Their order is the order of the history's columns in
    checkpoints: group by group, in each the inputs, then the gradients, then the weights.
    """

    def __init__(self, layers: list[list[str]], device: torch.device) -> None:
        keys = [(kind, name) for group in layers for kind in KINDS for name in group]
        count = len(keys)
        self.scale = torch.ones(count, device=device)
        self.inverse = torch.ones(count, 4, device=device)  # cuBLASLt wants each at a multiple of 16 bytes
        self.amax = torch.zeros(count, device=device)
        self.history = torch.zeros(HISTORY, count, device=device)  # of magnitudes per `unit`
        self.gradients = torch.tensor([kind == "gradient" for kind, _ in keys], device=device)
        self.unit = torch.ones(count, device=device)
        self.factor = 1.0
        dtypes = [E5M2 if kind == "gradient" else E4M3 for kind, _ in keys]
        self.target = torch.tensor([LARGEST[dtype] / MARGINS[dtype] for dtype in dtypes], device=device)
        self._tensors = {key: self._tensor(column, key[0]) for column, key in enumerate(keys)}

    def _tensor(self, column: int, kind: Kind) -> TensorScale:
        out = Fp8Out(self.scale[column : column + 1], self.amax[column : column + 1])
        return TensorScale(column, kind == "gradient", out, self.inverse[column, :1])

    def of(self, kind: Kind, layer: Linear) -> TensorScale:
        return self._tensors[kind, layer.name]

    def set(self, tensor: TensorScale, scale: float) -> None:
        """Set the scale of a tensor whose magnitude is known, without its history. (Assigned by index, a number is
        copied from the host's memory, and the host waits for the GPU.)"""
        tensor.out.scale.fill_(scale)
        tensor.inverse.fill_(1 / scale)

    def set_from_amax(self, tensor: TensorScale) -> None:
        """Set the scale of a tensor from the magnitude that was just measured."""
        part = slice(tensor.column, tensor.column + 1)
        self._scale_by(self.amax[part], part)

    def set_loss_factor(self, factor: float) -> None:
        """From now on the loss is multiplied by `factor`, and all gradients with it."""
        if factor != self.factor:
            self.factor = factor
            self.unit.masked_fill_(self.gradients, factor)
            self.set_from_history()

    def roll(self) -> None:
        """Add a micro-batch's magnitudes to the history, but no infinite one: it would spoil the next 16."""
        self.history[1:] = self.history[:-1].clone()
        self.history[0] = torch.where(self.amax.isfinite(), self.amax / self.unit, 0.0)
        self.amax.zero_()
        self.set_from_history()

    def set_from_history(self) -> None:
        """Set all scales from the largest magnitudes in the history."""
        self._scale_by(self.history.amax(0) * self.unit, slice(None))

    def _scale_by(self, amax: Tensor, part: slice) -> None:
        measured = amax > 0
        self.scale[part] = torch.where(measured, self.target[part] / amax.clamp(min=1e-30), self.scale[part])
        self.inverse[part, 0] = 1 / self.scale[part]


@dataclass
class Fp8Operand:
    """A tensor in fp8: as it is, transposed (each None where it was not made or is no longer needed), inverse scale."""

    x8: Tensor | None
    x8t: Tensor | None
    inverse: Tensor

    @property
    def plain(self) -> Tensor:
        assert self.x8 is not None
        return self.x8

    @property
    def transposed(self) -> Tensor:
        return kernels.transpose8(self.plain) if self.x8t is None else self.x8t


class Fp8Products(Products[Fp8Operand]):
    """The policy whose operands are fp8 tensors, except for the layers `in_bf16`, whose operands are bf16 tensors.

    Updates up to `warmup_steps` and `loss` use Bf16Products. A layer in bf16 can be the head only.
    """

    recompute_norms = False  # in fp8 their outputs take one byte a number

    def __init__(
        self, layers: list[list[str]], in_bf16: Collection[str], world: World, recompute: bool, warmup_steps: int
    ) -> None:
        self.world, self.in_bf16, self.warmup_steps = world, in_bf16, warmup_steps
        self.recompute_activation = recompute
        self.bf16 = Bf16Products(world.device, recompute=True)
        self.scales = Scales(layers, world.device)
        self.weights: dict[str, Fp8Operand] = {}  # by layer, made once an update
        self.unused = torch.zeros(1, device=world.device)  # of the largest magnitudes of weights, which have no history
        self.number = 0
        self.checkpointed = torch.zeros_like(self.scales.history)
        self.calibrated = False  # the history has magnitudes to scale by
        self.measuring = False  # each tensor is made twice: to find its scale, and with it
        self.counts: list[tuple[str, Tensor]] | None = None
        self.seed = torch.zeros(1, dtype=torch.int32, device=world.device)

    # --- the schedule of a run

    def begin(self, number: int) -> Products[Any]:
        """Bf16Products during the warm-up. A rehearsal measures and leaves no trace, even if it ran out of memory."""
        self.number = number
        self.weights.clear()
        self.measuring = not number or not self.calibrated
        self.scales.amax.zero_()
        self.scales.set_from_history()
        # A resumed run draws the same random numbers for the rounding; no two ranks do.
        self.seed.fill_((number * 65_537 + self.world.rank) % (1 << 31))
        self.counts = [] if number and number % COUNT_EVERY == 0 else None
        return self.bf16 if 0 < number <= self.warmup_steps else self

    @property
    def for_loss(self) -> Bf16Products:
        return self.bf16

    @property
    def calibrating(self) -> bool:
        return self.measuring and self.number > 0

    def begin_micro_batch(self, scale: float) -> None:
        self.scales.set_loss_factor(scale)

    def end_micro_batch(self, last: bool) -> None:
        if not self.number:
            return
        self.scales.roll()
        self.calibrated = True
        if last and self.world.world_size > 1:
            dist.all_reduce(self.scales.history, op=dist.ReduceOp.MAX)
            self.scales.set_from_history()

    # --- operands

    def norm(self, reader: Linear, kernel: NormKernel) -> tuple[Tensor, Normed[Fp8Operand]]:
        if reader.name in self.in_bf16:
            x, y, *statistics = kernel(None)
            return x, Normed(Fp8Operand(y, None, self.bf16.one), tuple(statistics))
        tensor = self.scales.of("input", reader)
        x, y, *statistics = self._rounded(tensor, kernel, 1)
        return x, Normed(Fp8Operand(y, None, tensor.inverse), tuple(statistics))

    def norm_backward(self, writer: Linear | None, kernel: NormBackwardKernel) -> ResidualGrad[Fp8Operand]:
        if writer is None:
            return ResidualGrad(kernel(None)[0], None)
        tensor = self.scales.of("gradient", writer)
        dx, dx8 = self._rounded(tensor, kernel, 1)
        return ResidualGrad(dx, Fp8Operand(dx8, None, tensor.inverse))

    def input(self, layer: Linear, x: Tensor) -> Fp8Operand:
        return self._cast(self.scales.of("input", layer), x)

    def output_grad(self, layer: Linear, dy: Tensor) -> Fp8Operand:
        return self._cast(self.scales.of("gradient", layer), dy)

    def saved(self, x: Fp8Operand) -> Fp8Operand:
        return Fp8Operand(None, x.transposed, x.inverse)

    def activated(self, layer: Linear, kept: Tensor, activation: Activation) -> Fp8Operand:
        tensor = self.scales.of("input", layer)
        if kept.dtype == E4M3:
            return self.saved(Fp8Operand(kept, None, tensor.inverse))
        return self.saved(self._cast(tensor, kept, activation))

    # --- products

    def linear(self, layer: Linear, x: Fp8Operand, bias: Tensor | None = None) -> Tensor:
        w = self._weight(layer)
        return gemm.linear8(x.plain, w.plain, x.inverse, w.inverse, bias)

    def linear_turned(self, layer: Linear, x: Fp8Operand, turn: Turn) -> tuple[Tensor, Tensor]:
        w = self._weight(layer)
        return epilogues.rotary_linear(x.plain, w.plain, turn, (x.inverse, w.inverse))

    def linear_activated(
        self, layer: Linear, x: Fp8Operand, reader: Linear, activation: Activation
    ) -> tuple[Tensor, Fp8Operand]:
        w, tensor = self._weight(layer), self.scales.of("input", reader)
        if activation == "relu2" and epilogues.fit(x.plain, w.plain):
            assert layer.bias is None

            def kernel(out: Fp8Out) -> tuple[Tensor, Tensor | None]:
                inverses = x.inverse, w.inverse
                return epilogues.relu2_linear8(x.plain, w.plain, inverses, out, not self.recompute_activation)

            act8, act8t = self._rounded(tensor, kernel, 0)
            return act8, Fp8Operand(act8, act8t, tensor.inverse)
        pre = self.linear(layer, x, layer.bias)
        return pre, self._cast(tensor, pre, activation, transposed=not self.recompute_activation)

    def input_grad(self, layer: Linear, dy: Fp8Operand) -> Tensor:
        w = self._weight(layer)
        return gemm.input_grad8(dy.plain, w.transposed, dy.inverse, w.inverse)

    def input_grad_activated(
        self,
        layer: Linear,
        dy: Fp8Operand,
        kept: Tensor,
        writer: Linear,
        activation: Activation,
        sums: Tensor | None = None,
    ) -> Fp8Operand:
        w, tensor = self._weight(layer), self.scales.of("gradient", writer)
        if kept.dtype == E4M3:
            assert sums is None
            act_inverse = self.scales.of("input", layer).inverse

            def kernel(out: Fp8Out) -> tuple[Tensor, Tensor]:
                inverses = dy.inverse, w.inverse
                return epilogues.relu2_input_grad8(dy.plain, w.transposed, inverses, kept, act_inverse, out)

            dpre8, dpre8t = self._rounded(tensor, kernel, 0)
            return Fp8Operand(dpre8, dpre8t, tensor.inverse)
        dact = self.input_grad(layer, dy)
        # Beside GELU's slope, the transposed store cost 38 ms a step of gpt2-1558m, and a pass of its own 19 ms.
        return self._cast(tensor, dact, activation, h=kept, sums=sums, transposed=activation != "gelu")

    def weight_grad(self, layer: Linear, dy: Fp8Operand, x: Fp8Operand, accumulate: bool) -> None:
        x_t = x.transposed
        gemm.weight_grad8(dy.transposed, x_t, dy.inverse, x.inverse, layer.gradient, accumulate)

    def head(
        self,
        layer: Linear,
        y: Fp8Operand,
        targets: Tensor,
        vocab_size: int,
        factor: Tensor | None,
        accumulate: bool,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        if layer.name in self.in_bf16:
            return self.bf16.head(layer, y.plain, targets, vocab_size, factor, accumulate, cap)
        assert factor is not None
        y8, w = y.plain, self._weight(layer)
        # The largest gradient of a logit is the loss's factor, that of a target whose probability is 0.
        tensor = self.scales.of("gradient", layer)
        self.scales.set(tensor, LARGEST[E5M2] / 2 / self.scales.factor)
        losses = torch.empty(len(y8), device=y8.device)
        dy = torch.empty(y8.shape, dtype=torch.bfloat16, device=y8.device)
        for part in head_chunks(len(y8), len(layer.weight)):
            self.seed.add_(1_013_904_223)
            logits = gemm.linear8(y8[part], w.plain, y.inverse, w.inverse)
            dlogits = kernels.cross_entropy8(
                logits, targets[part], vocab_size, factor, losses[part], tensor.out.scale, self.seed, cap
            )
            del logits
            self._count(tensor, dlogits)
            dy[part] = gemm.input_grad8(dlogits, w.transposed, tensor.inverse, w.inverse)
            y8t, add = kernels.transpose8(y8[part]), accumulate or part.start > 0
            gemm.weight_grad8(kernels.transpose8(dlogits), y8t, tensor.inverse, y.inverse, layer.gradient, add)
        return losses, dy

    # --- fp8

    def _weight(self, layer: Linear) -> Fp8Operand:
        """A weight scaled by its own largest magnitude: made once an update."""
        if layer.name not in self.weights:
            tensor = self.scales.of("weight", layer)
            largest = torch.linalg.vector_norm(layer.weight, torch.inf, dtype=torch.float32).view(1)
            torch.mul(largest.clamp_(min=1e-12), 1 / LARGEST[E4M3], out=tensor.inverse)
            torch.reciprocal(tensor.inverse, out=tensor.out.scale)
            x8, x8t = kernels.cast8(layer.weight, Fp8Out(tensor.out.scale, self.unused), transposed=True)
            self.weights[layer.name] = Fp8Operand(x8, x8t, tensor.inverse)
        return self.weights[layer.name]

    def _cast(
        self,
        tensor: TensorScale,
        x: Tensor,
        activation: Activation | None = None,
        h: Tensor | None = None,
        sums: Tensor | None = None,
        transposed: bool = True,
    ) -> Fp8Operand:
        def kernel(out: Fp8Out) -> tuple[Tensor, Tensor | None]:
            return kernels.cast8(x, out, transposed, activation, h, sums, gradient=tensor.gradient)

        x8, x8t = self._rounded(tensor, kernel, 0)
        return Fp8Operand(x8, x8t, tensor.inverse)

    def _rounded(self, tensor: TensorScale, kernel: Callable[[Fp8Out], Results], which: int) -> Results:
        """Results of a kernel, number `which` of them in fp8. While measuring, the kernel runs twice."""
        results = kernel(tensor.out)
        if self.measuring:
            self.scales.set_from_amax(tensor)
            results = kernel(tensor.out)
        self._count(tensor, results[which])
        return results

    # --- checkpoints and metrics

    def _count(self, tensor: TensorScale, x8: Tensor) -> None:
        """Record the fractions of a tensor that saturate at the largest number and that underflow to zero."""
        if self.counts is None or self.measuring:
            return
        bits = x8.view(torch.uint8) & 0x7F
        saturated, underflown = (bits == LARGEST_BITS[x8.dtype]).float().mean(), (bits == 0).float().mean()
        self.counts.append(("gradients" if tensor.gradient else "activations", torch.stack([saturated, underflown])))

    def extra_metrics(self) -> dict[str, float]:
        """Means over the tensors of an update; only each COUNT_EVERY-th update has them, and returns them once."""
        counts, self.counts = self.counts or [], None
        metrics: dict[str, float] = {}
        for kind in sorted({kind for kind, _ in counts}):
            fractions = torch.stack([fraction for counted, fraction in counts if counted == kind]).mean(0)
            saturated, underflown = fractions.tolist()
            metrics |= {f"fp8/{kind}_saturated": saturated, f"fp8/{kind}_underflown": underflown}
        return metrics

    def pieces(self) -> dict[str, Piece]:
        """A copy of the history as it is now: micro-batches change it while the checkpoint still copies to the host."""
        self.checkpointed.copy_(self.scales.history)
        return {"fp8.magnitudes": Piece.whole(self.checkpointed)}

    def restore(self) -> None:
        self.scales.history.copy_(self.checkpointed)
        self.calibrated = bool(self.scales.history.any())
        self.scales.set_from_history()
