"""Token shards: a line each, then their sums and the lengths of their documents."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from pipelines.show.console import cell, console
from pipelines.text.inspect import Documents, ShardContents

BAR = 40  # characters of the longest bar


def print_shards(shards: Sequence[ShardContents], documents: Documents) -> None:
    table = Table(*("shard", "tokens", "documents", "largest id", "begins with"), box=None, pad_edge=False)
    for shard in shards:
        numbers = (f"{shard.tokens:,}", f"{shard.documents:,}", f"{shard.largest_id:,}")
        begin = "…" if shard.begins_inside else ""
        table.add_row(cell(shard.path.name), *numbers, cell(f"{begin}{shard.peek[:40]!r}"))
    out = console()
    out.print(table)
    out.print(f"{sum(shard.tokens for shard in shards):,} tokens in {sum(documents.counts):,} documents")
    out.print(f"lengths of documents, in tokens; the longest has {documents.longest:,}")
    lengths = documents.lengths()
    most = max(count for _, count in lengths) or 1
    for name, count in lengths:
        out.print(f"  {name:>16}  {count:>12,}  {'▒' * -(-BAR * count // most)}")


def print_faults(faults: Sequence[tuple[str, str]]) -> None:
    for path, fault in faults:
        console().print(f"[red]WRONG[/]  {escape(path)}: {escape(fault)}")
