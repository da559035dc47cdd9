"""`skytrain` as its users meet it: a command in a folder of theirs, watched, killed and given again."""

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
from pipelines.stage import STAGES
from pipelines.tracking.runs import read_runs
from trainer.store import LocalStore, Store

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER_NAME = "ein Ordner für 東京"  # every run's: with spaces, and with letters beyond Latin-1
MARK = "SKYTRAIN_TEST_RUN"  # in the environment of a command and of all that it starts
STEPS = 60
# Of what `run --json` prints.
RUN_FIELDS = ["run", "state", "attempts", "usd", "billed_hours", "unpriced_hours", "val_loss", "artifacts"]
PRICE = 36.0  # dollars an hour: a cent a second
SERIES = ("step", "train/loss", "train/lr", "train/grad_norm")
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


def series_of(store: Store) -> list[dict[str, Any]]:
    """What the only run there is has learned, a row a step: all but when and how fast, which differs every time."""
    (run,) = read_runs(store)
    return [{key: row[key] for key in SERIES} for row in run.series if "train/loss" in row]


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
            out, err = process.communicate(timeout=300)
        assert process.returncode == expect, f"exit code {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def result(self, *arguments: str, recipe: str = "tiny.yaml") -> dict[str, Any]:
        """What `skytrain run --json` prints."""
        return json.loads(self.run("run", recipe, "--json", *arguments).stdout)

    def report(self) -> dict[str, Any]:
        """The only run there is, as `skytrain report --json` tells it."""
        (summary,) = json.loads(self.run("report", "--json").stdout)
        return summary

    def series(self) -> list[dict[str, Any]]:
        return series_of(self.store)

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
        """Look every 5 ms, so that what is killed then is killed in the midst of things; at most a fifth of the time,
        for who is watched needs the processor."""
        deadline = time.monotonic() + limit_s
        while True:
            began = time.monotonic()
            if condition():
                return
            if process.poll() is not None:
                raise AssertionError(f"it ended too early, with {process.returncode}: {process.communicate()}")
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(max(0.005, 4 * (time.monotonic() - began)))

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


def ranks(processes: int) -> list[str]:
    return ["--set", f"runtime.processes={processes}"]


def committed(project: Project, step: int) -> Callable[[], bool]:
    """Whether a checkpoint of this step or a later one has been committed."""

    def there() -> bool:
        commits = project.found("train/*/checkpoints/*/COMMIT.json")
        return any(int(path.parent.name.split("-")[1]) >= step for path in commits)

    return there


def sums(manifest: Manifest) -> dict[str, str]:
    """sha256 by file; the series also holds times and speeds, and these differ."""
    return {file.name: file.sha256 for file in manifest.files if file.name != "metrics.jsonl"}


def assert_as_undisturbed(project: Project, finished: Project) -> None:
    """The run learned the very same, bit for bit, and tells every step once."""
    series = project.series()
    assert [row["step"] for row in series] == list(range(1, STEPS + 1))
    assert series == finished.series()
    for stage in ("tokenize", "train", "export"):
        assert sums(project.artifact(stage)) == sums(finished.artifact(stage)), stage
    assert project.artifact("evaluate").facts == finished.artifact("evaluate").facts


def told(uri: str, run: str) -> tuple[Any, dict[str, Any]]:
    """MLflow's client, and its runs by name: the run's own and one for each stage."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("skytrain")
    found = client.search_runs([experiment.experiment_id])
    runs = {one.info.run_name: one for one in found}
    assert len(runs) == len(found) == 1 + len(STAGES), [one.info.run_name for one in found]
    parent = runs[run]
    for stage in STAGES:
        assert runs[f"{run}/{stage}"].data.tags["mlflow.parentRunId"] == parent.info.run_id
    return client, runs
