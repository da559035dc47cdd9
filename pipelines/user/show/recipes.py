"""The shipped recipes in a table."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from pipelines.user.show.console import console


def print_recipes(recipes: Iterable[dict[str, Any]]) -> None:
    """A row for each recipe."""
    table = Table("recipe", "parameters", "tokens", "FLOPs", box=None, pad_edge=False)
    for one in recipes:
        known = one["recipe"], f"{one['parameters'] / 1e6:,.1f}M"
        if not one["tokens"]:
            table.add_row(*known, "tunes a given model", "")
            continue
        tokens = f"{one['tokens'] / 1e9:,.2f}B" if one["tokens"] > 1e8 else f"{one['tokens'] / 1e6:,.1f}M"
        table.add_row(*known, tokens, f"{one['flops']:.1e}")
    console().print(table)
    console().print("[dim]`skytrain plan RECIPE --cloud` has time and dollars[/]")
