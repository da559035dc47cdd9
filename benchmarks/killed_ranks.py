"""A run of several ranks that is killed in several ways, against the same run left alone: losses, data and weights.

    python -m benchmarks.killed_ranks SHARDS gpt2-124m --gpus 8 --steps 400
    python -m benchmarks.killed_ranks SHARDS gpt2-124m --gpus 8 --steps 400 --elastic 8 4 8

It trains with `python -m trainer` under torchrun. The killed run ends once by SIGKILL of one rank, once by SIGKILL of
torchrun, and once by SIGTERM to torchrun, each time after --between new steps and a new commit; then it runs to its
end. With `runtime.deterministic`, which is set here, all its losses, gradient norms, data digests and weights must
equal the other run's, bit for bit; exit code 1 if one differs. The first commit of a run comes some ten seconds after
its first step. With --elastic the run is killed as a whole between
these numbers of ranks. Then the data must be equal, and the largest difference of a loss is printed. Without GPUs the
ranks share the CPU.
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

from benchmarks import run_as_command
from pipelines.nodes.ranks import kill_ranks
from pipelines.recipe import load_recipe
from trainer.errors import EXIT_DONE, EXIT_FAILED

LIMIT_SECONDS = 300.0
LOSS, DIGEST = "train/loss", "data/digest"
SAME = (LOSS, "train/grad_norm", "val/loss", DIGEST)


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
        steps, commits, started = self.steps(), self.commits(), time.monotonic()
        process = subprocess.Popen([*command, "--data", str(self.data), "--out", str(self.out)])
        try:
            while process.poll() is None:
                if time.monotonic() > started + LIMIT_SECONDS:
                    raise SystemExit(f"no end of an attempt in {LIMIT_SECONDS:.0f} s")
                if way and self.steps() >= steps + after and self.commits() - commits:
                    self.kill(process, way)
                    break
                time.sleep(0.02)
            else:
                if way:
                    raise SystemExit("the run ended before it was killed, without a new commit: give more --steps")
        finally:
            kill_ranks(process)
        if not way and process.returncode:
            raise SystemExit(f"the trainer ended with exit code {process.returncode}")
        print(f"{ranks} ranks, {way or 'done'}: {self.steps()} steps made, {len(self.commits())} commits", flush=True)

    @staticmethod
    def kill(process: subprocess.Popen[bytes], way: str) -> None:
        """Kill torchrun or its ranks, and wait until no process is left."""
        ranks = psutil.Process(process.pid).children(recursive=True)
        if way == "rank":
            ranks[-1].kill()
        elif way == "torchrun":
            process.kill()
        elif way == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            kill_ranks(process)
        process.wait(LIMIT_SECONDS)
        psutil.wait_procs(ranks, LIMIT_SECONDS)

    def steps(self) -> int:
        """Steps of all attempts, with those that were made again."""
        with suppress(FileNotFoundError):
            return (self.out / "events.jsonl").read_text().count('"train/loss"')
        return 0

    def commits(self) -> set[Path]:
        return set((self.out / "run" / "checkpoints").glob("*/COMMIT.json"))

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def sha256(self) -> str:
        return hashlib.sha256((self.out / "model.safetensors").read_bytes()).hexdigest()


def compare(whole: Run, killed: Run, elastic: bool) -> bool:
    """Print what differs; True if it is as promised."""
    rows, others = whole.rows(), killed.rows()
    if len(rows) != len(others):
        print(f"{len(rows)} rows against {len(others)}")
        return False
    pairs = list(zip(rows, others, strict=True))
    different = {name for name in SAME if any(a.get(name) != b.get(name) for a, b in pairs)}
    if elastic:
        apart = max(abs(a[LOSS] - b[LOSS]) for a, b in pairs if LOSS in a)
        print(f"data {'differs' if DIGEST in different else 'equal'}; largest difference of a loss {apart:.5f}")
        return DIGEST not in different
    if whole.sha256() != killed.sha256():
        different.add("the weights' sha256")
    print(f"{len(pairs)} rows: " + (f"different: {', '.join(sorted(different))}" if different else "all equal"))
    return not different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="llm.c's shards, train_*.bin and val_*.bin")
    parser.add_argument("recipe", nargs="?", default="gpt2-124m")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--between", type=int, default=8, help="new steps before each end")
    parser.add_argument("--elastic", type=int, nargs="+", help="numbers of ranks, one after the other")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="section.field=value")
    options = parser.parse_args()
    fixed = [f"train.max_steps={options.steps}", "train.warmup_steps=0", "train.val_every=null"]
    fixed += ["runtime.deterministic=true", "runtime.checkpoint_minutes=0.02"]
    recipe = load_recipe(options.recipe, [*fixed, *options.changes])
    sections = recipe.model_dump(include={"model", "train", "runtime"}, mode="json")
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = (Run(options.data.resolve(), Path(folder, name), sections) for name in ("whole", "killed"))
        whole.attempt(options.gpus)
        if options.elastic:
            for ranks in options.elastic[:-1]:
                killed.attempt(ranks, "all killed", options.between)
            killed.attempt(options.elastic[-1])
        else:
            for way in ("rank", "torchrun", "SIGTERM"):
                killed.attempt(options.gpus, way, options.between)
            killed.attempt(options.gpus)
        return EXIT_DONE if compare(whole, killed, bool(options.elastic)) else EXIT_FAILED


if __name__ == "__main__":
    run_as_command(main)
