"""evaluate: validation loss on the held-out shards, and HellaSwag, as report.json.

Both are computed in the precision of the training, which the report names: bf16 on a GPU that has it.
"""

import json
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.artifacts.shard_cache import ShardCache, shards_in
from pipelines.recipe import Recipe
from pipelines.sample import continue_text, load_weights
from pipelines.stage import Built, Work
from pipelines.stages.measures import encoder, hellaswag_facts, hellaswag_identity, hellaswag_items
from pipelines.text.tokenizer import tokenizer
from trainer.config import TrainConfig
from trainer.process import failpoint

if TYPE_CHECKING:
    import tiktoken
    import torch

    from trainer.data import TokenData
    from trainer.model import GPT
    from trainer.parallel import World

SAMPLE_TOKENS = 200
VAL_BATCH = 8  # sequences


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the evaluation. UserError if the HellaSwag file does not exist."""
    identity = {
        "stage": "evaluate",
        "train": plans["train"].fingerprint,
        "val_tokens": recipe.evaluate.val_tokens,
        "hellaswag": hellaswag_identity(recipe.evaluate.hellaswag),
    }
    return ArtifactPlan("evaluate", recipe.name, identity)


def build(work: Work) -> Built:
    """Evaluate the final weights, and generate a sample. UserError if HellaSwag cannot be loaded."""

    import torch

    from trainer.evaluate import validation_loss
    from trainer.parallel import World, autocast_on

    recipe = work.recipe
    world = World.alone(recipe.runtime)
    precision = evaluation_precision(world.device, recipe.train)
    torch.set_float32_matmul_precision("high")  # TF32, if the GPU has it, for products in fp32
    encoding = tokenizer(recipe.tokens.tokenizer)
    work.clock.enter("download")
    model = load_weights(recipe, work.fetch("train", "model.safetensors"))
    val = validation_data(work)
    work.clock.enter("evaluate")
    with autocast_on(world.device, precision):
        loss = validation_loss(model.loss, val, recipe.evaluate.val_tokens, VAL_BATCH, world, on_batch=work.check)
    facts: dict[str, Any] = {"val/loss": loss}
    work.report(metrics=facts)
    facts["precision"] = precision
    failpoint("evaluate")
    work.check()
    if recipe.evaluate.hellaswag:
        with autocast_on(world.device, precision):
            facts |= measured_hellaswag(work, recipe.evaluate.hellaswag, model, encoding, world)
    work.check()
    facts["sample"] = continue_text(model, encoding, prompt="", tokens=SAMPLE_TOKENS, seed=recipe.train.seed)
    path = work.folder / "report.json"
    path.write_text(json.dumps({"run": work.attempt.latest.run, **facts}, indent=1))
    return Built([work.upload(path)], facts)


def evaluation_precision(device: "torch.device", train: TrainConfig) -> str:
    """The format of the matrix products: as in training, but bf16 in place of fp8."""
    from trainer.parallel import precision_on

    return "bf16" if train.precision.startswith("fp8") else precision_on(device, train)


def validation_data(work: Work) -> "TokenData":
    """The held-out shards, fetched on demand."""

    from trainer.data import TokenData

    tokens, recipe = work.inputs["tokenize"], work.recipe
    cache, model = ShardCache(work.store, tokens, work.home / "cache", recipe.runtime.data_cache_gb), recipe.model
    return TokenData(shards_in(tokens, "val"), cache.fetch, model.block_size, recipe.train.seed, model.vocab_size)


def measured_hellaswag(
    work: Work, source: str, model: "GPT", encoding: "tiktoken.Encoding", world: "World"
) -> dict[str, float]:
    """The HellaSwag scores as facts of the artifact."""

    from trainer.hellaswag import hellaswag

    items = hellaswag_items(source, work.home / "cache")
    with work.screen.bar("hellaswag", len(items)) as bar:

        def progress(done: int) -> None:
            bar.update(done, f"{done:,} items")

        score = hellaswag(model, items, encoder(encoding), world, before_batch=work.check, progress=progress)
    return hellaswag_facts(score) | {"hellaswag_items": score.items}
