"""`skytrain recipes`: the recipes that come with skytrain."""

import json
from dataclasses import asdict

from pipelines.verbs.options import Json


def recipes(as_json: Json = False) -> None:
    """List the shipped recipes: parameters, tokens, FLOPs, and the hours and dollars of their training."""
    from pipelines.cloud.planner import shipped_recipes
    from pipelines.show.recipes import print_recipes

    found = shipped_recipes()
    print(json.dumps([asdict(one) for one in found])) if as_json else print_recipes(found)
