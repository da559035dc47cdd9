"""The tokens that one way to train needs to reach the loss of another: families, Muon against AdamW, and `modern` with
one ingredient less or more.

    skytrain run smoke --stage tokenize --set tokens.max_tokens=20000000
    python -m benchmarks.optimizers FOLDER --json runs.jsonl --search
    python -m benchmarks.optimizers FOLDER --json runs.jsonl --seeds 1 2 3 --lengths 0.5 1
    python -m benchmarks.optimizers FOLDER --json runs.jsonl --table
    python -m benchmarks.optimizers FOLDER --json ingredients.jsonl --ingredients --steps 300 --seeds 1 2

FOLDER holds llm.c's shards. An arm is a list of changes to one recipe, and the learning rate that is searched. --search
trains one seed at each of an arm's rates; later calls use the best one. A run of another length has its own schedule,
from warm-up to the end of its decay: the middle of a longer run would not have had its decay. --table shows for each
arm the validation loss of its seeds at full length, and the share of the first arm's tokens at which it is expected
to reach the first arm's loss: its losses at its lengths, interpolated over the logarithm of the length.

--ingredients searches the rates of `modern` with Muon and with AdamW. Each other arm leaves an ingredient of `modern`
out (GPT-2's takes its place, or nothing), or turns an option on, at the rate of `modern` with Muon. Its table has the
difference of each arm's loss, by pairs of equal seeds, and the share of its tokens at which plain `modern` is expected
to reach the arm's loss: above 1, the arm saves tokens. These arms have a size of their own, for a GPU. They run eager:
only the plain module can leave an ingredient out. --set changes the recipe of all arms.

Each run appends a line to --json, and a run that has one is not repeated. Time is not measured.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import run_as_command
from pipelines.recipe import Recipe, load_recipe
from trainer.amounts import micro_batch_count
from trainer.data.batches import TokenData
from trainer.data.shards import local_shards, sequences_of
from trainer.engine import Engine, make_engine
from trainer.errors import UserError
from trainer.eval.evaluation import validation_loss
from trainer.models import modern_module
from trainer.models.model_config import ModelConfig
from trainer.models.modern_module import Modern
from trainer.models.rotary import RotaryAttention, waves
from trainer.optim import muon
from trainer.optim.adamw import rates_at
from trainer.parallel import World

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
    """A way to train: changes to the recipe, field and values of the search, an attribute with another value."""

    changes: list[str]
    field: str
    rates: tuple[float, ...]  # none: the best of MODERN_MUON
    patched: tuple[Any, str, Any] | None = None


# --- modern without an ingredient


def unturned(*given: Any) -> tuple[Tensor, ...]:
    cos, sin = waves(*given)
    return torch.ones_like(cos), torch.zeros_like(sin)


def without_norm(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return RotaryAttention.placed(self, q, k, cos, -sin)


def with_gelu(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


def drawn(name: str, p: Tensor, config: ModelConfig, generator: torch.Generator, zero: Any = Modern.initial) -> None:
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        p.copy_(torch.empty(p.shape).normal_(0.0, 0.02 / math.sqrt(2 * config.n_layer), generator=generator))
    else:
        zero(name, p, config, generator)


# --- the arms


MODERN_MUON = "modern + muon"
# nanochat's rates of its untied embedding and head, which no other family has so large.
MODERN = ["model.family=modern", "train.embedding_learning_rate=0.3", "train.head_learning_rate=0.008"]
ADAMW_RATES = ("train.learning_rate", (7.5e-4, 1.5e-3, 3e-3, 6e-3))
ARMS = {
    "gpt2 + adamw": Arm([], *ADAMW_RATES),
    "gpt2 + muon": Arm(MUON, *MUON_RATES),
    "gpt2 + normuon": Arm([*MUON, "train.muon_beta2=0.95"], *MUON_RATES),
    "gpt2 + muon, c_attn as one matrix": Arm(MUON, *MUON_RATES, (muon, "parts_of", lambda name, rows, columns: [rows])),
    "llama + adamw": Arm(["model.family=llama"], *ADAMW_RATES),
    "llama + muon": Arm(["model.family=llama", *MUON], *MUON_RATES),
    "modern + adamw": Arm(["model.family=modern"], *ADAMW_RATES),
    MODERN_MUON: Arm([*MODERN, *MUON], *MUON_RATES),
}
# Of --ingredients: 10.8M parameters, and bytes as tokens.
SIZE = ["model.n_layer=6", "model.n_head=6", "model.n_embd=384", "model.block_size=512", "train.batch_tokens=32768"]
SIZE += ["runtime.engine=eager"]
WITHOUT: dict[str, tuple[Any, str, Any]] = {
    "rotary positions (none)": (modern_module, "waves", unturned),
    "QK-norm": (modern_module.Attention, "placed", without_norm),
    "ReLU² (GELU)": (modern_module.MLP, "forward", with_gelu),
    "projections of 0 (GPT-2's)": (Modern, "initial", staticmethod(drawn)),
    "capped logits": (Modern, "logits", lambda self, products: products),
}
OPTIONS = {
    "weights of the residual stream": ["model.residual_lambdas=true"],
    "value embeddings": ["model.value_embeddings=true"],
    "windows of 128": ["model.window=128"],
    "smear": ["model.smear=true"],
    "backout": ["model.backout=true"],
}
OPTIONS["all five"] = [change for changes in OPTIONS.values() for change in changes]
FIELD = MUON_RATES[0]
INGREDIENTS = {MODERN_MUON: ARMS[MODERN_MUON], "modern + adamw": ARMS["modern + adamw"]}
INGREDIENTS |= {f"without {name}": Arm([*MODERN, *MUON], FIELD, (), patched) for name, patched in WITHOUT.items()}
INGREDIENTS |= {f"with {name}": Arm([*MODERN, *MUON, *changes], FIELD, ()) for name, changes in OPTIONS.items()}
OTHER_LENGTHS = (0.5, 0.7, 1.5)  # of MODERN_MUON, in --ingredients
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
    arm, size = (INGREDIENTS[run.arm], SIZE) if options.ingredients else (ARMS[run.arm], [])
    changes = [
        f"train.seed={run.seed}",
        f"train.max_steps={run.steps}",
        f"train.warmup_steps={round(WARMUP * run.steps)}",
    ]
    changes = [*SHARED, *arm.changes, f"{arm.field}={run.rate}", *changes, *size]
    recipe = load_recipe(options.recipe, [*changes, *options.set])
    world = World.alone(recipe.runtime)
    with patch.object(*arm.patched) if arm.patched else nullcontext():
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
        engine.update(rates_at(step, recipe.train), loss_and_norm, step + 1)


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


def ingredient_table(runs: list[Run], length: int) -> Iterator[str]:
    """A line for each arm: rate, loss, its difference from MODERN_MUON's by seeds, tokens of that to the same loss."""
    plain = {run.seed: run.loss for run in at_best_rate(runs, MODERN_MUON, length)}
    yield "| arm | rate | val loss, mean of seeds | difference, each seed | modern + muon's tokens to this loss |"
    yield "|---|---|---|---|---|"
    for arm in dict.fromkeys(run.arm for run in runs):
        found = at_best_rate(runs, arm, length)
        loss = fmean(run.loss for run in found)
        apart = [run.loss - plain[run.seed] for run in found if run.seed in plain]
        each = f"{fmean(apart):+.4f} ({', '.join(f'{one:+.4f}' for one in apart)})" if arm != MODERN_MUON else ""
        share = share_to_reach(loss, runs, MODERN_MUON, length)
        tokens = f"{share:.2f} x" if share else ""
        yield f"| {arm} | {found[0].rate:g} | {loss:.4f} ({len(found)}) | {each} | {tokens} |"


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
    if options.ingredients:
        yield from searched([arm for arm in INGREDIENTS if INGREDIENTS[arm].rates], options)
        for seed in options.seeds:
            for arm in INGREDIENTS:
                like = arm if INGREDIENTS[arm].rates else MODERN_MUON
                yield Run(arm, best_rate(done(options.json), like, options.steps), seed, options.steps)
            rate = best_rate(done(options.json), MODERN_MUON, options.steps)
            yield from (Run(MODERN_MUON, rate, seed, round(share * options.steps)) for share in OTHER_LENGTHS)
        return
    if options.search:
        yield from searched(options.arms, options)
        return
    for seed in options.seeds:
        for share in options.lengths:
            for arm in options.arms:
                rate = best_rate(done(options.json), arm, options.steps)
                yield Run(arm, rate, seed, round(share * options.steps))


def searched(arms: Sequence[str], options: argparse.Namespace) -> Iterator[Run]:
    """A run at each rate of the arms, with the first seed."""
    for i in range(max(len(ARMS[arm].rates) for arm in arms)):
        for arm in arms:
            if i < len(ARMS[arm].rates):
                yield Run(arm, ARMS[arm].rates[i], options.seeds[0], options.steps)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="file of the runs, a line each")
    parser.add_argument("--recipe", default="smoke")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--search", action="store_true", help="all learning rates of the arms, with the first seed")
    parser.add_argument("--ingredients", action="store_true", help="modern with one ingredient less or more")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="for all arms")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=120, help="the full length")
    parser.add_argument("--lengths", nargs="+", type=float, default=[1.0], help="shares of the full length")
    parser.add_argument("--val-tokens", type=int, default=262_144)
    parser.add_argument("--table", action="store_true", help="print the results so far, and train nothing")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    for run in () if options.table else wanted(options):
        if run.settings in {one.settings for one in done(options.json)}:
            continue
        began = time.monotonic()
        finished = train(run, options)
        with options.json.open("a") as file:
            file.write(json.dumps(asdict(finished)) + "\n")
        print(f"{finished}, {time.monotonic() - began:.0f} s", flush=True)
    lines = ingredient_table if options.ingredients else table
    print("\n".join(lines(done(options.json), options.steps)))


if __name__ == "__main__":
    run_as_command(main)
