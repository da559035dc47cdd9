"""A training step with a hand-written backward pass: the result of `loss.backward()` with less traffic.

The arithmetic, a token: 2 FLOPs a weight forward and 4 backward, and attention (`trainer/fused/attention.py`):
6N + 12·L·C·T in all. The matrix products reach 700 TFLOP/s and more on an H200; the rest of the step only moves bytes.
All of it draws on one power budget, so every pass over memory that is left out counts twice. Left out here:

- float32 copies: weights and activations are bf16 (the float32 masters live in `trainer/fused/flat.py`), statistics
  float32;
- separate passes for bias, GELU and its derivative, which ride on the products (`trainer/fused/gemm.py`), and for
  residual sums, which ride on the norms (`trainer/fused/kernels.py`);
- zeroing gradients: the first micro-batch of a step overwrites, the others add, in float32 inside the product;
- float32 logits, and separate gradients of logits: loss and gradient are made in place, a chunk of rows at a time
  (whole, the logits of 64 x 1024 tokens would be 6.6 GB in bf16);
- autograd's graph: each family lists the tensors that a block saves. Its backward pass frees them.

A products policy (`trainer/fused/products.py`) makes operands and products in bf16 or fp8. `FusedStep` walks through
the model, forward and back. What a block, an embedding and the head compute is a subclass for each family
(`*_step.py`); `rotary_step.py` has what llama and modern share. Parameters have the names, the
shapes and the mathematics of the plain modules. llm.c's train_gpt2.cu (Karpathy et al. 2024) showed how far this goes.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from trainer.fused import kernels
from trainer.fused.attention import Attention
from trainer.fused.flat import FlatState
from trainer.fused.products import Linear, Normed, Operand, Products, ResidualGrad
from trainer.models.model_config import ModelConfig


class FusedStep(ABC, Generic[Operand]):
    """Forward and backward of micro-batches over the weights and into the gradients of a FlatState.

    M is the number of tokens of a micro-batch of B sequences, C the width of the residual stream.
    """

    BLOCK_LAYERS: ClassVar[tuple[str, ...]]  # those of a block
    head: Linear
    attentions: list[Attention]  # one for each window
    cap: float | None = None  # logits are cap · tanh(z / cap) of the head's products z

    def __init__(self, config: ModelConfig, state: FlatState, products: Products[Any], deterministic: bool) -> None:
        self.config, self.state, self.products, self.deterministic = config, state, products, deterministic
        self.device = state.world.device
        self.n_blocks = config.n_layer
        self.embeddings = config.n_layer  # the bucket of the parameters that are in no block
        self.number = 0  # of the current update
        self.current = products  # the policy of the current update
        self.first = True  # the next micro-batch overwrites the gradients
        self.order: tuple[Tensor, Tensor] | None = None  # a micro-batch's tokens, sorted, and their places

    @classmethod
    def layer_names(cls, config: ModelConfig) -> list[list[str]]:
        """The linear layers, group by group: those of each block, and last the head."""
        blocks = [[f"h.{i}.{name}" for name in cls.BLOCK_LAYERS] for i in range(config.n_layer)]
        return [*blocks, [cls.head_name(config)]]

    # --- of a family

    @classmethod
    @abstractmethod
    def head_name(cls, config: ModelConfig) -> str:
        """The name of the head's layer: "wte" for a tied one."""

    @abstractmethod
    def _zero(self) -> None:
        """Zero the gradients and partial sums to which every micro-batch adds."""

    @abstractmethod
    def _embed(self, p: Products[Operand], tokens: Tensor, B: int) -> tuple[Tensor, Normed[Operand], Any]:
        """The residual stream (M, C) of tokens (M,), its norm, and what the backward pass needs."""

    @abstractmethod
    def _forward(
        self, p: Products[Operand], i: int, x: Tensor, norm: Normed[Operand], B: int
    ) -> tuple[Tensor, Normed[Operand], Any]:
        """Block `i` from its input and that input's norm; returns the output, its norm, and the tensors to save."""

    @abstractmethod
    def _backward(
        self, p: Products[Operand], i: int, grad: ResidualGrad[Operand], saved: Any, B: int
    ) -> ResidualGrad[Operand]:
        """From the gradient of block `i`'s output to that of its input."""

    @abstractmethod
    def _last_norm_backward(
        self, p: Products[Operand], dy: Tensor, x: Tensor, norm: Normed[Operand]
    ) -> ResidualGrad[Operand]:
        """From the gradient (M, C) of the head's input to that of the last block's output."""

    @abstractmethod
    def _embed_backward(self, tokens: Tensor, dx: Tensor, saved: Any, B: int) -> None:
        """Add the gradients of the embeddings."""

    @abstractmethod
    def _complete(self, i: int) -> None:
        """Make block `i`'s gradients from the partial sums, and begin to reduce its bucket."""

    @abstractmethod
    def _complete_rest(self) -> None:
        """The same for the parameters that are in no block."""

    # --- of all

    def _linear(self, name: str) -> Linear:
        weights, gradients = self.state.weights, self.state.gradients
        return Linear(name, weights[f"{name}.weight"], gradients[f"{name}.weight"], weights.get(f"{name}.bias"))

    def _add_rows(self, name: str, tokens: Tensor, rows: Tensor) -> None:
        """Add rows (M, N) bf16 to the gradient of the embedding `name`, at their tokens (M,)."""
        if self.order is None:
            self.state.gradients[name].index_add_(0, tokens, rows.float())
        else:
            kernels.add_rows(self.state.gradients[name], *self.order, rows)

    def begin(self, number: int) -> None:
        """Begin update `number` (from 1; 0: a rehearsal, whose gradients are not used): its micro-batches follow."""
        self.number = number
        self.first = True
        self._zero()
        self.current = self.products.begin(number)

    def backward(self, tokens: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        """Add the gradients of `scale` · (sum of the losses) of one micro-batch, (B, T) tokens; return that number.

        The first micro-batch of a step overwrites the gradients; the `last` begins to reduce each bucket as soon as it
        is complete.
        """
        if self.current.calibrating:
            self._micro_batch(self.current, tokens, targets, scale, last=False)
            self.begin(self.number)
        return self._micro_batch(self.current, tokens, targets, scale, last)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats of (B, T) tokens; no gradients."""
        p = self.products.for_loss
        losses, _ = self._head(p, self._last_norm(p, tokens), targets.flatten(), None)
        return losses.mean()

    def hidden(self, tokens: Tensor) -> Tensor:
        """The input of the head in bf16: (B, T) tokens -> (B, T, C)."""
        norm: Normed[Any] = self._last_norm(self.products.for_loss, tokens)
        assert norm.y is not None
        hidden: Tensor = norm.y.view(*tokens.shape, -1)
        return hidden

    def logits(self, x: Tensor) -> Tensor:
        """The logits in bf16 of (N, C) inputs of the head: (N, padded_vocab_size), padding at -inf."""
        logits: Tensor = self.products.for_loss.linear(self.head, x.contiguous())
        if self.cap:
            logits = (self.cap * torch.tanh(logits.float() / self.cap)).type_as(logits)
        logits[:, self.config.vocab_size :] = float("-inf")
        return logits

    def _last_norm(self, p: Products[Operand], tokens: Tensor) -> Normed[Operand]:
        """The forward pass of (B, T) tokens up to the head's input."""
        B = tokens.size(0)
        x, norm, _ = self._embed(p, tokens.flatten(), B)
        for i in range(self.n_blocks):
            x, norm, _ = self._forward(p, i, x, norm, B)
        return norm

    def _micro_batch(self, p: Products[Operand], tokens: Tensor, targets: Tensor, scale: float, last: bool) -> Tensor:
        B = tokens.size(0)
        tokens, targets = tokens.flatten(), targets.flatten()
        factor = torch.full((1,), scale, device=self.device)
        p.begin_micro_batch(scale)
        x, norm, embedded = self._embed(p, tokens, B)
        saved = []
        for i in range(self.n_blocks):
            x, norm, block = self._forward(p, i, x, norm, B)
            saved.append(block)
        losses, dy = self._head(p, norm, targets, factor)
        self.order = None if self.deterministic else torch.sort(tokens)
        norm.y = None  # from here on only its statistics are needed
        grad = self._last_norm_backward(p, dy, x, norm)
        del dy, x, norm, block
        for i in reversed(range(self.n_blocks)):
            grad = self._backward(p, i, grad, saved.pop(), B)
            if last:
                self._complete(i)
        self._embed_backward(tokens, grad.dx, embedded, B)
        if last:
            self._complete_rest()
        self.first = False
        loss = losses.sum() * scale
        p.end_micro_batch(last)
        return loss

    def _head(
        self, p: Products[Operand], norm: Normed[Operand], targets: Tensor, factor: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Losses (M,), and with a `factor` the gradient (M, C) of the norm's output."""
        assert norm.y is not None
        accumulate = not self.first
        return p.head(self.head, norm.y, targets, self.config.vocab_size, factor, accumulate, self.cap)
