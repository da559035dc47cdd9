"""`skytrain shards`: the verification of token shards."""

from pathlib import Path
from typing import Annotated

import typer

shards_app = typer.Typer(name="shards", help="Verify token shards in llm.c's format.", no_args_is_help=True)


@shards_app.callback()
def options() -> None:
    """Verify token shards in llm.c's format."""


@shards_app.command()
def verify(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Shards, or folders with shards.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Whose ids and documents the shards have: gpt2, bytes, or a file [that of the MANIFEST.json; gpt2]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Verify header, size, ids, documents and sha256 (by MANIFEST.json) of shards; exit with 1 if one is wrong."""
    from rich.markup import escape

    from pipelines.show.console import console, say
    from pipelines.text.adopted import faults_of, shard_paths, tokenizer_by_manifest
    from pipelines.text.tokenizer import named_tokenizer

    shards = [shard for path in paths for shard in shard_paths(path)]
    encoding = named_tokenizer(tokenizer or tokenizer_by_manifest(shards[0]))
    faults = [(shard, fault) for shard in shards for fault in faults_of(shard, encoding)]
    for shard, fault in faults:
        console().print(f"[red]WRONG[/]  {escape(str(shard))}: {escape(fault)}")
    say(f"{'wrong' if faults else 'sound'}: {len(shards)} shard(s)")
    if faults:
        raise typer.Exit(1)
