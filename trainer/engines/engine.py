"""Engines: four implementations of the same update behind one interface.

*fused* (trainer/engines/fused/step.py) is for GPUs with bf16 and Triton: sm_80 and later. *compiled* is
`torch.compile` over the plain module, for GPUs without support for the fused kernels. *eager* is the plain module: the
reference for the others, and the engine on a CPU. *sharded* (trainer/engines/sharded.py) divides the plain module over
the ranks, for models that are too large for one GPU. All keep weights and moments in float32 under the same names, so
each can load the checkpoints of the others.

A step is `accumulate`, whose result [loss, gradient norm] stays on the device, and `update`. A `guarded` engine checks
these numbers on the device, and changes nothing if they are not finite. So the host can launch the update first and
read the numbers while the GPU is busy.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece
from trainer.config.model_config import ModelConfig
from trainer.optim.rates import Rates

Batches = Iterator[tuple[Tensor, Tensor]]


class Engine(ABC):
    """The interface between the training loop and an implementation of its step, and what most of them share. A
    micro-batch is B sequences of T tokens. The ranks' shares of a step, and the micro-batches of a share, may differ in
    size. Its class is called with (config, train, runtime, world, why), and raises UserError if it cannot run here."""

    why: str  # name of the engine, its device, and the reason for the choice
    precision: str
    config: ModelConfig
    tokens_at_once: int | None = None  # for which there is memory beside the training, once that is known
    collective: bool = False  # forward passes communicate: all ranks make equally many
    guarded: bool = False  # `update` itself leaves out an update whose numbers are not finite

    @abstractmethod
    def initialize(self, seed: int) -> None:
        """Draw the weights of a new run, see `LanguageModel.initialize`."""

    @abstractmethod
    def accumulate(self, batches: Batches, count: int, mean_share: float, number: int = 0) -> Tensor:
        """Gradients of the mean loss over all sequences of a step, of which this rank has `count` micro-batches.
        Returns [loss, norm of the gradient] (2,), float32 on the device. The norm is of all ranks' gradient together,
        before clipping. The mean of the loss over all ranks is the loss of the step.

        `mean_share` is the number of sequences of a step, divided by the number of ranks. A micro-batch of B sequences
        has the weight B / mean_share, so the mean over ranks is the mean over sequences. `number` is the number of the
        update that follows; 0: no update follows, and the ranks do not communicate.
        """

    @abstractmethod
    def update(self, rates: Rates, loss_and_norm: Tensor, number: int) -> None:
        """Clip the gradient and apply it as the optimizer's update `number` (from 1)."""

    @abstractmethod
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats of (B, T) tokens, without gradients. It takes less memory than `accumulate`, since it
        makes the logits in chunks."""

    @abstractmethod
    def hidden(self, tokens: Tensor) -> Tensor:
        """The input of the head, without gradients: (B, T) token ids -> (B, T, n_embd)."""

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """Logits of hidden states, without gradients: (N, n_embd) -> (N, padded_vocab_size), padding at -inf."""

    @abstractmethod
    def pieces(self) -> dict[str, Piece]:
        """The weights and moments of this rank, for a checkpoint to save and to fill."""

    @abstractmethod
    def restore(self, state: TrainState) -> None:
        """Continue from `state`, after a checkpoint has filled the pieces."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights in float32 under the model's names, one at a time, on rank 0; none on the others. All ranks have
        to exhaust it."""

    def extra_metrics(self) -> dict[str, float]:
        """Metrics of the last step that only this engine has, by name."""
        return {}

    def warnings(self) -> list[str]:
        """New reasons why this engine is slower than it could be, one line each."""
        return []
