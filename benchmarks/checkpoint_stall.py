"""How long a step waits for a checkpoint: skytrain's copy to the host against a blocking `torch.save`.

`python benchmarks/checkpoint_stall.py [124M|1558M] [REPEATS] [FOLDER]` makes the model and AdamW's moments on
the best device here, and in one run times on the very same state, alternating: the copy that training waits
for (`HostCopy.take`), what goes on behind it (hash, write, receipt, commit into FOLDER), and `torch.save` of
that state to FOLDER with fsync, which is what training waits for elsewhere. Median and [min … max] in seconds.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trainer.checkpoint import Checkpointer, HostCopy, TrainState, allocate_moments, training_tensors
from trainer.config import ModelConfig, RuntimeConfig, TrainConfig
from trainer.metrics import EventLog, PhaseClock
from trainer.model import GPT
from trainer.optim import make_optimizer
from trainer.parallel import World
from trainer.store import LocalStore

SHAPES = {"124M": (12, 12, 768), "1558M": (48, 25, 1600)}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def shown(times: list[float]) -> str:
    return f"{statistics.median(times):8.3f} [{min(times):.3f} … {max(times):.3f}]"


def blocking_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def main(size: str = "124M", repeats: int = 5, folder: Path | None = None) -> None:
    layers, heads, width = SHAPES[size]
    config = ModelConfig(n_layer=layers, n_head=heads, n_embd=width, block_size=1024)
    world = World.alone(RuntimeConfig())
    model = GPT(config).to(world.device)
    optimizer = make_optimizer(model, TrainConfig(batch_tokens=1024, max_steps=1, learning_rate=1e-4))
    allocate_moments(optimizer)
    pieces = training_tensors(model, optimizer)
    tensors = {name: piece.live for name, piece in pieces.items()}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        log = EventLog(None, PhaseClock())
        checkpointer = Checkpointer(LocalStore(Path(place)), "run", world, Path(place) / "work", keep_last=1)
        first = seconds(lambda: HostCopy(pieces, 0, 1).take())
        wait, stall, behind, blocking = [], [], [], []
        for step in range(repeats + 1):
            wait.append(seconds(lambda step=step: checkpointer.save(TrainState(step=step), pieces, log)))  # type: ignore[misc]
            stall.append(wait[-1] + seconds(torch.cuda.synchronize if world.device.type == "cuda" else lambda: None))
            behind.append(seconds(lambda: checkpointer.finish(log)))
            blocking.append(seconds(lambda: blocking_save(tensors, Path(place) / "blocking.pt")))
    size_gb = sum(t.nbytes for t in tensors.values()) / 1e9
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else world.device.type
    print(f"{size} on {name}, torch {torch.__version__}: {size_gb:.2f} GB of weights and moments, {repeats} times")
    print(f"  copy to the host, memory allocated anew  {first:8.3f}")
    print(f"  call of save, on a GPU with copies to do {shown(wait[1:])}")
    print(f"  until the copy is taken: at worst a step's wait {shown(stall[1:])}")
    print(f"  behind it: hash, write, commit           {shown(behind[1:])}")
    print(f"  blocking torch.save with fsync           {shown(blocking[1:])}")
    print(f"  torch.save / copy = {statistics.median(blocking[1:]) / statistics.median(stall[1:]):.0f}")


if __name__ == "__main__":
    size, repeats, folder = [*sys.argv[1:], *["124M", "5", ""][len(sys.argv) - 1 :]]
    main(size, int(repeats), Path(folder) if folder else None)
