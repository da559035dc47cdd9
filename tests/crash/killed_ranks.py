"""A run of several ranks that is killed in several ways, against the same run left alone: losses, data and weights.

    python -m tests.crash.killed_ranks SHARDS gpt2-124m --ranks 2 --steps 60

It trains with `python -m trainer` under torchrun, on the machine's GPUs or, without any, on the CPU, and needs neither
a network nor a server. The killed run ends once by SIGKILL of one rank, once by SIGKILL of torchrun, and once by
SIGTERM to torchrun, each time after --between new steps and a new commit; then it runs to its end. All its losses,
gradient norms, data digests and weights must equal the other run's, bit for bit; exit code 1 if one differs.
"""

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipelines.recipe import load_recipe

WAYS = ("rank", "torchrun", "SIGTERM")
SAME = ("train/loss", "train/grad_norm", "val/loss", "data/checksum")


class Run:
    """The attempts of one run."""

    def __init__(self, data: Path, folder: Path, sections: dict[str, Any]) -> None:
        folder.mkdir()
        self.data, self.out, self.config = data, folder / "out", folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(sections))

    def attempt(self, ranks: int, way: str | None = None, after: int = 0) -> None:
        """Start it; kill it in a way after so many new steps and a new commit, or let it finish."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *torchrun, "-m", "trainer", str(self.config)]
        steps, commits = self.steps(), self.commits()
        process = subprocess.Popen([*command, "--data", str(self.data), "--out", str(self.out)])
        try:
            while process.poll() is None:
                if way and self.steps() >= steps + after and self.commits() - commits:
                    self.kill(process, way)
                    break
                time.sleep(0.02)
            else:
                assert not way, "the run ended before it was killed, without a new commit: give it more steps"
                assert process.returncode == 0, f"the trainer ended with exit code {process.returncode}"
        finally:
            process.kill()  # after an error: the ranks end with it
            process.wait()

    @staticmethod
    def kill(process: subprocess.Popen[bytes], way: str) -> None:
        """Kill torchrun or a rank, and wait until no process is left."""
        ranks = psutil.Process(process.pid).children(recursive=True)
        if way == "rank":
            ranks[-1].kill()
        else:
            process.send_signal(signal.SIGKILL if way == "torchrun" else signal.SIGTERM)
        process.wait()
        psutil.wait_procs(ranks)

    def steps(self) -> int:
        """Steps of all attempts, with those that were made again."""
        with suppress(FileNotFoundError):
            return (self.out / "events.jsonl").read_text().count('"train/loss"')
        return 0

    def commits(self) -> set[Path]:
        return set((self.out / "run" / "checkpoints").glob("*/COMMIT.json"))

    def results(self) -> tuple[list[dict[str, Any]], str]:
        """The values that must be equal, one row a step, and the sha256 of the weights."""
        rows = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        weights = hashlib.sha256((self.out / "model.safetensors").read_bytes()).hexdigest()
        return [{name: row.get(name) for name in SAME} for row in rows], weights


def whole_and_killed(
    data: Path, folder: Path, sections: dict[str, Any], ranks: int, between: int, ways: tuple[str, ...] = WAYS
) -> tuple[Run, Run]:
    """Two finished runs: one undisturbed, the other killed in each way after `between` steps and a commit."""
    whole, killed = (Run(data, folder / name, sections) for name in ("whole", "killed"))
    whole.attempt(ranks)
    for way in ways:
        killed.attempt(ranks, way, between)
    killed.attempt(ranks)
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
    sections = recipe.model_dump(include={"model", "train", "runtime"}, mode="json")
    with tempfile.TemporaryDirectory() as folder:
        runs = whole_and_killed(options.data.resolve(), Path(folder), sections, options.ranks, options.between)
        (rows, weights), (others, other_weights) = (run.results() for run in runs)
        redone = runs[1].steps() - runs[0].steps()
    different = [name for name in SAME if [row[name] for row in rows] != [row[name] for row in others]]
    different += ["weights"] * (weights != other_weights)
    print(
        f"{len(rows)} rows, {redone} steps redone: "
        + (f"different: {', '.join(different)}" if different else "all equal")
    )
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
