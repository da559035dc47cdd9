"""What this process may take of its machine."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # of this container: microseconds in each period, or "max"
MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")  # bytes, or "max"
POD_CORES = "SKYPILOT_POD_CPU_CORE_LIMIT"  # that SkyPilot requests on Kubernetes, without a limit of the container


def cores() -> int:
    """The processor cores that this process may use."""
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (requested := os.environ.get(POD_CORES, "")).isdecimal() and int(requested):
        known = min(known, int(requested))
    try:
        quota, period = CPU_MAX.read_text().split()
        return min(known, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or no limit
        return known


def free_memory() -> int:
    """The bytes that processes of this command may still take: of the machine, its container and its ulimit."""
    import psutil

    limits = [psutil.virtual_memory().available]
    if (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(max(0, most - psutil.Process().memory_info().vms))
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        limits.append(int(MEMORY_MAX.read_text()))
    return min(limits)


@contextmanager
def memory_error_at_the_limit() -> Iterator[None]:
    """Let this process get a MemoryError where the free memory ends: a kernel that runs out of memory kills without a
    message."""
    import psutil

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + free_memory(), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
