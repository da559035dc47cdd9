"""Clock and power of a GPU under load, and its time in each kind of kernel."""

import math
import re
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SENSOR_SECONDS = 0.1

# The first class with a pattern that matches a kernel's name. Names: ours (trainer/fused/triton_kernels.py and
# rotary_triton.py), those of cuBLAS (nvjet, xmma, cutlass), cuDNN and torch, and those that torch.compile derives from
# the operations.
KERNEL_CLASSES = {
    "communication": r"nccl",
    "attention": r"flash|fmha|sdpa|attention|mha_",
    "gemm": r"gemm|nvjet|xmma|cutlass|cublas|splitk|gemv|wgmma|_mm_|_bmm_",
    "optimizer": r"adam|muon|multi_tensor|normtwo|norm_two|vector_norm|lpnorm",
    "cross-entropy": r"cross_entropy|softmax|nll_loss",
    "norm": r"norm|rowwisemoments|gammabeta|rms",
    "activation": r"gelu|relu|silu|swiglu",
    "rotary positions": r"rotary",
    "embedding": r"embedding|add_rows|values|indexselect|index_select|gather|scatter|indexing_backward",
    "casts and copies": r"memcpy|memset|copy|cast|transpose|fill|pack|column_sums",
}


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of some values."""

    median: float
    low_quartile: float
    high_quartile: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive") if ordered[1:] else ordered * 3
        return cls(middle, low, high, ordered[0], ordered[-1])


def kernel_seconds(work: Callable[[], None], trace: Path | None) -> dict[str, float]:
    """Seconds by kernel name during `work`. `trace`: a file for the Chrome trace."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] + ([ProfilerActivity.CPU] if trace else [])
    with profile(activities=activities) as profiler:
        work()
        torch.cuda.synchronize()
    if trace:
        profiler.export_chrome_trace(str(trace))
    return {
        event.key: event.self_device_time_total / 1e6
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    }


def class_of(kernel: str) -> str:
    """The class of a kernel, by its name."""
    lower = kernel.lower()
    return next((name for name, pattern in KERNEL_CLASSES.items() if re.search(pattern, lower)), "other")


def shares(kernels: dict[str, float]) -> dict[str, float]:
    """The share of each class in the time of all kernels, the largest first."""
    total, by_class = math.fsum(kernels.values()), dict.fromkeys([*KERNEL_CLASSES, "other"], 0.0)
    for name, seconds in kernels.items():
        by_class[class_of(name)] += seconds / total
    return dict(sorted(((name, share) for name, share in by_class.items() if share), key=lambda item: -item[1]))


def others(kernels: dict[str, float], most: int = 5) -> list[str]:
    """Names of the kernels outside all classes, the longest time first."""
    unknown = sorted((name for name in kernels if class_of(name) == "other"), key=lambda name: -kernels[name])
    return [name[:100] for name in unknown[:most]]


class Sensors:
    """Samples clock and power of a GPU by nvidia-smi. No samples without it, or on a CPU."""

    def __init__(self, device: "torch.device") -> None:
        self.device, self.samples = device, dict[str, list[float]]()
        self._nvidia_smi: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Sensors":
        import torch

        if self.device.type == "cuda" and shutil.which("nvidia-smi"):
            gpu = f"--id=GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            command = ["nvidia-smi", gpu, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
            command += [f"--loop-ms={SENSOR_SECONDS * 1e3:.0f}"]
            self._nvidia_smi = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvidia_smi:
            self._nvidia_smi.terminate()
            for line in self._nvidia_smi.communicate()[0].splitlines():
                for name, value in zip(("sm_mhz", "watts"), line.split(","), strict=False):
                    with suppress(ValueError):  # a GPU may not report its power, and the last line may be a part
                        self.samples.setdefault(name, []).append(float(value))

    def spread(self, name: str) -> Spread | None:
        return Spread.of(self.samples[name]) if self.samples.get(name) else None
