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
from pipelines.recipe import Recipe, load_recipe
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState, checkpoint_seconds
from trainer.data.batches import PendingNumbers
from trainer.engine import Engine, make_engine
from trainer.errors import UserError
from trainer.events import EventLog
from trainer.health import Health
from trainer.loop import Verdict, step
from trainer.metrics import PhaseClock
from trainer.optim.rates import Rates
from trainer.parallel import Agreement, World
from trainer.store import LocalStore

WARM_SECONDS = 8.0
LEARNING_RATE = 1e-5


class Training:
    """Steps of the training loop on the same random tokens."""

    def __init__(self, recipe: Recipe, engine: Engine, checkpointer: Checkpointer, world: World) -> None:
        self.recipe, self.engine, self.checkpointer, self.world = recipe, engine, checkpointer, world
        model, train, runtime = recipe.model, recipe.train, recipe.runtime
        configured = runtime.micro_batch_size if isinstance(runtime.micro_batch_size, int) else 8
        share = train.batch_tokens // (model.block_size * world.world_size)
        self.size = min(configured, share)
        if not self.size:
            raise UserError(f"--batch-tokens {train.batch_tokens}: less than a sequence for each of the ranks")
        self.count = share // self.size
        self.tokens = torch.randint(0, model.vocab_size, (self.size, model.block_size), device=world.device)
        self.done = 0

    def step(self) -> None:
        self.done += 1
        step(
            self.engine,
            iter([(self.tokens, self.tokens)] * self.count),
            self.count,
            self.count * self.size,
            Rates.adamw(LEARNING_RATE),
            self.done,
            judge,
            update_first=self.engine.guarded,
            before_update=self.checkpointer.before_update,
        )

    def steps(self, count: int) -> float:
        """The seconds of `count` steps."""
        started = time.perf_counter()
        for _ in range(count):
            self.step()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()


def judge(numbers: PendingNumbers) -> Verdict:
    """The verdict of a single rank without health."""
    loss, grad_norm = numbers.values()
    assert abs(loss) < 1e6 and abs(grad_norm) < 1e6, "a diverged run is faster"
    return Verdict(Agreement(loss, grad_norm), Health())


def blocking_save(engine: Engine, path: Path) -> float:
    """The seconds of a `torch.save` of weights and moments with fsync."""
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save({name: piece.live for name, piece in engine.pieces().items()}, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def measure(recipe: Recipe, saves: int, seconds: float, folder: Path) -> None:
    world = World.start(recipe.runtime)
    if world.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    engine = make_engine(recipe.model, recipe.train, recipe.runtime, world)
    engine.initialize(recipe.train.seed)
    log = EventLog(None, PhaseClock())
    checkpointer = Checkpointer(LocalStore(folder), "run", world, keep_last=1)
    training = Training(recipe, engine, checkpointer, world)
    size = sum(piece.live.nbytes for piece in engine.pieces().values()) / 1e9
    print(f"{recipe.name}, {engine.why}, torch {torch.__version__}: {size:.2f} GB of weights and moments", flush=True)

    started = time.perf_counter()
    checkpointer.prepare(engine.pieces())
    training.step()
    while world.sum(time.perf_counter() - started)[0] < WARM_SECONDS * world.world_size:
        training.step()
    checkpointer.save(TrainState(step=training.done), engine.pieces(), log)  # the first waits for pinned memory
    checkpointer.finish(log)
    count = max(1, round(2 * seconds * world.world_size / world.sum(training.steps(2))[0]))
    print(f"windows of {count} steps; the first save was done after {time.perf_counter() - started:.1f} s", flush=True)

    call, until_commit, cost = [], [], []
    for _ in range(saves):
        undisturbed = training.steps(count)
        began = time.perf_counter()
        checkpointer.save(TrainState(step=training.done), engine.pieces(), log)
        call.append(time.perf_counter() - began)
        cost.append(call[-1] + training.steps(count) - undisturbed)
        checkpointer.finish(log)
        until_commit.append(time.perf_counter() - began)
        print(f"  a step {undisturbed / count:.4f}; a save: call {call[-1]:.4f}, cost {cost[-1]:.3f}", flush=True)
    print(f"  call of save                          {spread(call)}")
    print(f"  cost of a save for training           {spread(cost)}")
    print(f"  until the commit, at most             {spread(until_commit)}")
    interval = checkpoint_seconds(max(0.1, statistics.median(call)))
    share = statistics.median(cost) / interval
    print(f"  share of training at the interval that `auto` chooses, {interval:.0f} s: {share:.2%}")
    training.wait()
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
    recipe = load_recipe(options.recipe, [f"train.batch_tokens={options.batch_tokens}"])
    if run := os.environ.get("TORCHELASTIC_RUN_ID"):  # the ranks share a folder
        measure(recipe, options.saves, options.seconds, (options.folder or Path(tempfile.gettempdir())) / run)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(recipe, options.saves, options.seconds, Path(folder))


if __name__ == "__main__":
    run_as_command(main)
