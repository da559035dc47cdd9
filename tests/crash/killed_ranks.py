"""A run of several ranks that is killed in several ways, against the same run left alone: losses, data and weights.

    PYTHONPATH=tests/support python -m tests.crash.killed_ranks SHARDS gpt2-124m --ranks 2 --steps 60

It trains with `python -m trainer` under torchrun, on the machine's GPUs or, without any, on the CPU, and needs neither
a network nor a server. The killed run ends once by SIGKILL of one rank, once by SIGKILL of torchrun, and once by
SIGTERM to torchrun, each time after --between new steps and a new commit; then it runs to its end. All its losses,
gradient norms, data digests and weights must equal the other run's, bit for bit; exit code 1 if one differs.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

import psutil
from pydantic import BaseModel
from trainer_command import SERIES, Command

from pipelines.recipe.loader import load_recipe
from trainer.__main__ import TrainerConfig

WAYS = ("rank", "torchrun", "SIGTERM")


def kill_after(command: Command, ranks: int, way: str, steps: int) -> None:
    """Start an attempt, and kill it after so many new steps and a new commit. Returns once no process is left."""
    rows, commits = command.rows_logged() + steps, set(command.commits())
    with command.started(ranks) as process:
        command.wait_for(lambda: command.rows_logged() >= rows and set(command.commits()) - commits, process)
        ended = "the run ended before it was killed, without a new commit: give it more steps"
        assert process.poll() is None, f"{ended}\n{process.communicate()[0][-2000:]}"
        children = psutil.Process(process.pid).children(recursive=True)
        if way == "rank":
            children[-1].kill()
        else:
            process.send_signal(signal.SIGKILL if way == "torchrun" else signal.SIGTERM)
        process.wait()
        psutil.wait_procs(children)


def whole_and_killed(data: Path, folder: Path, config: BaseModel, ranks: int, between: int) -> tuple[Command, Command]:
    """Two finished runs: one undisturbed, the other killed in each way after `between` steps and a commit."""
    whole, killed = (Command(data, folder / name, config) for name in ("whole", "killed"))
    for way in WAYS:
        kill_after(killed, ranks, way, between)
    for run in (whole, killed):
        run.finish(ranks)
    return whole, killed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="llm.c's shards, train_*.bin and val_*.bin")
    parser.add_argument("recipe", nargs="?", default="gpt2-124m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--between", type=int, default=8, help="new steps before each end")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="section.field=value")
    options = parser.parse_args()
    fixed = [f"train.max_steps={options.steps}", "train.warmup_steps=0", "train.val_every=null"]
    fixed += ["runtime.deterministic=true", "runtime.checkpoint_minutes=0.02"]
    recipe = load_recipe(options.recipe, [*fixed, *options.changes])
    config = TrainerConfig(model=recipe.model, train=recipe.train, runtime=recipe.runtime)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = whole_and_killed(options.data.resolve(), Path(folder), config, options.ranks, options.between)
        rows, others = whole.rows(), killed.rows()
        redone = killed.rows_logged() - whole.rows_logged()
        different = [name for name in SERIES if [row.get(name) for row in rows] != [row.get(name) for row in others]]
        different += ["weights"] * (whole.model_sha256() != killed.model_sha256())
    shown = f"different: {', '.join(different)}" if different else "all equal"
    print(f"{len(rows)} rows, {redone} steps redone: {shown}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
