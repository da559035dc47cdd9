"""The speed of 1, 2, 4 … GPUs together, against the sum of the same GPUs working alone at the same time.

    python -m benchmarks.scaling gpt2-124m --gpus 8
    python -m benchmarks.scaling gpt2-1558m --gpus 8 --set train.precision=fp8_head

Cards of one host differ by some percent, and all of them share its power and air. So every GPU first runs
`skytrain bench` by itself, all at the same time; then torchrun runs it on the first n. The batch of a GPU is the same
in both. A row has tokens/s (median and quartiles of the steps), its share of the sum of those n alone, the share of n
times their slowest, and the peak memory of rank 0. Without CUDA the processes share the CPU's cores, over gloo: that
shows that the command works, and nothing of any speed.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import torch

from benchmarks import run_as_command
from pipelines.recipe.loader import load_recipe
from trainer.config.errors import UserError


def started(arguments: list[str], gpus: range, of: int) -> subprocess.Popen[str]:
    """`skytrain bench` on these GPUs, one process a GPU. Each has its part of the CPU's cores: 1 / `of`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(gpus)}"]
    command = [sys.executable, *(torchrun if len(gpus) > 1 else []), "-m", "pipelines.cli", "bench", *arguments]
    threads = max(1, (os.cpu_count() or 1) // of)  # torchrun's default is 1, a lone process takes all cores
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def measured(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The measurement that a process prints. UserError if it fails; its stderr has said why."""
    output, _ = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise UserError(f"bench ended with exit code {process.returncode}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def compare(recipe: str, options: list[str], gpu_tokens: int, gpus: int) -> None:
    """Print the speed of the GPUs alone at the same time, then of 2, 4, … and all of them together."""
    common, batch = [recipe, "--json", *options, "--set"], "train.batch_tokens={}".format
    processes = [started([*common, batch(gpu_tokens)], range(gpu, gpu + 1), gpus) for gpu in range(gpus)]
    alone = [measured(process)["tokens_per_second"]["median"] for process in processes]
    print("alone, at the same time: " + ", ".join(f"{speed:,.0f}" for speed in alone), flush=True)
    for count in sorted({*(2**power for power in range(1, gpus.bit_length())), gpus} - {1}):
        together = measured(started([*common, batch(count * gpu_tokens)], range(count), gpus))
        speed, memory = together["tokens_per_second"], together["allocated_bytes"]
        print(
            f"{count} GPUs: {speed['median']:,.0f} tokens/s [{speed['low_quartile']:,.0f} … "
            f"{speed['high_quartile']:,.0f}], {speed['median'] / sum(alone[:count]):.1%} of the sum, "
            f"{speed['median'] / (count * min(alone[:count])):.1%} of {count} times the slowest"
            + (f"; {memory / 2**30:.1f} GiB" if memory is not None else ""),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", default="gpt2-124m")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="at least 2 [all]")
    parser.add_argument("--gpu-tokens", type=int, help="tokens of a step on a GPU [the recipe's batch / GPUs]")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="section.field=value")
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    if chosen.gpus < 2:
        parser.error("--gpus: one GPU has nothing to scale; name 2 or more")
    gpu_tokens = chosen.gpu_tokens or load_recipe(chosen.recipe).train.batch_tokens // chosen.gpus
    options = ["--steps", str(chosen.steps)]
    options += [word for change in chosen.changes for word in ("--set", change)]
    compare(chosen.recipe, options, gpu_tokens, chosen.gpus)


if __name__ == "__main__":
    run_as_command(main)
