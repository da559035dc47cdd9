"""The speed of whole optimizer steps on this machine, and the time of each kernel.

A step is all the work that training does for one: sequences from shards, forward and backward over the micro-batches,
reduction over the ranks, clipping, AdamW, and the loss on the host. Three effects would make a speed look better than
it is:

- A cold GPU. An H200 starts at 1980 MHz; after some seconds at 700 W it runs at 1560 to 1710 MHz. Timing starts after
  WARM_SECONDS, and the result has clock and power.
- NaN toggles few bits: the GPU stays cool and is 10 to 20% faster. A loss that is not finite raises Diverged.
- The best of many steps. The result has the median step and its spread.

    torchrun --standalone --nproc-per-node 4 -m pipelines.cli bench gpt2-124m

runs on several GPUs; rank 0 prints.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.extras.bench.gauges import Sensors, Spread, kernel_seconds
from trainer.config.errors import Diverged

if TYPE_CHECKING:
    import torch

    from pipelines.recipe.recipe import Recipe
    from trainer.base.parallel import World
    from trainer.data.batches import TokenData
    from trainer.engines.engine import Engine

WARM_SECONDS = 10.0
PROFILED_STEPS = 2
ZIPF_TOKENS = 1 << 22
SYNTHETIC_TEXT = "tokens drawn by Zipf's law; --data FOLDER reads llm.c's shards"


@dataclass(frozen=True)
class Measurement:
    """The steps of a recipe on this machine. Sizes in bytes, of this rank's GPU; None: unknown on this device, which
    `left_out` says."""

    recipe: str
    device: str
    torch: str  # version
    text: str
    parameters: int
    flops_per_token: int
    formula: str  # of MFU
    left_out: list[str]
    engine: str  # its name, device and the reason for it
    precision: str
    world_size: int
    micro_batch_size: int
    micro_batch_why: str
    accumulated: int  # micro-batches of a rank in a step
    batch_tokens: int
    step_seconds: Spread
    tokens_per_second: Spread  # of all ranks together
    sustained_tokens_per_second: float  # over all timed steps as a whole
    mfu: float | None  # of the median step
    first_loss: float
    last_loss: float
    remarks: list[str]  # reasons why the engine is slower than it could be
    allocated_bytes: int | None  # peak, as torch counts
    reserved_bytes: int | None
    sm_mhz: Spread | None
    watts: Spread | None
    kernel_seconds: dict[str, float] | None  # of a step, by name; their sum is less than the step where the GPU waits


def bench(name: str, recipe: "Recipe", steps: int, data: Path | None) -> Measurement | None:
    """Measure the engine of a recipe; None on every rank but 0. UserError for an engine that cannot run here."""
    from trainer.base.parallel import World

    world = World.start(recipe.runtime)
    with training_data(recipe, data) as tokens:
        measured = measure(name, str(data or SYNTHETIC_TEXT), recipe, tokens, world, steps)
    world.close()
    return None if world.rank else measured


def bench_recipe(name: str, changes: list[str]) -> "Recipe":
    """A recipe with a constant learning rate that stays stable for some hundred steps. UserError as for any recipe."""
    from pipelines.recipe.loader import load_recipe

    steady = ["train.schedule=constant", "train.warmup_steps=0", "train.learning_rate=1.0e-4"]
    constant = ["train.batch_ramp_from=null", "train.batch_ramp_tokens=null"]
    return load_recipe(name, [*steady, *constant, *changes])


@contextmanager
def training_data(recipe: "Recipe", folder: Path | None) -> "Iterator[TokenData]":
    """The shards of a folder; without one, a shard of random tokens with word frequencies by Zipf's law."""
    import numpy as np

    from trainer.data.batches import TokenData
    from trainer.data.shards import local_shards, token_dtype, write_shard

    def split_of(folder: Path) -> TokenData:
        return TokenData(local_shards(folder, "train"), folder.joinpath, recipe.model.block_size, recipe.train.seed)

    if folder:
        yield split_of(folder)
        return
    with tempfile.TemporaryDirectory(prefix="skytrain-bench-") as scratch:
        # Zipf's law in Mandelbrot's form: the frequency of the k-th word is proportional to 1 / (k + 2.7).
        up_to = np.cumsum(1 / (np.arange(recipe.model.vocab_size) + 3.7))
        drawn = np.random.RandomState(0).random_sample(ZIPF_TOKENS)
        ids = np.searchsorted(up_to / up_to[-1], drawn).astype(token_dtype(recipe.model.vocab_size))
        write_shard(Path(scratch) / "train_000000.bin", ids)
        yield split_of(Path(scratch))


def measure(name: str, text: str, recipe: "Recipe", data: "TokenData", world: "World", steps: int) -> Measurement:
    """Warm up, time and profile the steps of a recipe."""
    import torch

    from trainer.base.metrics import MFU_FORMULA, mfu, peak_flops
    from trainer.checkpoint.commits import TrainState
    from trainer.config.amounts import check_shares, micro_batch_count
    from trainer.engines.choice import make_engine
    from trainer.engines.micro_batch import choose_micro_batch

    model, train, runtime, device = recipe.model, recipe.train, recipe.runtime, world.device
    on_gpu = device.type == "cuda"
    device_name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    check_shares(model, train, world.world_size)
    engine = make_engine(model, train, runtime, world)
    engine.initialize(train.seed)
    fit = choose_micro_batch(engine, model, train, runtime, TrainState(), world)
    run = Steps(recipe, engine, data, world, fit.micro_batch_size)

    first_loss = run.step()
    warm(run, world)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with Sensors(device) as sensors:
        seconds = timed(run, steps, device)
    kernels = kernel_seconds(run.several) if on_gpu else None
    speeds = Spread.of(train.batch_tokens / s for s in seconds)
    peak = peak_flops(device_name) if on_gpu else None
    return Measurement(
        recipe=name,
        device=device_name,
        torch=torch.__version__,
        text=text,
        parameters=model.parameters,
        flops_per_token=model.flops_per_token,
        formula=MFU_FORMULA,
        left_out=[] if on_gpu else ["memory, clock, power, MFU and kernels: only CUDA devices report them"],
        engine=engine.why,
        precision=engine.precision,
        world_size=world.world_size,
        micro_batch_size=fit.micro_batch_size,
        micro_batch_why=fit.why,
        accumulated=micro_batch_count(len(run.sequences_at(0)), fit.micro_batch_size),
        batch_tokens=train.batch_tokens,
        step_seconds=Spread.of(seconds),
        tokens_per_second=speeds,
        sustained_tokens_per_second=steps * train.batch_tokens / math.fsum(seconds),
        mfu=mfu(speeds.median, model, world.world_size, peak) if peak else None,
        first_loss=first_loss,
        last_loss=run.loss,
        remarks=engine.warnings(),
        allocated_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
        sm_mhz=sensors.spread("sm_mhz"),
        watts=sensors.spread("watts"),
        kernel_seconds={name: s / PROFILED_STEPS for name, s in kernels.items()} if kernels else None,
    )


class Steps:
    """Steps of the training loop. Each returns this rank's own loss: the ranks exchange no numbers after a step."""

    def __init__(
        self,
        recipe: "Recipe",
        engine: "Engine",
        data: "TokenData",
        world: "World",
        micro_batch_size: int,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.recipe, self.data, self.world = recipe, data, world
        self.engine, self.micro_batch_size, self.before_update = engine, micro_batch_size, before_update
        self.done, self.loss = 0, math.nan

    def step(self) -> float:
        """Make a step and return its loss. Diverged if the loss is not finite."""
        from trainer.config.amounts import micro_batch_count
        from trainer.data.batches import PendingNumbers
        from trainer.optim.rates import rates_at

        sequences, upcoming = self.sequences_at(self.done), self.sequences_at(self.done + 1)
        rates = rates_at(0, self.recipe.train, self.recipe.model)
        loss_and_norm = self.engine.accumulate(
            self.data.micro_batches(sequences, self.micro_batch_size, self.world.device, upcoming),
            micro_batch_count(len(sequences), self.micro_batch_size),
            self.recipe.train.batch_tokens / self.recipe.model.block_size / self.world.world_size,
            self.done + 1,
        )
        self.before_update()
        numbers = PendingNumbers(loss_and_norm)
        if self.engine.guarded:  # the order of the training loop
            self.engine.update(rates, loss_and_norm, self.done + 1)
        self.loss, _ = numbers.values()
        if not self.engine.guarded:
            self.engine.update(rates, loss_and_norm, self.done + 1)
        self.done += 1
        if not math.isfinite(self.loss):
            raise Diverged(
                f"bench: the loss of step {self.done} is {self.loss}; a GPU is 10 to 20% faster on such numbers, so "
                "nothing was measured"
            )
        return self.loss

    def several(self) -> None:
        for _ in range(PROFILED_STEPS):
            self.step()

    def sequences_at(self, step: int) -> range:
        from trainer.data.shards import sequences_of

        return sequences_of(step, self.recipe.model, self.recipe.train, self.world.rank, self.world.world_size)


def warm(run: Steps, world: "World") -> None:
    """Steps until the clock has settled; all ranks make the same number."""
    started = time.perf_counter()
    while True:
        run.step()
        seconds = time.perf_counter() - started
        if world.device.type != "cuda" or world.sum(seconds)[0] >= WARM_SECONDS * world.world_size:
            return


def timed(run: Steps, steps: int, device: "torch.device") -> list[float]:
    """Seconds of each of `steps` steps. A GPU's own clock measures from the end of one step to the end of the next."""
    import torch

    marks = [mark(device)]
    for _ in range(steps):
        run.step()
        marks.append(mark(device))
    if device.type != "cuda":
        return [after - before for before, after in pairwise(marks)]
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def mark(device: "torch.device") -> Any:
    """Now: by the host's clock, or when a GPU's stream comes to this place."""
    import torch

    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
