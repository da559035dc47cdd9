"""The shipped recipes in a table."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from pipelines.show.console import console


def print_recipes(recipes: Iterable[dict[str, Any]], usd_per_hour: float) -> None:
    """A row for each recipe, with the hours and dollars of its training on a node of this price."""
    table = Table("recipe", "parameters", "tokens", "FLOPs", "time, $", box=None, pad_edge=False)
    for one in recipes:
        table.add_row(
            one["recipe"],
            f"{one['parameters'] / 1e6:,.1f}M",
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
    """ "4.8 min, 2.53" or "17.1 h, 544"."""
    time = f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min"
    return f"{time}, {usd:,.0f}" if usd >= 100 else f"{time}, {usd:,.2f}"
