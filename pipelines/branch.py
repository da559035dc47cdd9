"""A new run from a commit of another one, with its whole state: its recipe and plans."""

from collections.abc import Iterable

from pipelines.artifacts.manifest import ArtifactPlan, read_manifest
from pipelines.recipe import Recipe, changed_recipe
from pipelines.stage import plans_of
from pipelines.tracking.runs import read_run
from pipelines.weights import pinned
from trainer.store import Store


def branched(
    store: Store, name: str, step: int, changes: Iterable[str], label: str | None = None
) -> tuple[Recipe, dict[str, ArtifactPlan]]:
    """The recipe of run `name` with changes, which begins at the commit of `step`, and the plans of its stages.

    An unchanged text need not be on this machine. UserError if the step is no commit, or for a change that its state
    can't bear.
    """
    parent = read_run(store, name)
    values = parent.recipe.model_dump()
    values["train"] |= {"init_from": None, "branch_from": f"run:{parent.name}@{step}"}
    values["name"] = label or values["name"]
    recipe = pinned(changed_recipe(values, changes, "branch"), store)
    known: dict[str, ArtifactPlan] = {}
    if recipe.tokens == parent.recipe.tokens and (tokens := read_manifest(store, parent.record.prefixes["tokenize"])):
        known["tokenize"] = ArtifactPlan(tokens.stage, tokens.label, tokens.identity)
    return recipe, plans_of(recipe, known)
