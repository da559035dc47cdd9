"""Two runs side by side: their differences, and their losses at equal tokens and at equal dollars."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipelines.artifacts.manifest import differences
from pipelines.tracking.account import cost_until, market_of
from pipelines.tracking.runs import Run

FRACTIONS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the tokens or dollars that both runs have used
STEPS_TOGETHER = 20  # the training loss at a point is their mean: the loss of one step is noisy
FRESH = 0.9  # of a level: an older val loss does not describe it

RESULTS = (
    *("state", "attempts", "steps", "tokens", "train_loss", "val_loss", "bits_per_byte"),
    *("hellaswag_acc_norm", "core"),
    *("billed_hours", "usd", "unpriced_hours", "goodput", "usd_per_billion_tokens"),
)

Row = dict[str, Any]
Axis = Callable[[Row], float]


@dataclass(frozen=True)
class Level:
    """A loss of both runs after equal tokens or dollars; None for a run without one yet."""

    at: float  # tokens or dollars
    metric: str
    values: tuple[float | None, float | None]


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    runs: tuple[str, str]
    differs: dict[str, tuple[Any, Any]]  # recipe, data, code and machines, only where they differ
    results: dict[str, tuple[Any, Any]]
    at_equal_tokens: list[Level]
    at_equal_dollars: list[Level]  # of the whole bill; empty if a price is unknown or 0


def compare(one: Run, other: Run) -> Comparison:
    """Compare two runs."""
    series, totals = (one.series, other.series), (one.account.total, other.account.total)
    priced = all(total.usd and not total.unpriced_hours for total in totals)
    return Comparison(
        runs=(one.name, other.name),
        differs=differences(conditions(one), conditions(other)),
        results={name: (getattr(one.summary, name), getattr(other.summary, name)) for name in RESULTS},
        at_equal_tokens=levels(series, (by_tokens(one), by_tokens(other))),
        at_equal_dollars=levels(series, (by_dollars(one), by_dollars(other))) if priced else [],
    )


def conditions(run: Run) -> dict[str, Any]:
    """The conditions of a run: its recipe, inputs, code and machines."""
    train = run.manifests.get("train")
    attempts = [a for a in run.account.attempts if a.stage == "train" and not a.waited]
    return {
        "recipe": run.record.recipe,
        "artifacts": run.record.prefixes,
        "code": {k: train.provenance.get(k) for k in ("git_commit", "image", "python", "versions")} if train else {},
        "machines": {
            "market": ", ".join(sorted({market_of(a.machine) for a in attempts})),
            "accelerators": ", ".join(sorted({a.machine.accelerators or "" for a in attempts})),
            "nodes": max((a.nodes for a in attempts), default=0),
            "price_per_hour": ", ".join(sorted({f"{a.price_per_hour}" for a in attempts})),
        },
    }


def by_tokens(run: Run) -> Axis:
    """The tokens that a run has trained on at a row."""
    return lambda row: run.tokens_before(row["step"])


def by_dollars(run: Run) -> Axis:
    """The dollars that a run has cost at a row."""
    return lambda row: cost_until(run.account, row["time"]).usd


def levels(series: tuple[list[Row], list[Row]], axes: tuple[Axis, Axis]) -> list[Level]:
    """Both runs' losses at the end of the shorter run, and at fractions of it."""
    if not all(series):
        return []
    curves = [[(axis(row), row) for row in rows] for rows, axis in zip(series, axes, strict=True)]
    end = min(curve[-1][0] for curve in curves)
    found = []
    for metric, together in (("val/loss", 1), ("train/loss", STEPS_TOGETHER)):
        for fraction in FRACTIONS:
            a, b = (loss_at(curve, fraction * end, metric, together) for curve in curves)
            if (a, b) != (None, None):
                found.append(Level(fraction * end, metric, (a, b)))
    return found


def loss_at(curve: list[tuple[float, Row]], level: float, metric: str, together: int) -> float | None:
    """The mean of a metric's last values up to a level; None if they are too old."""
    known = [(at, row[metric]) for at, row in curve if at <= level * (1 + 1e-9) and metric in row][-together:]
    if not known or known[-1][0] < FRESH * level:
        return None
    return sum(value for _, value in known) / len(known)
