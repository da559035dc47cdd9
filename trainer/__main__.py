"""`torchrun --standalone --nproc-per-node N -m trainer CONFIG.yaml --data FOLDER --out FOLDER`

Trains on a folder of shards, without pipelines: CONFIG holds the sections model, train and runtime (a
recipe serves: its other sections are left alone). Checkpoints and metrics go to `--out`; the same
command goes on where it stopped. Exit code 0 done, 1 failed, 2 a mistake in what was asked, 75 interrupted.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import yaml
from pydantic import ValidationError

from trainer.config import ModelConfig, RuntimeConfig, Section, TrainConfig, explain
from trainer.errors import EXIT_INTERRUPTED, UserError, ending_of
from trainer.process import StopSignal, die_with_parent
from trainer.store import LocalStore


class TrainerConfig(Section):
    """The three sections that the trainer needs."""

    model: ModelConfig
    train: TrainConfig
    runtime: RuntimeConfig = RuntimeConfig()


def read_config(path: Path) -> TrainerConfig:
    try:
        sections = yaml.safe_load(path.read_text())
        return TrainerConfig(**{k: v for k, v in sections.items() if k in TrainerConfig.model_fields})
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a YAML file with sections model, train, runtime") from error
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise UserError(f"{path}: not a YAML file with sections model, train, runtime") from error
    except ValidationError as error:
        raise explain(error, TrainerConfig, str(path)) from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__.splitlines()[2])
    parser.add_argument("config", type=Path, help="YAML with sections model, train, runtime")
    parser.add_argument("--data", type=Path, required=True, help="folder of train_*.bin and val_*.bin shards")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, metrics and the model")
    arguments = parser.parse_args()
    try:
        return run(read_config(arguments.config), arguments.data, arguments.out)
    except Exception as error:
        if (ending := ending_of(error)) is None:
            raise
        print(ending.message, file=sys.stderr)
        return ending.exit_code


def run(config: TrainerConfig, data: Path, out: Path) -> int:
    stop = StopSignal()  # before the seconds that importing torch takes
    if "TORCHELASTIC_RUN_ID" in os.environ:  # or ranks whose torchrun was killed would hold the GPUs, and train on
        die_with_parent()
    from safetensors.torch import save_file

    from trainer.checkpoint import Checkpointer
    from trainer.commits import series
    from trainer.data import TokenData
    from trainer.loop import train
    from trainer.metrics import EventLog, PhaseClock
    from trainer.parallel import World
    from trainer.shards import local_shards

    train_data, val_data = (
        TokenData(local_shards(data, split), data.joinpath, config.model.block_size, config.train.seed)
        for split in ("train", "val")
    )
    world = World.start(config.runtime)
    store = LocalStore(out)
    claim(store, out, config, {shard.name: shard.tokens for shard in train_data.shards + val_data.shards})
    attempt = world.gather(take_attempt(store) if world.rank == 0 else 0)[0]
    log = EventLog(out / "events.jsonl" if world.rank == 0 else None, PhaseClock())
    checkpointer = Checkpointer(
        store,
        "run",
        world,
        out / "work",
        attempt,
        config.runtime.keep_last,
        superseded=lambda: store.get(attempt_key(attempt + 1)) is not None,
        keep_every=config.runtime.keep_every_steps,
    )
    engine, state = train(
        config.model, config.train, config.runtime, train_data, val_data, checkpointer, world, stop, log
    )
    done = state.step == config.train.max_steps
    weights = engine.weights() if done else {}
    if world.rank == 0:
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in series(store, "run")))
        if done:
            save_file(weights, out / "model.safetensors")
        print(f"step {state.step} of {config.train.max_steps}, val loss {state.val_loss}: {out}")
    world.close()
    return 0 if done else EXIT_INTERRUPTED


def claim(store: LocalStore, out: Path, config: TrainerConfig, shards: dict[str, int]) -> None:
    """Write down what is trained in a new folder. UserError if something else was begun there."""
    sections = {"model": config.model.model_dump(), "train": config.train.model_dump(), "data": shards}
    body = json.dumps(sections, indent=1).encode()
    if store.create("run/config.json", body) or store.get("run/config.json") == body:
        return
    begun = json.loads(store.get("run/config.json") or b"{}")
    changed = [
        f"{section}.{field}"
        for section, values in sections.items()
        for field in values.keys() | begun[section].keys()
        if values.get(field) != begun[section].get(field)
    ]
    raise UserError(f"{out}: holds a run with another {', '.join(sorted(changed))}; use another --out, or remove it")


def take_attempt(store: LocalStore) -> int:
    """The next free attempt number, from 1, taken by creating its file."""
    attempt = 1
    while not store.create(attempt_key(attempt), json.dumps({"time": time.time()}).encode()):
        attempt += 1
    return attempt


def attempt_key(attempt: int) -> str:
    return f"run/attempts/{attempt:04d}.json"


if __name__ == "__main__":
    sys.exit(main())
