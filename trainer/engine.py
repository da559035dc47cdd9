"""Engines: four implementations of the same update behind one interface.

*fused* (trainer/fused/step.py) is for GPUs with bf16 and Triton: sm_80 and later. *compiled* is `torch.compile` over
the plain module, for GPUs without support for the fused kernels. *eager* is the plain module: the reference for the
others, and the engine on a CPU. *sharded* (trainer/sharded.py) divides the plain module over the ranks, for models
that are too large for one GPU. All keep weights and moments in float32 under the same names, so each can load the
checkpoints of the others.

A step is `accumulate`, whose result [loss, gradient norm] stays on the device, and `update`. A `guarded` engine checks
these numbers on the device, and changes nothing if they are not finite. So the host can launch the update first and
read the numbers while the GPU is busy.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from trainer.amounts import batch_stages
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece, training_tensors
from trainer.config import RuntimeConfig, TrainConfig
from trainer.errors import UserError
from trainer.fused import gemm
from trainer.memory import automatic_engine
from trainer.models.family import plain_model
from trainer.models.language_model import LanguageModel
from trainer.models.model_config import ModelConfig
from trainer.optim.adamw import optimizer_for
from trainer.optim.rates import Rates
from trainer.parallel import World, autocast_on, clip_, flat_gradients, has_bf16, precision_on
from trainer.process import Background, failpoint

if TYPE_CHECKING:
    from trainer.fused.products import Products

Batches = Iterator[tuple[Tensor, Tensor]]


class Engine(Protocol):
    """The interface between the training loop and an implementation of its step, and what most of them share. A
    micro-batch is B sequences of T tokens. The ranks' shares of a step, and the micro-batches of a share, may differ in
    size."""

    why: str  # name of the engine, its device, and the reason for the choice
    precision: str
    config: ModelConfig
    tokens_at_once: int | None = None  # for which there is memory beside the training, once that is known
    collective: bool = False  # forward passes communicate: all ranks make equally many
    guarded: bool = False  # `update` itself leaves out an update whose numbers are not finite

    def initialize(self, seed: int) -> None:
        """Draw the weights of a new run, see `LanguageModel.initialize`."""

    def accumulate(self, batches: Batches, count: int, mean_share: float, number: int = 0) -> Tensor:
        """Gradients of the mean loss over all sequences of a step, of which this rank has `count` micro-batches.
        Returns [loss, norm of the gradient] (2,), float32 on the device. The norm is that of all ranks' gradient,
        before clipping. The mean of the loss over all ranks is that of the step.

        `mean_share` is the number of sequences of a step, divided by the number of ranks. A micro-batch of B sequences
        has the weight B / mean_share, so the mean over ranks is the mean over sequences. `number` is the number of the
        update that follows; 0: no update follows, and the ranks do not communicate.
        """

    def update(self, rates: Rates, loss_and_norm: Tensor, number: int) -> None:
        """Clip the gradient and apply it as the optimizer's update `number` (from 1)."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats of (B, T) tokens, without gradients. It takes less memory than `accumulate`, since it
        makes the logits in chunks."""

    def hidden(self, tokens: Tensor) -> Tensor:
        """The input of the head, without gradients: (B, T) token ids -> (B, T, n_embd)."""

    def head(self, x: Tensor) -> Tensor:
        """Logits of hidden states, without gradients: (N, n_embd) -> (N, padded_vocab_size), padding at -inf."""

    def pieces(self) -> dict[str, Piece]:
        """The weights and moments of this rank, for a checkpoint to save and to fill."""

    def restore(self, state: TrainState) -> None:
        """Continue from `state`, after a checkpoint has filled the pieces."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights in float32 under the model's names, one at a time, on rank 0; none on the others. All ranks have
        to exhaust it."""

    def extra_metrics(self) -> dict[str, float]:
        """Metrics of the last step that only this engine has, by name."""
        return {}

    def warnings(self) -> list[str]:
        """New reasons why this engine is slower than it could be, one line each."""
        return []


class PlainEngine(Engine):
    """The plain module of a family with autocast, an optimizer of `trainer/optim/adamw.py` and one all-reduce; compiled
    or not."""

    def __init__(
        self, config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world: World, compiled: bool, why: str
    ) -> None:
        self.config, self.world, self.train, self.why = config, world, train, why
        self.precision = precision_on(world.device, train)
        if world.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, if the GPU has it, for products outside autocast
        self.model: LanguageModel = plain_model(config, runtime.recompute).to(world.device)
        self.forward: Any = self.model
        if compiled:
            # torch does not compile beyond this limit: it must cover two sizes of micro-batches a batch of the ramp.
            dynamo = torch._dynamo.config
            dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * len(batch_stages(train)))
            self.forward = torch.compile(self.model, dynamic=False)
        if train.optimizer == "muon" and world.device.type == "cuda" and not has_bf16():
            raise UserError(f"train.optimizer: muon computes in bf16, which {device_name(world.device)} does not have")
        self.optimizer = optimizer_for(self.model, train)
        self.gradients = flat_gradients(self.model)

    def initialize(self, seed: int) -> None:
        self.model.initialize(seed)

    def accumulate(self, batches: Batches, count: int, mean_share: float, number: int = 0) -> Tensor:
        loss = self.backward(batches, mean_share)
        if number:
            self.world.mean_(self.gradients)
        return torch.stack((loss, torch.linalg.vector_norm(self.gradients)))

    def backward(self, batches: Batches, mean_share: float) -> Tensor:
        """Add up the weighted gradients of this rank's micro-batches. Returns the weighted sum of their losses."""
        self.model.train()
        self.gradients.zero_()
        total = torch.zeros((), device=self.world.device)
        for tokens, targets in batches:
            with autocast_on(self.world.device, self.precision):
                loss = self.forward(tokens, targets) / (mean_share / len(tokens))
            failpoint("mid-step")
            loss.backward()
            total += loss.detach()
        return total

    def update(self, rates: Rates, loss_and_norm: Tensor, number: int) -> None:
        clip_(self.gradients, loss_and_norm[1], self.train.grad_clip)
        self.optimizer.rates = rates
        self.optimizer.step()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.model.eval()
        with autocast_on(self.world.device, self.precision):
            # Not compiled: at each start that would take longer than it saves in some validations.
            return self.model.loss(tokens, targets)

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        self.model.eval()
        with autocast_on(self.world.device, self.precision):
            return self.model.hidden(tokens)

    @torch.no_grad()
    def head(self, x: Tensor) -> Tensor:
        with autocast_on(self.world.device, self.precision):
            return self.model.head(x)

    def pieces(self) -> dict[str, Piece]:
        return training_tensors(self.model, self.optimizer)

    def restore(self, state: TrainState) -> None:
        self.optimizer.set_steps(state.optimizer_steps)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.model.state_dict().items() if self.world.rank == 0 else ())


class FusedEngine(Engine):
    """The step of `trainer/fused/step.py` over the flat buffers of `trainer/fused/flat.py`."""

    guarded = True

    def __init__(self, config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world: World, why: str) -> None:
        from trainer.fused.flat import FlatState
        from trainer.fused.steps import step_of

        obstacle = gemm.why_not() if world.device.type == "cuda" else ""
        self.config, self.world = config, world
        self.why = f"{why}; torch computes its matrix products: {obstacle}" if obstacle else why
        self.warned: set[str] = set()
        self.precision: str = "bf16" if train.precision == "auto" else train.precision
        self.state = FlatState(config, train, runtime, world)
        step = step_of(config)
        self.products = self._products(step.layer_names(config), train, runtime)
        self.step = step(config, self.state, self.products, runtime.deterministic)
        if world.device.type == "cuda":
            Background("triton", hash_triton).start()  # while the state is loaded

    def _products(self, layers: list[list[str]], train: TrainConfig, runtime: RuntimeConfig) -> "Products[Any]":
        from trainer.fused.bf16 import Bf16Products
        from trainer.fused.fp8 import Fp8Products

        if self.precision == "bf16":
            return Bf16Products(self.world.device, bool(runtime.recompute))
        in_bf16 = () if self.precision == "fp8_head" else layers[-1]  # the head
        return Fp8Products(layers, in_bf16, self.world, bool(runtime.recompute), train.warmup_steps)

    def initialize(self, seed: int) -> None:
        self.state.initialize(seed)

    def accumulate(self, batches: Batches, count: int, mean_share: float, number: int = 0) -> Tensor:
        total = torch.zeros((), device=self.world.device)
        self.state.rehearsing = not number
        self.step.begin(number)
        for i, (tokens, targets) in enumerate(batches):
            failpoint("mid-step")
            total += self.step.backward(tokens, targets, 1 / (mean_share * tokens.size(1)), last=i == count - 1)
        return self.state.finish(total)

    def update(self, rates: Rates, loss_and_norm: Tensor, number: int) -> None:
        self.state.update(rates, number, loss_and_norm)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.step.loss(tokens, targets)

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.step.hidden(tokens)

    def head(self, x: Tensor) -> Tensor:
        return self.step.logits(x)

    def pieces(self) -> dict[str, Piece]:
        return self.state.pieces() | self.products.pieces()

    def restore(self, state: TrainState) -> None:
        self.state.restore()
        self.products.restore()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.state.full_weights()

    def extra_metrics(self) -> dict[str, float]:
        return self.products.extra_metrics()

    def warnings(self) -> list[str]:
        slow = [f"cuBLASLt cannot compute {product}; torch does" for product in gemm.refused()]
        slow += [line for attention in self.step.attentions for line in attention.refused()]
        new = [line for line in slow if line not in self.warned]
        self.warned.update(new)
        return new


def hash_triton() -> None:
    """Let Triton hash its own files, 0.4 s before the first kernel that it looks up. It remembers the hash."""
    with suppress(ImportError):  # a version that hashes elsewhere
        from triton.runtime.cache import triton_key

        triton_key()


def make_engine(config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world: World) -> Engine:
    """The fastest engine that works here, or the configured one. UserError if it does not work here."""
    name, why = choose_engine(config, train, runtime, world.device, world.world_size)
    if name == "fused":
        return FusedEngine(config, train, runtime, world, why)
    if name == "sharded":
        from trainer.sharded import ShardedEngine

        return ShardedEngine(config, train, runtime, world, why)
    return PlainEngine(config, train, runtime, world, name == "compiled", why)


def choose_engine(
    config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, device: torch.device, ranks: int = 1
) -> tuple[Literal["fused", "sharded", "compiled", "eager"], str]:
    """The name of the engine, and one line with its name, its device and the reason. UserError as in `make_engine`."""
    on = f"on {device_name(device)}"
    obstacle = why_not_fused(config, train, device)
    by_torchao = train.precision == "fp8" and runtime.engine == "sharded"
    if train.precision.startswith("fp8") and not by_torchao and (obstacle or runtime.engine not in ("auto", "fused")):
        reason = obstacle or f"runtime.engine is {runtime.engine}"
        raise UserError(f"train.precision: {train.precision} needs the fused engine: {reason}")
    if runtime.engine == "fused" and obstacle:
        raise UserError(f"runtime.engine: fused cannot run here: {obstacle}; use 'auto'")
    if runtime.engine == "sharded":
        return "sharded", f"sharded, {on}; as configured"
    if runtime.engine == "auto" and device.type == "cuda":
        memory, precision = torch.cuda.get_device_properties(device).total_memory, precision_on(device, train)
        name, why = automatic_engine(config, runtime, precision, train.optimizer == "muon", ranks, memory, obstacle)
        return name, f"{name}, {on}{why and f'; {why}'}"
    if runtime.engine == "fused" or (runtime.engine == "auto" and train.precision.startswith("fp8")):
        return "fused", f"fused, {on}"
    if runtime.engine == "compiled":
        return "compiled", f"compiled, {on}; as configured"
    why = "as configured" if runtime.engine == "eager" else "no CUDA device was found"
    return "eager", f"eager, {on}; {why}"


def why_not_fused(config: ModelConfig, train: TrainConfig, device: torch.device) -> str | None:
    """Why the fused engine cannot run here; None if it can."""
    if reason := config.why_not_fused:
        return reason
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA device, this is {device.type}"
    if torch.version.hip:
        return "its kernels are written for CUDA, this is ROCm"
    if train.precision == "fp32":
        return "it computes in bf16, but train.precision is fp32"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{device_name(device)} has no bf16"
    if train.precision.startswith("fp8"):
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
            return f"{device_name(device)} does not have Hopper's fp8"
        for field in ("n_embd", "block_size"):  # fp8 products need rows of 16, and sum over tokens in groups of 16
            if (value := getattr(config, field)) % 16:
                return f"model.{field} {value} is not a multiple of 16, which fp8 products need"
        if config.attention_width % 16:
            return f"the width of all heads, {config.attention_width}, is not a multiple of 16, which fp8 products need"
    return None


def device_name(device: torch.device) -> str:
    """The device's type, or for CUDA the name of the GPU with its compute capability."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
