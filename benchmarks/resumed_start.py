"""The downtime of a killed run, from its command to its first step.

`python -m benchmarks.resumed_start FOLDER [RECIPE] [--kills N] [--own] [--place FOLDER] [--set …]` trains on
llm.c's shards in FOLDER with `skytrain run --stage train`. After a commit it kills a rank (or what --victim names) with
SIGKILL, and waits for the next step: of the same command, as on a rented machine, or with --own of the same command
started again. It prints a line per start, in seconds: from the kill until the `others` are gone, and from the kill, at
first from the command, to the `first step`; and of that step's attempt `setup` (torch, ranks, engine), `download` (the
commit) and `compile` (kernels, allocations, the step).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import run_as_command

LIMIT_SECONDS = 300.0
PHASES = ("setup", "download", "compile")
RENTED = {"SKYPILOT_CLUSTER_INFO": json.dumps({"cloud": "aws", "cluster_name": "benchmark"})}


class Command:
    """`skytrain run` in a folder, started again and again."""

    def __init__(self, folder: Path, arguments: list[str], own: bool) -> None:
        self.home, self.own = folder / "home", own
        code = "from pipelines.cli import main; main()"
        self.arguments = [sys.executable, "-c", code, "run", *arguments]
        settings = {"SKYTRAIN_HOME": str(self.home), "SKYTRAIN_TRACKING": "off", "SKYTRAIN_NOTICE": "off"}
        self.environment = os.environ | settings | ({} if own else RENTED)
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    def first_step(self) -> dict[str, Any]:
        """The row of the next attempt's first step."""
        found: dict[str, Any] = {}
        known = self.events()

        def stepped() -> bool:
            assert self.process
            lines = [line for path in self.events() - known for line in path.read_bytes().split(b"\n")[:-1]]
            found.update(next((json.loads(line) for line in lines if b'"train/loss"' in line), {}))
            if self.process.poll() is not None and not found:
                raise SystemExit(f"the command ended by itself with exit code {self.process.returncode}")
            return bool(found)

        if self.process is None or self.own or self.process.poll() is not None:
            self.started = time.time()
            self.process = subprocess.Popen(self.arguments, env=self.environment, start_new_session=True)
        until(stepped)
        return found

    def events(self) -> set[Path]:
        return set(self.home.glob("work/**/events.jsonl"))

    def commits(self) -> set[Path]:
        return set(self.home.glob("store/train/*/checkpoints/*/COMMIT.json"))

    def kill(self, victim: str) -> float:
        """Kill the last rank, the launcher or the command. Returns the seconds until the ranks are gone; with --own,
        the command has ended then."""
        assert self.process
        command = psutil.Process(self.process.pid)
        (launcher,) = (one for one in command.children() if "pipelines.run.nodes" in str(one.cmdline()))
        ranks, began = launcher.children(), time.time()
        {"rank": ranks[-1], "launcher": launcher, "command": command}[victim].kill()
        until(lambda: all(map(has_ended, ranks)))
        seconds = time.time() - began
        if self.own or victim == "command":
            self.process.wait(LIMIT_SECONDS)
        return seconds


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool]) -> None:
    limit = time.time() + LIMIT_SECONDS
    while not condition():
        if time.time() > limit:
            raise SystemExit(f"nothing in {LIMIT_SECONDS:.0f} s")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="llm.c's shards, train_*.bin and val_*.bin")
    parser.add_argument("recipe", nargs="?", default="gpt2-124m")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--victim", choices=["rank", "launcher", "command"], default="rank")
    parser.add_argument("--own", action="store_true", help="start the command again after each kill")
    parser.add_argument("--place", type=Path, help="folder for the checkpoints")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="section.field=value")
    options = parser.parse_args()
    fixed = [f"tokens.source=llmc://{options.data.resolve()}", "train.val_every=null", "evaluate.every=null"]
    fixed += ["runtime.checkpoint_minutes=0.02", *options.changes]
    changes = [word for change in fixed for word in ("--set", change)]
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        command = Command(Path(folder), [options.recipe, "--stage", "train", *changes], options.own)
        try:
            began, others = time.time(), ""
            for number in range(options.kills + 1):
                commits = command.commits()
                row = command.first_step()
                phases = "  ".join(f"{name} {row['phases'].get(name, 0.0):.2f}" for name in PHASES)
                times = f"first step {row['time'] - began:.2f}, {row['time'] - command.started:.2f} from its command"
                print(f"step {row['step']}: {others}{times}  {phases}", flush=True)
                if number < options.kills:
                    until(lambda: bool(command.commits() - commits))  # noqa: B023
                    began = time.time()
                    others = f"others gone {command.kill(options.victim):.2f}  "
        finally:
            if command.process:
                command.process.terminate()
                command.process.wait(LIMIT_SECONDS)


if __name__ == "__main__":
    run_as_command(main)
