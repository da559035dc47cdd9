"""export: the trained weights as a Hugging Face checkpoint and in other formats.

The files of Hugging Face lie at the top of the artifact, the files of another format in a folder of its name.
"""

import shutil
from typing import Any

from pipelines.recipe.recipe import HF, Recipe
from pipelines.run.formats import hf
from pipelines.run.formats.export_weights import Format, Weights
from pipelines.run.runs import find_run
from pipelines.run.stage import Built, Stage, Start, Work
from pipelines.run.stages.model_card import CARD, model_card
from pipelines.run.text.tokenizer import tokenizer_of
from pipelines.store.manifest import ArtifactPlan
from trainer.base.process import failpoint
from trainer.config.errors import UserError
from trainer.config.extensions import FORMATS, extension


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the export: the trained weights, the dtype, and the formats beside Hugging Face's. UserErrors as
    of `formats_of`."""
    formats_of(recipe)
    identity: dict[str, Any] = {"stage": "export", "train": plans["train"].fingerprint, "dtype": recipe.export.dtype}
    if others := recipe.export.other_formats:
        identity["formats"] = others
    return ArtifactPlan("export", recipe.name, identity)


def build(work: Work) -> Built:
    """Write the formats one by one."""
    recipe, others = work.recipe, formats_of(work.recipe)
    for made in others.values():
        made.check()
    work.clock.enter("export")
    weights = Weights(
        work.fetch("train", "model.safetensors"),
        recipe.model,
        tokenizer_of(recipe.tokens, work.store, work.inputs["tokenize"].prefix),
        recipe.name,
        work.check,
    )
    paths = hf.write(weights, work.folder, recipe.export.dtype)
    failpoint("export")
    work.check()
    card = work.folder / CARD
    card.write_text(model_card(recipe, work.inputs, find_run(work.store, work.attempt.latest.run)), encoding="utf8")
    files = [work.upload(path, path.relative_to(work.folder).as_posix(), until_stopped=True) for path in (*paths, card)]
    for name, made in others.items():
        (folder := work.folder / name).mkdir()
        written = made.write(weights, folder)
        files += [work.upload(path, f"{name}/{path.name}", until_stopped=True) for path in written]
        shutil.rmtree(folder)  # all formats of 1558M together have 30 GB
    facts = {
        "dtype": recipe.export.dtype,
        "parameters": recipe.model.parameters,
        "formats": [HF, *recipe.export.other_formats],
    }
    return Built(files, facts)


def check(start: Start) -> None:
    """UserError if a package that a format needs is not installed."""
    for made in formats_of(start.recipe).values():
        made.check()


def formats_of(recipe: Recipe) -> dict[str, Format]:
    """The formats beside Hugging Face's, by name. UserError for one that no package declares, or that cannot hold the
    model."""
    found: dict[str, Format] = {
        name: extension(FORMATS, name, "export.formats")() for name in recipe.export.other_formats
    }
    for name, made in found.items():
        if made.families and recipe.model.family not in made.families:
            held = f"model.family {recipe.model.family}, only {', '.join(made.families)}"
            raise UserError(f"export.formats: {name} cannot hold {held}; remove it")
    return found


STAGE = Stage(plan, build, check=check)
