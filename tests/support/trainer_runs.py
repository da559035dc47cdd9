"""Whole runs of the trainer, in this process and in separate processes, with tiny data."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from pipeline_runs import flip_a_bit
from trainer_command import comparable, read_events
from waiting import LONG_SECONDS

from trainer.__main__ import TrainerConfig
from trainer.base.events import Event, EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World
from trainer.base.process import StopSignal
from trainer.base.store import LocalStore, Store
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState, committed_folders, series
from trainer.checkpoint.layout import step_of
from trainer.checkpoint.save_clock import SaveClock
from trainer.checkpoint.weights import Origin
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.model_config import Section
from trainer.data.batches import TokenData
from trainer.data.shard_maps import Fetch
from trainer.data.shards import local_shards, write_shard
from trainer.eval.evaluation import Evaluation
from trainer.loop.loop import Training
from trainer.models.gpt2 import Gpt2Config
from trainer.models.gpt2_module import GPT
from trainer.models.language_model import LanguageModel

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, CPU)
EVERY_STEP = 1e-9  # minutes between checkpoints

E = TypeVar("E", bound=Event)

CONFIG: dict[str, dict[str, Any]] = {
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 70},
    "train": {
        "batch_tokens": 256,
        "max_steps": 12,
        "learning_rate": 0.01,
        "warmup_steps": 3,
        "val_every": 5,
        "val_tokens": 400,
    },
    "runtime": {"micro_batch_size": 2, "device": "cpu", "checkpoint_minutes": 1000},
}


def configured(**changes: Any) -> TrainerConfig:
    """CONFIG with some fields changed, in any section."""
    sections = {
        name: values | {k: changes.pop(k) for k in list(changes) if k in FIELDS[name]}
        for name, values in CONFIG.items()
    }
    assert not changes, changes
    return TrainerConfig.model_validate(sections)


SECTIONS: dict[str, type[Section]] = {"model": Gpt2Config, "train": TrainConfig, "runtime": RuntimeConfig}
FIELDS = {name: section.model_fields for name, section in SECTIONS.items()}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # With such small operations, waking a second thread takes most of the time, ten times more on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of a learnable language: each token follows from the one before, with some noise."""
    folder = tmp_path_factory.mktemp("data")
    noise = np.random.RandomState(0)
    for name, n in (("train_000000", 900), ("train_000001", 1500), ("train_000002", 700), ("val_000000", 600)):
        tokens = np.zeros(n, dtype=np.uint16)
        for i in range(1, n):
            tokens[i] = noise.randint(70) if noise.rand() < 0.1 else (5 * int(tokens[i - 1]) + 3) % 70
        write_shard(folder / f"{name}.bin", tokens)
    return folder


# --- ranks that are threads of this process


@dataclass(frozen=True)
class ThreadedWorld(World):
    """The world of a rank that is a thread; what it gathers goes through `table`."""

    table: Any = None

    def gather(self, value: Any) -> list[Any]:
        values, barrier = self.table
        values[self.rank] = value
        barrier.wait(LONG_SECONDS)
        found = list(values)
        barrier.wait(LONG_SECONDS)
        return found


def threaded_worlds(count: int) -> list[ThreadedWorld]:
    table = ([None] * count, threading.Barrier(count))
    return [ThreadedWorld(rank, 0, count, CPU, table) for rank in range(count)]


# --- runs inside this process


@dataclass
class StopAt:
    """A stop signal that is set in the given step of this attempt, or before the given batch of its validations. The
    loop reads it once a step and once a batch."""

    clock: PhaseClock
    step: int | None = None
    val_batch: int | None = None
    steps: int = 0
    val_batches: int = 0

    @property
    def asked(self) -> bool:
        validating = self.clock.current == "evaluate"
        self.val_batches, self.steps = self.val_batches + validating, self.steps + (not validating)
        in_step = self.step is not None and self.steps >= self.step
        return in_step or (self.val_batch is not None and self.val_batches >= self.val_batch)


class PromptCheckpointer(Checkpointer):
    """Never busy, so that a run can save after every step, even with fast steps."""

    busy = False


Ending = tuple[list[dict[str, Any]], str]  # the rows, and the digest of the weights


@dataclass
class Runner:
    """Attempts of one run in a folder, each with the next attempt number."""

    data: Path
    out: Path
    config: TrainerConfig
    attempts: int = 0
    evaluation: Evaluation = Evaluation()
    origin: Callable[[World], Origin] | None = None
    events: list[Event] = field(default_factory=list)

    def attempt(
        self,
        stop_after: int | None = None,
        stop_in_val_batch: int | None = None,
        store: Store | None = None,
        superseded: Callable[[], bool] = lambda: False,
        fetch: Fetch | None = None,
    ) -> tuple[GPT, TrainState]:
        self.attempts += 1
        c, fetch = self.config, fetch or self.data.joinpath
        train_data, val_data = (
            TokenData(local_shards(self.data, s), fetch, c.model.block_size, c.train.seed) for s in ("train", "val")
        )
        self.out.mkdir(exist_ok=True, parents=True)
        log = EventLog(self.out / "events.jsonl", PhaseClock())
        stop = cast(StopSignal, StopAt(log.clock, stop_after, stop_in_val_batch))
        checkpointer = PromptCheckpointer(
            store or self.store,
            "run",
            ALONE,
            self.attempts,
            c.runtime.keep_last,
            superseded,
            c.runtime.keep_every_steps,
        )
        try:
            settings = (c.model, c.train, c.runtime, train_data, val_data)
            saving = (checkpointer, SaveClock(c.runtime))
            engine, state = Training(*settings, *saving, ALONE, stop, log, self.evaluation, self.origin).run()
            model = GPT(c.model)
            model.load_state_dict(dict(engine.weights()))
            return model, state
        finally:
            self.events = read_events(self.out / "events.jsonl")

    def events_of(self, kind: type[E]) -> list[E]:
        """The events of one kind, of all attempts, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.out)

    def rows(self) -> list[dict[str, Any]]:
        return comparable(series(self.store, "run"))

    def ended(self, model: GPT) -> Ending:
        """All that must be equal between two runs."""
        return self.rows(), weights(model)

    def commits(self) -> list[int]:
        """Steps that the run can resume from, newest first."""
        return committed_steps(self.store)

    def newest(self) -> Path:
        return max((self.out / "run/checkpoints").iterdir())


def committed_steps(store: Store) -> list[int]:
    """Steps that a run can resume from, newest first."""
    return [step_of(folder) for folder in committed_folders(store, "run")]


def flip_a_byte(folder: Path) -> None:
    flip_a_bit(next(folder.glob("*.safetensors")))


def weights(model: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, p in sorted(model.state_dict().items()):
        digest.update(name.encode() + p.numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Runners:
    """Makes runs in a test's folder. `endings` has those of the module's tests, by configuration."""

    data: Path
    folder: Path
    endings: dict[str, Ending]

    def __call__(self, name: str = "run", **changes: Any) -> Runner:
        return Runner(self.data, self.folder / name, configured(**changes))

    def undisturbed(self, **changes: Any) -> Ending:
        """The ending of a run in one attempt."""
        if str(changes) not in self.endings:
            run = self("undisturbed", **changes)
            self.endings[str(changes)] = run.ended(run.attempt()[0])
        return self.endings[str(changes)]


@pytest.fixture(scope="module")
def endings() -> dict[str, Ending]:
    return {}


@pytest.fixture
def runner(data: Path, tmp_path: Path, endings: dict[str, Ending]) -> Runners:
    return Runners(data, tmp_path, endings)


# A checkpoint about every 30 ms: most of the time a save is in progress, where a kill is most harmful. So many steps
# outlast the saves that a test waits for, on a slow disk too.
STEPS = 144
LONG = {"max_steps": STEPS, "checkpoint_minutes": 0.0005}
