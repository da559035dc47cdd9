"""A stage: the norm of every tensor of the trained weights, as a JSON file."""

import json

from safetensors.torch import load_file

from pipelines.recipe.recipe import Recipe
from pipelines.run.stage import Built, Stage, Work
from pipelines.store.manifest import ArtifactPlan


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    identity = {"stage": "norms", "train": plans["train"].fingerprint, "of": recipe.custom["norms"]}
    return ArtifactPlan("custom", f"{recipe.name}-norms", identity)


def build(work: Work) -> Built:
    weights = load_file(work.fetch("train", "model.safetensors"))
    order = work.recipe.custom["norms"].get("order", 2)
    norms = {name: float(tensor.norm(order)) for name, tensor in weights.items()}
    path = work.folder / "norms.json"
    path.write_text(json.dumps(norms))
    return Built([work.upload(path)], {"largest": max(norms.values())})


STAGE = Stage(plan, build)
