"""torchrun that leaves a file for each rank that a signal ended: `python -m pipelines.nodes.torchrun FOLDER …`.

Such a rank cannot leave its error itself, and torchrun exits with 1 after any failure.
"""

import signal
import sys
from contextlib import suppress
from pathlib import Path

from pipelines.nodes.results import KILLED
from trainer.health import STUCK
from trainer.process import log_line


def main(folder: Path, arguments: list[str]) -> None:
    """Run torchrun; raises its ChildFailedError."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    before = kills_for_memory()
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        why = "" if kills_for_memory() == before else ", and the kernel killed a process for lack of memory"
        for rank, failure in error.failures.items():
            if failure.exitcode < 0:
                with suppress(OSError):  # a full disk: the pipeline's process detects it on its own
                    text = f"rank {rank} was killed by {signal_name(-failure.exitcode)}{why}"
                    (folder / f"{KILLED}-{rank}.txt").write_text(text)
        raise
    except (DistNetworkError, DistStoreError, RendezvousError) as error:  # the torchrun of a node did not come
        log_line(f"torchrun: {STUCK} in phase 'rendezvous' of the nodes ({error}); exiting")
        raise


def signal_name(number: int) -> str:
    """ "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def kills_for_memory() -> str | None:
    """The kernel's count of processes that it killed for lack of memory; None if it does not tell."""
    with suppress(OSError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return counts.get("oom_kill")
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
