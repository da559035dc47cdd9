"""`skytrain tokenizer`: a tokenizer of one's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pipelines.user.verbs.options import Changes, RecipeName

tokenizer_app = typer.Typer(name="tokenizer", help="Train a tokenizer of your own.", no_args_is_help=True)


@tokenizer_app.callback()
def options() -> None:
    """Train a tokenizer of your own."""


@tokenizer_app.command()
def train(
    recipe: RecipeName,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the tokenizer to this file.")] = Path(
        "tokenizer.json"
    ),
    vocab_size: Annotated[
        int,
        typer.Option(min=257, max=262_144, metavar="IDS", help="Set the size of the vocabulary, with <|endoftext|>."),
    ] = 32_768,
    characters: Annotated[
        int, typer.Option(min=1, metavar="N", help="Learn from this many characters at the start of the text.")
    ] = 1_000_000_000,
    set_: Changes = None,
) -> None:
    """Train a byte-level BPE on the text of a recipe; the same text gives the same file."""
    from pipelines.recipe.loader import load_recipe
    from pipelines.run.text.bpe import text_sample, train_bpe
    from pipelines.user.show.console import TerminalScreen, say
    from trainer.base.process import StopSignal
    from trainer.base.store import sha256_of
    from trainer.config.errors import UserError

    config = load_recipe(recipe, set_ or []).tokens
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out {out}: not a file in an existing folder; choose another path")
    stop, documents, size = StopSignal(), 0, 0
    with TerminalScreen().bar("sample", characters) as bar:

        def read() -> Iterator[str]:
            nonlocal documents, size
            for text in text_sample(config, characters):
                stop.check()
                documents, size = documents + 1, size + len(text)
                if documents % 100 == 0:
                    bar.update(size, f"{documents:,} documents")
                yield text

        content = train_bpe(read(), vocab_size)
    out.write_bytes(content)
    say(f"{out}: {vocab_size:,} ids, from {size:,} characters of {documents:,} documents")
    say("in the recipe:")
    say(f"tokens:\n  tokenizer: {out}@sha256:{sha256_of(out)}\nmodel:\n  vocab_size: {vocab_size}")
