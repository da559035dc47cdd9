"""`skytrain sample`: text from a trained run."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.verbs.options import Json, Precision, RunName, Step, StoreUri, home, open_text_model, store_uri
from trainer.errors import UserError

if TYPE_CHECKING:
    from pipelines.sample import TextModel
    from trainer.sample import Sampling

BATCH = 16  # texts at a time: 124M keeps 37 MB of keys and values for each in bf16, 1558M 315 MB
PROMPTS_BYTES = 1 << 20
LAST_SEED = 2**63 - 1


@dataclass
class Sample:
    """A generated text."""

    prompt: str
    seed: int
    text: str = ""  # without the prompt
    finish: str = ""  # stop or length
    tokens: int = 0


def sample(
    run: RunName,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text to continue; can be repeated. Without one: a new document.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text file with a prompt on each line.", show_default=False)
    ] = None,
    number: Annotated[int, typer.Option(min=1, max=1000, help="Texts for each prompt, with ascending seeds.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens of a text.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among so many likeliest tokens; 0: among all.")] = 50,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw among the likeliest tokens that hold this probability together.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=LAST_SEED, help="Equal seeds give equal text.")] = 0,
    at: Step = None,
    precision: Precision = None,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Print each token at once [on a terminal]", show_default=False),
    ] = None,
    store: StoreUri = None,
    as_json: Json = False,
) -> None:
    """Generate text with a trained run, or with the newest commit of a run that still trains.

    A text ends with its document. One that outgrows the context goes on from the last half of it.
    """
    asked = [*(prompt or ()), *(prompts_in(prompts) if prompts else ())] or [""]
    from trainer.sample import Sampling

    model = open_text_model(store_uri(store), home() / "cache", run, at, precision)
    sampling = Sampling(temperature, top_k or None, top_p)
    texts = [Sample(text, (seed + i) % (LAST_SEED + 1)) for text, i in product(asked, range(number))]
    for text in texts:
        check_length(model, text.prompt)
    at_once = sys.stdout.isatty() if stream is None else stream
    show = show_json if as_json else show_streams if at_once else show_texts
    show(texts, lambda some, said: generate(model, some, tokens, sampling, said))


Generate = Callable[[list[Sample], Callable[[str], None]], None]


def prompts_in(path: Path) -> list[str]:
    """The lines of a file, without empty ones. UserError if there are none, or if it is no short text file."""
    try:
        with path.open("rb") as file:
            body = file.read(PROMPTS_BYTES + 1)
        lines = [line for line in body.decode().splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path}: no text file in UTF-8 ({error})") from error
    if len(body) > PROMPTS_BYTES:
        raise UserError(f"--prompts {path}: larger than {PROMPTS_BYTES:,} bytes; divide it")
    if not lines:
        raise UserError(f"--prompts {path}: holds no line; write a prompt on each")
    return lines


def check_length(model: "TextModel", prompt: str) -> None:
    """UserError for a prompt that does not fit into the context."""
    if (size := len(model.ids_of(prompt))) > model.context:
        raise UserError(
            f"--prompt: {size - 1:,} tokens, and {model.run} takes {model.context - 1:,} (block_size "
            f"{model.context}, of which the start of the document is one); shorten {prompt[:40]!r}"
        )


def generate(
    model: "TextModel", texts: list[Sample], tokens: int, sampling: "Sampling", said: Callable[[str], None]
) -> None:
    """Fill texts with what the model says, in batches. `said` gets each part of it."""
    for first in range(0, len(texts), BATCH):
        some = texts[first : first + BATCH]
        ids = [model.ids_of(text.prompt) for text in some]
        for step in model.continue_all(ids, tokens, [text.seed for text in some], sampling):
            for part in step:
                text = some[part.number]
                text.text, text.finish, text.tokens = text.text + part.text, part.finish or "", part.tokens
                said(part.text)


def show_texts(texts: list[Sample], generate: Generate) -> None:
    """Print the texts when all are complete."""
    from pipelines.show.console import printable

    generate(texts, lambda _: None)
    for text, heading in with_headings(texts):
        print(printable(heading + text.prompt + text.text))


def show_streams(texts: list[Sample], generate: Generate) -> None:
    """Print one text after the other, token by token."""
    from pipelines.show.console import printable

    for text, heading in with_headings(texts):
        print(printable(heading + text.prompt), end="", flush=True)
        generate([text], lambda part: print(printable(part), end="", flush=True))
        print(printable(""))


def show_json(texts: list[Sample], generate: Generate) -> None:
    generate(texts, lambda _: None)
    print(json.dumps([asdict(text) for text in texts]))


def with_headings(texts: list[Sample]) -> Iterator[tuple[Sample, str]]:
    """Texts, each with a line above it if there are several."""
    for i, text in enumerate(texts, 1):
        yield text, f"--- {i} of {len(texts)}, seed {text.seed}\n" if len(texts) > 1 else ""
