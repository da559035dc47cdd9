"""`skytrain sample`: text from a trained run."""

import json
import sys
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated

import typer

from pipelines.user.verbs.options import Json, Precision, RunName, Step, StoreUri, home, open_text_model, store_uri
from trainer.config.errors import UserError

BATCH = 16  # texts at a time: 124M keeps 37 MB of keys and values for each in bf16, 1558M 315 MB
LAST_SEED = 2**63 - 1


@dataclass
class GeneratedText:
    """A generated text."""

    prompt: str
    seed: int
    text: str = ""  # without the prompt
    finish: str = ""  # stop or length
    tokens: int = 0


def sample(
    run: RunName,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Continue this text; can be repeated. Without it: a new document.")
    ] = None,
    number: Annotated[
        int, typer.Option(min=1, max=1000, help="Generate this many texts for each prompt, with ascending seeds.")
    ] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens in a text.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="Set the temperature; 0 takes the most likely token.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the K most likely tokens; 0: from all.")] = 50,
    top_p: Annotated[
        float,
        typer.Option(min=0, max=1, help="Sample from the most likely tokens that together have this probability."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=LAST_SEED, help="Set the seed; equal seeds give equal text.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Let a tuned model answer each prompt, as the message of a user.")
    ] = False,
    at: Step = None,
    precision: Precision = None,
    store: StoreUri = None,
    as_json: Json = False,
) -> None:
    """Generate text with a run's final weights, or with the newest checkpoint of a run in training.

    A text ends with its document. One that outgrows the context goes on from the last half of it. For speed on a CPU,
    export gguf (export.formats) and run it in llama.cpp.
    """
    from pipelines.user.show.console import printable
    from trainer.models.decoder import Sampling

    model = open_text_model(store_uri(store), home() / "cache", run, at, precision, tuned=chat)
    sampling, ending = Sampling(temperature, top_k or None, top_p), "\n" if chat else ""  # of a prompt
    asked = prompt or [""]
    if chat and not (model.chat and prompt):
        raise UserError(f"--chat: {'needs --prompt' if model.chat else f'{model.run} has no tuned model'}")

    def ids_of(text: str) -> list[int]:
        return model.chat.prompt([{"role": "user", "content": text}]) if chat and model.chat else model.ids_of(text)

    for text in asked:
        if (size := len(ids_of(text))) > model.context:
            raise UserError(
                f"--prompt: {size - 1:,} tokens, and {model.run} takes {model.context - 1:,} (block_size "
                f"{model.context}, of which the start of the document is one); shorten {text[:40]!r}"
            )
    at_once = not as_json and sys.stdout.isatty()
    batch = 1 if at_once else BATCH
    made: list[GeneratedText] = []
    for text, first in product(asked, range(0, number, batch)):
        some = [GeneratedText(text, (seed + i) % (LAST_SEED + 1)) for i in range(first, min(number, first + batch))]
        if at_once:
            print(printable(heading(len(made), len(asked) * number, some[0]) + text + ending), end="", flush=True)
        for step in model.continue_prompt(ids_of(text), tokens, [one.seed for one in some], sampling):
            for part in step:
                one = some[part.number]
                one.text, one.finish, one.tokens = one.text + part.text, part.finish or "", part.tokens
                if at_once:
                    print(printable(part.text), end="", flush=True)
        if at_once:
            print(printable(""))
        made += some
    if as_json:
        print(json.dumps([asdict(one) for one in made]))
    elif not at_once:
        for i, one in enumerate(made):
            print(printable(heading(i, len(made), one) + one.prompt + ending + one.text))


def heading(number: int, of: int, text: GeneratedText) -> str:
    """The line above a text, if there are several."""
    return f"--- {number + 1} of {of}, seed {text.seed}\n" if of > 1 else ""
