"""`skytrain recipes`: the recipes that come with skytrain."""

import json
from dataclasses import asdict

from pipelines.verbs.options import Json


def recipes(as_json: Json = False) -> None:
    """List the shipped recipes: parameters, tokens, FLOPs, and the hours and dollars of their training."""
    from pipelines.plan import shipped_estimates
    from pipelines.show.recipes import print_recipes

    estimates = shipped_estimates()
    print(json.dumps([asdict(estimate) for estimate in estimates])) if as_json else print_recipes(estimates)
