"""evaluate: validation loss over the held-out shards, and HellaSwag, written down as report.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.recipe import Recipe
from pipelines.sample import continue_text, load_weights
from pipelines.stage import Built, Work
from pipelines.text.sources import HUB, patiently
from pipelines.text.tokenizer import tokenizer
from trainer.errors import UserError
from trainer.process import failpoint
from trainer.store import sha256_of

if TYPE_CHECKING:
    from trainer.evaluate import HellaSwagItem

SAMPLE_TOKENS = 200


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    identity = {
        "stage": "evaluate",
        "train": plans["train"].fingerprint,
        "val_tokens": recipe.evaluate.val_tokens,
        "hellaswag": hellaswag_identity(recipe.evaluate.hellaswag),
    }
    return ArtifactPlan("evaluate", recipe.name, identity)


def hellaswag_identity(source: str | None) -> str | None:
    """The Hub's name of the benchmark (it does not change), or the sha256 of a file."""
    if source is None or source.startswith(HUB):
        return source
    if not Path(source).is_file():
        raise UserError(f"evaluate.hellaswag: {source}: no such file; use {HUB}Rowan/hellaswag, a jsonl file, or null")
    return f"sha256:{sha256_of(Path(source))}"


def build(work: Work) -> Built:
    from trainer.data import TokenData
    from trainer.evaluate import hellaswag, validation_loss
    from trainer.parallel import World
    from trainer.shards import Shard

    recipe = work.recipe
    world = World.alone(recipe.runtime)
    encoding = tokenizer(recipe.tokens.tokenizer)
    work.clock.enter("download")
    model = load_weights(recipe, work.fetch("train", "model.safetensors"))
    shards = [Shard(s, n) for s, n in work.inputs["tokenize"].facts["shards"].items() if s.startswith("val")]
    val = TokenData(shards, lambda name: work.fetch("tokenize", name), recipe.model.block_size, recipe.train.seed)
    work.clock.enter("evaluate")
    facts: dict[str, Any] = {
        "val/loss": validation_loss(model, val, recipe.evaluate.val_tokens, 8, world, on_batch=work.check)
    }
    work.report(metrics=facts)
    failpoint("evaluate")
    work.check()
    if recipe.evaluate.hellaswag:
        items = hellaswag_items(recipe.evaluate.hellaswag)
        with work.screen.bar("hellaswag", len(items)) as bar:

            def progress(done: int) -> None:
                work.check()
                bar.update(done, f"{done:,} items")

            score = hellaswag(model, items, encoding.encode_ordinary, world.device, progress=progress)
        facts |= {
            "eval/hellaswag_acc_norm": score.acc_norm,
            "eval/hellaswag_acc": score.acc,
            "hellaswag_items": score.items,
        }
    work.check()
    facts["sample"] = continue_text(model, encoding, prompt="", tokens=SAMPLE_TOKENS, seed=recipe.train.seed)
    path = work.folder / "report.json"
    path.write_text(json.dumps({"run": work.attempt.latest.run, **facts}, indent=1))
    return Built([work.upload(path)], facts)


def hellaswag_items(source: str) -> "list[HellaSwagItem]":
    """The validation split from the Hub (`hf://datasets/ORG/NAME[@commit]`) or from a jsonl file."""
    from trainer.evaluate import read_hellaswag, read_hellaswag_file

    if not source.startswith(HUB):
        return read_hellaswag_file(Path(source))
    return read_hellaswag(hub_rows(source), source)


def hub_rows(source: str) -> Iterator[dict[str, Any]]:
    import datasets

    name, _, revision = source.removeprefix(HUB).partition("@")
    try:
        yield from patiently(lambda: datasets.load_dataset(name, split="validation", revision=revision or None))
    except (OSError, ValueError) as error:
        raise UserError(
            f"evaluate.hellaswag: {source}: could not be loaded ({str(error).splitlines()[0]}); "
            "name a jsonl file, or null to leave it out"
        ) from error
