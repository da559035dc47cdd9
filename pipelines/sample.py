"""Generates text with a trained run."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.artifacts.manifest import fetch, read_manifest
from pipelines.recipe import Recipe
from pipelines.text.tokenizer import tokenizer
from pipelines.tracking.runs import read_run
from trainer.errors import UserError
from trainer.store import Store

if TYPE_CHECKING:
    import tiktoken

    from trainer.model import GPT


def continue_text(model: "GPT", encoding: "tiktoken.Encoding", prompt: str, tokens: int, seed: int) -> str:
    """`prompt` and `tokens` generated tokens after it. The model sees the prompt as the start of a document."""
    from trainer.sample import generate

    ids = [encoding.eot_token, *encoding.encode_ordinary(prompt)]
    return prompt + encoding.decode(generate(model, ids, tokens, seed))


def sample_run(store: Store, cache: Path, run: str, prompt: str, tokens: int, seed: int) -> str:
    """Continue `prompt` with the final weights of a run. UserError if it has none yet."""
    found = read_run(store, run)
    prefix = found.record.prefixes.get("train")
    manifest = read_manifest(store, prefix) if prefix else None
    if manifest is None:
        raise UserError(f"{found.name}: the run has no trained weights yet; `skytrain run` finishes it")
    recipe = found.recipe
    path = fetch(store, manifest.prefix, manifest.file("model.safetensors"), cache)
    return continue_text(load_weights(recipe, path), tokenizer(recipe.tokens.tokenizer), prompt, tokens, seed)


def load_weights(recipe: Recipe, path: Path) -> "GPT":
    """The model with a run's weights in float32, on the best device of this machine."""
    from safetensors.torch import load_file

    from trainer.model import GPT
    from trainer.parallel import World

    model = GPT(recipe.model)
    model.load_state_dict(load_file(path))
    return model.to(World.alone(recipe.runtime).device)
