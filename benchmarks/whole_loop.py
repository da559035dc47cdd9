"""The speed of `skytrain run`, with checkpoints, heartbeat and tracking, against the bare steps of `skytrain bench`.

    python -m benchmarks.whole_loop SHARDS gpt2-124m --gpus 8 --steps 400

SHARDS holds llm.c's shards, which both read. bench, the run and bench again take turns on the same GPUs. The run has a
store in a temporary folder (of --place) and the recipe's settings, without validation, whose cost depends on its length
alone. Its speed is that of the wall clock from step --after to the last one, with all saves between. A GPU at its power
limit slows down while it gets warm, and it cools while a process starts. So bench times as many steps as the run, after
its own 10 s of warm-up; choose --after to take about as long. The last line divides the speed of the run, and that of
its median step, by the mean of the two benches. Without GPUs the ranks share the CPU's cores, which shows that the
command works, and nothing of any speed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import run_as_command
from benchmarks.scaling import measured, started
from pipelines.recipe.loader import load_recipe
from pipelines.user.verbs.bench import LEAST_STEPS
from trainer.base.store import LocalStore
from trainer.checkpoint.commits import series
from trainer.config.errors import UserError


def bench(recipe: Path, gpus: int, options: list[str]) -> float:
    """Tokens a second of bare steps: their median."""
    speed = measured(started([str(recipe), "--json", *options], range(gpus), gpus))["tokens_per_second"]
    return float(speed["median"])


def run(recipe: Path, store: Path) -> list[dict[str, Any]]:
    """The rows of a whole run's steps, in order."""
    words = ["run", str(recipe), "--store", str(store), "--stage", "train"]
    done = subprocess.run([sys.executable, "-m", "pipelines.cli", *words], cwd=recipe.parent, stdout=sys.stderr)
    if done.returncode:
        raise UserError(f"run ended with exit code {done.returncode}")
    (made,) = store.glob("train/*")
    return [row for row in series(LocalStore(store), f"train/{made.name}") if "train/loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="llm.c's shards, train_*.bin and val_*.bin")
    parser.add_argument("recipe", nargs="?", default="gpt2-124m")
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--steps", type=int, default=400, help="of the run")
    parser.add_argument("--after", type=int, default=40, help="steps of the run that do not count")
    parser.add_argument("--place", type=Path, help="folder for the store")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="section.field=value")
    chosen = parser.parse_args()
    if not 0 < chosen.after <= chosen.steps - LEAST_STEPS:
        parser.error(f"--after {chosen.after}: at least 1, and {LEAST_STEPS} less than --steps {chosen.steps}")
    fixed = [f"train.max_steps={chosen.steps}", "train.warmup_steps=0"]
    fixed += ["train.val_every=null", "evaluate.every=null", f"runtime.processes={chosen.gpus}"]
    recipe = load_recipe(chosen.recipe, [*fixed, *chosen.changes])
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(chosen.gpus)))
    with tempfile.TemporaryDirectory(dir=chosen.place) as folder:
        path, store = Path(folder, "recipe.yaml"), Path(folder, "store")
        sections = recipe.model_dump(mode="json", exclude_defaults=True)
        tokenizer = recipe.tokens.model_dump(mode="json")["tokenizer"]
        sections["tokens"] = {"source": f"llmc://{chosen.data.resolve()}", "tokenizer": tokenizer}
        path.write_text(yaml.safe_dump(sections))
        options = ["--data", str(chosen.data.resolve()), "--steps", str(chosen.steps - chosen.after)]
        before = bench(path, chosen.gpus, options)
        print(f"bare steps, before: {before:,.0f} tokens/s", flush=True)
        rows = [row for row in run(path, store) if row["step"] >= chosen.after]
        tokens = recipe.train.batch_tokens
        wall = tokens * (rows[-1]["step"] - rows[0]["step"]) / (rows[-1]["time"] - rows[0]["time"])
        single = tokens / statistics.median(b["time"] - a["time"] for a, b in pairwise(rows))
        print(f"run, steps {chosen.after} to {chosen.steps}: {wall:,.0f} tokens/s; median {single:,.0f}", flush=True)
        after = bench(path, chosen.gpus, options)
    bare = (before + after) / 2
    print(f"bare steps, after: {after:,.0f} tokens/s")
    print(f"the run does {wall / bare:.1%} of bare steps, its median step {single / bare:.1%}")


if __name__ == "__main__":
    run_as_command(main)
