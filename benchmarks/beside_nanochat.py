"""The family modern beside nanochat's own code: equal tokens in an equal order, equal shape, batch and schedules.

    python -m benchmarks.beside_nanochat CHECKOUT SHARDS --json RESULTS
    python -m benchmarks.beside_nanochat CHECKOUT SHARDS --json RESULTS --depth 24 --speed 12 --arms ours
    python -m benchmarks.beside_nanochat CHECKOUT SHARDS --json RESULTS --arms nanochat@65536 ours@65536 ours+ramp4

CHECKOUT is a checkout of github.com/karpathy/nanochat (July 2026, 92d63d4; `-`: none, for our arms alone), of
which model, optimizer and fp8 are imported; nothing of it is part of this project. Its code computes its rates for
batch and width itself, and follows the same schedules as ours: they are the same formulas. Without a network it has no
FlashAttention 3, and runs on torch's attention, which is slow in windows; so all layers are long by default.

SHARDS is a folder of llm.c's train_*.bin and val_*.bin, for example those that `benchmarks.beside_llmc prepare` and
`skytrain run RECIPE --stage tokenize` make. Every run appends a line to RESULTS: validation losses at the steps
of --at, and the median speed of the last half of its steps. Runs that RESULTS has are not repeated, so short calls add
up.
An arm with @TOKENS has a batch of its own; one with +ramp lets the batch grow. Both train on as many tokens as the
others, and their steps of --at are the last that those tokens suffice for.
"""

import argparse
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import run_as_command
from trainer.__main__ import TrainerConfig, read_config
from trainer.base.parallel import World
from trainer.config.amounts import batch_tokens_at, micro_batch_count, tokens_before
from trainer.config.config import TrainConfig
from trainer.config.errors import UserError
from trainer.data.batches import TokenData
from trainer.data.shards import local_shards, sequences_of
from trainer.engines.choice import make_engine
from trainer.eval.evaluation import validation_loss
from trainer.optim import rates

RECIPE = Path(__file__).parents[1] / "pipelines" / "recipes" / "modern-124m.yaml"
RAMPS = {
    "ramp2": (2, 0.5),
    "ramp4": (4, 0.9),
}  # last batch / first batch, share of the tokens in which it grows
OURS = ("ours", "ours-fp8_head")
ARM_NAMES = "nanochat, nanochat-fp8, ours, ours-fp8_head, each also with @TOKENS, ours with +ramp2 or +ramp4"
ARM = re.compile(
    rf"(?P<precise>nanochat|nanochat-fp8|{'|'.join(OURS)})(?:@(?P<batch>[1-9]\d*)|\+(?P<ramp>{'|'.join(RAMPS)}))?"
)


def arm_named(text: str) -> str:
    """An arm of the command line; argparse prints the error."""
    found = ARM.fullmatch(text)
    if not found or (found["ramp"] and found["precise"] not in OURS):
        raise argparse.ArgumentTypeError(f"'{text}' is not one of {ARM_NAMES}")
    return text


def steps_within(tokens: int, train: TrainConfig) -> int:
    """The number of steps that `tokens` suffice for."""
    return next(step for step in itertools.count() if tokens_before(step + 1, train) > tokens)


def configured(options: argparse.Namespace, precision: str, ramp: str | None, batch: int) -> TrainerConfig:
    """The recipe at a depth, with the batch of an arm, for the tokens of `options.steps` of `options.batch`."""
    base, heads, tokens = read_config(RECIPE), -(-options.depth // 2), options.batch * options.steps
    window = None if options.window == "L" else -(-options.T // 512) * 128
    shape = {"n_layer": options.depth, "n_head": heads, "n_embd": 128 * heads, "block_size": options.T}
    more: dict[str, Any] = {"batch_tokens": batch, "max_steps": tokens // batch, "precision": precision}
    parts, share = RAMPS[ramp] if ramp else (1, 0.0)
    more["batch_ramp_from"] = batch // parts if ramp else None
    more["batch_ramp_tokens"] = round(share * tokens) or None
    if options.speed:  # fp8 begins after the warm-up
        more["warmup_steps"] = 0
    model = base.model.model_copy(update={**shape, "window": window})
    train = base.train.model_copy(update=more)
    train = train.model_copy(update={"max_steps": steps_within(tokens, train)})
    return TrainerConfig(model=model, train=train, runtime=base.runtime)


class Ours:
    """Our engine for a configuration."""

    def __init__(self, config: TrainerConfig, world: World, seed: int, *_: str) -> None:
        self.config, self.engine = config, make_engine(config.model, config.train, config.runtime, world)
        self.engine.initialize(seed)
        self.loss = self.engine.loss

    def step(self, step: int, batches: Iterator[tuple[Tensor, Tensor]], count: int) -> float:
        train, model = self.config.train, self.config.model
        found = self.engine.accumulate(batches, count, batch_tokens_at(step, train) / model.block_size, step + 1)
        self.engine.update(rates.rates_at(step, train, model), found, step + 1)
        return float(found[0])


class Nanochat:
    """nanochat's model and optimizer, as its base_train.py sets them up."""

    def __init__(self, config: TrainerConfig, world: World, seed: int, kind: str, pattern: str) -> None:
        from nanochat.gpt import GPT, GPTConfig

        model, train = config.model, config.train
        self.config, self.on = config, world.device
        torch.manual_seed(seed)
        torch.set_float32_matmul_precision("high")
        sizes = {"n_layer": model.n_layer, "n_head": model.n_head, "n_kv_head": model.n_head, "n_embd": model.n_embd}
        with torch.device("meta"):
            self.plain = GPT(GPTConfig(model.block_size, model.vocab_size, window_pattern=pattern, **sizes))
        self.plain.to_empty(device=self.on)
        self.plain.init_weights()
        if kind == "fp8":
            from nanochat.fp8 import Float8LinearConfig, convert_to_float8_training

            def large(layer: Any, _: str) -> bool:
                sizes = getattr(layer, "in_features", 1), getattr(layer, "out_features", 1)
                return min(sizes) >= 128 and not any(size % 16 for size in sizes)

            recipe = Float8LinearConfig.from_recipe_name("tensorwise")
            convert_to_float8_training(self.plain, config=recipe, module_filter_fn=large)
        batch = (train.batch_tokens / rates.REFERENCE_BATCH) ** 0.5
        self.optimizer = self.plain.setup_optimizer(
            unembedding_lr=0.008 * batch, embedding_lr=0.3 * batch, scalar_lr=0.5 * batch, matrix_lr=0.02 * batch
        )
        self.model = torch.compile(self.plain, dynamic=False) if self.on.type == "cuda" else self.plain

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            loss: Tensor = self.model(tokens.contiguous(), targets.contiguous())
            return loss

    def step(self, step: int, batches: Iterator[tuple[Tensor, Tensor]], count: int) -> float:
        train, total = self.config.train, torch.zeros((), device=self.on)
        for tokens, targets in batches:
            loss = self.model(tokens.contiguous(), targets.contiguous()) / count
            loss.backward()
            total += loss.detach()
        now = rates.rates_at(step, train, self.config.model)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rates.learning_rate_at(step, train) / train.learning_rate
            if group["kind"] == "muon":
                group["momentum"], group["weight_decay"] = now.momentum, now.matrix_decay
        self.optimizer.step()
        self.plain.zero_grad(set_to_none=True)
        return float(total)


def run(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train an arm from a seed; its losses and its speed."""
    found = ARM.fullmatch(arm)
    assert found
    name, _, kind = found["precise"].partition("-")
    batch = int(found["batch"] or options.batch)
    config = configured(options, "bf16" if name == "nanochat" else kind or "auto", found["ramp"], batch)
    world = World.alone(config.runtime)
    cuda = world.device.type == "cuda"
    trained = (Nanochat if name == "nanochat" else Ours)(config, world, seed, kind, options.window)
    folder, T = options.shards, options.T
    text, val = (TokenData(local_shards(folder, k), folder.joinpath, T, seed) for k in ("train", "val"))
    measured = {steps_within(at * options.batch, config.train): at for at in options.at}
    losses, seconds, last = {}, [], options.speed or config.train.max_steps
    for step in range(last):
        began = time.perf_counter()
        sequences, upcoming = (sequences_of(at, config.model, config.train, 0, 1) for at in (step, step + 1))
        batches = text.micro_batches(sequences, options.B, world.device, upcoming)
        loss = trained.step(step, batches, micro_batch_count(len(sequences), options.B))
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if not options.speed and (at := measured.get(step + 1)):
            losses[at] = validation_loss(trained.loss, val, options.val_tokens, options.B, world)
            print(f"{arm}: step {step + 1}: loss {loss:.4f}, val {losses[at]:.4f}", flush=True)
    device = torch.cuda.get_device_name() if cuda else "cpu"
    half = range(last // 2, last)
    speed = statistics.median(batch_tokens_at(step, config.train) / seconds[step] for step in half)
    return {"val": losses, "last_loss": loss, "tokens_per_second": speed, "device": device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanochat", metavar="CHECKOUT")
    parser.add_argument("shards", type=Path)
    parser.add_argument("--json", type=Path, required=True, help="file of the results, a line each")
    parser.add_argument(
        "--arms", nargs="+", type=arm_named, metavar="ARM", default=["nanochat", "ours", "ours-fp8_head"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    sizes = {"depth": 12, "T": 1024, "B": 64, "batch": 262_144, "steps": 450, "val-tokens": 1_048_576, "speed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--at", nargs="+", type=int, default=[150, 300, 450], help="steps with a validation")
    parser.add_argument("--window", choices=("L", "SSSL"), default="L")
    options = parser.parse_args()
    if any(arm.startswith("nanochat") for arm in options.arms):
        if not (Path(options.nanochat) / "nanochat" / "gpt.py").is_file():
            raise UserError(f"{options.nanochat}: has no nanochat/gpt.py; name a checkout of karpathy/nanochat")
        sys.path.insert(0, options.nanochat)
    asked = {name: vars(options)[name] for name in ("depth", "T", "B", "batch", "steps", "speed", "window")}
    done = [json.loads(line) for line in options.json.read_text().splitlines()] if options.json.exists() else []
    for seed in options.seeds:
        for arm in options.arms:
            what = asked | {"arm": arm, "seed": seed}
            if any(what.items() <= one.items() for one in done):
                continue
            line = json.dumps(what | run(arm, seed, options))
            with options.json.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    run_as_command(main)
