"""The process that starts the ranks of a node and ends with them: `python -m pipelines.run.nodes.launcher`.

It imports torch and the program of the ranks once, and forks the ranks before any of them touches CUDA: so they start
without an import of their own. On GPUs it forks them before that: cores are plenty there, and the second that the
driver takes for a GPU's context passes beside the import. torchrun can fork, too. But then a rank that has left on a
signal waits for the others, the others get 30 s after a crash, and the exit code of one rank alone is reported.

Node 0 holds the TCPStore by which the ranks meet. A rank that a signal ended cannot leave its error itself: the
launcher writes it. It exits with 0 if all its ranks did, else with 1.
"""

import ctypes
import gc
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pipelines.run.nodes.address import NodeAddress, nvidia_gpus
from pipelines.run.nodes.ranks import ALIVE_SECONDS, FAILING_SECONDS, LOG_FILE, RANK_MODULE, RankTask, show_alive
from pipelines.run.nodes.results import KILLED, signal_name
from trainer.base.process import StopSignal, die_with_parent


class Rank(multiprocessing.Process):
    """The process of a rank. It waits for its task."""

    def __init__(self, local_rank: int) -> None:
        self._task, self._other_end = multiprocessing.Pipe(duplex=False)
        super().__init__(target=be_rank, args=(local_rank, self._task))
        self.start()
        self._task.close()

    def begin(self, *task: Any) -> None:
        """Give the rank its task, see `be_rank`."""
        with suppress(BrokenPipeError):  # it has been killed
            self._other_end.send(task)


def main() -> int:
    """Import, read the task from stdin, start the ranks, pass SIGTERM on, and wait for them. Returns the exit code."""
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork")
    early = [Rank(number) for number in range(nvidia_gpus())]
    error = import_program()
    if not (line := sys.stdin.readline()):
        for rank in early:
            rank.kill()
        return 0  # the command needs no ranks
    folder, cache, grace_seconds, address, environment = json.loads(line)
    write_to(Path(folder, LOG_FILE))
    if error:
        raise error
    os.environ |= environment
    return run_ranks(Path(folder), Path(cache), grace_seconds, NodeAddress(*address), early)


def import_program() -> Exception | None:
    """Import the program of the ranks. Returns the error, for the log of the attempt."""
    gc.disable()  # its passes over what is imported take a sixth of the time
    try:
        for module in (RANK_MODULE, "pipelines.run.stages.train", "trainer.loop.rank"):
            import_module(module)
    except Exception as broken:
        return broken
    finally:
        gc.freeze()
        gc.enable()
    return None


def write_to(log: Path) -> None:
    """Let this process write into a log."""
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def run_ranks(folder: Path, cache: Path, grace_seconds: float, address: NodeAddress, early: list[Rank]) -> int:
    """Start the ranks of a node, `early` ones first, and wait for them. Returns the exit code."""
    from torch.distributed import TCPStore

    processes, port = RankTask.read(folder).processes, address.port
    if address.rank == 0:
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        port = store.port
    os.environ |= {
        "MASTER_ADDR": address.first,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes * address.count),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # for torch.distributed: no rank holds the store
    }
    for unneeded in early[processes:]:
        unneeded.kill()
        unneeded.join()
    early += [Rank(number) for number in range(len(early), processes)]
    ranks = {processes * address.rank + number: rank for number, rank in enumerate(early[:processes])}
    for number, rank in ranks.items():
        rank.begin(number, folder, cache, dict(os.environ))
    deadline = math.inf

    def stop(*_: Any) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + grace_seconds)
        for rank in ranks.values():
            rank.terminate()

    signal.signal(signal.SIGTERM, stop)
    while (running := [rank.sentinel for rank in ranks.values() if rank.is_alive()]) and time.monotonic() < deadline:
        show_alive(folder, "launcher", *(f"rank {number}" for number, rank in ranks.items() if not rank.is_alive()))
        wait(running, ALIVE_SECONDS)
        if any(rank.exitcode for rank in ranks.values()):
            deadline = min(deadline, time.monotonic() + FAILING_SECONDS)
    for number, rank in ranks.items():
        if rank.exitcode and rank.exitcode < 0:
            with suppress(OSError):  # a full disk: the pipeline's process detects it on its own
                text = f"rank {number} was killed by {signal_name(-rank.exitcode)}"
                (folder / f"{KILLED}-{number}.txt").write_text(text)
    for rank in ranks.values():
        rank.kill()
        rank.join()
    return int(any(rank.exitcode for rank in ranks.values()))


def be_rank(local_rank: int, tasks: Connection) -> None:
    """The process of a rank. Its task: its number, the attempt's folder, the cache and the environment."""
    die_with_parent(signal.SIGKILL)  # until there is something to save
    stop = StopSignal()
    if RANK_MODULE not in sys.modules:
        threading.Thread(target=make_context, args=(local_rank,), daemon=True).start()
    error = import_program()
    number, folder, cache, environment = tasks.recv()
    die_with_parent()
    write_to(folder / LOG_FILE)
    if error:
        raise error
    os.environ |= environment | {"RANK": str(number), "LOCAL_RANK": str(local_rank)}
    if os.environ["LOCAL_WORLD_SIZE"] != "1" and os.environ.setdefault("OMP_NUM_THREADS", "1") == "1":  # as torchrun
        import_module("torch").set_num_threads(1)  # libgomp has read the variable before
    sys.exit(import_module(RANK_MODULE).run(folder, cache, stop))


def make_context(device: int) -> None:
    """Make CUDA's context of a GPU, which torch then uses. An error shows again there."""
    with suppress(OSError):
        cuda, context, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
        cuda.cuInit(0)
        cuda.cuDeviceGet(ctypes.byref(handle), device)
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


if __name__ == "__main__":
    sys.exit(main())
