"""`skytrain bench`: how fast whole optimizer steps are, on this machine, and where their time goes.

A step here is all that training does for one: text from shards, forward and backward over its micro-batches,
reduction over the ranks, clipping, AdamW, and the look at the loss. Three things make a speed look better than
it is, and are kept out:

- a cold card. An H200 that has just begun runs at 1980 MHz, and after some seconds at 700 W at 1560 to 1710:
  steps are timed only once WARM_SECONDS have passed, and clock and power are told with the speed.
- NaN, which toggles few bits: the card runs cool and 10 to 20% faster. A loss that is not finite is an error.
- the best of many. The speed is that of the median step, with its spread.

    torchrun --standalone --nproc-per-node 4 -m pipelines.bench.measure gpt2-124m --data-parallel zero1

runs on several GPUs; rank 0 prints.
"""

import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from pipelines.bench.gauges import Sensors, Spread, kernel_seconds, others, shares
from pipelines.bench.measurements import PEERS_DATE, measurements
from pipelines.verbs.options import Changes, Json

if TYPE_CHECKING:
    import torch

    from pipelines.recipe import Recipe
    from trainer.data import TokenData
    from trainer.engine import Engine, PendingNumbers
    from trainer.parallel import World

LEAST_STEPS = 20
WARM_SECONDS = 10.0
PROFILED_STEPS = 2
ZIPF_TOKENS = 1 << 22
TEXT_OF_NOBODY = "tokens drawn by Zipf's law; --data FOLDER reads llm.c's shards"
ENGINES = ("eager", "compiled", "fused")


PEERS_SOURCE = f"measured earlier, in {PEERS_DATE}, on another H200: not in this run"


@dataclass(frozen=True)
class Measured:
    """One engine's steps. Sizes in bytes, of this rank's GPU; None: can't be told here."""

    engine: str  # which, on what, and why
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
    remarks: list[str]  # what slowed it down
    first_step_seconds: float  # from the start of the process, or of this engine where it is not the first, to its end
    allocated_bytes: int | None  # at most, as torch counts
    reserved_bytes: int | None
    sm_mhz: Spread | None
    watts: Spread | None
    kernel_shares: dict[str, float] | None  # of the time in kernels, by class
    other_kernels: list[str] | None  # the names that no class knows, by time
    kernel_seconds: float | None  # a step's, added up: less than a step where the GPU waits


@dataclass(frozen=True)
class NotMeasured:
    engine: str
    why: str


def bench(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="RECIPE", help="Whose model and batch to take [gpt2-124m; without a GPU smoke]"),
    ] = None,
    micro_batch: Annotated[str, typer.Option(metavar="N|auto", help="Sequences at once.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16, fp16, fp8 or fp8_head.")] = "auto",
    engine: Annotated[str, typer.Option(help="auto, fused, compiled or eager.")] = "auto",
    data_parallel: Annotated[str, typer.Option(help="zero1 or all_reduce, under torchrun.")] = "zero1",
    batch_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Tokens of an optimizer step [the recipe's]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=LEAST_STEPS, help="Optimizer steps to time.")] = LEAST_STEPS,
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FOLDER", help="Shards train_*.bin to read; otherwise tokens by Zipf's law."),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="All our engines, one after the other, beside what others reach.")
    ] = False,
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write the profiled steps as a Chrome trace; of --peers, the first one's."),
    ] = None,
    set_: Changes = None,
    as_json: Json = False,
) -> None:
    """Time whole optimizer steps: tokens/s, MFU, memory, clock, and the share of each kind of kernel."""
    import torch

    from trainer.errors import UserError
    from trainer.parallel import World

    name = model or ("gpt2-124m" if torch.cuda.is_available() else "smoke")
    asked = {
        "runtime.micro_batch_size": micro_batch,
        "runtime.data_parallel": data_parallel,
        "runtime.engine": engine,
        "train.precision": precision,
    }
    changes = [f"{field}={value}" for field, value in asked.items()] + [*(set_ or [])]
    changes += [f"train.batch_tokens={batch_tokens}"] if batch_tokens else []
    recipe = bench_recipe(name, changes)
    recipes = [recipe] if not peers else [bench_recipe(name, [*changes, *more]) for more in contenders(precision)]
    world = World.start(recipe.runtime)
    if trace and world.device.type != "cuda":
        raise UserError("--trace: kernels are profiled on CUDA devices, and there is none here; leave it out")
    with text(recipe, data) as tokens:
        rows: list[Measured | NotMeasured] = []
        if peers:
            for i, one in enumerate(recipes):
                rows.append(measured_alone(one, tokens, world, steps, None if i else trace, first=not i))
        else:
            rows += [measured(recipe, tokens, world, steps, trace, time.perf_counter() - process_seconds())]
    world.close()
    if world.rank:
        return
    result = told(name, recipe, rows, world, data, peers)
    print(json.dumps(result) if as_json else "\n".join(lines(result)))


def bench_recipe(name: str, changes: list[str]) -> "Recipe":
    """A recipe with a constant learning rate that does no harm in some hundred steps. UserError as for any recipe."""
    from pipelines.recipe import load_recipe

    steady = ["train.schedule=constant", "train.warmup_steps=0", "train.learning_rate=1.0e-4"]
    constant = ["train.batch_ramp_from=null", "train.batch_ramp_tokens=null"]
    return load_recipe(name, [*steady, *constant, *changes])


def contenders(precision: str) -> list[list[str]]:
    """Our engines in the precision they have in common, and the fused one in fp8 if that was asked for."""
    common = [] if not precision.startswith("fp8") else ["train.precision=bf16"]
    several = [[f"runtime.engine={engine}", *common] for engine in ENGINES]
    return several + ([["runtime.engine=fused"]] if common else [])


@contextmanager
def text(recipe: "Recipe", folder: Path | None) -> "Iterator[TokenData]":
    """The shards of a folder, or a shard of tokens that are as unequally frequent as words."""
    import numpy as np

    from trainer.data import TokenData
    from trainer.shards import local_shards, write_shard

    def split_of(place: Path) -> TokenData:
        return TokenData(local_shards(place, "train"), place.joinpath, recipe.model.block_size, recipe.train.seed)

    if folder:
        yield split_of(folder)
        return
    with tempfile.TemporaryDirectory(prefix="skytrain-bench-") as scratch:
        # Zipf's law as Mandelbrot has it: the k-th most frequent word comes in proportion to 1 / (k + 2.7).
        up_to = np.cumsum(1 / (np.arange(recipe.model.vocab_size) + 3.7))
        drawn = np.random.RandomState(0).random_sample(ZIPF_TOKENS)
        ids = np.searchsorted(up_to / up_to[-1], drawn).astype(np.uint16)
        write_shard(Path(scratch) / "train_000000.bin", ids)
        yield split_of(Path(scratch))


def measured_alone(
    recipe: "Recipe", data: "TokenData", world: "World", steps: int, trace: Path | None, first: bool
) -> Measured | NotMeasured:
    """One of several engines' measurement, or why it can't run here; its memory is given back."""
    import torch

    from trainer.errors import UserError

    try:
        since = process_seconds() if first else 0.0
        return measured(recipe, data, world, steps, trace, time.perf_counter() - since)
    except (UserError, torch.cuda.OutOfMemoryError) as error:
        return NotMeasured(recipe.runtime.engine, str(error).splitlines()[0])
    finally:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch._dynamo.reset()


def measured(
    recipe: "Recipe", data: "TokenData", world: "World", steps: int, trace: Path | None, started: float
) -> Measured:
    import torch

    from trainer.commits import TrainState
    from trainer.config import grad_accum_steps, sequences_per_step
    from trainer.engine import make_engine
    from trainer.loop import fit_here
    from trainer.metrics import mfu, peak_flops

    model, train, runtime, device = recipe.model, recipe.train, recipe.runtime, world.device
    on_gpu = device.type == "cuda"
    grad_accum_steps(model, train, runtime, world.world_size)
    engine = make_engine(model, train, runtime, world)
    engine.initialize(train.seed)
    fit = fit_here(engine, model, train, runtime, TrainState(), world)
    run = Steps(recipe, engine, data, world, fit.micro_batch_size)

    first_loss = run.step()
    first_step_seconds = time.perf_counter() - started
    warm(run, world)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with Sensors(device) as sensors:
        seconds = timed(run, steps, device)
    memory = (
        (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)) if on_gpu else (None,) * 2
    )
    kernels = kernel_seconds(run.several, trace if world.rank == 0 else None) if on_gpu else None
    speeds = Spread.of(train.batch_tokens / s for s in seconds)
    peak = peak_flops(torch.cuda.get_device_name(device)) if on_gpu else None
    return Measured(
        engine=engine.why,
        precision=engine.precision,
        world_size=world.world_size,
        micro_batch_size=fit.micro_batch_size,
        micro_batch_why=fit.why,
        accumulated=sequences_per_step(model, train) // world.world_size // fit.micro_batch_size,
        batch_tokens=train.batch_tokens,
        step_seconds=Spread.of(seconds),
        tokens_per_second=speeds,
        sustained_tokens_per_second=steps * train.batch_tokens / math.fsum(seconds),
        mfu=mfu(speeds.median, model, world.world_size, peak) if peak else None,
        first_loss=first_loss,
        last_loss=run.loss,
        remarks=engine.warnings(),
        first_step_seconds=first_step_seconds,
        allocated_bytes=memory[0],
        reserved_bytes=memory[1],
        sm_mhz=sensors.spread("sm_mhz"),
        watts=sensors.spread("watts"),
        kernel_shares=shares(kernels) if kernels else None,
        other_kernels=others(kernels) if kernels else None,
        kernel_seconds=sum(kernels.values()) / PROFILED_STEPS if kernels else None,
    )


class Steps:
    """Steps of the training loop, with this rank's loss and without the exchange between ranks after each."""

    def __init__(
        self, recipe: "Recipe", engine: "Engine", data: "TokenData", world: "World", micro_batch_size: int
    ) -> None:
        self.recipe, self.engine, self.data, self.world = recipe, engine, data, world
        self.micro_batch_size = micro_batch_size
        self.done, self.loss = 0, math.nan

    def step(self) -> float:
        """Make a step and return its loss. Diverged if the loss is not finite."""
        from trainer.errors import Diverged
        from trainer.health import Health
        from trainer.loop import Verdict, step
        from trainer.parallel import Agreement

        def alone(numbers: "PendingNumbers") -> Verdict:
            loss, grad_norm = numbers.values()
            return Verdict(Agreement(loss, grad_norm), Health())

        sequences, upcoming = self.sequences_at(self.done), self.sequences_at(self.done + 1)
        verdict, _ = step(
            self.engine,
            self.data.micro_batches(sequences, self.micro_batch_size, self.world.device, upcoming),
            len(sequences) // self.micro_batch_size,
            self.recipe.train.learning_rate,
            self.done + 1,
            alone,
            update_first=self.engine.guarded,
        )
        self.loss = verdict.agreed.loss
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
        from trainer.shards import sequences_of

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
    """Seconds of each of some steps. On a GPU by its own clock, from the end of one step to the end of the next."""
    import torch

    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            run.step()
            marks.append(time.perf_counter())
        return [after - before for before, after in zip(marks, marks[1:], strict=False)]

    def mark() -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    events = [mark()]
    for _ in range(steps):
        run.step()
        events.append(mark())
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def process_seconds() -> float:
    """Since this process began; 0 where /proc does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


# --- what is told


def told(
    name: str,
    recipe: "Recipe",
    rows: list[Measured | NotMeasured],
    world: "World",
    data: Path | None,
    peers: bool,
) -> dict[str, Any]:
    """All of it, for a program."""
    import torch

    from trainer.metrics import MFU_FORMULA

    on_gpu = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if on_gpu else "CPU"
    figures = measurements()
    size = figures.size_of(recipe.model.n_layer, recipe.model.n_embd) if peers else None
    return {
        "recipe": name,
        "device": device,
        "world_size": world.world_size,
        "torch": torch.__version__,
        "text": str(data) if data else TEXT_OF_NOBODY,
        "parameters": recipe.model.parameters,
        "flops_per_token": recipe.model.flops_per_token,
        "formula": MFU_FORMULA,
        "measured": [asdict(row) for row in rows if isinstance(row, Measured)],
        "not_measured": [asdict(row) for row in rows if isinstance(row, NotMeasured)],
        "peers": {name: speeds[size] for name, speeds in figures.peers().items()} if size else {},
        "peers_source": PEERS_SOURCE if size else None,
        "left_out": [] if on_gpu else ["memory, clock, power, MFU and kernels: they are told of CUDA devices only"],
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """All of it, for a person."""
    yield f"{result['recipe']}: {result['parameters']:,} parameters, {result['world_size']} x {result['device']}"
    yield f"torch {result['torch']}; text: {result['text']}"
    for row in result["measured"]:
        yield from ("", *row_lines(row, result["flops_per_token"]))
    for row in result["not_measured"]:
        yield from ("", f"{row['engine']}: not measured: {row['why']}")
    if result["peers_source"] or len(result["measured"]) > 1:
        yield from ("", *comparison(result))
    yield from ("", result["formula"], *(f"left out: {what}" for what in result["left_out"]))


def row_lines(row: dict[str, Any], flops_per_token: int) -> Iterator[str]:
    speed, step = row["tokens_per_second"], row["step_seconds"]
    yield f"{row['engine']}; {row['precision']}"
    many = row["accumulated"] * row["world_size"]
    yield f"  batch    {row['batch_tokens']:,} tokens: {many} {row['micro_batch_why']}"
    yield f"  speed    {speed['median']:,.0f} tokens/s, the median step; half of them {around(speed, ',.0f')}"
    yield f"           {row['sustained_tokens_per_second']:,.0f} tokens/s over all of them"
    yield f"  step     {1e3 * step['median']:,.1f} ms ({1e3 * step['least']:,.1f} to {1e3 * step['most']:,.1f})"
    if row["mfu"] is not None:
        yield f"  MFU      {row['mfu']:.1%} at {flops_per_token / 1e9:.3f} GFLOP a token"
    if row["allocated_bytes"] is not None:
        allocated, reserved = row["allocated_bytes"] / 2**30, row["reserved_bytes"] / 2**30
        yield f"  memory   {allocated:.1f} GiB allocated at most, {reserved:.1f} reserved"
    if row["sm_mhz"]:
        yield f"  clock    {row['sm_mhz']['median']:,.0f} MHz ({around(row['sm_mhz'], ',.0f')})"
    if row["watts"]:
        yield f"  power    {row['watts']['median']:,.0f} W ({around(row['watts'], ',.0f')})"
    if row["kernel_shares"]:
        yield "  kernels  " + ", ".join(f"{name} {share:.1%}" for name, share in row["kernel_shares"].items())
        yield f"           {1e3 * row['kernel_seconds']:,.1f} ms a step, added up"
    yield f"  start    first step done after {row['first_step_seconds']:.1f} s"
    yield f"  loss     {row['first_loss']:.3f}, then {row['last_loss']:.3f}; all finite"
    yield from (f"  slow     {remark}" for remark in row["remarks"])


def around(spread: dict[str, float], form: str) -> str:
    ends = (spread[name] for name in ("low_quartile", "high_quartile", "least", "most"))
    low, high, least, most = (format(value, form) for value in ends)
    return f"{low} to {high}, all {least} to {most}"


def comparison(result: dict[str, Any]) -> Iterator[str]:
    """Every speed beside the last one of ours."""
    ours = result["measured"][-1]["tokens_per_second"]["median"]
    rows = [(f"{r['engine']}; {r['precision']}", r["tokens_per_second"]["median"]) for r in result["measured"]]
    yield "tokens/s, and the last of ours as a multiple of it"
    for name, speed in rows:
        yield f"  {speed:>12,.0f}  {ours / speed:6.3f}  {name}"
    if result["peers"]:
        yield f"{result['peers_source']}:"
        for name, speed in result["peers"].items():
            yield f"  {speed:>12,.0f}  {ours / speed:6.3f}  {name}"


def main() -> None:
    from trainer.errors import Diverged, UserError

    try:
        typer.run(bench)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Diverged as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
