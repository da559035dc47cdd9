"""Whether anything came of the blows: an undisturbed run and a disturbed one, compared.

Everything is judged from what lies in the two stores (and in MLflow), by functions that touch nothing: a
drill that could not fail would prove nothing, so each of them is tested with an outcome that was doctored.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.drill.faults import Blow
from pipelines.tracking.ledger import HEARTBEAT_SECONDS
from pipelines.tracking.records import Heartbeat
from pipelines.tracking.runs import read_run
from trainer.store import Store

SERIES = ("train/loss", "train/lr", "train/grad_norm", "val/loss")
DIGEST = "data/digest"
# Sums in another order differ in the last of float32's 7 digits, and training widens that.
WORLD_TOLERANCE = 1e-2
SLOW_SECONDS = 5.0  # that a heartbeat may take on its way from a busy machine

Points = dict[str, list[tuple[int, float]]]  # (step, value) in order of steps, by metric


@dataclass(frozen=True)
class Life:
    """A command of the disturbed run by the drill's own stopwatch: unix seconds."""

    pid: int
    began: float
    ended: float
    killed: bool


@dataclass(frozen=True)
class Outcome:
    """What a finished run has left."""

    rows: tuple[dict[str, Any], ...]
    files: dict[str, dict[str, str]]  # sha256 by name, by stage; without the series, which holds times
    val_loss: float
    beats: dict[str, list[Heartbeat]]  # attempts by stage
    attempts: int  # as the report says
    billed_hours: float  # as the report says


@dataclass(frozen=True)
class Verdict:
    what: str
    equal: bool | None  # None: not compared
    detail: str


def outcome(store: Store, run: str) -> Outcome:
    """Read what `run` has left in a store."""
    finished = read_run(store, run)
    summary, made = finished.summary, finished.intact_manifests
    files = {
        stage: {file.name: file.sha256 for file in manifest.files if file.name != "metrics.jsonl"}
        for stage, manifest in made.items()
        if manifest
    }
    evaluated = made["evaluate"]
    assert evaluated, "the run is finished"
    return Outcome(
        tuple(finished.series),
        files,
        evaluated.facts["val/loss"],
        finished.attempts,
        summary.attempts,
        summary.billed_hours,
    )


def verdicts(
    calm: Outcome, struck: Outcome, blows: Sequence[Blow], lives: Sequence[Life], mlflow: Points | None
) -> list[Verdict]:
    """All that has to be equal. `mlflow` is what MLflow was told of the disturbed run, None if nothing was."""
    exact = not any(blow.kind == "world" and blow.fell for blow in blows)
    return [
        _blows(blows),
        _series(calm, struck, (DIGEST,), "data digests", exact=True),
        _series(calm, struck, SERIES, "losses, rates, gradient norms", exact),
        _weights(calm, struck, exact),
        _artifacts(calm, struck, exact),
        _mlflow(struck, mlflow, exact),
        _attempts(struck, blows),
        _hours(struck, lives, outages=any(blow.kind == "cut" for blow in blows)),
    ]


def _blows(blows: Sequence[Blow]) -> Verdict:
    faults = [f"{b.kind} at {b.place}: {b.fault}" for b in blows if b.fault]
    return Verdict("blows", not faults, _few(faults) or f"all {len(blows)} fell and were taken as promised")


def _series(calm: Outcome, struck: Outcome, names: Sequence[str], what: str, exact: bool) -> Verdict:
    """Every step once, in order, with the same values."""
    if [row["step"] for row in calm.rows] != [row["step"] for row in struck.rows]:
        return Verdict(what, False, f"{len(calm.rows)} steps undisturbed, {len(struck.rows)} disturbed, or others")
    pairs = [(a["step"], name, a.get(name), b.get(name)) for a, b in _both(calm, struck) for name in names]
    differ = [f"step {s}: {n} {a} / {b}" for s, n, a, b in pairs if not _alike(a, b, exact)]
    values = sum(a is not None for _, _, a, _ in pairs)
    how = "bit for bit" if exact else f"to {WORLD_TOLERANCE:.0%}, as the world size was changed"
    return Verdict(what, not differ, _few(differ) or f"{values} values in {len(calm.rows)} rows, {how}")


def _both(calm: Outcome, struck: Outcome) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(calm.rows, struck.rows, strict=True))


def _alike(a: Any, b: Any, exact: bool) -> bool:
    if a is None or b is None or exact:
        return a == b
    return math.isclose(a, b, rel_tol=WORLD_TOLERANCE)


def _weights(calm: Outcome, struck: Outcome, exact: bool) -> Verdict:
    a, b = (each.files["train"]["model.safetensors"] for each in (calm, struck))
    if not exact:
        return Verdict("final weights", None, "other bits, as the world size was changed: see the losses")
    return Verdict("final weights", a == b, f"sha256 {a[:12]}… / {b[:12]}…")


def _artifacts(calm: Outcome, struck: Outcome, exact: bool) -> Verdict:
    """What the stages made: all of it, or with other weights the tokens and the evaluated loss."""
    stages = ("tokenize", "train", "export") if exact else ("tokenize",)
    differ = [stage for stage in stages if calm.files[stage] != struck.files[stage]]
    if not _alike(calm.val_loss, struck.val_loss, exact):
        differ.append(f"evaluated val/loss {calm.val_loss} / {struck.val_loss}")
    count = sum(len(calm.files[stage]) for stage in stages)
    return Verdict("artifacts", not differ, _few(differ) or f"{count} files by sha256, val/loss {struck.val_loss:.4f}")


def _mlflow(struck: Outcome, points: Points | None, exact: bool) -> Verdict:
    """One point a step, with the value that the store has.

    Of a step that was done twice MLflow keeps the first value, the store the last: other bits at another world size.
    """
    if points is None:
        return Verdict("MLflow series", None, "tracking is off")
    differ, count = [], 0
    for name in SERIES:
        wanted = [(row["step"], row[name]) for row in struck.rows if name in row]
        told, count = points.get(name, []), count + len(wanted)
        values, more = dict(told), len(told) - len(dict(told))
        off = [step for step, value in wanted if not _alike(value, values.pop(step, None), exact)]
        if off or more or values:
            differ.append(f"{name}: {len(off)} points missing or other, {more} told twice, {len(values)} of no step")
    return Verdict("MLflow series", not differ, _few(differ) or f"{count} points, each step once")


def _attempts(struck: Outcome, blows: Sequence[Blow]) -> Verdict:
    """Every stage was attempted once, and once more for each blow that interrupted it."""
    differ = []
    for stage, beats in struck.beats.items():
        wanted = 1 + sum(blow.interrupted and blow.stage == stage for blow in blows)
        if [beat.attempt for beat in beats] != list(range(1, wanted + 1)):
            differ.append(f"{stage}: {len(beats)} attempts, {wanted} expected")
    interruptions = sum(blow.interrupted for blow in blows)
    if struck.attempts != 1 + interruptions:
        differ.append(f"the report says {struck.attempts} attempts after {interruptions} interruptions")
    return Verdict("ledger: attempts", not differ, _few(differ) or f"{struck.attempts}: {interruptions} interruptions")


def _hours(struck: Outcome, lives: Sequence[Life], outages: bool) -> Verdict:
    """What is billed is what was lived, up to the last heartbeat before a kill."""
    beats = [beat for stage in struck.beats.values() for beat in stage]
    billed = sum(beat.time - beat.started for beat in beats)
    bound = HEARTBEAT_SECONDS + SLOW_SECONDS * (3 if outages else 1)  # a heartbeat waits for a store that is away
    faults = []
    if abs(3600 * struck.billed_hours - billed) > 1e-3:
        faults.append(f"the report says {3600 * struck.billed_hours:.1f} s, its attempts {billed:.1f} s")
    for life in lives:
        mine = [b for b in beats if b.process.pid == life.pid and life.began <= b.started <= life.ended]
        beats = [b for b in beats if b not in mine]
        if mine and max(b.time for b in mine) > life.ended:
            faults.append(f"process {life.pid}: billed beyond its end")
        if mine and life.killed and (unbilled := life.ended - max(b.time for b in mine)) > bound:
            faults.append(f"process {life.pid}: {unbilled:.1f} s before its death are not billed")
    if beats:
        faults.append(f"{len(beats)} attempts of no process that the drill started")
    lived = sum(life.ended - life.began for life in lives)
    told = f"{billed:.1f} s in attempts; {len(lives)} processes lived {lived:.1f} s, starting up included"
    return Verdict("ledger: billed time", not faults, _few(faults) or told)


def _few(faults: list[str]) -> str:
    """The first of them in a line; "" for none."""
    return "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")


def points_of(uri: str, run: str) -> Points:
    """What MLflow was told of a run's training."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("skytrain")
    found = client.search_runs([experiment.experiment_id] if experiment else [])
    wanted = {"skytrain.run": run, "skytrain.stage": "train"}
    ids = [one.info.run_id for one in found if wanted.items() <= one.data.tags.items()]
    return {
        name: sorted((p.step, p.value) for run_id in ids for p in client.get_metric_history(run_id, name))
        for name in SERIES
    }


@dataclass(frozen=True)
class Report:
    """What a drill was, and how it ended."""

    recipe: str
    seed: int
    store: str
    blows: list[Blow]
    verdicts: list[Verdict]
    left_out: dict[str, str]  # why, by kind
    seconds: float

    @property
    def passed(self) -> bool:
        return all(verdict.equal is not False for verdict in self.verdicts)

    def json(self) -> str:
        return json.dumps({"passed": self.passed, **asdict(self)}, indent=1)


def print_report(report: Report) -> None:
    """Where each blow fell and what it cost, and then what is equal."""
    from rich.table import Table

    from pipelines.show.tables import console

    blows = Table("#", "blow", "at", "stage", "attempt", "step", "redone", "seconds", box=None, pad_edge=False)
    for number, b in enumerate(report.blows, 1):
        numbers = [b.attempt, b.at_step, b.redone, None if b.seconds is None else f"{b.seconds:.1f}"]
        blows.add_row(str(number), b.kind, b.place, b.stage, *("–" if n is None else str(n) for n in numbers))
    marks = {True: "[green]equal[/]", False: "[red]NOT EQUAL[/]", None: "[dim]not compared[/]"}
    judged = Table(box=None, pad_edge=False, show_header=False)
    for verdict in report.verdicts:
        judged.add_row(verdict.what, marks[verdict.equal], verdict.detail)
    redone = sum(b.redone or 0 for b in report.blows)
    out = console()
    out.print(blows)
    out.print()
    out.print(judged)
    out.print()
    out.print(f"{len(report.blows)} blows, {redone} steps redone, {report.seconds:.0f} s, seed {report.seed}")
    if not report.passed:
        out.print(f"kept for a look: {report.store}")
