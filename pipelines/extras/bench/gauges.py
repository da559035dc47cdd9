"""Clock and power of a GPU under load, and its time in each kernel."""

import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SENSOR_SECONDS = 0.1


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


def kernel_seconds(work: Callable[[], None]) -> dict[str, float]:
    """Seconds of each kernel during `work`, the longest first."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {event.key: event.self_device_time_total / 1e6 for event in events}


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
