"""Size and training cost of the shipped recipes: `skytrain recipes`.

`skytrain plan --cloud` adds start-ups, saves, preemptions and the other stages.
"""

from dataclasses import dataclass

from pipelines.bench.throughput import speed_on
from pipelines.recipe import load_recipe, shipped

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
        costs: list[float] = []
        for precision in (recipe.train.precision, "fp8_head"):
            speed = speed_on(recipe.model, recipe.runtime, NODE, precision=precision)
            hours = recipe.train_tokens / speed.tokens_per_second / 3600
            costs += [hours, hours * NODE_USD_PER_HOUR]
        found.append(ShippedRecipe(name, recipe.model.parameters, recipe.train_tokens, recipe.train_flops, *costs))
    return found
