"""What a run is, from the store alone: its record, its attempts, its artifacts, its series.

`runs/<run>.json` is written whenever a run is started or resumed; everything else is read from the
attempts and manifests it points to, so a report needs no tracking server.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from pipelines.artifacts.manifest import ArtifactPlan, DamagedArtifact, Manifest, read_manifest
from pipelines.recipe import Recipe
from pipelines.tracking.account import Account, Interval, StoredHeartbeat, account
from pipelines.tracking.ledger import SILENT_SECONDS, is_alive, is_there
from pipelines.tracking.records import Heartbeat
from trainer.commits import committed_state, series
from trainer.config import TrainConfig, tokens_before
from trainer.errors import UserError
from trainer.health import data_step
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
    # What it worked on before its evaluation or export was asked for in another way: still on its bill.
    earlier: dict[str, list[str]] = field(default_factory=dict)

    def all_prefixes(self, stage: str) -> list[str]:
        """Every artifact of a stage that the run ever worked on, the present one last."""
        return [*self.earlier.get(stage, ()), self.prefixes[stage]]


@dataclass(frozen=True)
class Summary:
    """A run in a row of a table."""

    run: str
    # done, running, interrupted, stopped (as was wished), failed, lost (it died without a word), damaged
    state: str
    attempts: int  # starts and resumptions that it took, without those to wait for spot: 1 if nothing interrupted it
    steps: int
    tokens: int
    train_loss: float | None
    val_loss: float | None
    hellaswag_acc_norm: float | None
    billed_hours: float
    usd: float  # of the hours whose price is known
    unpriced_hours: float
    phases: dict[str, float]  # seconds of machine time
    goodput: float | None
    usd_per_billion_tokens: float | None
    updated: float
    faults: list[str]  # what could not be read


def record(store: Store, run: str, recipe: Recipe, plans: dict[str, ArtifactPlan], until: str) -> RunRecord:
    """Write down that a run is being started or resumed. Stages that it was asked for before stay in it."""
    prefixes = {s: plans[s].prefix for s in list(plans)[: list(plans).index(until) + 1]}
    earlier: dict[str, list[str]] = {}
    if body := store.get(f"runs/{run}.json"):
        before = _record(store, run, body)
        for stage, now in prefixes.items():
            known = before.all_prefixes(stage) if stage in before.prefixes else []
            earlier[stage] = [prefix for prefix in known if prefix != now]
        prefixes = before.prefixes | prefixes
    made = RunRecord(run, recipe.model_dump(), list(prefixes)[-1], prefixes, time.time(), earlier)
    store.put(f"runs/{run}.json", json.dumps(asdict(made), indent=1).encode())
    return made


def read_records(store: Store, names: Iterable[str] = ()) -> list[RunRecord]:
    """The records of the runs that `names` mean (all of them by default), oldest first."""
    runs = [e.key.removeprefix("runs/").removesuffix(".json") for e in store.entries("runs/")]
    wanted = [one_run(runs, name, store.uri) for name in names] or runs
    bodies = ((run, store.get(f"runs/{run}.json")) for run in wanted)
    return sorted((_record(store, run, body) for run, body in bodies if body), key=lambda r: r.updated)


def _record(store: Store, run: str, body: bytes) -> RunRecord:
    try:
        return RunRecord(**json.loads(body))
    except (ValueError, TypeError) as error:
        raise UserError(f"{store.uri}/runs/{run}.json: damaged ({error!r}); run its recipe to write it anew") from error


def one_run(runs: list[str], name: str, where: str) -> str:
    """The run that a full name or the beginning of one means. UserError if it is none or several."""
    found = [name] if name in runs else [run for run in runs if run.startswith(name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(found or runs) or "none yet; `skytrain run RECIPE` makes one"
    fault = "more than one run begins so" if found else "no such run"
    raise UserError(f"{name}: {fault} in {where}; there: {known}")


def manifests(store: Store, record: RunRecord) -> dict[str, Manifest | None]:
    """A run's artifacts by stage, None for what is missing. DamagedArtifact if one can't be read."""
    return {stage: read_manifest(store, prefix) for stage, prefix in record.prefixes.items()}


def sound_manifests(store: Store, record: RunRecord) -> tuple[dict[str, Manifest | None], list[str]]:
    """A run's artifacts by stage, and what is wrong with those that are damaged, which count as missing."""
    made: dict[str, Manifest | None] = {}
    faults = []
    for stage, prefix in record.prefixes.items():
        made[stage] = None
        try:
            made[stage] = read_manifest(store, prefix)
        except DamagedArtifact as error:
            faults.append(str(error))
    return made, faults


def stored_attempts(store: Store, run: str, prefix: str) -> tuple[list[StoredHeartbeat], list[str]]:
    """A run's attempts on an artifact as they lie in the store, and which of them can't be read.

    What another run did for a shared artifact is on its own bill.
    """
    found: dict[str, StoredHeartbeat] = {}
    faults = []
    for entry in reversed(list(store.entries(f"{prefix}/attempts/"))):  # heartbeat.json sorts behind claim.json
        if (number := entry.key.split("/")[-2]) in found:
            continue  # a launch that waits for spot has hundreds, and every get takes its time
        try:
            beat = Heartbeat.from_json(store.get(entry.key) or b"")
            found[number] = StoredHeartbeat(prefix, beat, entry.modified, is_alive(beat))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            faults.append(f"{store.uri}/{entry.key}: damaged ({error!r}), so this attempt may miss on the bill")
    return [found[number] for number in sorted(found) if found[number].beat.run == run], faults


def stored_heartbeats(
    store: Store, record: RunRecord, stages: Iterable[str] = ()
) -> tuple[list[StoredHeartbeat], list[str]]:
    """Every attempt of a run (of its `stages`), on whatever artifact, and what can't be read."""
    seen, faults = [], []
    for prefix in (prefix for stage in stages or record.prefixes for prefix in record.all_prefixes(stage)):
        some, wrong = stored_attempts(store, record.run, prefix)
        seen += some
        faults += wrong
    return seen, faults


def attempts_of(store: Store, record: RunRecord) -> dict[str, list[Heartbeat]]:
    """This run's attempts by stage, on the artifacts that it is about now."""
    return {
        stage: [one.beat for one in stored_attempts(store, record.run, prefix)[0]]
        for stage, prefix in record.prefixes.items()
    }


def account_of(store: Store, record: RunRecord) -> Account:
    """Everything that a run has cost, on whatever artifacts, from the store alone."""
    seen, faults = stored_heartbeats(store, record)
    return account(record.run, seen, tokens_axis(record), faults)


def tokens_axis(record: RunRecord) -> Callable[[int], int]:
    """Tokens of all updates of a run before one of them."""
    train = TrainConfig.model_validate(record.recipe["train"])
    return lambda step: tokens_before(step, train)


def summarize(store: Store, record: RunRecord) -> Summary:
    made, faults = sound_manifests(store, record)
    beats, bill = attempts_of(store, record), account_of(store, record)
    step, metrics = 0, dict[str, float]()
    for beat in beats.get("train", []):
        step = step if beat.progress.step is None else beat.progress.step
        metrics |= beat.progress.metrics
    train, evaluated = made.get("train"), made.get("evaluate")
    facts = {**metrics, **(train.facts if train else {}), **(evaluated.facts if evaluated else {})}
    worked = [attempt for attempt in bill.attempts if not attempt.waited]
    steps = train.facts["steps"] if train else step
    return Summary(
        run=record.run,
        state="damaged" if faults else state_of(made, beats),
        attempts=1 + len(worked) - len({attempt.prefix for attempt in worked}),
        steps=steps,
        tokens=tokens_axis(record)(steps),
        train_loss=facts.get("train/loss"),
        val_loss=facts.get("val/loss"),
        hellaswag_acc_norm=facts.get("eval/hellaswag_acc_norm"),
        billed_hours=bill.total.hours,
        usd=bill.total.usd,
        unpriced_hours=bill.total.unpriced_hours,
        phases={phase: 3600 * part.hours for phase, part in bill.by_phase.items()},
        goodput=bill.goodput,
        usd_per_billion_tokens=bill.usd_per_billion_tokens,
        updated=record.updated,
        faults=[*faults, *bill.faults],
    )


def state_of(made: dict[str, Manifest | None], beats: dict[str, list[Heartbeat]]) -> str:
    if all(made.values()):
        return "done"
    # A stale attempt says nothing about the run: the one that took over does. When an attempt began says nothing
    # either: its bill may go back to the boot of a machine that long waited for its turn.
    said = ([beat for beat in stage if beat.state != "stale"] for stage in beats.values())
    newest = max((stage[-1] for stage in said if stage), key=lambda beat: beat.time, default=None)
    if newest is None:
        return "interrupted"
    working = newest.state in ("running", "done")  # done with one stage, and about to start the next
    there = is_there(newest)
    if working and (there or (there is None and time.time() - newest.time < 3 * SILENT_SECONDS)):
        return "running"
    return {"running": "lost", "done": "interrupted"}.get(newest.state, newest.state)


def run_series(store: Store, record: RunRecord) -> list[dict[str, Any]]:
    """The committed rows of a run, one a step."""
    return series(store, record.prefixes["train"]) if "train" in record.prefixes else []


def intervals_of(store: Store, run: str) -> list[Interval]:
    """When the clusters that a run was launched on were up, as SkyPilot was last heard to say."""
    body = store.get(f"clusters/{run}.json")
    return [Interval(**one) for one in json.loads(body)] if body else []


def record_intervals(store: Store, run: str, intervals: Iterable[Interval]) -> None:
    """Keep what SkyPilot says of a run's clusters: it forgets, and a report asks the store alone."""
    body = json.dumps([asdict(one) for one in intervals], indent=1)
    store.put(f"clusters/{run}.json", body.encode())


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
    from trainer.shards import Order, Shard, sequence_digest, sequences_of

    made = manifests(store, record)
    tokens, train = made.get("tokenize"), made.get("train")
    if tokens is None:
        raise UserError(f"{record.run}: its tokens are not there, so there is nothing to compare with")
    recipe = Recipe.model_validate(record.recipe)
    shards = [Shard(name, n) for name, n in tokens.facts["shards"].items() if name.startswith("train")]
    order = Order(shards, recipe.model.block_size, recipe.train.seed)
    state = committed_state(store, record.prefixes["train"]) if train is None else None
    rollbacks = train.facts["rollbacks"] if train else state.rollbacks if state else ()
    end = train.facts["steps"] if train else state.step if state else 0  # what lies behind is committed nowhere
    rows = (row for row in run_series(store, record) if "data/digest" in row and row["step"] <= end)
    told = {row["step"]: row["data/digest"] for row in rows}
    read = {step: sequences_of(data_step(step - 1, rollbacks), recipe.model, recipe.train, 0, 1) for step in told}
    wrong = [step for step, digest in told.items() if digest != sequence_digest(order, read[step])]
    missing = sorted(set(range(1, end + 1)) - set(told))
    return Audit(record.run, len(told), sum(map(len, read.values())), tuple(wrong), tuple(missing))
