"""Runs of `skytrain` as a user starts them: a command in a folder, observed, killed and started again."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from in_process import skytrain
from trainer_command import kill_tree

from pipelines.run.runs import read_runs
from pipelines.store.layout import FOLDERS
from pipelines.store.manifest import Manifest, read_manifest
from trainer.base.store import LocalStore, Store

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER_NAME = "ein Ordner für 東京"  # of every run: with spaces and letters beyond Latin-1
MARK = "SKYTRAIN_TEST_RUN"  # in the environment of a command and of its descendants
STEPS = 60
WAIT_SECONDS = 240  # for what a run reaches
OF_ONE_RUN = ("README.md",)  # files with times and dollars
# The fields of `run --json`.
RUN_FIELDS = ["run", "state", "attempts", "usd", "billed_hours", "unpriced_hours", "val_loss", "artifacts"]
PRICE = 36.0  # dollars an hour: a cent a second
SERIES = ("step", "train/loss", "train/lr", "train/grad_norm")
SHIPPED_CLI = "from pipelines.cli import main; main()"

# About 2 s of training with a commit every few steps, 96 shards of text, and half a second of evaluation: long enough
# for a signal to arrive during each.
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
    """Four files of seeded random words, 60 KB each."""
    folder.mkdir(parents=True)
    choice = random.Random(4)
    words = ["the", "store", "keeps", "what", "a", "run", "has", "made", "größer", "ist", "東京", "als", "Dorf.\n"]
    for i in range(4):
        (folder / f"{i}.txt").write_text(" ".join(choice.choice(words) for _ in range(11_000)), encoding="utf8")


def series_of(store: Store) -> list[dict[str, Any]]:
    """The series of the only run in the store, one row a step, without times and speeds."""
    (run,) = read_runs(store)
    return [{key: row[key] for key in SERIES} for row in run.series if "train/loss" in row]


class Project:
    """A folder with the recipe `tiny.yaml` and the files that the command leaves beside it."""

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
            for module in ("numpy", "torch", "json", "datasets"):  # of somebody who wants our processes to run it
                (folder / f"{module}.py").write_text("import os; os._exit(9)")
            (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe or TINY))

    def copy(self, folder: Path) -> "Project":
        """A copy of the folder, for a test that changes it."""
        shutil.copytree(self.folder, folder)
        return Project(folder)

    # --- the command

    @contextmanager
    def started(
        self, *arguments: str, code: str = SHIPPED_CLI, command: Sequence[str] = ()
    ) -> Iterator[subprocess.Popen[str]]:
        """The running command, or another one; the end of the block kills all its processes."""
        process = subprocess.Popen(
            command or [sys.executable, "-P", "-c", code, *arguments],
            cwd=self.folder,
            env=self.whole_environment(),
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

    def whole_environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SKYTRAIN_", "MLFLOW_"))}
        return inherited | self.environment

    def run(self, *arguments: str, expect: int = 0, code: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command in this process, or Python code in another one, and check its exit code."""
        if code is None:
            done = skytrain(self.folder, self.whole_environment(), *arguments)
        else:
            with self.started(*arguments, code=code) as process:
                out, err = process.communicate(timeout=300)
            done = subprocess.CompletedProcess(arguments, process.returncode, out, err)
        assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def result(self, *arguments: str, recipe: str = "tiny.yaml") -> dict[str, Any]:
        """The output of `skytrain run --json`."""
        return json.loads(self.run("run", recipe, "--json", *arguments).stdout)

    def report(self) -> dict[str, Any]:
        """The only run in the store, from `skytrain report --json`."""
        (summary,) = json.loads(self.run("report", "--json").stdout)
        return summary

    def series(self) -> list[dict[str, Any]]:
        return series_of(self.store)

    # --- its files

    def artifacts(self, stage: str) -> list[Manifest]:
        """The finished artifacts of a stage."""
        keys = [path.parent.relative_to(self.store.root) for path in self.found(f"{FOLDERS[stage]}/*/MANIFEST.json")]
        manifests = [read_manifest(self.store, key.as_posix()) for key in keys]
        return [manifest for manifest in manifests if manifest]

    def artifact(self, stage: str) -> Manifest:
        (manifest,) = self.artifacts(stage)
        return manifest

    def path(self, stage: str, name: str) -> Path:
        """The path of a file of a stage's only artifact."""
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
        """Steps of the attempts that still have a work folder."""
        return sum(log.read_text().count('"train/loss"') for log in self.home.glob("work/**/events.jsonl"))

    def has_unsaved_state(self) -> bool:
        """Whether a store refused a checkpoint of an attempt that still has a work folder."""
        return any("CheckpointFailed" in log.read_text() for log in self.home.glob("work/**/events.jsonl"))

    def rows_committed(self) -> int:
        """Steps in the committed series of all attempts; a redone step counts twice."""
        return sum(path.read_text().count('"train/loss"') for path in self.found("train/*/metrics/*.jsonl"))

    # --- watching and killing

    def wait_until(self, condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
        """Poll every 5 ms, so that a kill comes right after the condition. Polling takes at most a fifth of the time:
        the command needs the processor."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            began = time.monotonic()
            with suppress(FileNotFoundError):  # a stage that ends removes its folders, also below a glob
                if condition():
                    return
            if process.poll() is not None:
                raise AssertionError(f"the command ended too early with {process.returncode}: {process.communicate()}")
            assert time.monotonic() < deadline, f"no success within {WAIT_SECONDS} s"
            time.sleep(max(0.005, 4 * (time.monotonic() - began)))

    def alive(self) -> list[psutil.Process]:
        """All live descendants of the commands of this project, orphans too."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def kill_all(self, process: subprocess.Popen[str]) -> None:
        """SIGKILL to the command and all its descendants at once: none can clean up."""
        kill_tree(process)
        while left := self.alive():  # started in between, or orphaned before
            for one in left:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            time.sleep(0.02)


def flip_a_bit(path: Path) -> None:
    """Flip a bit in the middle of a file, where weights and tokens are."""
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def ranks(processes: int) -> list[str]:
    return ["--set", f"runtime.processes={processes}"]


def committed(project: Project, step: int, artifact: str = "train/*") -> Callable[[], bool]:
    """The condition that a checkpoint of this step or a later one is committed."""

    def has_commit() -> bool:
        commits = project.found(f"{artifact}/checkpoints/*/COMMIT.json")
        return any(int(path.parent.name.split("-")[1]) >= step for path in commits)

    return has_commit


def sums(manifest: Manifest) -> dict[str, str]:
    """sha256 by file, without the series: it contains times and speeds, which differ."""
    return {file.name: file.sha256 for file in manifest.files if file.name not in OF_ONE_RUN}


def assert_as_undisturbed(project: Project, finished: Project) -> None:
    """The run has the same results as the undisturbed one, bit for bit, and every step once."""
    series = project.series()
    assert [row["step"] for row in series] == list(range(1, STEPS + 1))
    assert series == finished.series()
    for stage in ("tokenize", "train", "export"):
        assert sums(project.artifact(stage)) == sums(finished.artifact(stage)), stage
    assert project.artifact("evaluate").facts == finished.artifact("evaluate").facts
