"""The ranks of a run: their numbers and devices, the mean of their gradients, and their agreement after each step.

The gradients of the plain module are one flat float32 buffer. A single all-reduce after the last micro-batch averages
it (for the fused step see trainer/engines/fused/flat.py). torch's DistributedDataParallel would overlap the all-reduce
with the backward pass, but it rebuilds its buckets after the first step. A resumed run would then add in another order
than an undisturbed one: with more than two ranks the losses would no longer be equal bit for bit.
"""

import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.process import Background, log_line
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import EXIT_INTERRUPTED, UnfitMachine, UserError, cut


@dataclass(frozen=True)
class Agreement:
    """The values of a step that are equal on all ranks."""

    loss: float = 0.0  # mean over ranks
    grad_norm: float = 0.0  # of the mean gradient, before clipping
    stop: bool = False  # any rank was asked to stop
    save: bool = False  # a checkpoint is due
    checksum: int = 0  # of the tokens that all ranks read, see `TokenData.checksum`


@dataclass(frozen=True)
class World:
    """This rank among `world_size`, and its device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    _closing: threading.Event = field(default_factory=threading.Event, compare=False, repr=False, kw_only=True)

    @classmethod
    def start(cls, runtime: RuntimeConfig) -> "World":
        """Join the ranks that torchrun started; without torchrun, a single rank."""
        rank, local_rank, world_size = (int(os.environ.get(k, d)) for k, d in RANK_VARIABLES.items())
        kind = device_kind(runtime)
        device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            if local_rank >= torch.cuda.device_count():
                raise UserError(
                    f"runtime.processes: rank {local_rank} on this node has no GPU of its own "
                    f"(the node has {torch.cuda.device_count()}); use one process a GPU, or 'auto'"
                )
            torch.cuda.set_device(device)
        if runtime.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
            torch.set_deterministic_debug_mode("error")  # as torch.use_deterministic_algorithms; that imports inductor
        if world_size > 1:
            # Numbers of the host go over gloo, so that they never queue behind GPU work. The timeout holds for both.
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=collective_timeout(runtime))
        return cls(rank, local_rank, world_size, device)

    @classmethod
    def join(cls, runtime: RuntimeConfig, starting: Callable[[str], None]) -> "World":
        """`start`, and `connect`; `starting` gets each phase as it begins, for a watchdog. A collective call."""
        starting("rendezvous")
        world = cls.start(runtime)
        starting("first exchange")
        world.connect()
        return world

    @classmethod
    def alone(cls, runtime: RuntimeConfig) -> "World":
        """A single process on the best device; torchrun's variables are ignored."""
        return cls(0, 0, 1, torch.device(device_kind(runtime)))

    def close(self) -> None:
        """Leave the other ranks, once all of them have come here. A collective call."""
        if self.world_size > 1:
            self.gather(None)
            self._closing.set()
        if dist.is_initialized():  # the engine `sharded` starts a group for one rank
            dist.destroy_process_group()

    def connect(self) -> None:
        """Make the first exchange over the ranks' devices: NCCL connects them only then. From here on this process ends
        soon after another rank of its node, until all `close`. A collective call."""
        self.mean_(torch.zeros(1, device=self.device))
        own = self.rank - self.local_rank, os.getpid()  # ranks are numbered node by node
        peers = [pid for node, pid in self.gather(own) if node == own[0] and pid != own[1]]
        if peers:
            Background("peers", partial(leave_with_peers, peers, self._closing, f"rank {self.rank}")).start()

    def mean_(self, tensor: Tensor) -> None:
        """Average a tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
            tensor.div_(self.world_size)

    def sum(self, *values: float) -> list[float]:
        """The sums of a few numbers over all ranks, in float64."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(numbers)
        return numbers.tolist()

    def most(self, value: int) -> int:
        """The largest of the ranks' numbers."""
        number = torch.tensor(value)
        if self.world_size > 1:
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)

    def agree(self, loss: float, grad_norm: float, stop: bool, save: bool, checksum: int) -> Agreement:
        """One small all-reduce a step, so that all ranks stop, save, skip an update or give up together.

        The norm of the mean gradient is equal on all ranks. Its mean is exact, because float64 holds the sum of
        float32 numbers; a rank that computed another norm still decides like the others.
        """
        loss, grad_norm, stops, saves, checksums = self.sum(loss, grad_norm, stop, save, checksum)
        n = self.world_size
        return Agreement(loss / n, grad_norm / n, stops > 0, saves > 0, int(checksums))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


def leave_with_peers(pids: Sequence[int], closing: threading.Event, name: str) -> None:
    """End this process LEAVE_SECONDS after one of the processes `pids`, unless `closing` is set by then.

    Without that rank no step and no save can succeed, but NCCL would wait for it until the others are killed.
    """
    try:
        while not closing.wait(0.5):
            for pid in pids:
                os.kill(pid, 0)  # changes nothing; raises if there is no such process
    except ProcessLookupError:
        if not closing.wait(LEAVE_SECONDS):
            log_line(f"{name}: a rank on this node has crashed; exiting")
            os._exit(EXIT_INTERRUPTED)


LEAVE_SECONDS = 2.0  # for a rank to report its error and to end by itself
RANK_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def flat_gradients(model: torch.nn.Module) -> Tensor:
    """Make all gradients of a model views of one float32 buffer: one all-reduce, one norm, one memset."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes), device=parameters[0].device)
    for p, part in zip(parameters, flat.split(sizes), strict=True):
        p.grad = part.view_as(p)
    return flat


def clip_(gradient: Tensor, norm: Tensor, max_norm: float | None) -> None:
    """Scale a gradient, whose `norm` is known, down to `max_norm` if it is longer."""
    if max_norm is not None:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def collective_timeout(runtime: RuntimeConfig) -> timedelta:
    """The timeout of a collective: later than the watchdog's longest limit (six times a step's). The launcher
    recovers from the watchdog's exit, but treats a failed collective as a fault of the program."""
    if runtime.watchdog_minutes is None:
        return timedelta(minutes=10)
    return timedelta(minutes=7 * (10 if runtime.watchdog_minutes == "auto" else max(1.5, runtime.watchdog_minutes)))


def device_kind(runtime: RuntimeConfig) -> str:
    """'cuda', 'mps' or 'cpu': the best of this machine, or the configured one. UserError if the machine lacks it;
    UnfitMachine in a job of SkyPilot for which torch finds fewer GPUs than it pays for."""
    rented, found = int(os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE") or 0), torch.cuda.device_count()
    if runtime.device in ("auto", "cuda") and found < rented:
        raise UnfitMachine(f"torch finds {found} of the {rented} GPUs that SKYPILOT_NUM_GPUS_PER_NODE names; {cuda()}")
    exists = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [kind for kind in exists if exists[kind]]
    if runtime.device == "auto":
        return available[0]
    if runtime.device not in available:
        raise UserError(
            f"runtime.device: no {runtime.device} device on this machine; available: {', '.join(available)}"
        )
    return runtime.device


def cuda() -> str:
    """The versions of CUDA and of NVIDIA's driver, and why torch can't use the GPUs, if it says so."""
    versions, why = [f"torch {torch.__version__} has CUDA {torch.version.cuda}"], ""
    with suppress(OSError):
        driver = re.search(r"\b\d{3}\.[\d.]+", Path("/proc/driver/nvidia/version").read_text())
        versions.append(f"the driver is {driver[0] if driver else 'unknown'}")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = f" ({cut(str(error))})"
    return ", ".join(versions) + why


def autocast_on(device: torch.device, precision: str) -> torch.autocast:
    """bf16 matrix products over float32 weights; nothing in fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision != "fp32")


def precision_on(device: torch.device, train: TrainConfig) -> str:
    """The precision: as configured; auto is bf16 on a GPU that has it, else fp32."""
    if train.precision != "auto":
        return train.precision
    return "bf16" if device.type == "cuda" and has_bf16() else "fp32"


def has_bf16() -> bool:
    """Whether the current GPU computes in bf16."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def device_name(device: torch.device) -> str:
    """The device's type, or for CUDA the name of the GPU with its compute capability."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
