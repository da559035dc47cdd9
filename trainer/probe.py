"""A short test of this rank's device: a matrix product and an all-reduce whose results are known, and its time.

The matrices hold small integers, so every engine and precision gives the same exact sums, and Freivalds' method
(C·r = A·(B·r)) checks the product on the host with few operations. A wrong sum of all ranks looks alike on every rank.
So each rank also checks its own part, and if a sum is wrong, all pairs of ranks exchange their parts directly.
"""

import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from trainer.parallel import World

SIZE_ON_GPU, SIZE_ON_CPU = 4096, 256  # of the matrices: 0.14 TFLOP a product, 0.2 ms on an H100
TIMINGS, PRODUCTS_ON_GPU = 5, 50
WARM_UP = 500  # products: the clock of an idle GPU takes some 0.1 s to rise
ALL_REDUCED = 1 << 20  # elements


@dataclass(frozen=True)
class Probe:
    """What the test of one rank's device found."""

    device: str
    seconds: float  # of one product, the median
    wrong: str | None = None  # what is not as it must be, and can only be this rank's fault
    sum_is_wrong: bool = False  # the sum over all ranks, for which any of them or a link can be the cause
    wrong_from: tuple[int, ...] = ()  # if any rank's sum is wrong: the ranks whose numbers arrive wrongly here


def probe_device(world: World) -> Probe:
    """Test this rank's device, and the exchange with the others. A collective call."""
    on_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if on_gpu else world.device.type
    size = SIZE_ON_GPU if on_gpu else SIZE_ON_CPU
    seconds, right = product(world.device, size, WARM_UP if on_gpu else 1, PRODUCTS_ON_GPU if on_gpu else 1)
    wrong = None if right else f"a product of {size:,} x {size:,} matrices is wrong"
    part = numbers_of(world.rank, world.device)
    if not torch.equal((part + part).cpu(), 2 * numbers_of(world.rank, torch.device("cpu"))):
        wrong = wrong or "its own part of the sum of all ranks is wrong"
    sum_is_wrong = not all_reduce_is_right(world, part.clone())
    wrong_from = wrong_senders(world, part) if any(world.gather(sum_is_wrong)) else ()
    return Probe(name, seconds, wrong, sum_is_wrong, wrong_from)


def product(device: torch.device, size: int, warm_up: int, at_once: int) -> tuple[float, bool]:
    """The seconds of a matrix product, the median of some timings, and whether its result is right."""
    draw = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randint(-1, 2, (size, size), generator=draw, dtype=torch.int8).float() for _ in range(2))
    a[:, 64:] = 0  # so that each sum is at most 64, and bf16 holds it
    there = a.to(device, dtype), b.to(device, dtype)
    times = []
    for count in (warm_up, *[at_once] * TIMINGS):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            result = there[0] @ there[1]
        synchronize(device)
        times.append((time.perf_counter() - started) / count)
    r = torch.randint(1, 4, (size,), generator=draw, dtype=torch.int8).float()  # no zero, which would hide a column
    return median(times[1:]), torch.equal(result.cpu().float() @ r, a @ (b @ r))


def numbers_of(rank: int, device: torch.device) -> torch.Tensor:
    """A rank's part of the sum."""
    return (torch.arange(ALL_REDUCED, dtype=torch.float32, device=device) % 1024) * (rank + 1)


def all_reduce_is_right(world: World, part: torch.Tensor) -> bool:
    """Whether the sum of all ranks' parts over their links is right; it overwrites `part`. A collective call."""
    world.mean_(part)
    return torch.equal(part.cpu(), numbers_of(0, torch.device("cpu")) * (world.world_size + 1) / 2)


def wrong_senders(world: World, part: torch.Tensor) -> tuple[int, ...]:
    """The ranks whose parts arrive wrongly at this rank, sent by each to each directly. A collective call."""
    wrong, arrived, n = [], torch.empty_like(part), world.world_size
    for shift in range(1, n):
        target, source = (world.rank + shift) % n, (world.rank - shift) % n
        both = [dist.P2POp(dist.isend, part, target), dist.P2POp(dist.irecv, arrived, source)]
        for transfer in dist.batch_isend_irecv(both):
            transfer.wait()
        if not torch.equal(arrived.cpu(), numbers_of(source, torch.device("cpu"))):
            wrong.append(source)
    return tuple(sorted(wrong))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
