"""Train on a folder of token shards, without pipelines.

  python -m trainer CONFIG.yaml --data FOLDER --out FOLDER
  torchrun --standalone --nproc-per-node 8 -m trainer …    (several GPUs)

CONFIG is a YAML file with the sections model, train and runtime; other
sections are ignored, so a recipe works, too. train.init_from may be a path:
a folder in Hugging Face's format, a .bin of llm.c, or a model.safetensors of
this command. The folder of --data holds shards in the format of llm.c:
train_*.bin and val_*.bin. The folder of --out receives checkpoints, the
metrics of every step (metrics.jsonl) and the final weights
(model.safetensors). The same command resumes an interrupted run, on any
number of processes.

Exit codes: 0 done; 1 a fault, or a run that diverged; 2 a mistake in the
command or its files; 75 interrupted, after a commit. torchrun itself ends
with 0 if all its processes did, and with 1 otherwise, also if a signal
stopped it; its last lines give the code of each process, as `exitcode  : 75`.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainer.base.events import Event, Row, Started, Warned
from trainer.base.metrics import PhaseClock
from trainer.base.process import StopSignal, die_with_parent, log_line
from trainer.base.record import decoded, typed
from trainer.base.store import LocalStore
from trainer.base.strict_yaml import read_yaml
from trainer.checkpoint.layout import attempt_key
from trainer.config.config import RuntimeConfig, TrainConfig, identity_of
from trainer.config.config_errors import explain
from trainer.config.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError, ending_of
from trainer.config.model_config import Section, identity_of_model
from trainer.loop.watchdog import Watchdog
from trainer.models.family import AnyModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.base.parallel import World
    from trainer.checkpoint.weights import Origin

PREFIX = "run"  # of the run in its store


class TrainerConfig(Section):
    """The three sections that the trainer needs."""

    model: AnyModel
    train: TrainConfig
    runtime: RuntimeConfig = RuntimeConfig()


def read_config(path: Path) -> TrainerConfig:
    """The sections in a YAML file. UserError for anything else."""
    sections = read_yaml(path)
    if not isinstance(sections, dict):
        raise UserError(f"{path}: not a YAML file with sections model, train, runtime")
    try:
        return TrainerConfig(**{k: v for k, v in sections.items() if k in TrainerConfig.model_fields})
    except ValidationError as error:
        raise explain(error, TrainerConfig, str(path)) from error


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with sections model, train, runtime")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER", help="folder of train_*.bin and val_*.bin shards"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="folder for checkpoints, metrics and the model"
    )
    arguments = parser.parse_args()
    try:
        return run(read_config(arguments.config), arguments.data, arguments.out)
    except Exception as error:
        if (ending := ending_of(error)) is None:
            raise
        print(ending.message, file=sys.stderr)
        return ending.exit_code


def run(config: TrainerConfig, data: Path, out: Path) -> int:
    if config.train.stop_at and {"hellaswag", "core"} & config.train.stop_at.targets.keys():
        raise UserError(
            "train.stop_at: python -m trainer measures the validation loss alone; use {val_loss: …}, or skytrain run"
        )
    rank, stop = int(os.environ.get("RANK", "0")), StopSignal()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # ranks that outlive torchrun would hold the GPUs and continue to train
        die_with_parent()
    with Watchdog(config.runtime, PhaseClock("imports"), rank) as watch:
        from trainer.checkpoint.commits import series
        from trainer.data.shards import local_shards
        from trainer.loop.rank import RankJob, run_rank

        store = LocalStore(out)
        train_shards, val_shards = local_shards(data, "train"), local_shards(data, "val")

        def begin(world: "World") -> int:
            claim(store, out, config, {shard.name: shard.tokens for shard in train_shards + val_shards})
            return world.gather(take_attempt(store) if world.rank == 0 else 0)[0]

        state, done = run_rank(
            RankJob(
                model=config.model,
                train=config.train,
                runtime=config.runtime,
                train_shards=train_shards,
                val_shards=val_shards,
                fetch=data.joinpath,
                store=store,
                prefix=PREFIX,
                folder=out,
                begin=begin,
                starting=watch.enter,
                origin=origin_of(config, store),
                superseded=lambda attempt: store.get(attempt_key(PREFIX, attempt + 1)) is not None,
                watch=partial(print_event, config.train.max_steps) if rank == 0 else None,
            ),
            stop,
        )
    if rank == 0:
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in series(store, PREFIX)))
        print(f"step {state.step} of {config.train.max_steps}: {out}")
    return EXIT_DONE if done else EXIT_INTERRUPTED


def print_event(max_steps: int, event: Event) -> None:
    """Print an event of rank 0: validations, and a hundred steps of a run."""
    match event:
        case Started(step, world_size, device):
            log_line(f"step {step:,} of {max_steps:,}: training begins on {world_size} x {device}")
        case Warned(message):
            log_line(message)
        case Row(step, _, metrics) if "val/loss" in metrics or step % max(1, max_steps // 100) == 0:
            names = ("train/loss", "val/loss", "perf/tokens_per_second")
            shown = ", ".join(f"{name} {metrics[name]:,.4f}" for name in names if name in metrics)
            log_line(f"step {step:,} of {max_steps:,}: {shown}")


def origin_of(config: TrainerConfig, store: LocalStore) -> "Callable[[World], Origin] | None":
    """Where a new run begins. UserError for weights that do not fit, and for a run in a store."""
    from trainer.checkpoint.commits import committed_folders
    from trainer.checkpoint.weights import Origin, open_weights

    source = config.train.init_from
    if config.train.branch_from or (source or "").startswith("run:"):
        raise UserError(f"train: {config.train.branch_from or source}: only `skytrain run` knows runs; name a path")
    if source is None:
        return None
    where = f"train.init_from: {source}"
    if not committed_folders(store, PREFIX):  # a run with a commit needs its source no longer
        open_weights(Path(source), where).check(config.model)
    return lambda world: Origin(where, path=Path(source))


def claim(store: LocalStore, out: Path, config: TrainerConfig, shards: dict[str, int]) -> None:
    """Record model, training and data of a new run. UserError if the folder holds another run."""
    sections = {"model": identity_of_model(config.model), "train": identity_of(config.train), "data": shards}
    body = json.dumps(sections, indent=1).encode()
    key = f"{PREFIX}/config.json"
    if store.create(key, body):
        return
    existing = typed(dict[str, dict[str, Any]], decoded(store.get(key) or b"{}", key), f"{out}/{key}")
    if changed := [name for name, section in json.loads(body).items() if section != existing.get(name)]:
        raise UserError(f"{out}: holds a run with another {', '.join(changed)}; use another --out, or remove it")


def take_attempt(store: LocalStore) -> int:
    """The next free attempt number, from 1. Creating its file reserves it."""
    attempt = 1
    while not store.create(attempt_key(PREFIX, attempt), json.dumps({"time": time.time()}).encode()):
        attempt += 1
    return attempt


if __name__ == "__main__":
    sys.exit(main())
