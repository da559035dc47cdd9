"""Size and training cost of the shipped recipes: `skytrain recipes`.

The speeds are those of `throughput.py`: measured on one GPU, or estimated from such runs, and for eight GPUs by the
measured loss of a doubling. `skytrain plan --cloud` adds start-ups, saves, preemptions and the other stages.
"""

from dataclasses import dataclass

from pipelines.cloud.throughput import speed_on
from pipelines.recipe import Recipe, load_recipe, shipped

# At Lambda's on-demand price. Source: SkyPilot's catalog, read 2026-11.
NODE, NODE_USD_PER_HOUR = "H100:8", 31.92


@dataclass(frozen=True)
class ShippedRecipe:
    """A shipped recipe, and its training on one 8xH100 node as it stands and with `precision: fp8_head`."""

    recipe: str
    parameters: int
    tokens: int
    flops: float
    node_hours: float
    usd: float
    fp8_head_node_hours: float
    fp8_head_usd: float


def shipped_recipes() -> list[ShippedRecipe]:
    """Size, tokens, FLOPs, hours and dollars of each shipped recipe."""
    found = []
    for name in shipped():
        recipe = load_recipe(name)
        size = recipe.model.parameters, recipe.train_tokens, recipe.train_flops
        hours, fp8_head = (hours_of(recipe, precision) for precision in (recipe.train.precision, "fp8_head"))
        found.append(
            ShippedRecipe(name, *size, hours, hours * NODE_USD_PER_HOUR, fp8_head, fp8_head * NODE_USD_PER_HOUR)
        )
    return found


def hours_of(recipe: Recipe, precision: str) -> float:
    """Hours of the training on a node."""
    speed = speed_on(recipe.model, recipe.runtime, NODE, precision=precision)
    return recipe.train_tokens / speed.tokens_per_second / 3600
