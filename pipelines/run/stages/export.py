"""export: the trained weights as a Hugging Face checkpoint and in other formats.

The files of Hugging Face lie at the top of the artifact, those of another format in a folder of its name.
"""

import importlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any, Protocol, cast

from pipelines.recipe.recipe import HF, Recipe
from pipelines.run.formats import hf
from pipelines.run.formats.export_weights import Weights
from pipelines.run.stage import Built, Work
from pipelines.run.stages.model_card import CARD, model_card
from pipelines.run.text.tokenizer import tokenizer_of
from pipelines.store.manifest import ArtifactPlan
from pipelines.store.runs import find_run
from trainer.base.install import how_to_install
from trainer.base.process import failpoint
from trainer.config.errors import UserError


class Format(Protocol):
    """A module of pipelines/extras/formats."""

    def write(self, weights: Weights, folder: Path) -> list[Path]:
        """Write the files of the format."""


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the export: the trained weights, the dtype, and the formats beside Hugging Face's."""
    identity: dict[str, Any] = {"stage": "export", "train": plans["train"].fingerprint, "dtype": recipe.export.dtype}
    if others := recipe.export.other_formats:
        identity["formats"] = others
    return ArtifactPlan("export", recipe.name, identity)


def build(work: Work) -> Built:
    """Write the formats one by one."""
    recipe = work.recipe
    check_packages(recipe.export.other_formats)
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
    for name in recipe.export.other_formats:
        made, folder = cast(Format, importlib.import_module(f"pipelines.extras.formats.{name}")), work.folder / name
        folder.mkdir()
        written = made.write(weights, folder)
        files += [work.upload(path, f"{name}/{path.name}", until_stopped=True) for path in written]
        shutil.rmtree(folder)  # all formats of 1558M together have 30 GB
    facts = {
        "dtype": recipe.export.dtype,
        "parameters": recipe.model.parameters,
        "formats": [HF, *recipe.export.other_formats],
    }
    return Built(files, facts)


def check_packages(formats: list[str]) -> None:
    """UserError if a package that a format needs is not installed."""
    if "gguf" in formats and not importlib.util.find_spec("gguf"):
        raise UserError(
            f"export.formats: gguf needs the package gguf: {how_to_install('formats')}, or leave the format out; "
            "then run the same command again"
        )
