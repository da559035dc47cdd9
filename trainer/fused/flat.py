"""All parameters in flat buffers, and the optimizer's state cut up among the ranks (ZeRO-1; Rajbhandari et al. 2020).

Bytes a parameter: every rank has the weights in bf16 (2) and the gradients in fp32 (4); the fp32 master weights and
the two moments, which only the update needs (12), are cut into W shards. 1558M: 9.4 GB + 18.7 GB / W. Gradients
that travel in bf16 are copied for it (2 more).

Bytes a parameter on the wire, sent by each rank in a step: the reduce-scatter of fp32 gradients 4·(W-1)/W, of bf16
ones half of it; the all-gather of the bf16 weights 2·(W-1)/W. The all-reduce that they take the place of is 8·(W-1)/W.
1558M on 4 GPUs: 4.7 GB + 2.3 GB, which NVLink's 450 GB/s each way carries in no less than 16 ms.

Neither need be waited for. A block's parameters are one bucket, and what is in no block another: a bucket's reduce
runs while the backward pass is at the block before it, its gather while the forward pass is at the blocks before it.
A shard is one W-th of every bucket, not of the whole, so all ranks share in each bucket's update. All of it is done
in place: a rank's shard of the summed gradient arrives where its own gradient lay, and its shard of the new weights
is gathered from where the update wrote it.

Nothing here waits for the device: whether a step is fit to be applied, and by how much it is clipped, is decided there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ModelConfig, RuntimeConfig, TrainConfig
from trainer.model import GPT, draw
from trainer.parallel import World
from trainer.pieces import Piece

# Elements: 128 bytes of bf16, a cache line. TMA and cuBLAS's best kernels want 16.
ALIGNED = 64
# Elements of a shard that one program of an element-wise kernel likes to find whole.
SHARD_MULTIPLE = 128


@dataclass(frozen=True)
class Place:
    """Where a parameter is."""

    bucket: int
    offset: int  # of its first element in its bucket
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of the flat buffers: matrices, then vectors, then padding, which stays 0."""

    start: int
    length: int
    decayed: int  # where its vectors begin: what is before them takes weight decay

    @property
    def range(self) -> slice:
        return slice(self.start, self.start + self.length)


class Layout:
    """Where everything is in the flat buffers: bucket i is block i, the last one wte, wpe and ln_f.

    Every parameter begins at a multiple of 64 elements, and a bucket's length is one of world_size · 128.
    """

    def __init__(self, config: ModelConfig, world_size: int) -> None:
        with torch.device("meta"):
            shapes = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
        self.places: dict[str, Place] = {}
        self.buckets: list[Bucket] = []
        for index in range(config.n_layer + 1):
            names = [name for name in shapes if bucket_of(name, config.n_layer) == index]
            offset = decayed = 0
            for name in sorted(names, key=lambda n: -len(shapes[n])):
                self.places[name] = Place(index, offset, shapes[name])
                offset = _rounded_up(self.places[name].end, ALIGNED)
                if len(shapes[name]) > 1:
                    decayed = offset
            length = _rounded_up(offset, world_size * SHARD_MULTIPLE)
            self.buckets.append(Bucket(self.size, length, decayed))

    @property
    def size(self) -> int:
        """Elements of a flat buffer."""
        return sum(bucket.length for bucket in self.buckets)


def bucket_of(name: str, n_layer: int) -> int:
    """The bucket that a parameter is in, by its name."""
    return int(name.split(".")[1]) if name.startswith("h.") else n_layer


def _rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class FlatState:
    """Weights, gradients and AdamW's state of a model in training, as one of `world`'s ranks holds them.

    weights and gradients are views by parameter name, bf16 and fp32, of the parameter's shape. In every step, all
    gradients are overwritten, `begin_reduce` is called for every bucket, in the same order on all ranks, once its
    gradients are on their way, then `finish` and `update`; and `ready` before a bucket's weights are used.
    While `rehearsing`, nothing is sent and nobody waited for.
    """

    def __init__(self, config: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, world: World) -> None:
        self.config, self.train, self.world = config, train, world
        self.layout = Layout(config, world.world_size)
        self.shards = world.world_size if runtime.data_parallel == "zero1" else 1
        self.shard = world.rank if self.shards > 1 else 0
        size, device = self.layout.size, world.device
        self._weights = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self._gradients = torch.zeros(size, device=device)  # what lies between parameters counts for the norm, too
        bf16 = runtime.reduce_dtype == "bf16" and world.world_size > 1
        self._reduced = torch.empty_like(self._weights) if bf16 else self._gradients
        self.master, self.exp_avg, self.exp_avg_sq = (torch.zeros(size // self.shards, device=device) for _ in range(3))
        self.weights = self._views(self._weights)
        self.gradients = self._views(self._gradients)
        self._numbers = torch.zeros(5, device=device)
        self._adamw = adamw_for(device)
        self.rehearsing = False
        self._reduces: list[dist.Work] = []
        self._gathers: dict[int, dist.Work] = {}

    def initialize(self, seed: int) -> None:
        """The weights that GPT.initialize draws; each rank draws those that it has a part of."""
        mine = {name: torch.empty(self.layout.places[name].shape) for name in self._pieces(self.master)}
        draw(mine, self.config, seed)
        self.load(mine)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over weights of any dtype and device by name; the moments stay as they are."""
        for name, piece in self._pieces(self.master).items():
            piece.live.copy_(state[name].reshape(-1)[piece.start : piece.end])
        self.loaded()

    def loaded(self) -> None:
        """Make the bf16 weights of the master weights, after these were loaded."""
        for index, bucket in enumerate(self.layout.buckets):
            self._weights[self._mine(bucket)].copy_(self.master[self._kept(bucket)])
            self._begin_gather(index)
        self.ready()

    def begin_reduce(self, index: int) -> None:
        """Begin to average a bucket's gradients over the ranks, behind what the current stream has to do by now."""
        if self._ranks == 1:
            return
        bucket = self.layout.buckets[index]
        part = self._reduced[bucket.range]
        if self._reduced is not self._gradients:
            part.copy_(self._gradients[bucket.range])
        self._reduces.append(self._reduce(part, self._reduced[self._mine(bucket)]))

    def _reduce(self, part: Tensor, mine: Tensor) -> dist.Work:
        if part.device.type == "cpu":  # gloo has no mean, and scatters nothing in place: the rest of `part` is idle
            return dist.all_reduce(part.div_(self.world.world_size), async_op=True)
        if self.shards == 1:
            return dist.all_reduce(part, op=dist.ReduceOp.AVG, async_op=True)
        return dist.reduce_scatter_tensor(mine, part, op=dist.ReduceOp.AVG, async_op=True)

    def finish(self, loss: Tensor) -> Tensor:
        """(2,) fp32 on the device: the mean over ranks of `loss` (scalar), and the norm of the mean gradient."""
        ranks = self._ranks
        assert len(self._reduces) == (len(self.layout.buckets) if ranks > 1 else 0), "a bucket was left out"
        while self._reduces:
            self._reduces.pop(0).wait()
        shards = [self._reduced[self._mine(bucket)] for bucket in self.layout.buckets]
        squares = torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float32)).square().sum()
        # Without shards, every rank has the square of the whole norm.
        found = torch.stack([loss.float() / ranks, squares * self.shards / ranks])
        if ranks > 1:
            dist.all_reduce(found)
        found[1].sqrt_()
        return found

    @property
    def _ranks(self) -> int:
        """How many take part in a step's gradients."""
        return 1 if self.rehearsing else self.world.world_size

    def update(self, learning_rate: float, step: int, found: Tensor) -> None:
        """AdamW's update number `step` (from 1), clipped; nothing changes where `found`, of `finish`, is not finite."""
        numbers, train = self._numbers, self.train
        # By fill_, the numbers travel as arguments of the kernels: a copy from the host would have to be waited for.
        numbers[0].fill_(learning_rate)
        numbers[1].fill_(1 / (1 - train.beta1**step))
        numbers[2].fill_(1 / (1 - train.beta2**step))
        if train.grad_clip is None:
            numbers[3].fill_(1.0)
        else:
            numbers[3].copy_((train.grad_clip / (found[1] + 1e-6)).clamp(max=1.0))
        numbers[4].copy_(found.isfinite().all())
        last = len(self.layout.buckets) - 1
        for index in (last, *range(last)):  # as the forward pass needs them: embeddings first
            self._update_bucket(self.layout.buckets[index])
            self._begin_gather(index)

    def _update_bucket(self, bucket: Bucket) -> None:
        mine, kept, train = self._mine(bucket), self._kept(bucket), self.train
        buffers = [self._weights[mine], *(t[kept] for t in self._kept_buffers()), self._reduced[mine]]
        length = bucket.length // self.shards
        decayed = min(max(0, bucket.start + bucket.decayed - mine.start), length)
        for part, decay in ((slice(0, decayed), train.weight_decay), (slice(decayed, length), 0.0)):
            if part.start < part.stop:
                of_part = (buffer[part] for buffer in buffers)
                self._adamw(*of_part, self._numbers, decay, train.beta1, train.beta2, train.epsilon)

    def _begin_gather(self, index: int) -> None:
        if self.shards > 1:
            bucket = self.layout.buckets[index]
            self._gathers[index] = dist.all_gather_into_tensor(
                self._weights[bucket.range], self._weights[self._mine(bucket)], async_op=True
            )

    def ready(self, index: int | None = None) -> None:
        """Let the current stream wait until a bucket's weights are those of the last update; all of them by default."""
        for each in [index] if index is not None else list(self._gathers):
            if gather := self._gathers.pop(each, None):
                gather.wait()

    def pieces(self) -> dict[str, Piece]:
        """What a checkpoint holds of this rank, named as the plain path's; call `loaded` after a load into them."""
        kinds = zip(("model", "exp_avg", "exp_avg_sq"), self._kept_buffers(), strict=True)
        return {f"{kind}.{name}": piece for kind, buffer in kinds for name, piece in self._pieces(buffer).items()}

    def full_weights(self) -> dict[str, Tensor]:
        """All master weights, fp32 on the CPU, on rank 0; nothing on the others, which have to call it, too."""
        state: dict[str, Tensor] = {}
        for index, bucket in enumerate(self.layout.buckets):
            whole = self.master[self._kept(bucket)]
            if self.shards > 1:
                shard, whole = whole, whole.new_empty(bucket.length)
                dist.all_gather_into_tensor(whole, shard)
            for name, place in self.layout.places.items():
                if place.bucket == index and self.world.rank == 0:
                    state[name] = whole[place.offset : place.end].view(place.shape).to("cpu", copy=True)
        return state

    def _kept_buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq

    def _mine(self, bucket: Bucket) -> slice:
        """This rank's shard of a bucket in the buffers that hold all of it."""
        length = bucket.length // self.shards
        return slice(bucket.start + self.shard * length, bucket.start + (self.shard + 1) * length)

    def _kept(self, bucket: Bucket) -> slice:
        """The same in the buffers that hold nothing else."""
        return slice(bucket.start // self.shards, (bucket.start + bucket.length) // self.shards)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        views = {}
        for name, place in self.layout.places.items():
            start = self.layout.buckets[place.bucket].start
            views[name] = flat[start + place.offset : start + place.end].view(place.shape)
        return views

    def _pieces(self, kept: Tensor) -> dict[str, Piece]:
        """What this rank holds of each parameter, if anything, in one of the buffers of its shards."""
        pieces = {}
        for name, place in self.layout.places.items():
            bucket = self.layout.buckets[place.bucket]
            mine, at = self._mine(bucket), self._kept(bucket).start
            start, end = mine.start - bucket.start, mine.stop - bucket.start
            first, last = max(start, place.offset), min(end, place.end)
            if first < last:
                live = kept[at + first - start : at + last - start]
                pieces[name] = Piece(live, first - place.offset, place.shape, replicated=self.shards == 1)
        return pieces


def adamw_for(device: torch.device) -> Callable[..., None]:
    """The update of flat slices: one kernel on a GPU, torch's operations elsewhere."""
    if device.type == "cuda":
        from trainer.fused.kernels import adamw

        return adamw
    return adamw_in_torch


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
    """kernels.adamw on the CPU: flat slices of one length, changed in place; weights become master's in bf16."""
    learning_rate, correction1, correction2, scale, apply = numbers.tolist()
    if not apply:
        return
    gradient = gradient.float() * scale
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    master.mul_(1 - learning_rate * weight_decay)
    master.addcdiv_(exp_avg, (exp_avg_sq * correction2).sqrt_().add_(epsilon), value=-learning_rate * correction1)
    weights.copy_(master)
