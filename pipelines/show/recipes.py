"""The shipped recipes in a table."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from pipelines.show.console import console


def print_recipes(recipes: Iterable[dict[str, Any]], usd_per_hour: float) -> None:
    """A row for each recipe, with the hours and dollars of its training on a node of this price."""
    table = Table("recipe", "parameters", "tokens", "FLOPs", "time, $", box=None, pad_edge=False)
    for one in recipes:
        known = one["recipe"], f"{one['parameters'] / 1e6:,.1f}M"
        if not one["tokens"]:
            table.add_row(*known, "", "", "tunes a given model")
            continue
        table.add_row(
            *known,
            f"{one['tokens'] / 1e9:,.2f}B" if one["tokens"] > 1e8 else f"{one['tokens'] / 1e6:,.1f}M",
            f"{one['flops']:.1e}",
            cost(one["node_hours"] / one["nodes"], one["usd"])
            + (f", {one['nodes']} nodes" if one["nodes"] > 1 else ""),
        )
    console().print(table)
    console().print(
        f"[dim]time and dollars: training alone on the fewest 8xH100 with the memory, at ${usd_per_hour}/h, by the "
        f"speeds in docs/measurements.md; `plan RECIPE --cloud` has the whole run[/]"
    )


def cost(hours: float, usd: float) -> str:
    """ "2.5 s, 0.02", "4.8 min, 2.53" or "17.1 h, 544"."""
    amount, unit = (hours, "h") if hours >= 1 else (60 * hours, "min") if hours >= 1 / 60 else (3600 * hours, "s")
    time = f"{amount:,.1f} {unit}"
    return f"{time}, {usd:,.0f}" if usd >= 100 else f"{time}, {usd:,.2f}"
