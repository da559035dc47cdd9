"""`skytrain gc`: remove files that nothing needs."""

from typing import Annotated

import typer

from pipelines.user.verbs.options import StoreUri, store_uri


def gc(
    store: StoreUri = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the files without deleting them.")] = False,
    older_than_days: Annotated[
        float, typer.Option(min=0.0, help="Delete unfinished artifacts on which nothing has worked for this many days.")
    ] = 7.0,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Delete this run instead, and what no other run uses.")
    ] = None,
) -> None:
    """Delete files that nothing uses any more."""
    from pipelines.run.gc import collect, remove_run
    from pipelines.store.s3_store import open_store
    from pipelines.user.show.console import say

    opened = open_store(store_uri(store))
    count = size = 0
    damaged: list[str] = []
    everything = collect(opened, older_than_days, damaged.append, dry_run)
    for leftover in everything if run is None else remove_run(opened, run, dry_run):
        say(f"{leftover.size:>15,}  {leftover.path or leftover.key}  ({leftover.why})")
        count, size = count + 1, size + leftover.size
    verb = "would be removed" if dry_run else "removed"
    say(f"{count} objects, {size:,} bytes {verb} in {opened.uri}")
    for message in damaged:
        say(f"skipped: {message}", on_stderr=True)
