"""`skytrain sample`: text from a trained run."""

from typing import Annotated

import typer

from pipelines.verbs.options import RunName, StoreUri, home, store_uri


def sample(
    run: RunName,
    prompt: Annotated[str, typer.Option(help="The text to continue; empty for a new document.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="The number of tokens to generate.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal text.")] = 0,
    store: StoreUri = None,
) -> None:
    """Generate text with a trained run."""
    from pipelines.artifacts.store import open_store
    from pipelines.sample import sample_run
    from pipelines.show.console import printable

    print(printable(sample_run(open_store(store_uri(store)), home() / "cache", run, prompt, tokens, seed)))
