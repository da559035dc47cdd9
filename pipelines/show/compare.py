"""Two runs side by side."""

from rich.table import Table

from pipelines.show.console import cell, console, number
from pipelines.tracking.compare import Comparison


def print_comparison(compared: Comparison) -> None:
    """The differences of two runs, their results, and their losses at equal tokens and dollars."""
    out = console()
    for title, rows in (("difference", compared.differs), ("result", compared.results)):
        table = Table(title, *map(cell, compared.runs), box=None, pad_edge=False)
        for name, pair in rows.items():
            table.add_row(cell(name), *(cell(number(value)) for value in pair))
        out.print(table)
        out.print()
    for title, levels in (("tokens", compared.at_equal_tokens), ("dollars", compared.at_equal_dollars)):
        table = Table(f"at equal {title}", "loss", *map(cell, compared.runs), box=None, pad_edge=False)
        for level in levels:
            at = f"{level.at:,.0f}" if title == "tokens" else f"{level.at:.4g}"
            table.add_row(at, level.metric, *(number(value) for value in level.values))
        out.print(table if levels else f"at equal {title}: nothing to compare")
        out.print()
