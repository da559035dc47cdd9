"""`skytrain` as its users meet it: a command in a folder of theirs, watched, killed and given again."""

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipelines.artifacts.manifest import FOLDERS, Manifest, read_manifest
from trainer.store import LocalStore

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER_NAME = "ein Ordner für 東京"  # every run's: with spaces, and with letters beyond Latin-1
MARK = "SKYTRAIN_TEST_RUN"  # in the environment of a command and of all that it starts
STEPS = 60
SHIPPED_CLI = "from pipelines.cli import main; main()"

# About 2 s of training with a commit every few steps, 96 shards of text, and an evaluation of half a second: long
# enough for a signal to arrive in the midst of each.
TINY: dict[str, Any] = {
    "name": "tiny",
    "tokens": {
        "source": "texts/*.txt",
        "tokenizer": "bytes",
        "shard_tokens": 2048,
        "max_tokens": 196_608,
        "val_shards": 16,
    },
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 257},
    "train": {
        "batch_tokens": 1024,
        "max_steps": STEPS,
        "learning_rate": 1.0e-2,
        "warmup_steps": 5,
        "val_every": 15,
        "val_tokens": 2048,
    },
    "evaluate": {"val_tokens": 32_768},
    "export": {"dtype": "float32"},
    "runtime": {"micro_batch_size": 4, "processes": 1, "checkpoint_minutes": 0.0005, "device": "cpu"},
}


def write_texts(folder: Path) -> None:
    """Four files of seeded nonsense, 60 KB each."""
    folder.mkdir(parents=True)
    choice = random.Random(4)
    words = ["the", "store", "keeps", "what", "a", "run", "has", "made", "größer", "ist", "東京", "als", "Dorf.\n"]
    for i in range(4):
        (folder / f"{i}.txt").write_text(" ".join(choice.choice(words) for _ in range(11_000)), encoding="utf8")


class Project:
    """A folder with a recipe, `tiny.yaml`, and beside it whatever the command leaves there."""

    def __init__(self, folder: Path, recipe: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.home = folder / ".skytrain"
        self.store = LocalStore(self.home / "store")
        self.mark = uuid.uuid4().hex
        self.environment = {
            MARK: self.mark,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "SKYTRAIN_TRACKING": "off",
            "SKYTRAIN_NOTICE": "off",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        if not folder.exists():
            write_texts(folder / "texts")
            (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe or TINY))

    def copy(self, folder: Path) -> "Project":
        """The same folder somewhere else, to be damaged."""
        shutil.copytree(self.folder, folder)
        return Project(folder)

    # --- the command

    @contextmanager
    def started(self, *arguments: str, code: str = SHIPPED_CLI) -> Iterator[subprocess.Popen[str]]:
        """The command, running; at the end of the block nothing of it is left."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SKYTRAIN_", "MLFLOW_"))}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=self.folder,
            env=inherited | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            self.kill_all(process)
            process.communicate()

    def run(self, *arguments: str, expect: int = 0, code: str = SHIPPED_CLI) -> subprocess.CompletedProcess[str]:
        """Give the command and wait for the exit code that is expected of it."""
        with self.started(*arguments, code=code) as process:
            out, err = process.communicate(timeout=120)
        assert process.returncode == expect, f"exit code {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def result(self, *arguments: str, recipe: str = "tiny.yaml") -> dict[str, Any]:
        """What `skytrain run --json` prints."""
        return json.loads(self.run("run", recipe, "--json", *arguments).stdout)

    def report(self) -> dict[str, Any]:
        """The only run there is, as `skytrain report --json` tells it."""
        (summary,) = json.loads(self.run("report", "--json").stdout)
        return summary

    def series(self) -> list[dict[str, str]]:
        """`skytrain report --series` without the speed, which is another every time."""
        rows = list(csv.DictReader(self.run("report", "--series").stdout.splitlines()))
        assert list(rows[0]) == ["step", "train/loss", "lr", "grad_norm", "tokens/s"]
        return [{k: v for k, v in row.items() if k != "tokens/s"} for row in rows]

    # --- what it leaves

    def artifacts(self, stage: str) -> list[Manifest]:
        """The finished artifacts of a stage."""
        keys = [path.parent.relative_to(self.store.root) for path in self.found(f"{FOLDERS[stage]}/*/MANIFEST.json")]
        manifests = [read_manifest(self.store, key.as_posix()) for key in keys]
        return [manifest for manifest in manifests if manifest]

    def artifact(self, stage: str) -> Manifest:
        (manifest,) = self.artifacts(stage)
        return manifest

    def path(self, stage: str, name: str) -> Path:
        """Where the store keeps a file of a stage's only artifact."""
        manifest = self.artifact(stage)
        return self.store.path_of(f"{manifest.prefix}/{manifest.file(name).key}")

    def found(self, pattern: str) -> list[Path]:
        return sorted(self.store.root.glob(pattern))

    def claims(self, stage: str) -> int:
        """Attempts at a stage, over all runs."""
        return len(self.found(f"{FOLDERS[stage]}/*/attempts/*/claim.json"))

    def attempts(self) -> dict[str, int]:
        return {stage: self.claims(stage) for stage in FOLDERS}

    def heartbeats(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.found("*/*/attempts/*/heartbeat.json")]

    def rows_logged(self) -> int:
        """Steps done by the attempts whose work folders are still there."""
        with suppress(FileNotFoundError):  # a stage that ends removes its folders while we look
            return sum(log.read_text().count('"train/loss"') for log in self.home.glob("work/**/events.jsonl"))
        return 0

    def rows_committed(self) -> int:
        """Steps in the committed parts of all attempts' series; a step that was done twice counts twice."""
        return sum(path.read_text().count('"train/loss"') for path in self.found("train/*/metrics/*.jsonl"))

    # --- watching and killing

    def wait_until(self, condition: Callable[[], object], process: subprocess.Popen[str], limit_s: float = 60) -> None:
        """Look every 5 ms, so that what is killed then is killed in the midst of things."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if process.poll() is not None:
                raise AssertionError(f"it ended too early, with {process.returncode}: {process.communicate()}")
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    def alive(self) -> list[psutil.Process]:
        """Every living process that descends from a command given here, whatever its parent is now."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def kill_all(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL to the command and all that descends from it at once, so that nobody can clean up."""
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            descendants = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for one in descendants:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        while left := self.alive():  # born in between, or orphaned before
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            time.sleep(0.02)
