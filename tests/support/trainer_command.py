"""The trainer as a command, in processes of its own, which a test may kill. It needs no pytest."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml
from pydantic import BaseModel

from trainer.base.events import Event, event_from_json

REPOSITORY = Path(__file__).resolve().parents[2]
SERIES = ("train/loss", "train/lr", "train/grad_norm", "val/loss", "data/checksum")

E = TypeVar("E", bound=Event)


def read_events(path: Path) -> list[Event]:
    """All events of a file, in the order of writing."""
    return [event_from_json(line) for line in path.read_text().splitlines()]


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values of rows that must be equal between two runs: no times, no speeds."""
    return [{k: row[k] for k in ("step", *SERIES) if k in row} for row in rows]


class Command:
    """`python -m trainer` (or torchrun) on a folder, started like a user does."""

    def __init__(self, data: Path, out: Path, config: BaseModel, program: Sequence[str] = ("-m", "trainer")) -> None:
        self.data, self.out, self.program = data, out, program
        self.config = out.parent / f"{out.name}.yaml"
        self.config.write_text(yaml.safe_dump(config.model_dump()))

    @contextmanager
    def started(self, ranks: int = 1) -> Iterator[subprocess.Popen[str]]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        arguments = [*self.program, str(self.config), "--data", str(self.data), "--out", str(self.out)]
        process = subprocess.Popen(
            [sys.executable, *(torchrun if ranks > 1 else []), *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            kill_tree(process)
            process.communicate()

    def finish(self, ranks: int = 1) -> str:
        with self.started(ranks) as process:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output
            return output

    def rows_logged(self) -> int:
        """Steps done by all attempts together, including redone ones."""
        with suppress(FileNotFoundError):
            return (self.out / "events.jsonl").read_text().count('"train/loss"')
        return 0

    def events_of(self, kind: type[E]) -> list[E]:
        """The events of one kind, of all attempts, in order."""
        return [event for event in read_events(self.out / "events.jsonl") if isinstance(event, kind)]

    def wait_for(self, condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
        """Wait until a condition on the files of the run holds, or the process has ended."""
        while process.poll() is None:
            with suppress(FileNotFoundError):
                if condition():
                    return
            time.sleep(0.01)

    def wait_for_rows(self, n: int, process: subprocess.Popen[str]) -> None:
        """Wait until this attempt did `n` steps."""
        wanted = self.rows_logged() + n
        self.wait_for(lambda: self.rows_logged() >= wanted, process)

    def commits(self) -> list[Path]:
        return sorted((self.out / "run/checkpoints").glob("*/COMMIT.json"))

    def wait_for_commits(self, n: int, process: subprocess.Popen[str]) -> None:
        """Wait until `n` commits exist. Rows do not show that, because steps continue during a save."""
        self.wait_for(lambda: len(self.commits()) >= n, process)

    def rows(self) -> list[dict[str, Any]]:
        return comparable([json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()])

    def model_sha256(self) -> str:
        return hashlib.sha256((self.out / "model.safetensors").read_bytes()).hexdigest()


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL a process and all its descendants, so that none can clean up."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        for one in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()
