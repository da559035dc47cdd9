"""The cost of a checkpoint for the steps during the save, compared with a blocking `torch.save` of the same state.

`python -m benchmarks.checkpoint_stall [RECIPE] [--saves N] [--seconds S] [--folder FOLDER]` trains on random tokens
with the engine of this machine. Windows of S seconds alternate: one without a save, one with a save at its start.
Hashing, writing and committing run during the steps. The cost of a save is the extra time of its window's steps; `call`
is the time that the loop waits in `save` itself. Results are printed as they come, then median and [min … max].

    torchrun --standalone --nproc-per-node 8 -m benchmarks.checkpoint_stall gpt2-1558m --folder /dev/shm

does the same with several ranks, of which each saves its part; rank 0 prints its own times, without the blocking save.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import run_as_command, spread
from pipelines.extras.bench.steps import Steps, bench_recipe, training_data
from pipelines.recipe.recipe import Recipe
from trainer.base.events import EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World
from trainer.base.store import LocalStore
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState, checkpoint_seconds
from trainer.data.batches import TokenData
from trainer.engines.choice import make_engine
from trainer.engines.engine import Engine

WARM_SECONDS = 8.0


def blocking_save(engine: Engine, path: Path) -> float:
    """The seconds of a `torch.save` of weights and moments with fsync."""
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save({name: piece.live for name, piece in engine.pieces().items()}, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def measure(recipe: Recipe, data: TokenData, saves: int, seconds: float, folder: Path) -> None:
    world = World.start(recipe.runtime)
    if world.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    engine = make_engine(recipe.model, recipe.train, recipe.runtime, world)
    engine.initialize(recipe.train.seed)
    log = EventLog(None, PhaseClock())
    checkpointer = Checkpointer(LocalStore(folder), "run", world, keep_last=1)
    sequences = recipe.runtime.micro_batch_size
    training = Steps(recipe, engine, data, world, 8 if sequences == "auto" else sequences, checkpointer.before_update)

    def steps(count: int) -> float:
        """The seconds of `count` steps."""
        started = time.perf_counter()
        for _ in range(count):
            training.step()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    size = sum(piece.live.nbytes for piece in engine.pieces().values()) / 1e9
    print(f"{recipe.name}, {engine.why}, torch {torch.__version__}: {size:.2f} GB of weights and moments", flush=True)

    started = time.perf_counter()
    checkpointer.prepare(engine.pieces())
    training.step()
    while world.sum(time.perf_counter() - started)[0] < WARM_SECONDS * world.world_size:
        training.step()
    checkpointer.save(TrainState(step=training.done), engine.pieces(), log)  # the first waits for pinned memory
    checkpointer.finish(log)
    count = max(1, round(2 * seconds * world.world_size / world.sum(steps(2))[0]))
    print(f"windows of {count} steps; the first save was done after {time.perf_counter() - started:.1f} s", flush=True)

    call, until_commit, cost = [], [], []
    for _ in range(saves):
        undisturbed = steps(count)
        began = time.perf_counter()
        checkpointer.save(TrainState(step=training.done), engine.pieces(), log)
        call.append(time.perf_counter() - began)
        cost.append(call[-1] + steps(count) - undisturbed)
        checkpointer.finish(log)
        until_commit.append(time.perf_counter() - began)
        print(f"  a step {undisturbed / count:.4f}; a save: call {call[-1]:.4f}, cost {cost[-1]:.3f}", flush=True)
    print(f"  call of save                          {spread(call)}")
    print(f"  cost of a save for training           {spread(cost)}")
    print(f"  until the commit, at most             {spread(until_commit)}")
    interval = checkpoint_seconds(max(0.1, statistics.median(call)))
    share = statistics.median(cost) / interval
    print(f"  share of training at the interval that `auto` chooses, {interval:.0f} s: {share:.2%}")
    if world.world_size > 1:
        world.sum(0)  # until all ranks are here
        world.close()
        if not world.rank:
            shutil.rmtree(folder)
        return
    blocking = blocking_save(engine, folder / "blocking.pt")
    print(
        f"  blocking torch.save with fsync        {blocking:8.3f}: {blocking / statistics.median(cost):.0f} times that"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="gpt2-124m", help="its model and batch")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a window")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints")
    options = parser.parse_args()
    recipe = bench_recipe(options.recipe, [f"train.batch_tokens={options.batch_tokens}"])
    with training_data(recipe, None) as data, tempfile.TemporaryDirectory(dir=options.folder) as own:
        shared = options.folder or Path(tempfile.gettempdir())
        run = os.environ.get("TORCHELASTIC_RUN_ID")  # the ranks share a folder
        measure(recipe, data, options.saves, options.seconds, shared / run if run else Path(own))


if __name__ == "__main__":
    run_as_command(main)
