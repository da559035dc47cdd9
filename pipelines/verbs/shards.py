"""`skytrain shards`: a look into token shards, and their verification."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.verbs.options import Json, WholeHelp

shards_app = typer.Typer(
    name="shards", cls=WholeHelp, help="Token shards in llm.c's format: inspect, verify.", no_args_is_help=True
)

Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", help="Shards, or folders with shards.")]
Tokenizer = Annotated[
    str, typer.Option(help="gpt2, bytes, or the file of your own: whose ids and documents the shards have.")
]


@shards_app.command()
def inspect(paths: Paths, tokenizer: Tokenizer = "gpt2", as_json: Json = False) -> None:
    """Show what the shards hold: tokens, documents and their lengths, duplicates, a look at the text."""
    from pipelines.show.shards import print_faults, print_shards
    from pipelines.text.inspect import contents_of_all, shard_paths, sums_of
    from pipelines.text.tokenizer import named_tokenizer

    encoding = named_tokenizer(tokenizer)
    found = list(contents_of_all((shard for path in paths for shard in shard_paths(path)), encoding))
    sums, faults = sums_of(found), [(str(shard.path), fault) for shard in found for fault in shard.faults]
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
        values: dict[str, Any] = {"tokens": sums.tokens, "documents": sums.documents, "duplicates": sums.duplicates}
        print(json.dumps({"shards": rows, **values, "longest": sums.longest, "lengths": dict(sums.lengths)}))
    else:
        print_shards(found, sums)
        print_faults(faults)


@shards_app.command()
def verify(paths: Paths, tokenizer: Tokenizer = "gpt2") -> None:
    """Verify header, size, ids and documents, and sha256 by a MANIFEST.json beside them: exit 1 if one is wrong."""
    from pipelines.show.console import say
    from pipelines.show.shards import print_faults
    from pipelines.text.inspect import contents_of_all, faults_by_manifest, shard_paths
    from pipelines.text.tokenizer import named_tokenizer

    encoding = named_tokenizer(tokenizer)
    found = [shard for path in paths for shard in shard_paths(path)]
    faults = [(str(one.path), fault) for one in contents_of_all(found, encoding) for fault in one.faults]
    faults += [(str(path), fault) for path, fault in faults_by_manifest(found)]
    print_faults(faults)
    if faults:
        raise typer.Exit(1)
    say(f"sound: {len(found)} shard(s)")
