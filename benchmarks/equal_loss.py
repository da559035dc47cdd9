"""The training quality of two implementations of a step: fp8 against bf16, and the fused step against plain PyTorch.

    python -m benchmarks.equal_loss FOLDER --size 124M --variants bf16,fp8,fp8_head
    python -m benchmarks.equal_loss FOLDER --size 124M --variants bf16,eager

FOLDER holds llm.c's shards, train_*.bin and val_*.bin. Two runs that differ only in rounding diverge by 0.02 to 0.04
nats within some hundred steps at a high learning rate, so curves alone prove little. Therefore all variants branch
from one bf16 state after warm-up. The learning rate of each branch decays to 0, which leaves little noise. Each
variant has three branches with different text (the same text for all variants). The mean val loss decides: a
variant is equal if it is within 0.01 nats of bf16 and within the spread of bf16's own branches. "bf16 again" is bf16
with micro-batches of half the size: its distance from bf16 on the same text is the noise of a pair. "eager" is bf16 in
plain PyTorch, on one GPU.

Everything stays in the memory of the device. Results are printed, and written to --json, as they come, with a table
after each order of the text.
"""

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import run_as_command
from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from trainer.base.parallel import World
from trainer.checkpoint.commits import TrainState
from trainer.config.amounts import micro_batch_count, sequences_per_step
from trainer.config.errors import EXIT_DONE, EXIT_FAILED, UserError
from trainer.data.batches import TokenData
from trainer.data.shards import local_shards, sequences_of
from trainer.engines.choice import make_engine
from trainer.engines.engine import Engine
from trainer.eval.evaluation import validation_loss
from trainer.optim.rates import rates_of

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
    results: dict[str, Any] = field(default_factory=dict)

    def engine(self, variant: str) -> Engine:
        engine, precision = ("eager", "bf16") if variant == "eager" else ("auto", variant)
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


def run_steps(
    bench: Bench,
    engine: Engine,
    data: TokenData,
    rates: list[float],
    done: int = 0,
    micro_batch_size: int | None = None,
    name: str = "",
) -> list[float]:
    """Run one update per learning rate, from number `done` + 1 on. Returns the loss of each.

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
        engine.update(rates_of(rate, done + step, train, model), loss_and_norm, done + step + 1)
        if not (abs(loss) < 100 and abs(norm) < 1e6):
            raise RuntimeError(f"{name}: step {step + 1}: loss {loss}, gradient norm {norm}")
        history.append(loss)
        if (step + 1) % REPORT_EVERY == 0:
            speed = (step + 1) * train.batch_tokens / (time.perf_counter() - started)
            mean = statistics.fmean(history[-REPORT_EVERY:])
            bench.log(f"  {name} step {step + 1}/{len(rates)}: loss {mean:.4f}, {speed:,.0f} tokens/s")
    return history


def val_loss(bench: Bench, engine: Engine) -> float:
    return validation_loss(engine.loss, bench.text("val", 0), bench.val_tokens, bench.micro_batch_size, bench.world)


def release() -> None:
    """Free unreferenced memory for the next engine."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


AGAIN = " again"  # bf16 with other micro-batches


def branch(bench: Bench, names: list[str], warmup_steps: int, steps: int, orders: int) -> bool:
    """Branch every variant from one state, once for each order of the text. True if all are equal to bf16."""
    peak = bench.recipe.train.learning_rate
    snapshot = warmed_up(bench, [peak * (i + 1) / warmup_steps for i in range(warmup_steps)])
    release()
    names = [names[0], *([names[0] + AGAIN] if bench.micro_batch_size % 2 == 0 else []), *names[1:]]
    down = [peak * (steps - i) / steps for i in range(steps)]
    losses: dict[str, list[float]] = {name: [] for name in names}
    curves: dict[str, list[list[float]]] = {name: [] for name in names}
    equal = False
    for order in range(orders):
        for name in names:
            engine = branched(bench, name.removesuffix(AGAIN), snapshot, warmup_steps)
            size = bench.micro_batch_size // (2 if name.endswith(AGAIN) else 1)
            text = bench.text("train", 1000 + order)
            history = run_steps(bench, engine, text, down, warmup_steps, size, f"{name} {order}")
            losses[name].append(val_loss(bench, engine))
            curves[name].append(history)
            bench.log(f"{name} {order}: val loss {losses[name][-1]:.4f}")
            bench.record(val=losses, train=curves)
            del engine
            release()
        equal = verdict(bench, losses)
    return equal


def warmed_up(bench: Bench, rates: list[float]) -> dict[str, Tensor]:
    """Weights and moments after a warm-up in bf16."""
    engine = bench.engine("bf16")
    bench.log(f"warm-up: {engine.why}")
    engine.initialize(bench.recipe.train.seed)
    run_steps(bench, engine, bench.text("train", bench.recipe.train.seed), rates, name="warm-up")
    loss = val_loss(bench, engine)
    bench.log(f"after warm-up: val loss {loss:.4f}")
    bench.record(warm_val=loss, engine=engine.why)
    return {name: piece.live.detach().clone() for name, piece in engine.pieces().items()}


def branched(bench: Bench, variant: str, snapshot: dict[str, Tensor], steps: int) -> Engine:
    """The engine of a variant, with the state of the snapshot."""
    engine = bench.engine(variant)
    with torch.no_grad():
        for name, piece in engine.pieces().items():
            if name in snapshot:  # fp8's scaling history begins with the branch
                piece.live.copy_(snapshot[name])
    engine.restore(TrainState(step=steps, optimizer_steps=steps))
    return engine


def verdict(bench: Bench, val_losses: dict[str, list[float]]) -> bool:
    """Print the table. True if every variant is equal to bf16."""
    base = val_losses["bf16"]
    spread, table = max(base) - min(base), {}
    bench.log("variant     mean val loss   - bf16   on each order")
    for name, losses in val_losses.items():
        paired = [a - b for a, b in zip(losses, base, strict=True)]
        difference = statistics.fmean(paired)
        equal = name.startswith("bf16") or abs(difference) <= min(EQUAL_NATS, spread)
        table[name] = {"mean": statistics.fmean(losses), "difference": difference, "paired": paired, "equal": equal}
        each = " ".join(f"{value:+.4f}" for value in paired)
        word = "" if equal else "  NOT equal"
        bench.log(f"{name:10}  {table[name]['mean']:13.4f}  {difference:+.4f}   {each}{word}")
    bench.log(f"equal: within {EQUAL_NATS} nats and within bf16's own spread, {spread:.4f}")
    bench.record(verdict=table, spread=spread)
    return all(row["equal"] for row in table.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="llm.c's shards, train_*.bin and val_*.bin")
    parser.add_argument("--size", default="124M", help="124M, 1558M, or a recipe")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--micro-batch", type=int, help="sequences at once [64 at 124M, 16 at 1558M]")
    parser.add_argument("--steps", type=int, default=200, help="of a branch")
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--variants", default="bf16,fp8", help="bf16 first; then fp8, fp8_head, eager")
    parser.add_argument("--repeats", type=int, default=3, help="orders of the text")
    parser.add_argument("--val-tokens", type=int, default=1_048_576)
    parser.add_argument("--set", action="append", default=[], dest="changes", help="section.field=value")
    parser.add_argument("--json", type=Path, help="file for all results, as they come")
    options = parser.parse_args()
    names = options.variants.split(",")
    if names[0] != "bf16":
        raise UserError(f"--variants {options.variants}: all are compared with bf16; put bf16 first")
    micro = options.micro_batch or MICRO_BATCHES.get(options.size, 8)
    changes = [f"train.batch_tokens={options.batch_tokens}", f"runtime.micro_batch_size={micro}"]
    changes += [f"train.warmup_steps={options.warmup_steps}"]  # which fp8 leaves to bf16
    recipe = load_recipe(RECIPES.get(options.size, options.size), [*changes, *options.changes])
    world = World.start(recipe.runtime)
    if sequences_per_step(recipe.model, recipe.train) % (micro * world.world_size):
        raise UserError(f"--batch-tokens {options.batch_tokens}: not a multiple of {micro} sequences per process")
    if "eager" in names and world.world_size > 1:
        raise UserError("--variants eager: holds whole tensors, so it cannot branch from shards; start one process")
    bench = Bench(recipe, options.folder, world, micro, options.val_tokens, options.json)
    bench.record(options={k: str(v) for k, v in vars(options).items()}, torch=torch.__version__)
    equal = branch(bench, names, options.warmup_steps, options.steps, options.repeats)
    bench.world.close()
    return EXIT_DONE if equal else EXIT_FAILED


if __name__ == "__main__":
    run_as_command(main)
