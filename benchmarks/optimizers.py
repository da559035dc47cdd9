"""The tokens that one way to train needs to reach the loss of another: families, Muon against AdamW, and `modern` with
one of its options.

    skytrain run smoke --stage tokenize --set tokens.max_tokens=20000000
    python -m benchmarks.optimizers FOLDER --json runs.jsonl --search
    python -m benchmarks.optimizers FOLDER --json runs.jsonl --seeds 1 2 3 --lengths 0.5 1
    python -m benchmarks.optimizers FOLDER --json runs.jsonl --table

FOLDER holds llm.c's shards. An arm is a list of changes to one recipe, and the learning rate that is searched. --search
trains one seed at each of an arm's rates; later calls use the best one. A run of another length has its own schedule,
from warm-up to the end of its decay: the middle of a longer run would not have had its decay. --table shows for each
arm the validation loss of its seeds at full length, and the share of the first arm's tokens at which it is expected
to reach the first arm's loss: its losses at its lengths, interpolated over the logarithm of the length.
--set changes the recipe of all arms, for example their size.

Each run appends a line to --json, and a run that has one is not repeated. Time is not measured.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

import torch

from benchmarks import run_as_command
from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from trainer.base.parallel import World
from trainer.config.amounts import micro_batch_count
from trainer.config.errors import UserError
from trainer.data.batches import TokenData
from trainer.data.shards import local_shards, sequences_of
from trainer.engines.choice import make_engine
from trainer.engines.engine import Engine
from trainer.eval.evaluation import validation_loss
from trainer.optim.rates import rates_at

# What all arms share: a byte-level model of 0.9M parameters, 0.5M tokens, and one schedule.
SHARED = [
    "train.batch_tokens=4096",
    "train.schedule=wsd",
    "train.wsd_decay_fraction=0.65",
    "train.min_lr_fraction=0.05",
    "train.val_every=null",
    "train.precision=bf16",
]
MUON = ["train.optimizer=muon", "train.learning_rate=3e-3", "train.muon_momentum_warmup_steps=100"]
MUON_RATES = ("train.muon_learning_rate", (0.005, 0.01, 0.02, 0.04, 0.08))


@dataclass(frozen=True)
class Arm:
    """A way to train: changes to the recipe, and field and values of the search."""

    changes: list[str]
    field: str
    rates: tuple[float, ...]


MODERN_MUON = "modern + muon"
# nanochat's rates of its untied embedding and head, which no other family has so large.
MODERN = ["model.family=modern", "train.embedding_learning_rate=0.3", "train.learning_rate=0.008"]
ADAMW_RATES = ("train.learning_rate", (7.5e-4, 1.5e-3, 3e-3, 6e-3))
ARMS = {
    "gpt2 + adamw": Arm([], *ADAMW_RATES),
    "gpt2 + muon": Arm(MUON, *MUON_RATES),
    "llama + adamw": Arm(["model.family=llama"], *ADAMW_RATES),
    "llama + muon": Arm(["model.family=llama", *MUON], *MUON_RATES),
    "modern + adamw": Arm(["model.family=modern"], *ADAMW_RATES),
    MODERN_MUON: Arm([*MUON, *MODERN], *MUON_RATES),
}
OPTIONS = {
    "weights of the residual stream": ["model.residual_lambdas=true"],
    "value embeddings": ["model.value_embeddings=true"],
    "windows of 128": ["model.window=128"],
    "smear": ["model.smear=true"],
    "backout": ["model.backout=true"],
    "queries and keys times 1.2": ["model.qk_scale=1.2"],
}
OPTIONS["all six"] = [change for changes in OPTIONS.values() for change in changes]
ARMS |= {f"modern + muon + {name}": Arm([*MUON, *MODERN, *changes], *MUON_RATES) for name, changes in OPTIONS.items()}
WARMUP = 0.1  # of the steps
AT_ONCE = 32_768  # tokens


@dataclass(frozen=True)
class Run:
    """A run and its validation loss."""

    arm: str
    rate: float
    seed: int
    steps: int
    loss: float = math.nan

    @property
    def settings(self) -> tuple[str, float, int, int]:
        return self.arm, self.rate, self.seed, self.steps


def train(run: Run, options: argparse.Namespace) -> Run:
    """Train a run from its seed to its end, and validate it."""
    arm = ARMS[run.arm]
    changes = [
        f"train.seed={run.seed}",
        f"train.max_steps={run.steps}",
        f"train.warmup_steps={round(WARMUP * run.steps)}",
    ]
    changes = [*SHARED, *arm.changes, f"{arm.field}={run.rate}", *changes]
    recipe = load_recipe(options.recipe, [*changes, *options.set])
    world = World.alone(recipe.runtime)
    engine = make_engine(recipe.model, recipe.train, recipe.runtime, world)
    engine.initialize(run.seed)
    steps(recipe, engine, text(recipe, options.folder, "train"), world)
    data = text(recipe, options.folder, "val")
    return replace(run, loss=validation_loss(engine.loss, data, options.val_tokens, 32, world))


def steps(recipe: Recipe, engine: Engine, data: TokenData, world: World) -> None:
    """All updates of a recipe, in micro-batches of at most AT_ONCE tokens."""
    most = AT_ONCE // recipe.model.block_size
    for step in range(recipe.train.max_steps):
        sequences = sequences_of(step, recipe.model, recipe.train, 0, 1)
        batches = data.micro_batches(sequences, most, world.device)
        count = micro_batch_count(len(sequences), most)
        loss_and_norm = engine.accumulate(batches, count, len(sequences), step + 1)
        engine.update(rates_at(step, recipe.train, recipe.model), loss_and_norm, step + 1)


def text(recipe: Recipe, folder: Path, split: str) -> TokenData:
    return TokenData(local_shards(folder, split), folder.joinpath, recipe.model.block_size, recipe.train.seed)


# --- the runs that were done


def done(path: Path) -> list[Run]:
    """The runs of a file of results."""
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def best_rate(runs: list[Run], arm: str, length: int) -> float:
    """The rate of the lowest loss at full length, over the seeds that all rates have. UserError without a search."""
    losses: dict[float, list[float]] = {}
    for run in runs:
        if (run.arm, run.steps) == (arm, length) and math.isfinite(run.loss):
            losses.setdefault(run.rate, []).append(run.loss)
    if not losses:
        raise UserError(f"--arms {arm}: its learning rate was not searched; add --search first")
    return min(losses, key=lambda rate: losses[rate][0])  # of the search's seed, which each rate has


def table(runs: list[Run], length: int) -> Iterator[str]:
    """A line for each arm: rate, losses over seeds, tokens to the first arm's loss."""
    first = runs[0].arm
    target = fmean(run.loss for run in at_best_rate(runs, first, length))
    yield "| arm | rate | val loss, mean of seeds | spread | tokens to the loss of the first arm |"
    yield "|---|---|---|---|---|"
    for arm in dict.fromkeys(run.arm for run in runs):
        found = at_best_rate(runs, arm, length)
        losses = [run.loss for run in found]
        spread = f"{stdev(losses):.4f}" if len(losses) > 1 else ""
        share = share_to_reach(target, runs, arm, length)
        tokens = f"{share:.2f} x" if share else ""
        yield f"| {arm} | {found[0].rate:g} | {fmean(losses):.4f} ({len(losses)}) | {spread} | {tokens} |"


def at_best_rate(runs: list[Run], arm: str, length: int, steps: int | None = None) -> list[Run]:
    rate = best_rate(runs, arm, length)
    return [run for run in runs if (run.arm, run.rate, run.steps) == (arm, rate, steps or length)]


def share_to_reach(target: float, runs: list[Run], arm: str, length: int) -> float | None:
    """The length at which an arm's mean loss is `target`, as a share of the full length; None outside its lengths."""
    lengths = sorted({run.steps for run in runs if run.arm == arm})
    points = [(n, fmean(r.loss for r in found)) for n in lengths if (found := at_best_rate(runs, arm, length, n))]
    for (short, above), (long, below) in zip(points, points[1:], strict=False):
        if above >= target >= below:
            part = (above - target) / (above - below)
            return math.exp(math.log(short) + part * math.log(long / short)) / length
    return None


def wanted(options: argparse.Namespace) -> Iterator[Run]:
    """The runs that a call asks for, those of all arms alternating."""
    if options.search:
        for i in range(max(len(ARMS[arm].rates) for arm in options.arms)):
            for arm in options.arms:
                if i < len(ARMS[arm].rates):
                    yield Run(arm, ARMS[arm].rates[i], options.seeds[0], options.steps)
        return
    for seed in options.seeds:
        for share in options.lengths:
            for arm in options.arms:
                rate = best_rate(done(options.json), arm, options.steps)
                yield Run(arm, rate, seed, round(share * options.steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="file of the runs, a line each")
    parser.add_argument("--recipe", default="smoke")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["gpt2 + adamw", MODERN_MUON])
    parser.add_argument("--search", action="store_true", help="all learning rates of the arms, with the first seed")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="for all arms")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=120, help="the full length")
    parser.add_argument("--lengths", nargs="+", type=float, default=[1.0], help="shares of the full length")
    parser.add_argument("--val-tokens", type=int, default=262_144)
    parser.add_argument("--table", action="store_true", help="print the results so far, and train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for run in () if options.table else wanted(options):
        if run.settings in {one.settings for one in done(options.json)}:
            continue
        began = time.monotonic()
        finished = train(run, options)
        with options.json.open("a") as file:
            file.write(json.dumps(asdict(finished)) + "\n")
        print(f"{finished}, {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(table(done(options.json), options.steps)))


if __name__ == "__main__":
    run_as_command(main)
