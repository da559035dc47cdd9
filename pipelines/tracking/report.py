"""What a run is, from the store alone: its record, its attempts, its artifacts, its series.

`runs/<run>.json` is written whenever a run is started or resumed; everything else is read from the
attempts and manifests it points to, so a report needs no tracking server.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.artifacts.manifest import Manifest, Plan, read_manifest
from pipelines.recipe import Recipe
from pipelines.tracking.ledger import SILENT_SECONDS, Account, Heartbeat, account, attempts, is_there
from trainer.config import UserError
from trainer.store import Store

SERIES = {  # CSV column -> metric
    "step": "step",
    "train/loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens/s": "perf/tokens_per_second",
}


@dataclass(frozen=True)
class RunRecord:
    """A run as it was last started: its recipe, and where its stages' artifacts are to be."""

    run: str
    recipe: dict[str, Any]
    until: str  # the last stage that was ever asked for
    prefixes: dict[str, str]  # by stage, up to `until`
    updated: float


@dataclass(frozen=True)
class Summary:
    """A run in a row of a table."""

    run: str
    state: str  # done, running, interrupted, stopped (as was wished), failed, lost (it died without a word)
    attempts: int  # starts and resumptions that it took: 1 if nothing ever interrupted it
    steps: int
    tokens: int
    train_loss: float | None
    val_loss: float | None
    hellaswag_acc_norm: float | None
    billed_hours: float
    usd: float  # of the hours whose price is known
    unpriced_hours: float
    phases: dict[str, float]  # seconds
    updated: float


def record(store: Store, run: str, recipe: Recipe, plans: dict[str, Plan], until: str) -> RunRecord:
    """Write down that a run is being started or resumed. Stages that it was asked for before stay in it."""
    prefixes = {s: plans[s].prefix for s in list(plans)[: list(plans).index(until) + 1]}
    if body := store.get(f"runs/{run}.json"):
        prefixes = json.loads(body)["prefixes"] | prefixes
    made = RunRecord(run, recipe.model_dump(), list(prefixes)[-1], prefixes, time.time())
    store.put(f"runs/{run}.json", json.dumps(asdict(made), indent=1).encode())
    return made


def read_records(store: Store, names: Iterable[str] = ()) -> list[RunRecord]:
    """The records of the runs that `names` mean (all of them by default), oldest first."""
    runs = [e.key.removeprefix("runs/").removesuffix(".json") for e in store.entries("runs/")]
    wanted = [one_run(runs, name, store.uri) for name in names] or runs
    bodies = (store.get(f"runs/{run}.json") for run in wanted)
    return sorted((RunRecord(**json.loads(b)) for b in bodies if b), key=lambda r: r.updated)


def one_run(runs: list[str], name: str, where: str) -> str:
    """The run that a full name or the beginning of one means. UserError if it is none or several."""
    found = [name] if name in runs else [run for run in runs if run.startswith(name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(found or runs) or "none yet; `skytrain run RECIPE` makes one"
    fault = "more than one run begins so" if found else "no such run"
    raise UserError(f"{name}: {fault} in {where}; there: {known}")


def manifests(store: Store, record: RunRecord) -> dict[str, Manifest | None]:
    return {stage: read_manifest(store, prefix) for stage, prefix in record.prefixes.items()}


def attempts_of(store: Store, record: RunRecord) -> dict[str, list[Heartbeat]]:
    """This run's attempts by stage; what another run did for a shared artifact is on its own bill."""
    return {
        stage: [beat for beat in attempts(store, prefix) if beat.run == record.run]
        for stage, prefix in record.prefixes.items()
    }


def summarize(store: Store, record: RunRecord) -> Summary:
    made, beats = manifests(store, record), attempts_of(store, record)
    total: Account = account(beat for stage in beats.values() for beat in stage)
    progress: dict[str, Any] = {}
    for beat in beats.get("train", []):
        progress |= beat.progress
    train, evaluated = made.get("train"), made.get("evaluate")
    facts = {**progress, **(train.facts if train else {}), **(evaluated.facts if evaluated else {})}
    steps = train.facts["steps"] if train else int(progress.get("step", 0))
    return Summary(
        run=record.run,
        state=state_of(made, beats),
        attempts=1 + sum(max(0, len(stage) - 1) for stage in beats.values()),
        steps=steps,
        tokens=steps * record.recipe["train"]["batch_tokens"],
        train_loss=facts.get("train/loss"),
        val_loss=facts.get("val/loss"),
        hellaswag_acc_norm=facts.get("eval/hellaswag_acc_norm"),
        billed_hours=total.billed_hours,
        usd=total.usd,
        unpriced_hours=total.unpriced_hours,
        phases=total.phases,
        updated=record.updated,
    )


def state_of(made: dict[str, Manifest | None], beats: dict[str, list[Heartbeat]]) -> str:
    if all(made.values()):
        return "done"
    # A stale attempt says nothing about the run: the one that took over does.
    said = (b for stage in beats.values() for b in stage if b.state != "stale")
    newest = max(said, key=lambda b: b.started, default=None)
    if newest is None:
        return "interrupted"
    working = newest.state in ("running", "done")  # done with one stage, and about to start the next
    there = is_there(newest)
    if working and (there or (there is None and time.time() - newest.time < 3 * SILENT_SECONDS)):
        return "running"
    return {"running": "lost", "done": "interrupted"}.get(newest.state, newest.state)


def run_series(store: Store, record: RunRecord) -> list[dict[str, Any]]:
    """The committed rows of a run, one a step."""
    from trainer.checkpoint import series

    return series(store, record.prefixes["train"]) if "train" in record.prefixes else []


@dataclass(frozen=True)
class Audit:
    """Whether a run read what its recipe says: the windows of every committed step, recomputed."""

    run: str
    steps: int  # that were compared
    sequences: int
    wrong_steps: tuple[int, ...]  # whose digest is another
    missing_steps: tuple[int, ...]  # that no row tells of


def audit(store: Store, record: RunRecord) -> Audit:
    """Recompute which windows each step reads and compare with the digest that the ranks recorded.

    The order is a permutation of every epoch's windows, so equal digests at all steps mean that each
    window was read exactly once an epoch (left-out data of rollbacks apart). UserError without tokens.
    """
    from trainer.checkpoint import committed_state
    from trainer.data import Order, Shard, sequence_digest, sequences_of
    from trainer.health import data_step

    made = manifests(store, record)
    tokens, train = made.get("tokenize"), made.get("train")
    if tokens is None:
        raise UserError(f"{record.run}: its tokens are not there, so there is nothing to compare with")
    recipe = Recipe.model_validate(record.recipe)
    shards = [Shard(name, n) for name, n in tokens.facts["shards"].items() if name.startswith("train")]
    order = Order(shards, recipe.model.block_size, recipe.train.seed)
    state = committed_state(store, record.prefixes["train"]) if train is None else None
    rollbacks = train.facts["rollbacks"] if train else state.rollbacks if state else ()
    per_step = recipe.train.batch_tokens // recipe.model.block_size
    end = train.facts["steps"] if train else state.step if state else 0  # what lies behind is committed nowhere
    rows = (row for row in run_series(store, record) if "data/digest" in row and row["step"] <= end)
    told = {row["step"]: row["data/digest"] for row in rows}
    wrong = [
        step
        for step, digest in told.items()
        if digest != sequence_digest(order, sequences_of(data_step(step - 1, rollbacks), per_step, 0, 1))
    ]
    missing = sorted(set(range(1, end + 1)) - set(told))
    return Audit(record.run, len(told), len(told) * per_step, tuple(wrong), tuple(missing))
