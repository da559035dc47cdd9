"""The engine *sharded*: weights, gradients and moments are divided over the ranks (ZeRO-3; Rajbhandari et al. 2020), by
torch's FSDP2 (Zhao et al. 2023). It trains models beyond the memory of one GPU.

Bytes a parameter: 16/W on each of W ranks (float32 weights, gradients and two moments), and the weights of the block
that computes, in bf16: they are gathered before its forward and its backward pass, and dropped after them. Parameters
outside the blocks (embeddings, head, last norm) stay gathered through a step. Each micro-batch reduces its gradients
at once, so that no rank ever holds a whole gradient; large micro-batches keep that traffic small. GPUs with memory for
6 more bytes a parameter gather the weights once a step, and add up its gradients in float32 before one reduction: the
state is then divided as in ZeRO-1.

With `runtime.shard_size` several copies of the state exist, each over that many ranks (hybrid sharding, HSDP): the
gathers stay inside a node, and only gradients cross nodes: once a step, in float32.

With `runtime.tensor_parallel` that many neighbouring ranks divide the blocks' products by heads and by the width of the
MLP, by torch's `parallelize_module`. Each rank still has sequences of its own, and all else works on these: the ranks
of a group gather them before attention and MLP, and scatter the sums after (as Korthikanti et al. 2022 do along the
sequence, here along the batch). So a block's gathered weights take 1/N, and activations as much memory as before.

What is not built: pipeline parallelism would be a dimension of `mesh_of` whose ranks make, fill and store their own
blocks alone (`pieces`), with `accumulate` run by a schedule of torch.distributed.pipelining. Context parallelism would
be one whose ranks cut each sequence (where `padded` pads it), with attention by torch's `context_parallel`.

A forward pass is a collective call: ranks with fewer micro-batches than others add some of weight 0, and evaluations
run as many batches on every rank.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.base.install import how_to_install
from trainer.base.parallel import World, precision_on
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.pieces import Piece, Place, tensor_of
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import UserError
from trainer.config.model_config import HEAD_ROWS, ModelConfig
from trainer.engines.engine import Engine
from trainer.engines.memory import gathers_once
from trainer.models.family import plain_model
from trainer.models.language_model import ChunkedLoss
from trainer.optim.optimizers import AdamW, Muon
from trainer.optim.owners import slices_of
from trainer.optim.rates import Rates, group_of

NO_TARGET = -100  # of padding, which cross_entropy leaves out


class ShardedEngine(Engine):
    """The plain module of a family, divided over the ranks; its blocks are compiled on a GPU."""

    guarded, collective = True, True

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
        if self.precision == "fp8":
            use_float8(self.model.h, world.device)
        if on_gpu:
            for block in self.model.h:
                block.forward = compiled_in_training(block.forward)
        self.divide_head(compiled_in_training if on_gpu else lambda forward: forward)
        size = runtime.shard_size or world.world_size
        if world.world_size % size:
            raise UserError(f"runtime.shard_size: {size} does not divide the {world.world_size} ranks; use a divisor")
        self.copies, self.copy = world.world_size // size, world.rank // size
        # In bf16 the ranks would also add up in bf16.
        self.copies_meet_once = self.copies > 1 and runtime.reduce_dtype == "fp32"
        if self.copies > 1:
            self.why += f"; {self.copies} copies of the state, each over {size} ranks"
        self.tensor = runtime.tensor_parallel
        self.mesh = inside = mesh_of(world, replicate=self.copies, shard=size)
        if self.tensor > 1:
            check_tensor_parallel(config, self.tensor, size)
            self.why += f"; products divided over {self.tensor} ranks"
            whole = mesh_of(world, replicate=self.copies, shard=size // self.tensor, tensor=self.tensor)
            inside = whole["replicate", "shard"] if self.copies > 1 else whole["shard"]
            for block in self.model.h:
                divide(block, whole["tensor"])
        memory = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else 0
        smallest = -world.most(-memory)  # or the ranks' collective calls would differ
        self.gathers_once = gathers_once(config, runtime, train.optimizer == "muon", world.world_size, smallest)
        if self.gathers_once:
            self.why += "; weights gathered once a step"
        policy = MixedPrecisionPolicy(
            param_dtype=None if self.precision == "fp32" else torch.bfloat16,
            reduce_dtype=torch.bfloat16 if runtime.reduce_dtype == "bf16" else torch.float32,
            cast_forward_inputs=False,  # the waves of rotary positions stay in float32
        )
        for block in self.model.h:  # the backward pass begins with the last one
            again = not self.gathers_once and block is not self.model.h[-1]
            fully_shard(block, mesh=inside, mp_policy=policy, reshard_after_forward=again)
        self.root = fully_shard(self.model, mesh=self.mesh, mp_policy=policy, reshard_after_forward=False)
        self.model.to_empty(device=world.device)
        # FSDP gathers for `forward`. These aliases are for evaluations: `forward` itself uses the methods as they are.
        for method in ("hidden", "loss"):
            setattr(self.model, f"gathered_{method}", getattr(self.model, method))
            register_fsdp_forward_method(self.model, f"gathered_{method}")
        self.shards = Shards(self.model, self.mesh, self.tensor)
        kind = sharded_muon if train.optimizer == "muon" else AdamW
        self.optimizer: AdamW = kind(self.shards, train)

    def divide_head(self, compiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        """Make the model compute the loss of many tokens in chunks, so that all their logits never exist. Of few tokens
        the logits take less memory than the float32 gradient that the chunks add up."""
        whole, summed = compiled(self.model.loss_of), compiled(self.model.summed_loss)

        def loss_of(x: Tensor, targets: Tensor) -> Tensor:
            if targets.numel() <= HEAD_ROWS + self.config.n_embd:
                return whole(x, targets)
            loss: Tensor = ChunkedLoss.apply(x.flatten(0, 1), self.model.head_weight, targets.flatten(), summed)
            return loss

        self.model.loss_of = loss_of  # type: ignore[method-assign]

    def initialize(self, seed: int) -> None:
        """As `Engine.initialize`; a rank never holds more than its shards and one whole layer."""
        pieces = self._pieces_of("model", dict(self.shards.named_parameters()))
        for _, keys in groupby(pieces, lambda key: key.split(".")[1:3]):
            layer = {key: tensor_of(key).removeprefix("model.") for key in keys}
            whole = {name: torch.empty(pieces[key].shape) for key, name in layer.items()}
            self.model.draw(whole, self.config, seed)
            for key, name in layer.items():
                piece = pieces[key]
                piece.live.view(piece.rows, -1).copy_(piece.place.of(whole[name].view(-1)))
            del whole  # before the next one is allocated

    def accumulate(
        self, batches: Iterator[tuple[Tensor, Tensor]], count: int, mean_share: float, number: int = 0
    ) -> Tensor:
        """As `Engine.accumulate`; the ranks communicate also without an update to follow."""
        for p in self.shards.whole.values():
            p.grad = None
        total = torch.zeros((), device=self.world.device)
        most = self.world.most(count)
        for number in range(most):
            if self.gathers_once:
                self.root.set_reshard_after_backward(number == most - 1)
                self.root.set_requires_gradient_sync(number == most - 1)
            elif self.copies_meet_once:
                self.root.set_requires_all_reduce(number == most - 1)
            share = 0.0
            if number < count:
                tokens, targets = next(batches)
                share = len(tokens) / mean_share
            if number in (0, most - 1):  # those between are as large as the first one, on every rank
                sizes = self._sizes(tokens)
            loss = self.model(padded(tokens, sizes), padded(targets, sizes, NO_TARGET)) * share
            loss.backward()
            total += loss.detach()
        gradients = {name: shard_of(p.grad) for name, p in self.shards.whole.items() if p.grad is not None}
        if self.tensor > 1:  # which have the sum over a group, and the mean over groups
            torch._foreach_div_([g for name, g in gradients.items() if name.startswith("h.")], self.tensor)
        norms = torch._foreach_norm(list(gradients.values()))
        shared = [norm for norm, name in zip(norms, gradients, strict=True) if self.shards.holders[name] > 1]
        if shared:
            torch._foreach_div_(shared, self.tensor**0.5)
        squares = torch.stack(norms).square().sum()
        dist.all_reduce(squares, group=self.mesh.get_group("shard"))
        return torch.stack((total, squares.sqrt()))

    def update(self, rates: Rates, loss_and_norm: Tensor, number: int) -> None:
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

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        sizes = self._sizes(tokens)
        even = padded(targets, sizes, NO_TARGET)
        loss: Tensor = self.model.gathered_loss(padded(tokens, sizes), even)  # type: ignore[operator]
        return loss * (even.numel() / targets.numel())

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.model.gathered_hidden(padded(tokens, self._sizes(tokens)))  # type: ignore[operator]
        return hidden[: tokens.size(0), : tokens.size(1)]

    def _sizes(self, tokens: Tensor) -> list[int]:
        """The sizes to which this rank pads (B, T) tokens. With tensor parallelism they are the largest ones of all
        ranks, since gathered inputs must be equally large. A collective call."""
        return [self.world.most(size) for size in tokens.shape] if self.tensor > 1 else list(tokens.shape)

    @torch.no_grad()
    def head(self, x: Tensor) -> Tensor:
        return self.model.head(x)  # its weights are gathered since `hidden`

    def pieces(self) -> dict[str, Piece]:
        shards = dict(self.shards.named_parameters())
        found = self._pieces_of("model", shards)
        for kind, tensors in self.optimizer.state().items():
            found |= self._pieces_of(kind, {name: tensors[p] for name, p in shards.items() if p in tensors})
        for name, squares in self.optimizer.squares.items():
            found[f"squares.{name}"] = Piece(squares, 0, tuple(squares.shape), False, stored=self.copy == 0)
        return found

    def _pieces_of(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        """The pieces of tensors that are cut as the parameters with their names."""
        found = {}
        for number, (name, p) in enumerate(self.shards.whole.items()):
            if name in tensors:
                live, at = tensors[name].detach().view(-1), 0
                holder = self.world.rank % self.tensor == number % self.tensor
                stored = number % self.copies == self.copy and (holder or self.shards.holders[name] == 1)
                for part, place in enumerate(self.shards.places[name]):
                    key = f"{kind}.{name}#{part}" if part else f"{kind}.{name}"
                    piece = live[at : at + place.size]
                    found[key] = Piece(piece, place.start, tuple(p.shape), False, stored, place.count)
                    at += place.size
        return found

    def restore(self, state: TrainState) -> None:
        self.optimizer.set_steps(state.optimizer_steps)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.shards.whole.items():
            whole = p.full_tensor()
            if self.world.rank == 0:
                if packed(name):
                    whole = whole.view(self.tensor, 3, -1).transpose(0, 1).reshape(whole.shape)
                yield name, whole.detach().cpu()

    def extra_metrics(self) -> dict[str, float]:
        return {}

    def warnings(self) -> list[str]:
        return []


class Shards(nn.Module):
    """This rank's shards of a model's parameters, as parameters of the same names: an optimizer works on them as on a
    whole model. A rank may have no rows of a small parameter, which then is not among them.

    `mesh`: its dimension `shard` has the ranks that divide a copy of the state; of these, `tensor` neighbours divide
    each product. `whole` has the sharded parameters: those of the model are other ones while they are gathered.
    `holders`: how many ranks of a copy have the same shard.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, tensor: int) -> None:
        super().__init__()
        self.mesh, self.tensor = mesh, tensor
        self.whole = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        self.own = {name: nn.Parameter(shard_of(p)) for name, p in self.whole.items() if shard_of(p).numel()}
        self.places = {name: self.places_of(name, mesh.get_local_rank("shard")) for name in self.whole}
        self.holders = {name: 1 if self.divided(name) else tensor for name in self.whole}

    def divided(self, name: str) -> bool:
        """Whether the ranks that divide a product have different parts of a parameter."""
        return not name.startswith("h.") or not self.whole[name].placements[-1].is_replicate()

    def places_of(self, name: str, rank: int) -> list[Place]:
        """The parts of a parameter that a rank of a copy has, in the order of its memory. FSDP2 divides the rows that
        tensor parallelism leaves to a rank."""
        p, ranks, number, tensor = self.whole[name], self.mesh.size(-1), 0, 1
        if self.tensor > 1 and name.startswith("h."):
            ranks, (rank, number) = ranks // self.tensor, divmod(rank, self.tensor)
            tensor = self.tensor if self.divided(name) else 1
        width = prod(p.shape[1:])
        columns = p.placements[-1].is_shard(1)
        rows = p.shape[0] if columns else p.shape[0] // tensor
        first, last = (min(n * -(-rows // ranks), rows) for n in (rank, rank + 1))
        if columns and tensor > 1:
            part = width // tensor
            return [Place(first * width + number * part, part, last - first, width)] if first < last else []
        number = number if tensor > 1 else 0
        found, each = [], rows // (3 if tensor > 1 and packed(name) else 1)
        for which in range(rows // each):  # of queries, keys and values
            start, end = max(first, which * each), min(last, (which + 1) * each)
            if start < end:
                found.append(
                    Place(((which * tensor + number) * each + start - which * each) * width, (end - start) * width)
                )
        return found

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.own.items()


def sharded_muon(shards: Shards, config: TrainConfig) -> Muon:
    """Muon over shards: the owners of the matrices make their directions (trainer/optim/owners.py)."""
    shapes = {name: tuple(p.shape) for name, p in shards.whole.items() if group_of(name, p.dim()) == "matrix"}
    ranks, own, group = shards.mesh.size(-1), shards.mesh.get_local_rank("shard"), shards.mesh.get_group("shard")
    slices = [slices_of({name: shards.places_of(name, rank) for name in shapes}) for rank in range(ranks)]
    return Muon(shards, config, shapes, slices, own, group)


def mesh_of(world: World, **sizes: int) -> DeviceMesh:
    """The ranks in these dimensions, the last one of neighbours; without `replicate` for a single copy of the state."""
    sizes = {name: size for name, size in sizes.items() if name != "replicate" or size > 1}
    return init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def check_tensor_parallel(config: ModelConfig, ranks: int, size: int) -> None:
    """UserError if the ranks cannot divide the model's products, or not their own number `size`."""
    where = f"runtime.tensor_parallel: {ranks}"
    inner = getattr(config, "inner", 4 * config.n_embd)
    for number, of in (
        (config.n_head, "heads"),
        (config.kv_heads, "heads of keys"),
        (inner, "columns of the MLP"),
    ):
        if number % ranks:
            raise UserError(f"{where} does not divide the model's {number} {of}; use a divisor")
    if size % ranks:
        raise UserError(f"{where} does not divide the {size} ranks of a copy of the state; use a divisor")


def divide(block: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the products of a block, whose inputs and outputs are sequences of each rank's own."""
    attention: Any = block.attn
    attention.n_head //= mesh.size()
    if hasattr(attention, "kv_heads"):
        attention.kv_heads //= mesh.size()
    styles: dict[str, ParallelStyle] = {}
    for name, module in block.named_modules():
        if name in ("attn", "mlp"):
            module.register_forward_pre_hook(partial(gathered, mesh))
        elif name == "attn.ve_gate":  # of each rank's own sequences
            styles[name] = SequenceParallel(sequence_dim=0, use_local_output=True)
        elif isinstance(module, nn.Linear):
            into_residual = name.endswith(("c_proj", "o_proj", "down_proj"))
            styles[name] = RowwiseParallel(output_layouts=Shard(0)) if into_residual else ColwiseParallel()
        elif name in ("attn.q_norm", "attn.k_norm"):  # of each rank's heads
            styles[name] = SequenceParallel(sequence_dim=1, use_local_output=True)
        elif name:
            styles[name] = SequenceParallel(sequence_dim=0)
    parallelize_module(block, mesh, styles)


def use_float8(blocks: nn.Module, device: torch.device) -> None:
    """Make the products of the blocks compute in fp8, scaled by each tensor's largest value (torchao); emulated in
    float32 without a GPU. UserError if torchao is missing or the GPU has no fp8."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"train.precision: fp8 in the engine sharded needs torchao: {how_to_install('float8')}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(f"train.precision: {torch.cuda.get_device_name(device)} does not have fp8; use bf16")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        blocks,
        config=Float8LinearConfig(emulate=device.type != "cuda"),
        module_filter_fn=lambda module, _: module.in_features % 16 == module.out_features % 16 == 0,
    )


def gathered(mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a module, with the sequences of all ranks that divide its products: the first one, and the values
    (B, T, kv_heads, D) that attention adds, whose heads the ranks divide."""

    def moved(x: Tensor, to: Placement) -> DTensor:
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Shard(0)])
        return x.redistribute(placements=[to])

    found = [moved(inputs[0], Replicate()), *inputs[1:]]
    if len(found) > 4 and found[4] is not None:
        found[4] = moved(found[4], Shard(2)).to_local()
    return tuple(found)


def padded(tokens: Tensor, sizes: list[int], value: int = 0) -> Tensor:
    """Tokens (B, T), padded at the ends to these sizes."""
    more = [size - own for size, own in zip(sizes, tokens.shape, strict=True)]
    return F.pad(tokens, (0, more[1], 0, more[0]), value=value) if any(more) else tokens


def packed(name: str) -> bool:
    """Whether a parameter has the rows of queries, keys and values. Ranks divide each of the three by heads, so
    DTensor's order of the rows is: queries, keys and values of the first rank, those of the second one, and so on."""
    return ".c_attn." in name


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
