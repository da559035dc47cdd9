"""The process that starts the ranks of a node and ends with them: `python -m pipelines.nodes.launcher`.

It imports torch and the program of the ranks once, and forks the ranks before any of them touches CUDA: so they start
without an import of their own. torchrun can fork, too. But then a rank that has left on a signal waits for the others,
the others get 30 s after a crash, and the exit code of one rank alone is reported.

Node 0 holds the TCPStore by which the ranks meet. A rank that a signal ended cannot leave its error itself: the
launcher writes it. It exits with 0 if all its ranks did, else with 1.
"""

import json
import math
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pipelines.nodes.address import NodeAddress
from pipelines.nodes.ranks import LOG_FILE, RANK_MODULE, RankSpec
from pipelines.nodes.results import KILLED, signal_name

FAILING_SECONDS = 4.0  # for the other ranks to leave once one has failed; see also trainer/parallel.py
POLL_SECONDS = 1.0


def main() -> int:
    """Import, read the task from stdin, start the ranks, pass SIGTERM on, and wait for them. Returns the exit code."""
    error: Exception | None = None
    try:
        for module in (RANK_MODULE, "trainer.rank"):
            import_module(module)
    except Exception as broken:
        error = broken  # for the log of the attempt
    if not (line := sys.stdin.readline()):
        return 0  # the command needs no ranks
    folder, cache, grace_seconds, address, environment = json.loads(line)
    with Path(folder, LOG_FILE).open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if error:
        raise error
    os.environ |= environment
    return run_ranks(Path(folder), Path(cache), grace_seconds, NodeAddress(*address))


def run_ranks(folder: Path, cache: Path, grace_seconds: float, address: NodeAddress) -> int:
    """Start the ranks of a node and wait for them. Returns the exit code."""
    from torch.distributed import TCPStore

    spec, killed_for_memory = RankSpec.read(folder), kills_for_memory()
    port = spec.port
    if address.rank == 0:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        port = store.port
    os.environ |= {
        "MASTER_ADDR": address.first,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(spec.processes * address.count),
        "LOCAL_WORLD_SIZE": str(spec.processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # for torch.distributed: no rank holds the store
    }
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork")
    ranks: dict[int, multiprocessing.Process] = {}
    for local_rank in range(spec.processes):
        number = spec.processes * address.rank + local_rank
        ranks[number] = multiprocessing.Process(target=be_rank, args=(number, local_rank, folder, cache))
        ranks[number].start()
    deadline = math.inf

    def stop(*_: Any) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + grace_seconds)
        for rank in ranks.values():
            rank.terminate()

    signal.signal(signal.SIGTERM, stop)
    while (running := [rank.sentinel for rank in ranks.values() if rank.is_alive()]) and time.monotonic() < deadline:
        wait(running, POLL_SECONDS)
        if any(rank.exitcode for rank in ranks.values()):
            deadline = min(deadline, time.monotonic() + FAILING_SECONDS)
    for number, rank in ranks.items():
        if rank.exitcode and rank.exitcode < 0:
            memory = kills_for_memory() != killed_for_memory
            why = ", and the kernel killed a process for lack of memory" if memory else ""
            with suppress(OSError):  # a full disk: the pipeline's process detects it on its own
                text = f"rank {number} was killed by {signal_name(-rank.exitcode)}{why}"
                (folder / f"{KILLED}-{number}.txt").write_text(text)
    for rank in ranks.values():
        rank.kill()
        rank.join()
    return int(any(rank.exitcode for rank in ranks.values()))


def be_rank(number: int, local_rank: int, folder: Path, cache: Path) -> None:
    """The process of a rank."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(local_rank)}
    if os.environ["LOCAL_WORLD_SIZE"] != "1" and os.environ.setdefault("OMP_NUM_THREADS", "1") == "1":  # as torchrun
        import_module("torch").set_num_threads(1)  # libgomp has read the variable before
    sys.exit(import_module(RANK_MODULE).main(folder, cache))


def kills_for_memory() -> str | None:
    """The kernel's count of processes that it killed for lack of memory; None if it does not tell."""
    with suppress(OSError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return counts.get("oom_kill")
    return None


if __name__ == "__main__":
    sys.exit(main())
