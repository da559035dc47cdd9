"""The products policy: how a fused step makes operands, matrix products and the head, and which tensors a block saves.

`FusedStep` (`step.py`) writes the forward and backward pass once and calls a policy for everything that depends on the
precision: `Bf16Products` (`trainer/engines/fused/bf16.py`) or `Fp8Products`
(`trainer/engines/fused/fp8.py`). An operand is one input of a matrix product in the form that the policy's kernels
read: a bf16 tensor, or an fp8 tensor with its scale. A policy knows layers by name and shape, not their order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from trainer.checkpoint.pieces import Piece
from trainer.engines.fused.kernels import Activation, Fp8Out
from trainer.engines.fused.llama_kernels import Turn

LOGIT_BYTES = 1 << 31  # of a chunk of rows: the matrix products reach full speed from about 8,192 rows on

Operand = TypeVar("Operand")

# Launch a norm: (Fp8Out, or None for bf16) -> x, y and the statistics of a kernel; likewise dx in bf16 and fp8.
NormKernel = Callable[[Fp8Out | None], tuple[Any, ...]]
NormBackwardKernel = Callable[[Fp8Out | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Linear:
    """The parameters of a linear layer: weight (N, K) in bf16, its gradient (N, K) in fp32, bias (N,) in bf16."""

    name: str
    weight: Tensor
    gradient: Tensor
    bias: Tensor | None


@dataclass
class Normed(Generic[Operand]):
    """A norm's output and its statistics for the backward pass, (M,) each; `y` is None if that pass recomputes it."""

    y: Operand | None
    statistics: tuple[Any, ...]


@dataclass
class ResidualGrad(Generic[Operand]):
    """The gradient of the residual stream (M, C) in bf16, and the same as the output gradient of a layer, if any."""

    dx: Tensor
    operand: Operand | None

    @property
    def dy(self) -> Operand:
        assert self.operand is not None
        return self.operand


class Products(ABC, Generic[Operand]):
    """The precision-dependent part of a micro-batch. M is its number of tokens; a layer's weight is (N, K)."""

    # True: blocks do not save these outputs; the backward pass computes them again from the other saved tensors.
    recompute_norms: bool
    recompute_activation: bool

    # --- the schedule of a run

    def begin(self, number: int) -> "Products[Any]":
        """Prepare update `number` (from 1; 0: a rehearsal, whose gradients are not used); return its policy."""
        return self

    @property
    def for_loss(self) -> "Products[Any]":
        """The policy that computes losses without gradients."""
        return self

    @property
    def calibrating(self) -> bool:
        """True if the next micro-batch only measures: the step discards its gradients and runs it again."""
        return False

    def begin_micro_batch(self, scale: float) -> None:
        """Prepare a micro-batch whose losses are multiplied by `scale`."""

    def end_micro_batch(self, last: bool) -> None:
        """Finish a micro-batch; `last`: of its update."""

    # --- operands

    @abstractmethod
    def norm(self, reader: Linear, kernel: NormKernel) -> tuple[Tensor, Normed[Operand]]:
        """Run a norm whose output is the input of `reader`; return the residual stream (M, C) in bf16, and the norm."""

    @abstractmethod
    def norm_backward(self, writer: Linear | None, kernel: NormBackwardKernel) -> ResidualGrad[Operand]:
        """Run the backward pass of a norm, or of rotary positions; return the gradient of its input.

        `writer` is the layer whose output that is, or was added to the residual stream just before the norm; None if
        there is none.
        """

    @abstractmethod
    def input(self, layer: Linear, x: Tensor) -> Operand:
        """x (M, K) in bf16 as the input of `layer`."""

    @abstractmethod
    def output_grad(self, layer: Linear, dy: Tensor) -> Operand:
        """dy (M, N) in bf16 as the output gradient of `layer`."""

    @abstractmethod
    def saved(self, x: Operand) -> Operand:
        """An input in the form that `weight_grad` reads: the backward pass needs no other."""

    @abstractmethod
    def activated(self, layer: Linear, kept: Tensor, activation: Activation) -> Operand:
        """The input (M, K) of `layer` as `saved` returns it, recomputed from the tensor of `linear_activated`."""

    # --- products

    @abstractmethod
    def linear(self, layer: Linear, x: Operand, bias: Tensor | None = None) -> Tensor:
        """x (M, K) @ weightᵀ + bias (N,) -> (M, N) in bf16."""

    @abstractmethod
    def linear_turned(self, layer: Linear, x: Operand, turn: Turn) -> tuple[Tensor, Tensor]:
        """The same without a bias, with `llama_kernels.rotate` of the first heads; and the result of that."""

    @abstractmethod
    def linear_activated(
        self, layer: Linear, x: Operand, reader: Linear, activation: Activation
    ) -> tuple[Tensor, Operand]:
        """The activation of x (M, K) @ weightᵀ + the layer's bias, as the input of `reader`; before it the tensor
        (M, N) that the backward pass needs."""

    @abstractmethod
    def input_grad(self, layer: Linear, dy: Operand) -> Tensor:
        """dy (M, N) @ weight -> (M, K) in bf16."""

    @abstractmethod
    def input_grad_activated(
        self,
        layer: Linear,
        dy: Operand,
        kept: Tensor,
        writer: Linear,
        activation: Activation,
        sums: Tensor | None = None,
    ) -> Operand:
        """dy (M, N) @ weight, times the activation's slope (M, K), as the output gradient of `writer`; adds its column
        sums to `sums`.

        kept: of `linear_activated`. sums: (P, K) fp32 with P = kernels.column_partials.
        """

    @abstractmethod
    def weight_grad(self, layer: Linear, dy: Operand, x: Operand, accumulate: bool) -> None:
        """The layer's gradient (N, K) = or += dyᵀ @ x, in fp32. x is as `saved`, `activated` or `norm` returned it."""

    @abstractmethod
    def head(
        self,
        layer: Linear,
        y: Operand,
        targets: Tensor,
        vocab_size: int,
        factor: Tensor | None,
        accumulate: bool,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Losses (M,) in fp32 of y (M, C), and the gradient (M, C) in bf16 of `factor` (1,) · (sum of the losses).
        `cap`: as in `kernels.cross_entropy`.

        With a `factor`, the layer's gradient is overwritten, or added to (`accumulate`); without one, the second
        result is not written.
        """

    # --- checkpoints and metrics

    def pieces(self) -> dict[str, Piece]:
        """The pieces of a checkpoint besides weights and moments."""
        return {}

    def restore(self) -> None:
        """Take over the pieces that a checkpoint has filled."""

    def extra_metrics(self) -> dict[str, float]:
        """Further metrics of the last update."""
        return {}


def head_chunks(rows: int, width: int) -> Iterator[slice]:
    """Chunks of about equal length, whose logits (rows, width) in bf16 take hardly more than LOGIT_BYTES.

    Their lengths are multiples of 16 as far as `rows` is one: fp8 products sum over multiples of 16 rows.
    """
    count = -(-rows * 2 * width // LOGIT_BYTES)
    size = 16 * -(-rows // (16 * count))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
