"""Token shards: a line each, then their sums and the lengths of their documents."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from pipelines.show.console import cell, console
from pipelines.text.inspect import ShardContents, ShardSet

BAR = 40  # characters of the longest bar


def print_shards(shards: Sequence[ShardContents], sums: ShardSet) -> None:
    table = Table(*("shard", "tokens", "documents", "largest id", "begins with"), box=None, pad_edge=False)
    for shard in shards:
        numbers = (f"{shard.tokens:,}", f"{shard.documents:,}", f"{shard.largest_id:,}")
        begin = "…" if shard.begins_inside else ""
        table.add_row(cell(shard.path.name), *numbers, cell(f"{begin}{shard.peek[:40]!r}"))
    out = console()
    out.print(table)
    share = f" ({sums.duplicates / sums.documents:.2%})" if sums.documents else ""
    out.print(f"{sums.tokens:,} tokens in {sums.documents:,} documents, {sums.duplicates:,} of them again{share}")
    out.print(f"lengths of documents, in tokens; the longest has {sums.longest:,}")
    most = max(count for _, count in sums.lengths) or 1
    for name, count in sums.lengths:
        out.print(f"  {name:>16}  {count:>12,}  {'▒' * -(-BAR * count // most)}")


def print_faults(faults: Sequence[tuple[str, str]]) -> None:
    for path, fault in faults:
        console().print(f"[red]WRONG[/]  {escape(path)}: {escape(fault)}")
