"""The engine *sharded*: weights, gradients and moments are divided over the ranks (ZeRO-3; Rajbhandari et al. 2020), by
torch's FSDP2 (Zhao et al. 2023). It trains models beyond the memory of one GPU.

Bytes a parameter: 16/W on each of W ranks (float32 weights, gradients and two moments), and the weights of the block
that computes, in bf16: they are gathered before its forward and its backward pass, and dropped after them. Parameters
outside the blocks (embeddings, head, last norm) stay gathered through a step. Each micro-batch reduces its gradients
at once, so that no rank ever holds a whole gradient; large micro-batches keep that traffic small.

With `runtime.shard_size` several copies of the state exist, each over so many ranks (hybrid sharding, HSDP): the
gathers stay inside a node, and only gradients cross nodes.

A forward pass is a collective call: ranks with fewer micro-batches than others add some of weight 0, and evaluations
run as many batches on every rank.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece
from trainer.config import RuntimeConfig, TrainConfig
from trainer.errors import UserError
from trainer.models.family import plain_model
from trainer.models.model_config import ModelConfig
from trainer.optim.adamw import optimizer_for
from trainer.optim.rates import Rates
from trainer.parallel import World, precision_on
from trainer.process import failpoint

DRAWN_AT_ONCE = 4  # tensors that a rank draws whole, before it cuts them: the largest of 8B has 2 GB


class ShardedEngine:
    """An `Engine` (trainer/engine.py) over the plain module of a family; its blocks are compiled on a GPU."""

    guarded, overflow_allowed, collective = True, False, True
    tokens_at_once: int | None = None

    def __init__(self, config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world: World, why: str) -> None:
        self.config, self.world, self.train, self.why = config, world, train, why
        self.precision = precision_on(world.device, train)
        on_gpu = world.device.type == "cuda"
        if on_gpu:
            torch.set_float32_matmul_precision("high")
        if not dist.is_initialized():  # a rank alone
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        with torch.device("meta"):
            self.model = plain_model(config, runtime.recompute)
        if on_gpu:
            for block in self.model.h:
                block.forward = compiled_in_training(block.forward)
            self.model.loss_of = compiled_in_training(self.model.loss_of)  # type: ignore[method-assign]
        size = runtime.shard_size or world.world_size
        if world.world_size % size:
            raise UserError(f"runtime.shard_size: {size} does not divide the {world.world_size} ranks; use a divisor")
        if size < world.world_size:
            self.why += f"; {world.world_size // size} copies of the state, each over {size} ranks"
        self.mesh = init_device_mesh(
            world.device.type, (world.world_size // size, size), mesh_dim_names=("replicate", "shard")
        )
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self.precision == "bf16" else None,
            reduce_dtype=torch.bfloat16 if runtime.reduce_dtype == "bf16" else torch.float32,
            cast_forward_inputs=False,  # the waves of rotary positions stay in float32
        )
        for block in self.model.h:  # the backward pass begins with the last one
            fully_shard(block, mesh=self.mesh, mp_policy=policy, reshard_after_forward=block is not self.model.h[-1])
        fully_shard(self.model, mesh=self.mesh, mp_policy=policy, reshard_after_forward=False)
        self.model.to_empty(device=world.device)
        # FSDP gathers for `forward`. These aliases are for evaluations: `forward` itself uses the methods as they are.
        for method in ("hidden", "loss"):
            setattr(self.model, f"gathered_{method}", getattr(self.model, method))
            register_fsdp_forward_method(self.model, f"gathered_{method}")
        self.shards = Shards(self.model)
        self.optimizer = optimizer_for(self.shards, train)

    def initialize(self, seed: int) -> None:
        def draw(key: str, piece: Piece) -> None:
            whole = torch.empty(piece.shape)
            self.model.draw({key.removeprefix("model."): whole}, self.config, seed)
            piece.live.copy_(whole.view(-1)[piece.start : piece.end])

        pieces = self._pieces_of("model", dict(self.shards.named_parameters()))
        with ThreadPoolExecutor(DRAWN_AT_ONCE) as pool:
            list(pool.map(draw, *zip(*pieces.items(), strict=True)))

    def accumulate(
        self, batches: Iterator[tuple[Tensor, Tensor]], count: int, mean_share: float, number: int = 0
    ) -> Tensor:
        """As `Engine.accumulate`; the ranks communicate also without an update to follow."""
        for p in self.shards.whole.values():
            p.grad = None
        total = torch.zeros((), device=self.world.device)
        missing = self.world.most(count) - count
        for tokens, targets in batches:
            loss = self.model(tokens, targets) * (len(tokens) / mean_share)
            failpoint("mid-step")
            loss.backward()
            total += loss.detach()
        for _ in range(missing):
            (self.model(tokens, targets) * 0.0).backward()
        gradients = [shard_of(p.grad) for p in self.shards.whole.values() if p.grad is not None]
        squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(squares, group=self.mesh.get_group("shard"))
        return torch.stack((total, squares.sqrt()))

    def update(self, rates: Rates, loss_and_norm: Tensor, number: int, apply: bool = True) -> bool:
        if apply:
            for name, shard in self.shards.own.items():
                gradient = self.shards.whole[name].grad
                assert gradient is not None, name
                shard.grad = shard_of(gradient)
            clip = self.train.grad_clip
            divisor = None if clip is None else ((loss_and_norm[1] + 1e-6) / clip).clamp(min=1.0)
            self.optimizer.rates = rates
            self.optimizer.step(divisor, skip=(~loss_and_norm.isfinite().all()).float())
            for shard in self.shards.own.values():
                shard.grad = None  # or its memory would be held until the next update
        return apply

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model.gathered_loss(tokens, targets)  # type: ignore[operator]
        return loss

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.model.gathered_hidden(tokens)  # type: ignore[operator]
        return hidden

    @torch.no_grad()
    def head(self, x: Tensor) -> Tensor:
        return self.model.head(x)  # its weights are gathered since `hidden`

    def pieces(self) -> dict[str, Piece]:
        shards = dict(self.shards.named_parameters())
        found = self._pieces_of("model", shards)
        for kind, tensors in self.optimizer.state().items():
            found |= self._pieces_of(kind, {name: tensors[p] for name, p in shards.items() if p in tensors})
        return found

    def _pieces_of(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """The pieces of tensors that are cut as the parameters with their names."""
        found, copies, copy = {}, self.mesh.size(0), self.mesh.get_local_rank("replicate")
        for number, (name, p) in enumerate(self.shards.whole.items()):
            if name in tensors:
                _, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
                start = offsets[0] * (p.numel() // p.shape[0])
                live, stored = tensors[name].detach().view(-1), number % copies == copy
                found[f"{kind}.{name}"] = Piece(live, start, tuple(p.shape), replicated=False, stored=stored)
        return found

    def restore(self, state: TrainState) -> None:
        self.optimizer.set_steps(state.optimizer_steps)

    def record(self, state: TrainState) -> None:
        """All values are in the pieces."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.shards.whole.items():
            whole = p.full_tensor()
            if self.world.rank == 0:
                yield name, whole.detach().cpu()

    def extra_metrics(self) -> dict[str, float]:
        return {}

    def warnings(self) -> list[str]:
        return []


class Shards(nn.Module):
    """This rank's shards of a model's parameters, as parameters of the same names: an optimizer works on them as on a
    whole model. A rank may have no rows of a small parameter, which then is not among them.

    `whole` has the sharded parameters: those of the model are other ones while they are gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.whole = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        self.own = {name: nn.Parameter(shard_of(p)) for name, p in self.whole.items() if shard_of(p).numel()}

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.own.items()


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in the same memory."""
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local().detach()
    return local


def compiled_in_training(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that torch.compile makes fast where gradients are on: the shapes of evaluations vary, and compiling
    for each would take longer than it saves."""
    compiled = torch.compile(forward, dynamic=False)

    def chosen(*inputs: object) -> Tensor:
        return compiled(*inputs) if torch.is_grad_enabled() else forward(*inputs)

    return chosen
