"""The `Work` of a stage, for tests of single stages: with the real attempt and store of a tiny recipe."""

import threading
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

from pipelines.recipe.loader import load_recipe
from pipelines.recipe.recipe import Recipe
from pipelines.run.stage import Work
from pipelines.run.stages import tokenize
from pipelines.store.ledger import claim
from pipelines.store.manifest import ArtifactPlan, Manifest, commit, upload
from pipelines.store.records import Billing
from pipelines.user.show.console import TerminalScreen
from trainer.base.process import StopSignal
from trainer.base.store import LocalStore
from trainer.config.errors import Interrupted
from trainer.data.shards import write_shard
from trainer.models.family import plain_model

SMALL = [
    "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=8", "model.vocab_size=257",
    "tokens.tokenizer=bytes", "train.batch_tokens=64", "runtime.micro_batch_size=8",
    "runtime.processes=1", "runtime.device=cpu",
]  # fmt: skip


class NoSignals(StopSignal):
    """A stop signal that leaves the signals of this process to pytest."""

    def __init__(self) -> None:
        self.asked, self.heard = False, threading.Event()

    def ask(self, reason: str, ending: type[Interrupted] = Interrupted) -> None:
        super().ask(reason, ending)
        self.heard.set()


def tokenized(work: Work, recipe: Recipe) -> Manifest:
    """The tokens of a recipe, as the stage makes them."""
    work.recipe, work.plan = recipe, tokenize.plan(recipe, {})
    built, plan = tokenize.build(work), work.plan
    about = (plan.stage, plan.label, plan.fingerprint, plan.identity)
    manifest = Manifest(*about, {}, tuple(built.files), {}, built.facts, "tiny-1", 1, 1.0)
    return Manifest.from_json(commit(work.store, manifest, built.scratch).to_json())


def tiny_work(folder: Path, stage: str, *changes: str) -> Work:
    """The first attempt of a stage, with its inputs in the store."""
    recipe, store = load_recipe("smoke", [*SMALL, *changes]), LocalStore(folder / "store")
    plan = ArtifactPlan(stage, "tiny", {"stage": stage})
    attempt = claim(store, plan.prefix, "tiny-1", stage, 1, Billing())
    assert attempt
    model = plain_model(recipe.model)
    model.initialize(0)
    save_file(model.state_dict(), folder / "model.safetensors")
    write_shard(folder / "val_000000.bin", np.zeros(100, np.uint16))
    inputs = {}
    for made, path in (("tokenize", folder / "val_000000.bin"), ("train", folder / "model.safetensors")):
        made_plan = ArtifactPlan(made, "tiny", {"stage": made, "of": "an input"})
        file, facts = (
            upload(store, made_plan.prefix, 1, path),
            {"shards": {path.name: 100}, "train_tokens": 100_000, "steps": 5},
        )
        about = made, "tiny", made_plan.fingerprint, made_plan.identity
        inputs[made] = commit(store, Manifest(*about, {}, (file,), {}, facts, "tiny-1", 1, 1.0))
    screen = TerminalScreen(quiet=True)
    return Work(recipe, plan, inputs, store, folder / "home", attempt, screen, NoSignals())
