"""The identity of a process, by which another process of its machine knows whether it still exists."""

import os
import platform
from pathlib import Path

from pipelines.store.records import ProcessId
from trainer.base.process import steady_time


def process_exists(process: ProcessId) -> bool | None:
    """Whether the process of an attempt, or one that it started, still exists; None if this machine cannot know."""
    here = this_process()
    if here.machine == process.machine:
        starts = ((one.pid, one.started) for one in (process, *process.children))
        return any(pid is not None and process_started(pid) == started for pid, started in starts)
    return None  # no comparison with its clock, which may differ by hours


def this_process() -> ProcessId:
    """The identity of this process: machine (boot and container), pid and start time."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    # Containers of one host share its boot and may share its name; a pid is valid in one of them only.
    parts = [boot.read_text().strip() if boot.exists() else "", os.readlink(pids) if pids.is_symlink() else ""]
    machine = "/".join([platform.node(), *filter(None, parts)])
    return ProcessId(machine, os.getpid(), process_started(os.getpid()))


def process_started(pid: int) -> str | None:
    """The start time of a process in clock ticks since boot, None if there is no such process (any more)."""
    try:
        # The name in field 2 may hold spaces and brackets; the start time is the 20th field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A zombie is dead: it stays forever in a container whose first process reaps no children.
        return None if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc").exists():
            return None
    import psutil

    return "unknown" if psutil.pid_exists(pid) else None


def process_began() -> float:
    """The start of this process, in unix seconds."""
    ticks, uptime = process_started(os.getpid()), Path("/proc/uptime")
    if ticks is None or not ticks.isdigit() or not uptime.exists():
        return steady_time()
    return steady_time() - float(uptime.read_text().split()[0]) + int(ticks) / os.sysconf("SC_CLK_TCK")
