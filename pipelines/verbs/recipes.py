"""`skytrain recipes`: the recipes that come with skytrain."""

import json

from pipelines.verbs.options import Json

NODE, NODE_USD_PER_HOUR = "H100:8", 31.92  # at Lambda's on-demand price. Source: SkyPilot's catalog, read 2026-11.


def recipes(as_json: Json = False) -> None:
    """List the shipped recipes: parameters, tokens, FLOPs, and the hours and dollars of their training."""
    from pipelines.bench.gpus import fewest_nodes
    from pipelines.bench.throughput import speed_on
    from pipelines.recipe import load_recipe, shipped
    from pipelines.show.recipes import print_recipes

    rows = []
    for name in shipped():
        recipe = load_recipe(name)
        nodes = fewest_nodes(recipe, NODE)
        hours = nodes * recipe.train_tokens / speed_on(recipe, NODE, nodes).tokens_per_second / 3600
        sizes = {"parameters": recipe.model.parameters, "tokens": recipe.train_tokens, "flops": recipe.train_flops}
        rows.append({"recipe": name, **sizes, "nodes": nodes, "node_hours": hours, "usd": hours * NODE_USD_PER_HOUR})
    print(json.dumps(rows)) if as_json else print_recipes(rows, NODE_USD_PER_HOUR)
