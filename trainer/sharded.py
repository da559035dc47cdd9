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
from typing import get_args

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
from trainer.optim import muon
from trainer.optim.adamw import AdamW, parameters_of
from trainer.optim.owners import Owners, Slice
from trainer.optim.rates import Group, Rates, group_of
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
        self.copies, self.copy = world.world_size // size, world.rank // size
        if self.copies > 1:
            self.why += f"; {self.copies} copies of the state, each over {size} ranks"
        shape, names = ((self.copies, size), ("replicate", "shard")) if self.copies > 1 else ((size,), ("shard",))
        self.mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
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
        kind = ShardedMuon if train.optimizer == "muon" else AdamW
        self.optimizer: AdamW = kind(self.shards, train)

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
        if isinstance(self.optimizer, ShardedMuon):
            for name, squares in self.optimizer.owners.squares.items():
                found[f"squares.{name}"] = Piece(squares, 0, tuple(squares.shape), False, stored=self.copy == 0)
        return found

    def _pieces_of(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """The pieces of tensors that are cut as the parameters with their names."""
        found = {}
        for number, (name, p) in enumerate(self.shards.whole.items()):
            if name in tensors:
                _, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
                start = offsets[0] * (p.numel() // p.shape[0])
                live, stored = tensors[name].detach().view(-1), number % self.copies == self.copy
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


class ShardedMuon(AdamW):
    """Muon for the matrices of the blocks, whose directions their owners make (trainer/optim/owners.py), and AdamW for
    all other parameters."""

    def __init__(self, shards: Shards, config: TrainConfig) -> None:
        super().__init__(shards, config, [group for group in get_args(Group) if group != "matrix"])
        self.matrices = parameters_of(shards, "matrix")
        self.momentum = {p: torch.zeros_like(p, requires_grad=False) for p in self.matrices.values()}
        whole = {name: p for name, p in shards.whole.items() if group_of(name, p.dim()) == "matrix"}
        mesh = next(iter(whole.values())).device_mesh
        ranks = mesh.size(-1)
        slices: list[list[Slice]] = []
        for rank in range(ranks):
            slices.append([])
            at = 0
            for name, p in whole.items():
                rows = -(-p.size(0) // ranks)  # as FSDP2 cuts them
                start, end = (min(n * rows, p.size(0)) * p.size(1) for n in (rank, rank + 1))
                if start < end:
                    slices[-1].append(Slice(name, start, end, at))
                    at += end - start
        own = mesh.get_local_rank("shard")
        self.shapes = {name: (p.size(0), p.size(1)) for name, p in whole.items()}
        self.slices, group = {one.name: one for one in slices[own]}, mesh.get_group("shard")
        device = next(iter(shards.own.values())).device
        self.owners = Owners(self.shapes, slices, own, device, group=group)

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        super().step(divisor, skip)
        rates, applied = self.rates, 1.0 if skip is None else 1.0 - skip
        size = sum(one.size for one in self.slices.values())
        ahead = torch.empty(size, dtype=torch.bfloat16, device=self.owners.device)
        for name, p in self.matrices.items():
            assert p.grad is not None
            gradient = p.grad if divisor is None else p.grad / divisor
            if skip is not None:
                gradient = torch.where(skip > 0, self.momentum[p], gradient)  # then the momentum stays
            self.slices[name].of(ahead).copy_(muon.look_ahead(self.momentum[p], gradient, rates.momentum).view(-1))
        self.owners.begin(ahead).finish((1 - muon.BETA2) * applied)
        for name, p in self.matrices.items():
            decay = rates.matrix_decay * muon.factor_of(name, *self.shapes[name])
            muon.move_(p, self.slices[name].of(ahead).view(p.shape), rates.of["matrix"] * applied, decay)

    def state(self) -> dict[str, Mapping[Tensor, Tensor]]:
        return super().state() | {"momentum": self.momentum}


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
