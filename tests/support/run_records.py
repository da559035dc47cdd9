"""A run of the recipe smoke as records in a store, without training: attempts, manifests and series."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.run.run_record import RunRecord, record
from pipelines.run.stage import STAGES, plans_of, run_name
from pipelines.store.layout import manifest_key
from pipelines.store.ledger import claim
from pipelines.store.manifest import File, Manifest
from pipelines.store.process_id import this_process
from pipelines.store.records import Billing, Heartbeat, ProcessId
from trainer.base.store import Store
from trainer.checkpoint.commits import Commit, TrainState

SOURCE = f"tokens.source=hf://datasets/a/b@{'a' * 40}"
SMALLER = ["train.max_steps=200", "train.batch_tokens=8192"]


RECIPE = load_recipe("smoke", [SOURCE, *SMALLER])


PLANS = plans_of(RECIPE)


RUN = run_name(PLANS)


TRAIN = PLANS["train"].prefix


ELSEWHERE = ProcessId("other/boot", 1, "1")


GONE = replace(this_process(), started="1")  # this machine, a process that is no more


FACTS: dict[str, dict[str, Any]] = {
    "tokenize": {"tokens": 8_000_000, "train_tokens": 6_000_000, "val_tokens": 2_000_000, "shards": {}},
    "train": {"steps": 200, "train/loss": 2.4, "val/loss": 2.5, "perf/tokens_per_second": 4321.0},
    "evaluate": {
        "val/loss": 2.45678,
        "val/bits_per_byte": 1.02348,
        "eval/hellaswag_acc_norm": 0.2945,
        "eval/core": 0.11394,
        "sample": "def [bold]f(x):\n\x1b[2J",
    },
    "export": {"parameters": 7},
}


def recipe_with(*changes: str) -> Recipe:
    return load_recipe("smoke", [SOURCE, *SMALLER, *changes])


def put_heartbeat(store: Store, prefix: str, beat: Heartbeat) -> None:
    """Store an attempt's heartbeat, without a claim."""
    store.put(f"{prefix}/attempts/{beat.attempt:04d}/heartbeat.json", beat.to_json())


def finished(store: Store, stage: str, files: tuple[File, ...] = (), **facts: Any) -> Manifest:
    plan = PLANS[stage]
    manifest = Manifest(
        plan.stage, plan.label, plan.fingerprint, plan.identity, {}, files, {}, FACTS[stage] | facts, RUN, 1, 1.0
    )
    store.create(manifest_key(plan.prefix), manifest.to_json())  # commit() would look up the files
    return manifest


def attempted(store: Store, stage: str, number: int = 1, hours: float = 1.0, **changes: Any) -> Heartbeat:
    """An attempt as it last reported, by default one that is done."""
    claim(store, PLANS[stage].prefix, RUN, stage, number, Billing())
    now = time.time()
    beat = Heartbeat(RUN, stage, number, "done", now - hours * 3600, now, 0.0, GONE)
    beat = replace(beat, **changes)
    put_heartbeat(store, PLANS[stage].prefix, beat)
    return beat


def recorded(store: Store, until: str = "export", recipe: Recipe = RECIPE) -> RunRecord:
    return record(store, RUN, recipe, PLANS, until)


def done_run(store: Store, **facts: dict[str, Any]) -> RunRecord:
    """A finished run; `facts` by stage are more than FACTS."""
    for stage in STAGES:
        attempted(store, stage, hours=0.5, price_per_hour=10.0, phases={"setup": 60.0, stage: 1740.0})
        finished(store, stage, **facts.get(stage, {}))
    return recorded(store)


def committed(store: Store, step: int, attempt: int = 1, prefix: str = TRAIN, at: float = 0.0) -> str:
    """Store the record of a commit, without its files. Returns the key."""
    key = f"{prefix}/checkpoints/step-{step:08d}-a{attempt:04d}/COMMIT.json"
    store.put(key, Commit(step, attempt, 1, at, TrainState(step=step), "", ()).encode())
    return key


def segment(store: Store, step: int, attempt: int, rows: list[dict[str, Any]]) -> None:
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    store.put(f"{TRAIN}/metrics/step-{step:08d}-a{attempt:04d}.jsonl", body)


def row(step: int, loss: float) -> dict[str, Any]:
    values = {"train/loss": loss, "train/lr": 1e-3, "train/grad_norm": 0.5, "perf/tokens_per_second": 10.0}
    return {"step": step, "time": 1.0, **values}


def places(values: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every object and value in a record."""
    if before:
        yield before
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, value in inside:
        yield from places(value, (*before, name))
