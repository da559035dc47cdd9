"""`skytrain shards`: a look into token shards, and their verification."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.verbs.options import Json, WholeHelp

shards_app = typer.Typer(
    name="shards", cls=WholeHelp, help="Inspect or verify token shards in llm.c's format.", no_args_is_help=True
)

Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", help="Shards, or folders with shards.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Whose ids and documents the shards have: gpt2, bytes, or a file [that of the MANIFEST.json; gpt2]",
        show_default=False,
    ),
]


@shards_app.command()
def inspect(paths: Paths, tokenizer: Tokenizer = None, as_json: Json = False) -> None:
    """Show tokens, documents, their lengths, and some text of shards."""
    from pipelines.show.shards import print_faults, print_shards
    from pipelines.text.inspect import Documents, contents_of_all, shard_paths, tokenizer_by_manifest
    from pipelines.text.tokenizer import named_tokenizer

    named, documents = [shard for path in paths for shard in shard_paths(path)], Documents()
    encoding = named_tokenizer(tokenizer or tokenizer_by_manifest(named[0]))
    found = list(contents_of_all(named, encoding, documents))
    faults = [(str(shard.path), fault) for shard in found for fault in shard.faults]
    if as_json:
        rows = [
            {
                "path": str(shard.path),
                "tokens": shard.tokens,
                "documents": shard.documents,
                "largest_id": shard.largest_id,
                "begins_inside": shard.begins_inside,
                "begins_with": shard.peek,
                "faults": list(shard.faults),
            }
            for shard in found
        ]
        values: dict[str, Any] = {
            "tokens": sum(shard.tokens for shard in found),
            "documents": sum(documents.counts),
        }
        values |= {"longest": documents.longest, "lengths": dict(documents.lengths())}
        print(json.dumps({"shards": rows} | values))
    else:
        print_shards(found, documents)
        print_faults(faults)


@shards_app.command()
def verify(paths: Paths, tokenizer: Tokenizer = None) -> None:
    """Verify header, size, ids, documents and sha256 (by MANIFEST.json) of shards; exit with 1 if one is wrong."""
    from pipelines.show.console import say
    from pipelines.show.shards import print_faults
    from pipelines.text.inspect import (
        Documents,
        contents_of_all,
        faults_by_manifest,
        shard_paths,
        tokenizer_by_manifest,
    )
    from pipelines.text.tokenizer import named_tokenizer

    found, documents = [shard for path in paths for shard in shard_paths(path)], Documents()
    contents = contents_of_all(found, named_tokenizer(tokenizer or tokenizer_by_manifest(found[0])), documents)
    faults = [(str(one.path), fault) for one in contents for fault in one.faults]
    faults += [(str(path), fault) for path, fault in faults_by_manifest(found)]
    print_faults(faults)
    say(f"{'wrong' if faults else 'sound'}: {len(found)} shard(s), {sum(documents.counts):,} documents")
    if faults:
        raise typer.Exit(1)
