"""`skytrain recipes`: the recipes that come with skytrain."""

import json

from pipelines.user.verbs.options import Json


def recipes(as_json: Json = False) -> None:
    """List the shipped recipes: parameters, tokens and FLOPs of their training."""
    from pipelines.recipe.loader import load_recipe, shipped
    from pipelines.user.show.recipes import print_recipes

    rows = []
    for recipe in map(load_recipe, shipped()):
        sizes = {"parameters": recipe.model.parameters, "tokens": recipe.train_tokens, "flops": recipe.train_flops}
        rows.append({"recipe": recipe.name, **sizes})
    print(json.dumps(rows)) if as_json else print_recipes(rows)
