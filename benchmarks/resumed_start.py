"""The downtime of a killed run: from the start of a process to its first resumed step, by phase.

`python -m benchmarks.resumed_start FOLDER [RECIPE] [--kills N] [--gpus N] [--place FOLDER] [--set …]` trains on llm.c's
shards in FOLDER with `python -m trainer`. After a commit it kills all processes with SIGKILL and starts the same
command again. It prints one line per start, in seconds: `imports` until the trainer's clock starts (the interpreter,
torch, the process group), `setup` (the engine), `download` (finding, checking and loading the commit), `first step`
(kernels, allocations, the step itself), and the total from the start of the process to the end of that step. The first
start has no commit to load; it draws its weights.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks import run_as_command
from pipelines.nodes.ranks import kill_ranks
from pipelines.recipe import load_recipe

PHASES = {"setup": "setup", "download": "download", "compile": "first step"}
LIMIT_SECONDS = 300.0  # for one start


def start(config: Path, data: Path, out: Path, gpus: int, last: bool) -> dict[str, Any]:
    """Start the trainer, read its first step, and kill it after its next commit (or at once, if `last`)."""
    events, commits = out / "events.jsonl", out / "run" / "checkpoints"
    offset = events.stat().st_size if events.exists() else 0
    before = committed(commits)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    command = [sys.executable, *torchrun, "-m", "trainer", str(config), "--data", str(data), "--out", str(out)]
    started = time.time()
    process = subprocess.Popen(command)
    row: dict[str, Any] = {}
    try:
        while time.time() < started + LIMIT_SECONDS:
            if process.poll() is not None:
                raise SystemExit(f"the trainer ended by itself with exit code {process.returncode}")
            if not row and events.exists():
                row = first_row(events, offset)
            if row and (last or committed(commits) > before):
                break
            time.sleep(0.05)
    finally:
        kill_ranks(process)
    if not row:
        raise SystemExit(f"no step in {LIMIT_SECONDS:.0f} s")
    seconds = {name: row["phases"].get(phase, 0.0) for phase, name in PHASES.items()}
    total = row["time"] - started
    return {"step": row["step"], "imports": total - sum(row["phases"].values()), **seconds, "total": total}


def first_row(events: Path, offset: int) -> dict[str, Any]:
    """The row of the first step in the file after `offset` bytes; empty without one."""
    lines = events.read_bytes()[offset:].split(b"\n")[:-1]
    rows = (json.loads(line) for line in lines if b'"train/loss"' in line)
    return next(rows, {})


def committed(commits: Path) -> set[Path]:
    return set(commits.glob("*/COMMIT.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="llm.c's shards, train_*.bin and val_*.bin")
    parser.add_argument("recipe", nargs="?", default="gpt2-124m")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1, help="more than one: by torchrun")
    parser.add_argument("--place", type=Path, help="folder for the checkpoints")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="section.field=value")
    options = parser.parse_args()
    fixed = ["train.val_every=null", "runtime.checkpoint_minutes=0.02"]
    recipe = load_recipe(options.recipe, [*fixed, *options.changes])
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        config, out = Path(folder, "config.yaml"), Path(folder, "out")
        config.write_text(yaml.safe_dump(recipe.model_dump(include={"model", "train", "runtime"}, mode="json")))
        out.mkdir()
        for number in range(options.kills + 1):
            result = start(config, options.data.resolve(), out, options.gpus, last=number == options.kills)
            phases = "  ".join(f"{name} {seconds:.2f}" for name, seconds in result.items() if name != "step")
            print(f"{'first' if number == 0 else 'resumed'}, step {result['step']}: {phases}", flush=True)


if __name__ == "__main__":
    run_as_command(main)
