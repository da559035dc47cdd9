"""The same training by skytrain and by llm.c: text, model, batch, schedule and validation tokens are equal.

    python -m benchmarks.beside_llmc prepare FOLDER          # the text, recipe.yaml and llmc.sh
    skytrain run FOLDER/recipe.yaml --store FOLDER/store     # tokenize, train, evaluate, export
    sh FOLDER/llmc.sh SHARDS OUT                             # in llm.c's folder; SHARDS: the artifact of tokenize
    python -m benchmarks.beside_llmc shuffle SHARDS NEW      # the same shards with their windows in random order
    python -m benchmarks.beside_llmc table LOG [LOG …]       # val losses by step, of main.log or metrics.jsonl

The text is the Python code of the packages that constraints.txt pins, in a random order of its files: it is there after
`make install`. Other versions of the packages are another text. llm.c (github.com/karpathy/llm.c) is built with
`make train_gpt2cu USE_CUDNN=1`, for several GPUs with NCCL. With `--gpus N`, llmc.sh starts N ranks on one host, which
find each other by a file in OUT and use ZeRO-1, as skytrain does. SHARDS and OUT: absolute paths.

The batches of the two differ. llm.c shuffles blocks of GPUs x micro_batch_size x block_size tokens, so the
micro-batches of all ranks are one piece of contiguous text (llmc/dataloader.h). skytrain shuffles windows of block_size
tokens. `shuffle` writes shards with their windows in a random order; from these llm.c reads shuffled windows too. So
the effect of the order shows by itself.
"""

import argparse
import json
import random
import shutil
import sysconfig
from pathlib import Path

import numpy as np

from benchmarks import run_as_command
from pipelines.user.show.overlay import read_overlay
from trainer.config.errors import UserError
from trainer.data.shards import local_shards, read_shard, write_shard

SEED = 1337  # of the order of files and windows
RECIPE = """\
# GPT-2 124M on the Python code of this project's pinned dependencies, beside llm.c (benchmarks/beside_llmc.py).
name: code-124m
tokens: {{source: "{text}/*.txt", tokenizer: gpt2, shard_tokens: 4_194_304, val_shards: 1}}
model: {{n_layer: 12, n_head: 12, n_embd: 768, block_size: 1024, vocab_size: 50257}}
train:
  batch_tokens: {batch_tokens}
  max_steps: {steps}
  learning_rate: 6.0e-4
  warmup_steps: 100
  schedule: cosine
  weight_decay: 0.1
  grad_clip: 1.0
  val_every: 100
  val_tokens: {val_tokens}
evaluate: {{val_tokens: {val_tokens}}}
runtime: {{micro_batch_size: 64, processes: {gpus}}}
"""
LLMC = """\
set -e
shards=$1 out=$2
rank() {{
    exec ./train_gpt2cu -i "$shards/train_*.bin" -j "$shards/val_*.bin" -o "$out" -e d12 -b 64 -t 1024 \\
        -d {batch_tokens} -x {steps} -l 0.0006 -u 100 -q 0.0 -c 0.1 -v 100 -m {val_batches} -s 0 -h 0 -r 0 -ge 2 \\
        -z {zero} -pn {gpus} -pr "$1" -pg {gpus} -pi fs -pf "$out"
}}
mkdir -p "$out"
rm -f "$out/ncclUniqueId.sync"
trap 'exit 130' INT TERM
trap 'kill $others 2>/dev/null || :' EXIT  # ranks whose peer has failed would wait in NCCL
others= other=1
while [ $other -lt {gpus} ]; do
    rank $other &
    others="$others $!"
    other=$((other + 1))
done
(rank 0)
wait
"""
VAL_TOKENS = 1_048_576
MICRO_BATCH_TOKENS = 64 * 1024


def prepare(folder: Path, packages: Path, steps: int, batch_tokens: int, gpus: int) -> None:
    """Write FOLDER/text/NNNNNN.txt, FOLDER/recipe.yaml and FOLDER/llmc.sh."""
    if gpus < 1 or VAL_TOKENS // MICRO_BATCH_TOKENS % gpus:
        raise UserError(f"--gpus {gpus}: must share a validation of {VAL_TOKENS:,} tokens; choose 1, 2, 4, 8 or 16")
    at_once = gpus * MICRO_BATCH_TOKENS
    if batch_tokens < 1 or batch_tokens % at_once:
        raise UserError(
            f"--batch-tokens {batch_tokens}: must be whole micro-batches of {MICRO_BATCH_TOKENS:,} tokens on {gpus} "
            f"GPU(s); choose a multiple of {at_once}"
        )
    paths = sorted(path for path in packages.rglob("*.py") if path.is_file() and path.stat().st_size)
    if not paths:
        raise UserError(
            f"--packages {packages}: contains no Python file; name the site-packages of this project's .venv"
        )
    random.Random(SEED).shuffle(paths)
    text = folder.resolve() / "text"
    text.mkdir(parents=True)
    for number, path in enumerate(paths):
        shutil.copyfile(path, text / f"{number:06d}.txt")
    same = {"steps": steps, "batch_tokens": batch_tokens, "gpus": gpus}
    (folder / "recipe.yaml").write_text(RECIPE.format(text=text, val_tokens=VAL_TOKENS, **same))
    val_batches = VAL_TOKENS // at_once
    (folder / "llmc.sh").write_text(LLMC.format(val_batches=val_batches, zero=int(gpus > 1), **same))
    print(f"{len(paths):,} files, {sum(p.stat().st_size for p in paths):,} bytes of text; see {folder / 'recipe.yaml'}")


def shuffle(shards: Path, out: Path, block_size: int = 1024) -> None:
    """Copy val shards, and permute the windows of `block_size` tokens in each train shard.

    The last target of a window is the first token of the next one, so one target of `block_size` is wrong.
    """
    out.mkdir(parents=True)
    for shard in local_shards(shards, "val"):
        shutil.copyfile(shards / shard.name, out / shard.name)
    order = np.random.default_rng(SEED)
    for shard in local_shards(shards, "train"):
        tokens = read_shard(shards / shard.name)
        windows = tokens[: len(tokens) // block_size * block_size].reshape(-1, block_size)
        write_shard(out / shard.name, order.permutation(windows).reshape(-1))


def val_losses(log: Path) -> dict[int, float]:
    """Val loss by step, from llm.c's main.log or our metrics.jsonl."""
    if log.suffix == ".log":
        return read_overlay(str(log)).series["val/loss"]
    rows = map(json.loads, log.read_text().splitlines())
    return {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}


def table(logs: list[Path]) -> None:
    """Print a Markdown table: a line a step that every log has, a column a log."""
    curves = [val_losses(log) for log in logs]
    print("| step | " + " | ".join(map(str, logs)) + " |")
    print("|---" * (1 + len(logs)) + "|")
    for step in sorted(set.intersection(*(set(curve) for curve in curves))):
        print(f"| {step:,} | " + " | ".join(f"{curve[step]:.4f}" for curve in curves) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("prepare")
    making.add_argument("folder", type=Path)
    making.add_argument(
        "--packages", type=Path, default=Path(sysconfig.get_paths()["purelib"]), help="folder with .py files"
    )
    making.add_argument("--steps", type=int, default=1800)
    making.add_argument("--batch-tokens", type=int, default=131_072, help="tokens of a step")
    making.add_argument("--gpus", type=int, default=1, help="GPUs of one host")
    shuffling = commands.add_parser("shuffle")
    shuffling.add_argument("shards", type=Path)
    shuffling.add_argument("out", type=Path)
    commands.add_parser("table").add_argument("logs", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.folder, options.packages, options.steps, options.batch_tokens, options.gpus)
    elif options.command == "shuffle":
        shuffle(options.shards, options.out)
    else:
        table(options.logs)


if __name__ == "__main__":
    run_as_command(main)
