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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from trainer.config import RuntimeConfig, TrainConfig, identity_of
from trainer.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError, ending_of
from trainer.explained import explain
from trainer.health import StartWatch
from trainer.models.family import AnyModel
from trainer.models.model_config import Section, identity_of_model
from trainer.process import StopSignal, die_with_parent
from trainer.store import LocalStore
from trainer.stored import decoded, typed
from trainer.strict_yaml import load_yaml

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.models.weights import Origin
    from trainer.parallel import World

PREFIX = "run"  # of the run in its store


class TrainerConfig(Section):
    """The three sections that the trainer needs."""

    model: AnyModel
    train: TrainConfig
    runtime: RuntimeConfig = RuntimeConfig()


def read_config(path: Path) -> TrainerConfig:
    try:
        sections = load_yaml(path.read_text(encoding="utf8"))
        return TrainerConfig(**{k: v for k, v in sections.items() if k in TrainerConfig.model_fields})
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a YAML file with sections model, train, runtime") from error
    except ValidationError as error:
        raise explain(error, TrainerConfig, str(path)) from error
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a YAML file with sections model, train, runtime") from error


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
    parser.add_argument(
        "--log-every",
        type=positive,
        metavar="STEPS",
        help="steps between two lines in a log; by default a hundredth of the run (a terminal shows every step)",
    )
    arguments = parser.parse_args()
    try:
        return run(read_config(arguments.config), arguments.data, arguments.out, arguments.log_every)
    except Exception as error:
        if (ending := ending_of(error)) is None:
            raise
        print(ending.message, file=sys.stderr)
        return ending.exit_code


def positive(text: str) -> int:
    """A number of steps from the command line."""
    if not text.isdecimal() or not (steps := int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; give 1 or more")
    return steps


def run(config: TrainerConfig, data: Path, out: Path, log_every: int | None = None) -> int:
    if config.train.stop_at and {"hellaswag", "core"} & config.train.stop_at.targets.keys():
        raise UserError(
            "train.stop_at: python -m trainer measures the validation loss alone; use {val_loss: …}, or skytrain run"
        )
    stop = StopSignal()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # ranks that outlive torchrun would hold the GPUs and continue to train
        die_with_parent()
    with stop.leaving_at_once():
        from trainer.checkpoint.commits import series
        from trainer.data.shards import local_shards
        from trainer.progress import LINES, Progress
        from trainer.rank import RankJob, run_rank

    every = log_every or max(1, config.train.max_steps // LINES)
    progress = Progress(config.train.max_steps, every, sys.stderr if sys.stderr.isatty() else None)
    store = LocalStore(out)
    train_shards, val_shards = local_shards(data, "train"), local_shards(data, "val")

    def begin(world: "World") -> int:
        claim(store, out, config, {shard.name: shard.tokens for shard in train_shards + val_shards})
        return world.gather(take_attempt(store) if world.rank == 0 else 0)[0]

    try:
        with StartWatch(config.runtime, int(os.environ.get("RANK", "0"))) as watch:
            outcome = run_rank(
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
                    checkpoint_folder=out / "work",
                    begin=begin,
                    starting=watch.enter,
                    origin=origin_of(config, store),
                    superseded=lambda attempt: store.get(attempt_key(attempt + 1)) is not None,
                    watch=progress if os.environ.get("RANK", "0") == "0" else None,
                ),
                stop,
            )
    finally:
        progress.close()
    if outcome.rank == 0:
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in series(store, PREFIX)))
        val_loss = outcome.state.val_loss
        scored = "" if val_loss is None else f", val loss {val_loss:.4f}"
        print(f"step {outcome.state.step} of {config.train.max_steps}{scored}: {out}")
    return EXIT_DONE if outcome.done else EXIT_INTERRUPTED


def origin_of(config: TrainerConfig, store: LocalStore) -> "Callable[[World], Origin] | None":
    """Where a new run begins. UserError for weights that do not fit, and for those of a run in a store."""
    from trainer.checkpoint.commits import committed_folders
    from trainer.models.weights import Origin, open_weights

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
    if store.create(key, body) or store.get(key) == body:
        return
    where = f"{out}/{key}"
    existing = typed(dict[str, dict[str, Any]], decoded(store.get(key) or b"{}", where), where)
    changed = [
        f"{section}.{field}"
        for section, values in sections.items()
        for field in values.keys() | existing.get(section, {}).keys()
        if values.get(field) != existing.get(section, {}).get(field)
    ]
    raise UserError(f"{out}: holds a run with another {', '.join(sorted(changed))}; use another --out, or remove it")


def take_attempt(store: LocalStore) -> int:
    """The next free attempt number, from 1. Creating its file reserves it."""
    attempt = 1
    while not store.create(attempt_key(attempt), json.dumps({"time": time.time()}).encode()):
        attempt += 1
    return attempt


def attempt_key(attempt: int) -> str:
    return f"{PREFIX}/attempts/{attempt:04d}.json"


if __name__ == "__main__":
    sys.exit(main())
