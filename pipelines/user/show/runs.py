"""Runs in a table, and their series as JSON."""

import json
from typing import Any

from rich.markup import escape
from rich.table import Table

from pipelines.run.runs import Summary
from pipelines.user.show.console import cell, console, money, number


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


def print_series(run: str, rows: list[dict[str, Any]]) -> None:
    """The steps of a run, a line of JSON each."""
    for row in rows:
        if "train/loss" in row:
            print(json.dumps({"run": run, **row}))
