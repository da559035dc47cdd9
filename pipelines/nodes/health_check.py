"""The comparison of the machines before training: which node computes wrongly, or slower than its peers.

Each rank times a matrix product with a known result, and all of them an all-reduce (trainer/probe.py). One rank of a
node asks nvidia-smi for ECC errors and throttling, and times the disk and the store. All ranks judge the same numbers.
The texts of nvidia-smi are recorded ones: no faulty GPU was ever asked.
"""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from trainer.errors import FaultyMachine
from trainer.events import Compared
from trainer.store import Store

if TYPE_CHECKING:
    from trainer.parallel import World
    from trainer.probe import Probe

SLOW = 1.10  # times the median of all ranks: of a matrix product, which is steady within 4% between cards
SLOW_TRANSFER = 2.0  # of a disk or the store, which others use, too
TRANSFER_BYTES = 16 << 20
QUERY_SECONDS = 20.0
# The bits of clocks_throttle_reasons.active for a fault of cooling or power; a power cap of software is usual.
THROTTLED = {0x08: "slowed down by its hardware", 0x40: "too hot", 0x80: "short of power"}
QUERY = ("index", "pci.bus_id", "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active")


@dataclass(frozen=True)
class Findings:
    """What one rank found; the first rank of a node also about the node."""

    host: str
    rank: int
    probe: "Probe"
    gpus: tuple[str, ...] = ()  # complaints of nvidia-smi
    disk_seconds: float | None = None  # for TRANSFER_BYTES
    store_seconds: float | None = None


def compare_machines(
    world: "World", store: Store, key: str, folder: Path, leave_slow: bool
) -> tuple[Compared, FaultyMachine | None]:
    """Compare the machines of all ranks. What was found, and the error that ends the ranks of this machine, if it is
    wrong, or if it is slow and may be left. A collective call."""
    from trainer.probe import probe_device

    probe, host = probe_device(world), platform.node()
    if world.local_rank == 0:
        mine = Findings(host, world.rank, probe, gpus_here(), disk_seconds(folder), store_seconds(store, key))
    else:
        mine = Findings(host, world.rank, probe)
    found: list[Findings] = world.gather(mine)
    wrong, slow = wrong_machines(found), slow_machines(found)
    told = [f"{name}: {why}" for name, why in [*wrong, *slow]]
    reasons = [why for name, why in [*wrong, *(slow if leave_slow else [])] if name == host]
    error = FaultyMachine(f"{reasons[0]} ({host})") if reasons else None
    return Compared(f"{1e3 * median(one.probe.seconds for one in found):.2f} ms a matrix product", told), error


def wrong_machines(found: Sequence[Findings]) -> list[tuple[str, str]]:
    """The machines that compute wrongly or report faults, each with the reason."""
    wrong = [(one.host, f"rank {one.rank}: {one.probe.wrong}") for one in found if one.probe.wrong]
    return wrong + [(one.host, complaint) for one in found for complaint in one.gpus]


def slow_machines(found: Sequence[Findings]) -> list[tuple[str, str]]:
    """The machines that are slower than the median of all, each with the reason. Only GPUs are judged: other work on a
    CPU slows it down."""
    slow = []
    times = [one.probe.seconds for one in found]
    for one in found:
        ratio = one.probe.seconds / median(times)
        if ratio >= SLOW and one.probe.device != "cpu":
            slow.append((one.host, f"rank {one.rank}: {100 * ratio - 100:.0f}% slower than the median of all GPUs"))
    for what in ("disk", "store"):
        each = [(one.host, getattr(one, f"{what}_seconds")) for one in found]
        known = [(host, seconds) for host, seconds in each if seconds is not None]
        usual = median([seconds for _, seconds in known]) if known else 0.0
        for host, seconds in known:
            if len(known) > 1 and seconds >= max(1.0, SLOW_TRANSFER * usual):
                slow.append((host, f"the {what} is {seconds / usual:.1f} times as slow as the median of all nodes"))
    return slow


def gpus_here() -> tuple[str, ...]:
    """The complaints of nvidia-smi about this node's GPUs; none where it does not answer."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS)
        return gpu_complaints(answer.stdout) if answer.returncode == 0 else ()
    return ()


def gpu_complaints(answer: str) -> tuple[str, ...]:
    """The GPUs with faults in an answer to QUERY, a line a GPU. Lines that say nothing ("[N/A]") are no complaint."""
    complaints = []
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(QUERY):
            continue
        index, address, errors, reasons = fields
        where = f"GPU {index} ({address})"
        if errors.isdecimal() and int(errors):
            complaints.append(f"{where}: {int(errors):,} uncorrectable ECC errors since its driver started")
        with suppress(ValueError):
            active = int(reasons, 16)
            complaints += [f"{where}: {why}" for bit, why in THROTTLED.items() if active & bit]
    return tuple(complaints)


def disk_seconds(folder: Path) -> float | None:
    """How long this node's disk takes for TRANSFER_BYTES; None if it takes none."""
    path, started = folder / "probe", time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(os.urandom(TRANSFER_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - started
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)


def store_seconds(store: Store, key: str) -> float | None:
    """How long the store takes for the first TRANSFER_BYTES of an object; None if it is smaller or does not answer."""
    buffer, started = memoryview(bytearray(TRANSFER_BYTES)), time.perf_counter()
    with suppress(OSError, ValueError):
        if store.read_into(key, 0, buffer) == TRANSFER_BYTES:
            return time.perf_counter() - started
    return None
