"""The shipped recipes in a table."""

from collections.abc import Iterable

from rich.table import Table

from pipelines.plan import ASSUMED_MFU, NODE_USD_PER_HOUR, Estimate
from pipelines.show.console import console


def print_recipes(estimates: Iterable[Estimate]) -> None:
    table = Table("recipe", "parameters", "tokens", "FLOPs", "time", "dollars", box=None, pad_edge=False)
    for estimate in estimates:
        table.add_row(
            estimate.recipe,
            f"{estimate.parameters / 1e6:,.1f}M",
            f"{estimate.tokens / 1e9:,.2f}B",
            f"{estimate.flops:.1e}",
            f"{estimate.node_hours:,.1f} h" if estimate.node_hours >= 1 else f"{60 * estimate.node_hours:,.0f} min",
            f"{estimate.usd:,.0f}",
        )
    console().print(table)
    console().print(
        f"[dim]time = tokens x (6N + 12·L·C·T) / (8 x 989 TFLOP/s x {ASSUMED_MFU:.0%} MFU, assumed) on 8xH100; "
        f"dollars at ${NODE_USD_PER_HOUR}/h[/]"
    )
