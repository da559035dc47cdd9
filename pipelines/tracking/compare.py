"""Two runs side by side: what differs between them, and what came of it at equal tokens and at equal dollars."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipelines.artifacts.manifest import differences
from pipelines.tracking.account import Account, cost_until, market_of
from pipelines.tracking.runs import RunRecord, account_of, run_series, sound_manifests, summarize, tokens_axis
from trainer.store import Store

PARTS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of what both runs have come to
STEPS_TOGETHER = 20  # whose mean is the training loss at a point: one step's says little
FRESH = 0.9  # of a level: a val loss that was measured earlier than that says nothing of it

Row = dict[str, Any]
Axis = Callable[[Row], float]


@dataclass(frozen=True)
class Level:
    """A loss of both runs where they had used up the same; None where a run has none yet."""

    at: float  # tokens or dollars
    metric: str
    values: tuple[float | None, float | None]


@dataclass(frozen=True)
class Comparison:
    runs: tuple[str, str]
    differs: dict[str, tuple[Any, Any]]  # recipe, data, code and machines, only where they differ
    results: dict[str, tuple[Any, Any]]
    at_equal_tokens: list[Level]
    at_equal_dollars: list[Level]  # of the whole bill; empty while a price is unknown, or nothing cost anything


def compare(store: Store, one: RunRecord, other: RunRecord) -> Comparison:
    facts = conditions(store, one), conditions(store, other)
    bills = account_of(store, one), account_of(store, other)
    series = run_series(store, one), run_series(store, other)
    summaries = summarize(store, one), summarize(store, other)
    shown = ("state", "attempts", "steps", "tokens", "train_loss", "val_loss", "hellaswag_acc_norm")
    costs = ("billed_hours", "usd", "unpriced_hours", "goodput", "usd_per_billion_tokens")
    priced = not any(bill.total.unpriced_hours for bill in bills) and all(bill.total.usd for bill in bills)
    dollars = (by_dollars(bills[0]), by_dollars(bills[1]))
    return Comparison(
        runs=(one.run, other.run),
        differs=differences(*facts),
        results={name: (getattr(summaries[0], name), getattr(summaries[1], name)) for name in shown + costs},
        at_equal_tokens=levels(series, (by_tokens(one), by_tokens(other))),
        at_equal_dollars=levels(series, dollars) if priced else [],
    )


def conditions(store: Store, record: RunRecord) -> dict[str, Any]:
    """What a run was made with: its recipe, its inputs, its code, its machines."""
    made, _ = sound_manifests(store, record)
    train = made.get("train")
    attempts = [a for a in account_of(store, record).attempts if a.stage == "train" and not a.waited]
    return {
        "recipe": record.recipe,
        "artifacts": record.prefixes,
        "code": {k: train.provenance.get(k) for k in ("git_commit", "image", "python", "versions")} if train else {},
        "machines": {
            "market": ", ".join(sorted({market_of(a.machine) for a in attempts})),
            "accelerators": ", ".join(sorted({a.machine.accelerators or "" for a in attempts})),
            "nodes": max((a.nodes for a in attempts), default=0),
            "price_per_hour": ", ".join(sorted({f"{a.price_per_hour}" for a in attempts})),
        },
    }


def by_tokens(record: RunRecord) -> Axis:
    tokens_at = tokens_axis(record)
    return lambda row: tokens_at(row["step"])


def by_dollars(bill: Account) -> Axis:
    return lambda row: cost_until(bill, row["time"]).usd


def levels(series: tuple[list[Row], list[Row]], axes: tuple[Axis, Axis]) -> list[Level]:
    """Both runs' losses where they had come as far as the one that came less far, and at parts of that."""
    if not all(series):
        return []
    curves = [[(axis(row), row) for row in rows] for rows, axis in zip(series, axes, strict=True)]
    end = min(curve[-1][0] for curve in curves)
    found = []
    for metric, together in (("val/loss", 1), ("train/loss", STEPS_TOGETHER)):
        for part in PARTS:
            a, b = (loss_at(curve, part * end, metric, together) for curve in curves)
            if (a, b) != (None, None):
                found.append(Level(part * end, metric, (a, b)))
    return found


def loss_at(curve: list[tuple[float, Row]], level: float, metric: str, together: int) -> float | None:
    """The mean of the last values of a metric that had been reached at some level; None where they are old by then."""
    known = [(at, row[metric]) for at, row in curve if at <= level * (1 + 1e-9) and metric in row][-together:]
    if not known or known[-1][0] < FRESH * level:
        return None
    return sum(value for _, value in known) / len(known)
