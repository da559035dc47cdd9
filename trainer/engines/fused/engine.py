"""The fused step as an engine: bf16 or fp8 on GPUs from sm_80 on."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from trainer.base.parallel import World
from trainer.base.process import Background
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.extensions import FUSED_STEPS, extension
from trainer.config.model_config import ModelConfig
from trainer.engines.engine import Batches, Engine
from trainer.engines.fused import gemm
from trainer.engines.fused.bf16 import Bf16Products
from trainer.engines.fused.flat import FlatState
from trainer.engines.fused.fp8 import Fp8Products
from trainer.engines.fused.products import Products
from trainer.engines.fused.step import FusedStep
from trainer.optim.rates import Rates


class FusedEngine(Engine):
    """The step of `trainer/engines/fused/step.py` over the flat buffers of `trainer/engines/fused/flat.py`."""

    guarded = True

    def __init__(self, config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world: World, why: str) -> None:
        obstacle = gemm.why_not() if world.device.type == "cuda" else ""
        self.config, self.world = config, world
        self.why = f"{why}; torch computes its matrix products: {obstacle}" if obstacle else why
        self.warned: set[str] = set()
        self.precision: str = "bf16" if train.precision == "auto" else train.precision
        self.state = FlatState(config, train, runtime, world)
        step: type[FusedStep[Any]] = extension(FUSED_STEPS, config.family)
        self.products = self._products(step.layer_names(config), train, runtime)
        self.step = step(config, self.state, self.products, runtime.deterministic)
        if world.device.type == "cuda":
            Background("triton", hash_triton).start()  # while the state is loaded

    def _products(self, layers: list[list[str]], train: TrainConfig, runtime: RuntimeConfig) -> Products[Any]:
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
