"""Runs in a table, their series as CSV or JSON, and their audits."""

import csv
import json
import sys
from typing import Any

from rich.markup import escape
from rich.table import Table

from pipelines.show.console import cell, console, money, number, printable, say
from pipelines.tracking.audit import Audit
from pipelines.tracking.runs import Summary

SERIES = {  # CSV column -> metric
    "step": "step",
    "train/loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "tokens/s": "perf/tokens_per_second",
}


def print_runs(summaries: list[Summary], where: str) -> None:
    if not summaries:
        console().print(f"no runs in {escape(where)} yet; `skytrain run smoke` makes one")
        return
    columns = ("run", "state", "attempts", "tokens", "val loss", "HellaSwag", "hours", "dollars", "goodput")
    table = Table(*columns, box=None)
    for s in summaries:
        table.add_row(
            cell(s.run),
            cell(s.state),
            str(s.attempts),
            f"{s.tokens:,}",
            number(s.val_loss),
            number(s.hellaswag_acc_norm),
            f"{s.billed_hours:.3f}",
            money(s.usd, s.unpriced_hours),
            "" if s.goodput is None else f"{s.goodput:.0%}",
        )
    console().print(table)
    for line in (line for s in summaries for line in s.faults):
        console().print(escape(line))


def print_series(run: str, rows: list[dict[str, Any]], as_json: bool, alone: bool) -> None:
    """The steps of a run as CSV (with a first column `run` unless it is `alone`), or as a JSON line each."""
    steps = [row for row in rows if "train/loss" in row]
    if as_json:
        for row in steps:
            print(json.dumps({"run": run, **row}))
        return
    out = csv.writer(sys.stdout, lineterminator="\n")
    first = [] if alone else ["run"]
    out.writerow([*first, *SERIES])
    name = f"'{printable(run)}" if run[:1] in "=+-@" else printable(run)  # a formula, to a spreadsheet
    for row in steps:
        out.writerow([*([] if alone else [name]), *(row.get(metric) for metric in SERIES.values())])


def print_audits(audits: list[Audit]) -> None:
    for a in audits:
        differences = [
            f"{len(steps)} steps {difference} (the first: {steps[0]:,})"
            for difference, steps in (("read other sequences", a.wrong_steps), ("are missing", a.missing_steps))
            if steps
        ]
        verdict = "; ".join(differences) or "every step read exactly the sequences of the recipe and the seed"
        of = f" ({' + '.join(f'{count:,}' for count in a.source_sequences)} by source)" if a.source_sequences else ""
        on = f", {a.threads} CPU thread{'s' * (a.threads > 1)} a rank" if a.threads else ""
        say(f"{a.run}: {a.steps:,} steps, {a.sequences:,} sequences{of}{on}: {verdict}")
