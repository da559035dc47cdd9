"""`skytrain pull`: the export of a run on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.user.verbs.options import RunName, StoreUri, store_uri
from trainer.config.errors import UserError


def pull(
    run: RunName,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder for the files; it may be a new one.")],
    format: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="One format, such as hf or gguf; all by default."),
    ] = None,
    tuned: Annotated[bool, typer.Option("--tuned", help="The last model of tuning instead of the export.")] = False,
    store: StoreUri = None,
) -> None:
    """Download and verify the export of a run, or its tuned model; the same command continues after an interruption."""
    from pipelines.store.s3_store import open_store
    from pipelines.user.pull import pull_run
    from pipelines.user.show.console import say

    if not folder:
        raise UserError("DIR: an empty name; name a folder, or . for this one")
    count = size = 0
    for file in pull_run(open_store(store_uri(store)), run, Path(folder), format, tuned):
        say(f"{file.size:>15,}  {file.path}" + ("  (already there)" if file.was_there else ""))
        count, size = count + 1, size + file.size
    say(f"{count} files, {size:,} bytes in {folder}, verified by sha256")
