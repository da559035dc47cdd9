"""The plain module of a family as two engines: *eager*, the reference, and *compiled* by torch.compile."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.base.parallel import World, autocast_on, clip_, device_name, flat_gradients, has_bf16, precision_on
from trainer.base.process import failpoint
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece, training_tensors
from trainer.config.amounts import batch_stages
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig
from trainer.engines.engine import Batches, Engine
from trainer.models.family import plain_model
from trainer.models.language_model import LanguageModel
from trainer.optim.optimizers import optimizer_for
from trainer.optim.rates import Rates


class PlainEngine(Engine):
    """The plain module of a family with autocast, an optimizer of `trainer/optim/optimizers.py` and one all-reduce."""

    compiled: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world: World, why: str) -> None:
        self.config, self.world, self.train, self.why = config, world, train, why
        self.precision = precision_on(world.device, train)
        if world.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, if the GPU has it, for products outside autocast
        self.model: LanguageModel = plain_model(config, runtime.recompute).to(world.device)
        self.forward: Any = self.model
        if self.compiled:
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


class CompiledEngine(PlainEngine):
    """The same, with its forward and backward pass compiled."""

    compiled = True
