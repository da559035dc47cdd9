"""The comparison of an undisturbed run and a disturbed one.

Pure functions judge the content of the two stores (and of MLflow). A drill that cannot fail proves nothing, so
the tests give each function a falsified outcome.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.drill.faults import Fault
from pipelines.tracking.ledger import HEARTBEAT_SECONDS
from pipelines.tracking.records import Heartbeat
from pipelines.tracking.runs import read_run
from trainer.store import Store

SERIES = ("train/loss", "train/lr", "train/grad_norm", "val/loss")
DIGEST = "data/digest"
# Another order of summation changes the last of float32's 7 digits, and training amplifies the difference.
WORLD_TOLERANCE = 1e-2
SLOW_SECONDS = 5.0  # delay of a heartbeat from a busy machine

Points = dict[str, list[tuple[int, float]]]  # (step, value) in order of steps, by metric


@dataclass(frozen=True)
class CommandRun:
    """The lifetime of a command of the disturbed run, by the drill's own clock: unix seconds."""

    pid: int
    began: float
    ended: float
    killed: bool
    skew: float = 0.0  # seconds that its wall clock was fast


@dataclass(frozen=True)
class Outcome:
    """The results of a finished run."""

    rows: tuple[dict[str, Any], ...]
    files: dict[str, dict[str, str]]  # sha256 by stage and name; without the series, which contains times
    val_loss: float
    beats: dict[str, list[Heartbeat]]  # attempts by stage
    attempts: int  # by the report
    billed_hours: float  # by the report


@dataclass(frozen=True)
class Verdict:
    """One comparison of the two runs."""

    what: str
    equal: bool | None  # None: not compared
    detail: str


OF_ONE_RUN = ("metrics.jsonl", "README.md")  # files with times and dollars
TICKS_SECONDS = 0.05  # Linux tells the start of a process in hundredths of a second, rounded down


def outcome(store: Store, run: str) -> Outcome:
    """Read the results of `run` from a store."""
    finished = read_run(store, run)
    summary, made = finished.summary, finished.intact_manifests
    files = {
        stage: {file.name: file.sha256 for file in manifest.files if file.name not in OF_ONE_RUN}
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
    undisturbed: Outcome,
    disturbed: Outcome,
    faults: Sequence[Fault],
    command_runs: Sequence[CommandRun],
    mlflow: Points | None,
) -> list[Verdict]:
    """All comparisons. `mlflow` holds the points of the disturbed run in MLflow; None if tracking is off."""
    exact = not any(fault.kind == "world" and fault.injected_at for fault in faults)
    return [
        _faults(faults),
        _series(undisturbed, disturbed, (DIGEST,), "data digests", exact=True),
        _series(undisturbed, disturbed, SERIES, "losses, rates, gradient norms", exact),
        _weights(undisturbed, disturbed, exact),
        _artifacts(undisturbed, disturbed, exact),
        _mlflow(disturbed, mlflow, exact),
        _attempts(disturbed, faults),
        _hours(disturbed, command_runs, outages=any(fault.kind in ("cut", "odd", "eio") for fault in faults)),
    ]


def _faults(faults: Sequence[Fault]) -> Verdict:
    broken = [f"{f.kind} at {f.failpoint}: {f.violation}" for f in faults if f.violation]
    return Verdict("faults", not broken, _few(broken) or f"all {len(faults)} injected, every promise kept")


def _series(undisturbed: Outcome, disturbed: Outcome, names: Sequence[str], what: str, exact: bool) -> Verdict:
    """Every step occurs once, in order, with the same values."""
    if [row["step"] for row in undisturbed.rows] != [row["step"] for row in disturbed.rows]:
        return Verdict(
            what,
            False,
            f"{len(undisturbed.rows)} steps undisturbed, {len(disturbed.rows)} disturbed, or other step numbers",
        )
    both = zip(undisturbed.rows, disturbed.rows, strict=True)
    pairs = [(a["step"], name, a.get(name), b.get(name)) for a, b in both for name in names]
    differ = [f"step {s}: {n} {a} / {b}" for s, n, a, b in pairs if not _alike(a, b, exact)]
    values = sum(a is not None for _, _, a, _ in pairs)
    how = "bit for bit" if exact else f"to {WORLD_TOLERANCE:.0%}, because the world size changed"
    return Verdict(what, not differ, _few(differ) or f"{values} values in {len(undisturbed.rows)} rows, {how}")


def _alike(a: Any, b: Any, exact: bool) -> bool:
    if a is None or b is None or exact:
        return a == b
    return math.isclose(a, b, rel_tol=WORLD_TOLERANCE)


def _weights(undisturbed: Outcome, disturbed: Outcome, exact: bool) -> Verdict:
    a, b = (each.files["train"]["model.safetensors"] for each in (undisturbed, disturbed))
    if not exact:
        return Verdict("final weights", None, "the world size changed, so the bits differ: see the losses")
    return Verdict("final weights", a == b, f"sha256 {a[:12]}… / {b[:12]}…")


def _artifacts(undisturbed: Outcome, disturbed: Outcome, exact: bool) -> Verdict:
    """The artifacts of all stages. At another world size: the tokens and the evaluated loss."""
    stages = ("tokenize", "train", "export") if exact else ("tokenize",)
    differ = [stage for stage in stages if undisturbed.files[stage] != disturbed.files[stage]]
    if not _alike(undisturbed.val_loss, disturbed.val_loss, exact):
        differ.append(f"evaluated val/loss {undisturbed.val_loss} / {disturbed.val_loss}")
    count = sum(len(undisturbed.files[stage]) for stage in stages)
    return Verdict(
        "artifacts", not differ, _few(differ) or f"{count} files by sha256, val/loss {disturbed.val_loss:.4f}"
    )


def _mlflow(disturbed: Outcome, points: Points | None, exact: bool) -> Verdict:
    """One point per step, with the value of the store.

    For a redone step, MLflow keeps the first value and the store the last. At another world size their bits differ.
    """
    if points is None:
        return Verdict("MLflow series", None, "tracking is off")
    differ, count = [], 0
    for name in SERIES:
        wanted = [(row["step"], row[name]) for row in disturbed.rows if name in row]
        shipped, count = points.get(name, []), count + len(wanted)
        values, more = dict(shipped), len(shipped) - len(dict(shipped))
        off = [step for step, value in wanted if not _alike(value, values.pop(step, None), exact)]
        if off or more or values:
            differ.append(
                f"{name}: {len(off)} points missing or different, {more} shipped twice, {len(values)} of no step"
            )
    return Verdict("MLflow series", not differ, _few(differ) or f"{count} points, each step once")


def _attempts(disturbed: Outcome, faults: Sequence[Fault]) -> Verdict:
    """Every stage has one attempt, and one more for each fault that interrupted it."""
    differ = []
    for stage, beats in disturbed.beats.items():
        wanted = 1 + sum(fault.interrupted and fault.stage == stage for fault in faults)
        if [beat.attempt for beat in beats] != list(range(1, wanted + 1)):
            differ.append(f"{stage}: {len(beats)} attempts, {wanted} expected")
    interruptions = sum(fault.interrupted for fault in faults)
    if disturbed.attempts != 1 + interruptions:
        differ.append(f"the report says {disturbed.attempts} attempts after {interruptions} interruptions")
    return Verdict(
        "ledger: attempts", not differ, _few(differ) or f"{disturbed.attempts}: {interruptions} interruptions"
    )


def _hours(disturbed: Outcome, command_runs: Sequence[CommandRun], outages: bool) -> Verdict:
    """The billed time is the lifetime of the commands, up to the last heartbeat before a kill."""
    beats = [beat for stage in disturbed.beats.values() for beat in stage]
    billed = sum(beat.time - beat.started for beat in beats)
    bound = HEARTBEAT_SECONDS + SLOW_SECONDS * (3 if outages else 1)  # a heartbeat waits for the store during an outage
    errors = []
    if abs(3600 * disturbed.billed_hours - billed) > 1e-3:
        errors.append(f"the report says {3600 * disturbed.billed_hours:.1f} s, its attempts {billed:.1f} s")
    for run in command_runs:
        began, ended = run.began + run.skew, run.ended + run.skew  # by its own clock
        of_run = [b for b in beats if b.process.pid == run.pid and began - TICKS_SECONDS <= b.started <= ended]
        beats = [b for b in beats if b not in of_run]
        if of_run and max(b.time for b in of_run) > ended:
            errors.append(f"process {run.pid}: billed after its end")
        if of_run and run.killed and (unbilled := ended - max(b.time for b in of_run)) > bound:
            errors.append(f"process {run.pid}: {unbilled:.1f} s before its kill are not billed")
    if beats:
        errors.append(f"{len(beats)} attempts belong to no process of the drill")
    lifetime = sum(run.ended - run.began for run in command_runs)
    detail = f"{billed:.1f} s in attempts; {len(command_runs)} processes ran {lifetime:.1f} s, start-up included"
    return Verdict("ledger: billed time", not errors, _few(errors) or detail)


def _few(errors: list[str]) -> str:
    """The first three, in one line; empty for none."""
    return "; ".join(errors[:3]) + (f"; and {len(errors) - 3} more" if len(errors) > 3 else "")


def points_of(uri: str, run: str) -> Points:
    """The points of a run's training in MLflow."""
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
class DrillReport:
    """The settings and the result of a drill."""

    recipe: str
    seed: int
    store: str
    faults: list[Fault]
    verdicts: list[Verdict]
    left_out: dict[str, str]  # why, by kind
    seconds: float

    @property
    def passed(self) -> bool:
        return all(verdict.equal is not False for verdict in self.verdicts)

    def json(self) -> str:
        return json.dumps({"passed": self.passed, **asdict(self)}, indent=1)
