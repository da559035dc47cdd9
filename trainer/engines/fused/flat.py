"""All parameters in flat buffers, and the optimizer's state sharded over the ranks (ZeRO-1; Rajbhandari et al. 2020).

Bytes a parameter: every rank has the weights in bf16 (2) and the gradients in fp32 (4). Only the update needs the fp32
master weights and the two moments (12); they are cut into W shards. 1558M: 9.4 GB + 18.7 GB / W. Gradients that are
reduced in bf16 have a bf16 copy (2 more).

Bytes a parameter that each rank sends in a step: the reduce-scatter of fp32 gradients 4·(W-1)/W, of bf16 ones half of
it; the all-gather of the bf16 weights 2·(W-1)/W. The all-reduce that they replace sends 8·(W-1)/W.
1558M on 4 GPUs: 4.7 GB + 2.3 GB, which NVLink's 450 GB/s each way carries in no less than 16 ms.

Both overlap with computation. The parameters of a block are one bucket, and all others are another one. The reduce of a
bucket runs during the backward pass of the block before it, its all-gather during the forward pass of the blocks before
it. A shard is one W-th of every bucket, not of the whole, so all ranks share in each bucket's update. All of it is done
in place: a rank receives its shard of the summed gradient where its own gradient lay, and the all-gather sends its
shard of the new weights from where the update wrote it.

With Muon, the matrices of the blocks have a momentum instead of two moments; trainer/optim/owners.py tells how a matrix
that shards cut gets its direction.

Nothing here waits for the device: it decides itself whether to apply a step, and how much to clip it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.parallel import World
from trainer.base.places import Place
from trainer.checkpoint.pieces import Piece
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.model_config import ModelConfig
from trainer.models.family import plain_model
from trainer.optim import muon
from trainer.optim.owners import Exchange, Owners, Slice
from trainer.optim.rates import Group, Moments, Rates, group_of, moments_of

# Elements: 128 bytes of bf16, a cache line. TMA and cuBLAS's best kernels want 16.
ALIGNED = 64
# Elements: a shard's length is a multiple of it, so that the programs of an element-wise kernel have full blocks.
SHARD_MULTIPLE = 128


@dataclass(frozen=True)
class ParameterSlot:
    """The range of a bucket that a parameter takes."""

    bucket: int
    offset: int  # of its first element in its bucket
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape)


@dataclass(frozen=True)
class GroupRange:
    """The range of a bucket whose parameters are of one group."""

    start: int
    end: int
    group: Group


# What a sharded buffer holds of its rank's shards: all, the part that Muon moves, or the part that AdamW moves.
Held = Literal["all", "muon", "adamw"]


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of the flat buffers: matrices, then vectors, then padding, which stays 0."""

    index: int
    start: int
    length: int
    segments: tuple[GroupRange, ...]  # of the whole bucket; the padding belongs to the last one
    muon: int  # the end of the parameters that Muon moves; AdamW moves those after it

    @property
    def range(self) -> slice:
        return slice(self.start, self.start + self.length)

    def shard(self, index: int, shards: int, held: Held = "all") -> tuple[int, int]:
        """The range that a buffer holds of a shard, from the start of the bucket on."""
        length = self.length // shards
        start, end = index * length, (index + 1) * length
        border = min(max(self.muon, start), end)
        return {"all": (start, end), "muon": (start, border), "adamw": (border, end)}[held]


class Layout:
    """The slots of all parameters in the flat buffers: bucket i is block i, the last one has the others.

    Every parameter begins at a multiple of 64 elements, and a bucket's length is one of world_size · 128.
    """

    def __init__(self, config: ModelConfig, world_size: int, with_muon: bool = False) -> None:
        with torch.device("meta"):
            self.model = plain_model(config)
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.slots: dict[str, ParameterSlot] = {}
        self.buckets: list[Bucket] = []
        self.matrices: list[list[str]] = []  # of each bucket
        for index in range(config.n_layer + 1):
            names = [name for name in shapes if bucket_of(name, config.n_layer) == index]
            groups = {name: group_of(name, len(shapes[name])) for name in names}
            self.matrices.append([name for name in names if groups[name] == "matrix"])
            offset, ends = 0, dict[Group, int]()
            for name in sorted(names, key=lambda n: get_args(Group).index(groups[n])):
                self.slots[name] = ParameterSlot(index, offset, shapes[name])
                offset = ends[groups[name]] = _rounded_up(self.slots[name].end, ALIGNED)
            length = _rounded_up(offset, world_size * SHARD_MULTIPLE)
            borders = [0, *list(ends.values())[:-1], length]
            segments = tuple(map(GroupRange, borders, borders[1:], ends))
            end_of_muon = ends.get("matrix", 0) if with_muon else 0
            self.buckets.append(Bucket(index, self.size, length, segments, end_of_muon))

    @property
    def size(self) -> int:
        """Elements of a flat buffer."""
        return sum(bucket.length for bucket in self.buckets)

    def places(self, rank: int, shards: int, held: Held) -> list[int]:
        """Where each bucket begins in a buffer of a rank's shards, and the buffer's size."""
        ranges = [bucket.shard(rank, shards, held) for bucket in self.buckets]
        return list(accumulate((end - start for start, end in ranges), initial=0))

    def slices(self, rank: int, shards: int, held: Held) -> list[Slice]:
        """The parts of the parameters that such a buffer holds, in its order."""
        places, found = self.places(rank, shards, held), []
        for name, slot in self.slots.items():
            start, end = self.buckets[slot.bucket].shard(rank, shards, held)
            first, last = max(start, slot.offset), min(end, slot.end)
            if first < last:
                at = places[slot.bucket] + first - start
                found.append(Slice(name, Place(first - slot.offset, last - first), at))
        return found


def bucket_of(name: str, n_layer: int) -> int:
    """The index of a parameter's bucket, from its name."""
    return int(name.split(".")[1]) if name.startswith("h.") else n_layer


def _rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class FlatState:
    """Weights, gradients and optimizer state of a model in training, as one rank of `world` holds them.

    weights (bf16) and gradients (fp32) are views by parameter name, of the parameter's shape. In every step the caller
    overwrites all gradients; calls `begin_reduce` for each bucket, in the same order on all ranks, once the kernels
    that write its gradients are launched; then calls `finish` and `update`. It calls `ready` before it uses the weights
    of a bucket. While `rehearsing`, this rank sends nothing and waits for no other.
    """

    def __init__(self, config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world: World) -> None:
        self.config, self.train, self.world = config, train, world
        self.layout = Layout(config, world.world_size, train.optimizer == "muon")
        self.shards, self.shard_index = world.world_size, world.rank
        size, device = self.layout.size, world.device
        self._weights = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self._gradients = torch.zeros(size, device=device)  # the norm includes the gaps between parameters: they stay 0
        bf16 = runtime.reduce_dtype == "bf16" and world.world_size > 1
        self._reduced = torch.empty_like(self._weights) if bf16 else self._gradients
        self._places = {h: self.layout.places(self.shard_index, self.shards, h) for h in get_args(Held)}
        self.master = torch.zeros(self._places["all"][-1], device=device)
        self.exp_avg, self.exp_avg_sq = (torch.zeros(self._places["adamw"][-1], device=device) for _ in range(2))
        self.momentum = torch.zeros(self._places["muon"][-1], device=device)
        self._kernels = Kernels.of(device)
        self.owners = self._owners()
        self.weights = self._views(self._weights)
        self._exact, self._exact_parts = self._in_float32()
        self.gradients = self._views(self._gradients)
        # Rows of 32 bytes, so that each group's numbers are as aligned as a buffer of their own. AdamW alone needs one.
        rows = torch.zeros(len(get_args(Group)), 8, device=device)[:, :5]
        by_muon = train.optimizer == "muon"
        self._numbers: dict[Group, Tensor] = {g: rows[i * by_muon] for i, g in enumerate(get_args(Group))}
        self._with_numbers: tuple[Group, ...] = get_args(Group) if by_muon else ("vector",)
        self.rehearsing = False
        self._reduces: list[dist.Work] = []
        self._gathers: dict[int, dist.Work] = {}
        self._exact_sum: dist.Work | None = None
        moved = [group for group in get_args(Group) if group != "matrix" or not by_muon]
        self._moments: dict[Group, Moments] = {group: moments_of(group, train) for group in moved}

    def initialize(self, seed: int) -> None:
        """Set the weights that the plain module draws; each rank draws only its shards."""
        weights = {name: torch.empty(self.layout.slots[name].shape) for name in self._pieces(self.master, "all")}
        self.layout.model.draw(weights, self.config, seed)
        self.load(weights)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights of any dtype and device by name; the moments stay as they are."""
        for name, piece in self._pieces(self.master, "all").items():
            piece.live.copy_(state[name].reshape(-1)[piece.start : piece.end])
        self.restore()

    def restore(self) -> None:
        """Make the bf16 weights from the master weights, after a load of these."""
        for index, bucket in enumerate(self.layout.buckets):
            self._weights[self._in_full(bucket)].copy_(self.master[self._in_shards(bucket)])
            self._begin_gather(index)
        self._share_exact()
        self.ready()

    def begin_reduce(self, index: int) -> None:
        """Begin to average a bucket's gradients over the ranks, after the work that the current stream has by now."""
        if self._ranks == 1:
            return
        bucket = self.layout.buckets[index]
        whole = self._reduced[bucket.range]
        if self._reduced is not self._gradients:
            whole.copy_(self._gradients[bucket.range])
        self._reduces.append(self._reduce(whole, self._reduced[self._in_full(bucket)]))

    def _reduce(self, whole: Tensor, shard: Tensor) -> dist.Work:
        if whole.device.type == "cpu":  # gloo has no mean and no reduce-scatter in place; the other shards are unused
            return dist.all_reduce(whole.div_(self.world.world_size), async_op=True)
        return dist.reduce_scatter_tensor(shard, whole, op=dist.ReduceOp.AVG, async_op=True)

    def finish(self, loss: Tensor) -> Tensor:
        """(2,) fp32 on the device: the mean over ranks of `loss` (scalar), and the norm of the mean gradient."""
        ranks = self._ranks
        assert len(self._reduces) == (len(self.layout.buckets) if ranks > 1 else 0), (
            "begin_reduce was not called for every bucket"
        )
        while self._reduces:
            self._reduces.pop(0).wait()
        shards = [self._reduced[self._in_full(bucket)] for bucket in self.layout.buckets]
        squares = torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float32)).square().sum()
        loss_and_norm = torch.stack([loss.float() / ranks, squares])
        if ranks > 1:
            dist.all_reduce(loss_and_norm)
        loss_and_norm[1].sqrt_()
        return loss_and_norm

    @property
    def _ranks(self) -> int:
        """The number of ranks that take part in a step's gradients."""
        return 1 if self.rehearsing else self.world.world_size

    def update(self, rates: Rates, step: int, loss_and_norm: Tensor) -> None:
        """The optimizer's update number `step` (from 1), clipped.

        loss_and_norm: the result of `finish`. If it is not finite, nothing changes.
        """
        self._set_numbers(rates, step, loss_and_norm)
        exchange = self._look_ahead(rates.momentum) if self.train.optimizer == "muon" else None
        last = len(self.layout.buckets) - 1
        for index in (last, *range(last)):  # in the order of the forward pass: embeddings first
            self._update_by_adamw(self.layout.buckets[index])
            if exchange is None or not self.layout.buckets[index].muon:
                self._begin_gather(index)
        self._share_exact()
        if exchange:
            apply = self._numbers["matrix"][4]
            exchange.finish(apply * (1 - muon.BETA2))
            for index, bucket in enumerate(self.layout.buckets):
                if bucket.muon:
                    self._update_by_muon(bucket, exchange.buffer, rates.matrix_decay)
                    self._begin_gather(index)

    def _set_numbers(self, rates: Rates, step: int, loss_and_norm: Tensor) -> None:
        train, apply = self.train, loss_and_norm.isfinite().all()
        scale = (train.grad_clip / (loss_and_norm[1] + 1e-6)).clamp(max=1.0) if train.grad_clip is not None else None
        for group in self._with_numbers:
            numbers = self._numbers[group]
            # fill_ passes a number as a kernel argument. A copy from the host would have to wait for the device.
            numbers[0].fill_(rates.of[group])
            if group in self._moments:
                numbers[1].fill_(1 / (1 - self._moments[group].beta1 ** step))
                numbers[2].fill_(1 / (1 - self._moments[group].beta2 ** step))
            numbers[3].fill_(1.0) if scale is None else numbers[3].copy_(scale)
            numbers[4].copy_(apply)

    def _update_by_adamw(self, bucket: Bucket) -> None:
        start, end = bucket.shard(self.shard_index, self.shards, "adamw")
        for segment in bucket.segments:
            first, last = max(start, segment.start), min(end, segment.end)
            if first < last and segment.group in self._moments:  # not the padding behind Muon's
                full = slice(bucket.start + first, bucket.start + last)
                moments = (t[self._at(bucket, first, last, "adamw")] for t in (self.exp_avg, self.exp_avg_sq))
                buffers = self._weights[full], self.master[self._at(bucket, first, last)], *moments, self._reduced[full]
                beta1, beta2, epsilon, decay = self._moments[segment.group]
                self._kernels.adamw(*buffers, self._numbers[segment.group], decay, beta1, beta2, epsilon)

    def _look_ahead(self, m: float) -> Exchange:
        """Add the gradients of the matrices to the momentum, and begin to send it to the owners."""
        ahead = torch.empty_like(self.momentum, dtype=torch.bfloat16)
        for bucket in self.layout.buckets:
            start, end = bucket.shard(self.shard_index, self.shards, "muon")
            if start < end:
                held = self._at(bucket, start, end, "muon")
                gradient = self._reduced[bucket.start + start : bucket.start + end]
                self._kernels.look_ahead(ahead[held], self.momentum[held], gradient, self._numbers["matrix"], m)
        return self.owners.begin(ahead)

    def _update_by_muon(self, bucket: Bucket, directions: Tensor, decay: float) -> None:
        start, end = bucket.shard(self.shard_index, self.shards, "muon")
        for name in self.layout.matrices[bucket.index] if start < end else ():
            slot = self.layout.slots[name]
            first, last = max(start, slot.offset), min(end, slot.end)
            if first < last:
                weights = self._weights[bucket.start + first : bucket.start + last]
                master = self.master[self._at(bucket, first, last)]
                along = directions[self._at(bucket, first, last, "muon")]
                own = decay * muon.factor_of(name, *slot.shape)
                self._kernels.move(weights, master, along, self._numbers["matrix"], own)

    def _begin_gather(self, index: int) -> None:
        if self.shards > 1:
            bucket = self.layout.buckets[index]
            self._gathers[index] = dist.all_gather_into_tensor(
                self._weights[bucket.range], self._weights[self._in_full(bucket)], async_op=True
            )

    def ready(self, index: int | None = None) -> None:
        """Make the current stream wait for the last update of a bucket's weights; by default, of all buckets."""
        for each in [index] if index is not None else list(self._gathers):
            if gather := self._gathers.pop(each, None):
                gather.wait()
        if self._exact_sum:
            self._exact_sum.wait()
            self._exact_sum = None

    def pieces(self) -> dict[str, Piece]:
        """This rank's pieces for a checkpoint, named as PlainEngine's; call `restore` after a load into them."""
        kinds: tuple[tuple[str, Tensor, Held], ...] = (
            ("model", self.master, "all"),
            ("exp_avg", self.exp_avg, "adamw"),
            ("exp_avg_sq", self.exp_avg_sq, "adamw"),
            ("momentum", self.momentum, "muon"),
        )
        pieces = {f"{k}.{name}": p for k, buffer, held in kinds for name, p in self._pieces(buffer, held).items()}
        for name, squares in self.owners.squares.items():
            pieces[f"squares.{name}"] = Piece(squares, 0, tuple(squares.shape), replicated=self.shards == 1)
        return pieces

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All master weights by name, fp32 on the CPU, on rank 0; none on the others. All ranks have to exhaust it."""
        for index, bucket in enumerate(self.layout.buckets):
            whole = self.master[self._in_shards(bucket)]
            if self.shards > 1:
                shard, whole = whole, whole.new_empty(bucket.length)
                dist.all_gather_into_tensor(whole, shard)
            for name, slot in self.layout.slots.items():
                if slot.bucket == index and self.world.rank == 0:
                    yield name, whole[slot.offset : slot.end].view(slot.shape).to("cpu", copy=True)

    def _in_full(self, bucket: Bucket) -> slice:
        """This rank's shard of a bucket in the buffers that hold whole buckets."""
        length = bucket.length // self.shards
        return slice(bucket.start + self.shard_index * length, bucket.start + (self.shard_index + 1) * length)

    def _in_shards(self, bucket: Bucket) -> slice:
        """This rank's shard of a bucket in the master weights."""
        return slice(bucket.start // self.shards, (bucket.start + bucket.length) // self.shards)

    def _at(self, bucket: Bucket, first: int, last: int, held: Held = "all") -> slice:
        """The place of a range of a bucket in the sharded buffers that hold it."""
        start = self._places[held][bucket.index] - bucket.shard(self.shard_index, self.shards, held)[0]
        return slice(start + first, start + last)

    def _owners(self) -> Owners:
        """Of the matrices that Muon moves, as the shards of all ranks cut them."""
        slots = self.layout.slots
        slices = [self.layout.slices(rank, self.shards, "muon") for rank in range(self.shards)]
        shapes = {s.name: slots[s.name].shape for of_rank in slices for s in of_rank}
        return Owners(shapes, slices, self.shard_index, self.world.device, self._kernels.squared)

    def _in_float32(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """A buffer of the vectors that bf16 is too coarse for, all but biases and the weights beside these; it becomes
        their `weights`. With it, the parts that this rank's masters hold: there, and in the masters."""
        slots = self.layout.slots
        names = [n for n, s in slots.items() if len(s.shape) == 1 and f"{n.rpartition('.')[0]}.bias" not in slots]
        exact = torch.zeros(
            sum(_rounded_up(slots[name].shape[0], ALIGNED) for name in names), device=self.master.device
        )
        held, at, parts = self._pieces(self.master, "all"), 0, []
        for name in names:
            whole = exact[at : at + slots[name].shape[0]]
            at += _rounded_up(len(whole), ALIGNED)
            self.weights[name] = whole
            if piece := held.get(name):
                parts.append((whole[piece.start : piece.end], piece.live))
        return exact, parts

    def _share_exact(self) -> None:
        """Begin to bring the float32 vectors from the masters: each element has one rank, so that a sum is exact."""
        if not len(self._exact):
            return
        if self.shards > 1:
            self._exact.zero_()
        if self._exact_parts:
            live, held = zip(*self._exact_parts, strict=True)
            torch._foreach_copy_(live, held)
        if self.shards > 1:
            self._exact_sum = dist.all_reduce(self._exact, async_op=True)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views = {}
        for name, slot in self.layout.slots.items():
            start = self.layout.buckets[slot.bucket].start
            views[name] = flat[start + slot.offset : start + slot.end].view(slot.shape)
        return views

    def _pieces(self, buffer: Tensor, held: Held) -> dict[str, Piece]:
        """The part of each parameter that one of this rank's sharded buffers holds, if any."""
        slots, replicated = self.layout.slots, self.shards == 1
        slices = self.layout.slices(self.shard_index, self.shards, held)
        return {s.name: Piece(s.of(buffer), s.place.start, slots[s.name].shape, replicated) for s in slices}


class Kernels(NamedTuple):
    """The functions of an update: a kernel each on a GPU, torch's operations elsewhere."""

    adamw: Callable[..., None]
    look_ahead: Callable[..., None]
    move: Callable[..., None]
    squared: muon.Squared

    @classmethod
    def of(cls, device: torch.device) -> "Kernels":
        if device.type == "cuda":
            from trainer.engines.fused import kernels

            return cls(kernels.adamw, kernels.look_ahead, kernels.move, kernels.squared)
        return cls(adamw_in_torch, look_ahead_in_torch, move_in_torch, muon.squared)


def adamw_in_torch(
    weights: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    numbers: Tensor,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """kernels.adamw on the CPU: flat slices of one length, changed in place; weights become the master's in bf16."""
    learning_rate, correction1, correction2, scale, apply = numbers.tolist()
    if not apply:
        return
    gradient = gradient.float() * scale
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    master.mul_(1 - learning_rate * weight_decay)
    master.addcdiv_(exp_avg, (exp_avg_sq * correction2).sqrt_().add_(epsilon), value=-learning_rate * correction1)
    weights.copy_(master)


def look_ahead_in_torch(ahead: Tensor, momentum: Tensor, gradient: Tensor, numbers: Tensor, m: float) -> None:
    """kernels.look_ahead on the CPU."""
    _, _, _, scale, apply = numbers
    # A momentum that takes itself for the gradient stays as it is.
    ahead.copy_(muon.look_ahead(momentum, torch.where(apply != 0, gradient.float() * scale, momentum), m))


def move_in_torch(weights: Tensor, master: Tensor, directions: Tensor, numbers: Tensor, decay: float) -> None:
    """kernels.move on the CPU."""
    muon.move_(master, directions, numbers[0] * numbers[4], decay)
    weights.copy_(master)
