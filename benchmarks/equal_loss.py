"""The training quality of two implementations of a step: fp8 against bf16, and the fused step against plain PyTorch.

    python -m benchmarks.equal_loss FOLDER --size 124M --precisions bf16,fp8,fp8_head
    python -m benchmarks.equal_loss FOLDER --size 124M --curve

FOLDER holds llm.c's shards, train_*.bin and val_*.bin. Two runs that differ only in rounding diverge by 0.02 to 0.04
nats within some hundred steps at a high learning rate, so curves alone prove little. Therefore all precisions branch
from one bf16 state after warm-up. The learning rate of each branch decays to 0, which leaves little noise. Each
precision has three branches with different text (the same text for all precisions). The mean val loss decides: a
precision is equal if it is within 0.01 nats of bf16 and within the spread of bf16's own branches. "bf16 again" is bf16
with micro-batches of half the size: its distance from bf16 on the same text is the noise of a pair.

--curve runs eager and fused bf16 twice each, from one seed, over the same text. The second run of each accumulates a
step in micro-batches of half the size. It differs only in rounding, so it measures the noise even where a step is
bit-for-bit repeatable. At first, the engines differ by more than that, because one rounds weights where the other
rounds activations. Within some hundred steps, all such differences grow to the same size. In the last third, the
difference between the two engines must not exceed that noise.

Everything stays in the memory of the device. Results are printed, and written to --json, as they come. --minutes ends
the benchmark between two branches.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import run_as_command
from pipelines.recipe import Recipe, load_recipe
from trainer.amounts import micro_batch_count, sequences_per_step
from trainer.checkpoint.commits import TrainState
from trainer.data.batches import TokenData, to_device
from trainer.data.shards import local_shards, sequences_of
from trainer.engine import Engine, make_engine
from trainer.errors import EXIT_DONE, EXIT_FAILED, UserError
from trainer.optim.adamw import rates_of
from trainer.parallel import World

RECIPES = {"124M": "gpt2-124m", "1558M": "gpt2-1558m"}
MICRO_BATCHES = {"124M": 64, "1558M": 16}
EQUAL_NATS = 0.01
REPORT_EVERY = 20  # steps


@dataclass
class Bench:
    """The settings that all branches share."""

    recipe: Recipe
    folder: Path
    world: World
    micro_batch_size: int
    val_tokens: int
    out: Path | None
    until: float
    results: dict[str, Any] = field(default_factory=dict)

    def engine(self, engine: str, precision: str) -> Engine:
        runtime = self.recipe.runtime.model_copy(update={"engine": engine})
        train = self.recipe.train.model_copy(update={"precision": precision})
        return make_engine(self.recipe.model, train, runtime, self.world)

    def text(self, split: str, seed: int) -> TokenData:
        return TokenData(local_shards(self.folder, split), self.folder.joinpath, self.recipe.model.block_size, seed)

    def record(self, **results: Any) -> None:
        """Write the results so far; an interrupted benchmark keeps them."""
        self.results |= results
        if self.out and self.world.rank == 0:
            self.out.write_text(json.dumps(self.results, indent=1))

    def log(self, line: str) -> None:
        if self.world.rank == 0:
            print(line, flush=True)

    @property
    def time_is_up(self) -> bool:
        return self.world.sum(time.monotonic() > self.until)[0] > 0


def run_steps(
    bench: Bench,
    engine: Engine,
    data: TokenData,
    rates: list[float],
    done: int = 0,
    micro_batch_size: int | None = None,
    name: str = "",
) -> list[tuple[float, float]]:
    """Run one update per learning rate, from number `done` + 1 on. Returns (loss, gradient norm) of each.

    RuntimeError if a value is not finite or far too large: a diverged run is not comparable.
    """
    model, train, world = bench.recipe.model, bench.recipe.train, bench.world
    size, history = micro_batch_size or bench.micro_batch_size, []

    def sequences(step: int) -> range:
        return sequences_of(step, model, train, world.rank, world.world_size)

    started = time.perf_counter()
    for step, rate in enumerate(rates):
        batches = data.micro_batches(sequences(step), size, world.device, upcoming=sequences(step + 1))
        count, mean_share = micro_batch_count(len(sequences(step)), size), train.batch_tokens / model.block_size
        loss_and_norm = engine.accumulate(batches, count, mean_share / world.world_size, done + step + 1)
        loss, norm = loss_and_norm.tolist()
        loss = world.sum(loss)[0] / world.world_size
        engine.update(rates_of(rate, done + step, train), loss_and_norm, done + step + 1)
        if not (abs(loss) < 100 and abs(norm) < 1e6):
            raise RuntimeError(f"{name}: step {step + 1}: loss {loss}, gradient norm {norm}")
        history.append((loss, norm))
        if (step + 1) % REPORT_EVERY == 0:
            speed = (step + 1) * train.batch_tokens / (time.perf_counter() - started)
            mean = statistics.fmean(loss for loss, _ in history[-REPORT_EVERY:])
            bench.log(f"  {name} step {step + 1}/{len(rates)}: loss {mean:.4f}, {speed:,.0f} tokens/s")
    return history


def val_loss(bench: Bench, engine: Engine) -> float:
    """Mean loss of the first val windows, computed by the engine."""
    data, size = bench.text("val", 0), bench.micro_batch_size
    windows = [(s, w) for s, shard in enumerate(data.shards) for w in range(shard.windows(data.block_size))]
    windows = windows[: max(size, bench.val_tokens // data.block_size)]
    losses: list[tuple[Tensor, int]] = []
    for start in range(0, len(windows), size):
        batch = data.windows(windows[start : start + size])
        losses.append((engine.loss(*to_device(batch, bench.world.device)).detach().double(), len(batch)))
    return sum(float(loss) * n for loss, n in losses) / len(windows)


def release() -> None:
    """Free unreferenced memory for the next engine."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- precisions


AGAIN = " again"  # bf16 with other micro-batches


def precisions(bench: Bench, names: list[str], warmup_steps: int, steps: int, orders: range) -> bool:
    """Branch every precision from one state, once for each order of the text. True if all are equal to bf16."""
    peak = bench.recipe.train.learning_rate
    snapshot = warmed_up(bench, [peak * (i + 1) / warmup_steps for i in range(warmup_steps)])
    release()
    names = [names[0], *([names[0] + AGAIN] if bench.micro_batch_size % 2 == 0 else []), *names[1:]]
    down = [peak * (steps - i) / steps for i in range(steps)]
    losses: dict[str, list[float]] = {name: [] for name in names}
    curves: dict[str, list[list[float]]] = {name: [] for name in names}
    for order in orders:
        for name in names:
            if bench.time_is_up:
                bench.log("time is up: the verdict has fewer branches than requested")
                return verdict(bench, losses)
            engine = branched(bench, name.removesuffix(AGAIN), snapshot, warmup_steps)
            size = bench.micro_batch_size // (2 if name.endswith(AGAIN) else 1)
            text = bench.text("train", 1000 + order)
            history = run_steps(bench, engine, text, down, warmup_steps, size, f"{name} {order}")
            losses[name].append(val_loss(bench, engine))
            curves[name].append([loss for loss, _ in history])
            bench.log(f"{name} {order}: val loss {losses[name][-1]:.4f}")
            bench.record(val=losses, train=curves)
            del engine
            release()
    return verdict(bench, losses)


def warmed_up(bench: Bench, rates: list[float]) -> dict[str, Tensor]:
    """Weights and moments after a warm-up in bf16."""
    engine = bench.engine("auto", "bf16")
    bench.log(f"warm-up: {engine.why}")
    engine.initialize(bench.recipe.train.seed)
    run_steps(bench, engine, bench.text("train", bench.recipe.train.seed), rates, name="warm-up")
    loss = val_loss(bench, engine)
    bench.log(f"after warm-up: val loss {loss:.4f}")
    bench.record(warm_val=loss, engine=engine.why)
    return {name: piece.live.detach().clone() for name, piece in engine.pieces().items()}


def branched(bench: Bench, precision: str, snapshot: dict[str, Tensor], steps: int) -> Engine:
    """An engine in the given precision, with the state of the snapshot."""
    engine = bench.engine("auto", precision)
    with torch.no_grad():
        for name, piece in engine.pieces().items():
            if name in snapshot:  # fp8's scaling history begins with the branch
                piece.live.copy_(snapshot[name])
    engine.restore(TrainState(step=steps, optimizer_steps=steps))
    return engine


def verdict(bench: Bench, val_losses: dict[str, list[float]]) -> bool:
    """Print the table. True if every precision is equal to bf16 over the branches that both have."""
    base = val_losses["bf16"]
    if not base:
        return False
    spread, all_equal, table = max(base) - min(base), True, {}
    bench.log("precision   val loss of each branch            mean     - bf16   paired, each")
    for name, losses in val_losses.items():
        if not losses:
            all_equal = False
            continue
        paired = [a - b for a, b in zip(losses, base, strict=False)]  # over the orders that both have
        difference = statistics.fmean(paired)
        equal = abs(difference) <= min(EQUAL_NATS, spread)
        all_equal &= equal or name.startswith("bf16")
        table[name] = {"mean": statistics.fmean(losses), "difference": difference, "paired": paired, "equal": equal}
        each, pairs = (
            " ".join(f"{value:{form}}" for value in row) for row, form in ((losses, ".4f"), (paired, "+.4f"))
        )
        word = "" if name.startswith("bf16") else "equal" if equal else "NOT equal"
        bench.log(f"{name:10}  {each:33}  {table[name]['mean']:.4f}  {difference:+.4f}  {pairs}  {word}")
    bench.log(f"equal: within {EQUAL_NATS} nats and within bf16's own spread, {spread:.4f}")
    bench.record(verdict=table, spread=spread)
    return all_equal


# --- engines


def curve(bench: Bench, warmup_steps: int, steps: int) -> bool:
    """Eager and fused bf16 over the same text from one seed, twice each. True if they differ by noise only."""
    peak = bench.recipe.train.learning_rate
    rates = [peak * min(1.0, (i + 1) / warmup_steps) for i in range(steps)]
    if bench.micro_batch_size % 2:
        raise UserError(f"--micro-batch {bench.micro_batch_size}: an odd number cannot be halved; use an even one")
    runs: dict[str, list[tuple[float, float]]] = {}
    for turn, size in enumerate((bench.micro_batch_size, bench.micro_batch_size // 2), 1):
        for name in ("fused", "eager"):
            if bench.time_is_up:
                bench.log("time is up")
                return False
            engine = bench.engine(name, "bf16")
            engine.initialize(bench.recipe.train.seed)
            data = bench.text("train", bench.recipe.train.seed)
            runs[f"{name} {turn}"] = run_steps(bench, engine, data, rates, 0, size, f"{name} {turn}")
            loss = val_loss(bench, engine)
            bench.log(f"{name} {turn}: {engine.why}: val loss {loss:.4f}")
            bench.record(**{f"{name} {turn}": {"train": runs[f"{name} {turn}"], "val": loss}})
            del engine
            release()
    return compare_curves(bench, runs)


def compare_curves(bench: Bench, runs: dict[str, list[tuple[float, float]]]) -> bool:
    """The distance between runs, over all steps and over parts: within an engine, and between the two engines."""
    within = [("eager 1", "eager 2"), ("fused 1", "fused 2")]
    across = [(f"eager {i}", f"fused {j}") for i in (1, 2) for j in (1, 2)]
    steps = len(runs["eager 1"])
    thirds = {"all steps": (0, steps), "first tenth": (0, max(1, steps // 10)), "last third": (steps * 2 // 3, steps)}
    table: dict[str, dict[str, float]] = {}
    bench.log("mean |difference| of train loss   eager twice  fused twice  eager, fused   mean of fused - eager")
    for part, (a, b) in thirds.items():
        apart = {pair: mean_of(lambda x, y: abs(x - y), runs, pair, a, b) for pair in within + across}
        signed = {pair: mean_of(lambda x, y: y - x, runs, pair, a, b) for pair in within + across}
        row = {
            "eager": apart[within[0]],
            "fused": apart[within[1]],
            "across": statistics.fmean(apart[pair] for pair in across),
            "signed": statistics.fmean(signed[pair] for pair in across),
            "signed_within": max(abs(signed[pair]) for pair in within),
        }
        table[part] = row
        bench.log(f"{part:33} {row['eager']:11.5f}  {row['fused']:11.5f}  {row['across']:12.5f}   {row['signed']:+.5f}")
    end = table["last third"]
    noise, bias = max(end["eager"], end["fused"]), max(EQUAL_NATS, end["signed_within"])
    equal = end["across"] <= 1.25 * noise  # the mean of one pair over a hundred steps is uncertain itself
    equal &= abs(end["signed"]) <= bias
    bench.log(
        f"{'within' if equal else 'MORE than'} noise in the last third: {end['across']:.5f}, noise {noise:.5f}; "
        f"on average {end['signed']:+.5f}, up to {bias:.5f} is noise"
    )
    bench.record(parted=table, equal=equal)
    return equal


def mean_of(
    of: Callable[[float, float], float],
    runs: dict[str, list[tuple[float, float]]],
    pair: tuple[str, str],
    start: int,
    end: int,
) -> float:
    first, second = (runs[name][start:end] for name in pair)
    return statistics.fmean(of(x, y) for (x, _), (y, _) in zip(first, second, strict=True))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="llm.c's shards, train_*.bin and val_*.bin")
    parser.add_argument("--size", default="124M", help="124M, 1558M, or a recipe")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--micro-batch", type=int, help="sequences at once [64 at 124M, 16 at 1558M]")
    parser.add_argument("--steps", type=int, help="of a branch [200], of a curve [300]")
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, help="at its peak [the recipe's]")
    parser.add_argument("--precisions", default="bf16,fp8", help="the first one is bf16")
    parser.add_argument("--repeats", type=int, default=3, help="orders of the text")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first order, to continue on another machine")
    parser.add_argument("--val-tokens", type=int, default=1_048_576)
    parser.add_argument("--minutes", type=float, default=1e6, help="start no branch after this time")
    parser.add_argument("--curve", action="store_true", help="eager against fused, instead of precisions")
    parser.add_argument("--json", type=Path, help="file for all results, as they come")
    return parser.parse_args()


def prepared(options: argparse.Namespace) -> Bench:
    name = RECIPES.get(options.size, options.size)
    micro = options.micro_batch or MICRO_BATCHES.get(options.size, 8)
    changes = [f"train.batch_tokens={options.batch_tokens}", f"runtime.micro_batch_size={micro}"]
    changes += [f"train.warmup_steps={options.warmup_steps}"]  # which fp8 leaves to bf16
    changes += [f"train.learning_rate={options.learning_rate}"] if options.learning_rate else []
    recipe = load_recipe(name, changes)
    world = World.start(recipe.runtime)
    if sequences_per_step(recipe.model, recipe.train) % (micro * world.world_size):
        raise UserError(f"--batch-tokens {options.batch_tokens}: not a multiple of {micro} sequences per process")
    until = time.monotonic() + 60 * options.minutes
    return Bench(recipe, options.folder, world, micro, options.val_tokens, options.json, until)


def main() -> int:
    options = arguments()
    bench = prepared(options)
    bench.record(options={k: str(v) for k, v in vars(options).items()}, torch=torch.__version__)
    if options.curve:
        equal = curve(bench, options.warmup_steps, options.steps or 300)
    else:
        names = options.precisions.split(",")
        if names[0] != "bf16":
            raise UserError(f"--precisions {options.precisions}: all are compared with bf16; put bf16 first")
        orders = range(options.first, options.first + options.repeats)
        equal = precisions(bench, names, options.warmup_steps, options.steps or 200, orders)
    bench.world.close()
    return EXIT_DONE if equal else EXIT_FAILED


if __name__ == "__main__":
    run_as_command(main)
