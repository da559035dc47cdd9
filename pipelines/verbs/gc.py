"""`skytrain gc`: remove files that nothing needs."""

from typing import Annotated

import typer

from pipelines.verbs.options import StoreUri, home, store_uri


def gc(
    store: StoreUri = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the objects.")] = False,
    older_than_days: Annotated[
        float, typer.Option(min=0.0, help="Remove an unfinished artifact after so many days without any work on it.")
    ] = 7.0,
) -> None:
    """Remove every object that no manifest and no running or resumable attempt needs."""
    from pipelines.artifacts.store import open_store
    from pipelines.gc import collect, leftovers
    from pipelines.show.console import say

    opened = open_store(store_uri(store))
    count = size = 0
    damaged: list[str] = []
    for leftover in (leftovers if dry_run else collect)(opened, home(), older_than_days, damaged.append):
        say(f"{leftover.size:>15,}  {leftover.path or leftover.key}  ({leftover.why})")
        count, size = count + 1, size + leftover.size
    verb = "would be removed" if dry_run else "removed"
    say(f"{count} objects, {size:,} bytes {verb} in {opened.uri}")
    for message in damaged:
        say(f"left alone: {message}", on_stderr=True)
