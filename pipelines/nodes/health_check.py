"""The comparison of the machines before training: which node computes wrongly, or slower than its peers.

Each rank times a matrix product with a known result, and all of them an all-reduce (trainer/probe.py). One rank of a
node asks nvidia-smi for ECC errors and throttling, and times the disk and the store. All ranks judge the same numbers.
A wrong sum names a machine only if its own numbers, or those that it exchanges with each other machine, are wrong.
The texts of nvidia-smi are recorded ones: no faulty GPU was ever asked.
"""

import json
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

from trainer.errors import FaultyMachine, SuspectNetwork
from trainer.events import Compared
from trainer.store import Store, replacing

if TYPE_CHECKING:
    from trainer.parallel import World
    from trainer.probe import Probe

SLOW = 1.10  # times the median of all ranks: of a matrix product, which is steady within 4% between cards
SLOW_TRANSFER = 2.0  # of a disk or the store, which others use, too
TRANSFER_BYTES = 16 << 20
QUERY_SECONDS = 20.0
# The bits of clocks_throttle_reasons.active for a fault of cooling or power; a power cap of software is usual.
THROTTLED = {0x08: "slowed down by its hardware", 0x40: "too hot", 0x80: "short of power"}
QUERY = ("index", "pci.bus_id", "uuid", "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active")
FIRST_COUNTS = "gpu-errors.json"  # in SKYTRAIN_HOME: uncorrectable errors by GPU when the first run here began


@dataclass(frozen=True)
class Findings:
    """What one rank found; the first rank of a node also about the node."""

    host: str
    rank: int
    probe: "Probe"
    gpus: tuple[str, ...] = ()  # faults that nvidia-smi reports
    throttled: tuple[str, ...] = ()  # GPUs that it calls slowed down
    disk_seconds: float | None = None  # for TRANSFER_BYTES
    store_seconds: float | None = None


def compare_machines(
    world: "World", store: Store, key: str, folder: Path, home: Path, leave_slow: bool
) -> tuple[Compared, Exception | None]:
    """Compare the machines of all ranks. What was found, and the error that ends the ranks of this machine: it is
    wrong, or slow and may be left, or the network is suspect, which ends all. A collective call."""
    from trainer.probe import probe_device

    on_gpus = world.device.type == "cuda"  # else the machine's GPUs, if any, do not matter
    first = first_counts(home, ask_gpus()) if world.local_rank == 0 and on_gpus else {}
    probe, host = probe_device(world), platform.node()
    if world.local_rank == 0:
        answer = ask_gpus() if on_gpus else ""
        of_gpus = gpu_faults(answer, first), throttled_gpus(answer)
        mine = Findings(host, world.rank, probe, *of_gpus, disk_seconds(folder), store_seconds(store, key))
    else:
        mine = Findings(host, world.rank, probe)
    found: list[Findings] = world.gather(mine)
    (wrong, suspicion), slow = wrong_machines(found), slow_machines(found)
    told = [f"{name}: {why}" for name, why in [*wrong, *slow]] + ([suspicion] if suspicion else [])
    reasons = [why for name, why in [*wrong, *(slow if leave_slow else [])] if name == host]
    error = FaultyMachine(f"{reasons[0]} ({host})") if reasons else SuspectNetwork(suspicion) if suspicion else None
    return Compared(f"{1e3 * median(one.probe.seconds for one in found):.2f} ms a matrix product", told), error


def wrong_machines(found: Sequence[Findings]) -> tuple[list[tuple[str, str]], str | None]:
    """The machines that compute wrongly or report faults, each with the reason; and the network that is suspect if a
    sum is wrong and no machine is named for it. `found` is in the order of ranks."""
    wrong = [(one.host, f"rank {one.rank}: {one.probe.wrong}") for one in found if one.probe.wrong]
    suspicion = None
    if not wrong and any(one.probe.sum_is_wrong for one in found):
        wrong, suspicion = wrong_exchanges(found)
    return wrong + [(one.host, complaint) for one in found for complaint in one.gpus], suspicion


def wrong_exchanges(found: Sequence[Findings]) -> tuple[list[tuple[str, str]], str | None]:
    """The machines that a wrong sum is due to, each with the reason, or the part of the network that is suspect.

    A machine is named if two of its own ranks, or it and each of two or more other machines, exchange numbers wrongly,
    unless that is so for all.
    """
    hosts = sorted({one.host for one in found})
    pairs = {(one.host, found[sender].host) for one in found for sender in one.probe.wrong_from}
    pairs |= {(b, a) for a, b in pairs}
    if len(hosts) == 1:
        return [(hosts[0], "the sum of its ranks' numbers is wrong")], None
    named = [(host, "its ranks exchange numbers wrongly") for host in hosts if (host, host) in pairs]
    if not named and len(hosts) > 2:
        bad = [host for host in hosts if all((host, other) in pairs for other in hosts if other != host)]
        if len(bad) < len(hosts):
            named = [(host, "it exchanges numbers wrongly with every other machine") for host in bad]
    if named:
        return named, None
    links = [f"{a} and {b}" for a, b in sorted(pairs) if a < b] or [", ".join(hosts)]
    return [], f"the network between {'; '.join(links)} is suspect: the sum of all ranks' numbers is wrong"


def slow_machines(found: Sequence[Findings]) -> list[tuple[str, str]]:
    """The machines that are slower than the median of all, each with the reason. Only GPUs are judged: other work on a
    CPU slows it down."""
    slow = []
    times = [one.probe.seconds for one in found]
    for one in found:
        ratio = one.probe.seconds / median(times)
        if ratio >= SLOW and one.probe.device != "cpu":
            slow.append((one.host, f"rank {one.rank}: {100 * ratio - 100:.0f}% slower than the median of all GPUs"))
        slow += [(one.host, complaint) for complaint in one.throttled]
    for what in ("disk", "store"):
        each = [(one.host, getattr(one, f"{what}_seconds")) for one in found]
        known = [(host, seconds) for host, seconds in each if seconds is not None]
        usual = median([seconds for _, seconds in known]) if known else 0.0
        for host, seconds in known:
            if len(known) > 1 and seconds >= max(1.0, SLOW_TRANSFER * usual):
                slow.append((host, f"the {what} is {seconds / usual:.1f} times as slow as the median of all nodes"))
    return slow


def ask_gpus() -> str:
    """The answer of nvidia-smi to QUERY, a line a GPU; empty where it does not answer."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS)
        return answer.stdout if answer.returncode == 0 else ""
    return ""


def fields_of(answer: str) -> list[list[str]]:
    """The fields of each line of an answer to QUERY."""
    lines = ([field.strip() for field in line.split(",")] for line in answer.splitlines())
    return [fields for fields in lines if len(fields) == len(QUERY)]


def first_counts(home: Path, answer: str) -> dict[str, int]:
    """Each GPU's uncorrectable errors when the first run on this machine began: those are an earlier tenant's.

    The driver counts from 0 again after its start, so a lower count replaces the first one.
    """
    path, known = home / FIRST_COUNTS, {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        known = {str(gpu): int(count) for gpu, count in json.loads(path.read_text()).items()}
    now = {gpu: int(errors) for _, _, gpu, errors, _ in fields_of(answer) if errors.isdecimal()}
    first = known | {gpu: min(count, known.get(gpu, count)) for gpu, count in now.items()}
    if first != known:
        with suppress(OSError), replacing(path) as file:
            file.write(json.dumps(first).encode())
    return first


def gpu_faults(answer: str, first: dict[str, int]) -> tuple[str, ...]:
    """The GPUs with more errors than their `first` count in an answer to QUERY. "[N/A]" is no complaint."""
    counts = [
        (index, address, int(n) - first.get(gpu, int(n)))
        for index, address, gpu, n, _ in fields_of(answer)
        if n.isdecimal()
    ]
    text = "GPU {} ({}): {:,} new uncorrectable ECC errors since the first run on this machine"
    return tuple(text.format(*one) for one in counts if one[2] > 0)


def throttled_gpus(answer: str) -> tuple[str, ...]:
    """The GPUs that cooling or power slows down in an answer to QUERY, each with the reason."""
    complaints = []
    for index, address, _, _, reasons in fields_of(answer):
        with suppress(ValueError):
            active = int(reasons, 16)
            complaints += [f"GPU {index} ({address}): {why}" for bit, why in THROTTLED.items() if active & bit]
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
