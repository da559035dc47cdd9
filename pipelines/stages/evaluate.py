"""evaluate: validation loss on the held-out shards, HellaSwag and CORE, as report.json.

All are computed in the precision of the training, which the report names: bf16 on a GPU that has it. All processes of
this node share the work: one process is the pipeline's own, several are ranks that torchrun starts, as in train.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.artifacts.manifest import ArtifactPlan, Manifest
from pipelines.artifacts.shard_cache import ShardCache, shards_in
from pipelines.nodes.address import NodeAddress, processes_on_this_node
from pipelines.nodes.ranks import RankSpec, start_torchrun, wait_for_orphans
from pipelines.recipe import Recipe
from pipelines.sample import continue_text, load_weights
from pipelines.screen import Screen
from pipelines.stage import Built, Work
from pipelines.stages.follow import follow_events, held, pass_on_stop, raise_error_of_ranks
from pipelines.stages.harness import harness_facts, harness_identity, verify_tasks
from pipelines.stages.measures import (
    core_facts,
    encoder,
    fetch_inputs,
    hellaswag_facts,
    hellaswag_identity,
    hellaswag_items,
)
from pipelines.text.core_bundle import core_identity, core_tasks
from pipelines.text.tokenizer import token_bytes, tokenizer_of
from pipelines.weight_sources import bring, brought, check_baseline, content_identity, name_of
from trainer.config import PRIOR_SECONDS_BETWEEN_FAILURES, TrainConfig
from trainer.events import EVENTS_FILE, PhaseChanged, Progressed, Row
from trainer.metrics import PhaseClock
from trainer.process import failpoint
from trainer.store import Store

if TYPE_CHECKING:
    import tiktoken
    import torch

    from trainer.data import TokenData
    from trainer.model import LanguageModel
    from trainer.parallel import World

SAMPLE_TOKENS = 200
VAL_BATCH = 8  # sequences
FACTS_FILE = "facts.json"  # that rank 0 writes


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the evaluation. UserError if a benchmark is not on this machine and cannot be had."""
    identity = {
        "stage": "evaluate",
        "train": plans["train"].fingerprint,
        "val_tokens": recipe.evaluate.val_tokens,
        "hellaswag": hellaswag_identity(recipe.evaluate.hellaswag),
    }
    if recipe.evaluate.core:  # an evaluation without it keeps the fingerprint of before there was CORE
        identity["core"] = core_identity(recipe.evaluate.core)
    if recipe.evaluate.baselines:
        identity["baselines"] = [content_identity(source) for source in recipe.evaluate.baselines]
    if recipe.evaluate.lm_eval:
        identity["lm_eval"] = harness_identity(recipe.evaluate.lm_eval)
    return ArtifactPlan("evaluate", recipe.name, identity)


def build(work: Work) -> Built:
    """Evaluate the final weights on all GPUs of this node, and generate a sample. UserError if an input of the
    evaluation cannot be had."""
    recipe, cache = work.recipe, work.home / "cache"
    work.clock.enter("download")
    check_inputs(recipe, cache)
    for source in recipe.evaluate.baselines:
        bring(source, work.store, cache, "evaluate.baselines")
    weights = work.fetch("train", "model.safetensors")
    processes = processes_on_this_node(recipe.runtime)
    measured = measured_here(work, weights) if processes == 1 else measured_on_ranks(work, weights, processes)
    if recipe.evaluate.lm_eval:
        scores = harness_facts(work, weights)
        work.report(metrics={name: value for name, value in scores.items() if isinstance(value, float)})
        measured |= scores
    path = work.folder / "report.json"
    path.write_text(json.dumps({"run": work.attempt.latest.run, **measured}, indent=1))
    return Built([work.upload(path)], measured)


def check_inputs(recipe: Recipe, cache: Path) -> None:
    """UserError if an item of HellaSwag or CORE cannot be read, or if the harness does not know a task."""
    fetch_inputs(recipe, cache)
    if recipe.evaluate.lm_eval:
        verify_tasks(recipe.evaluate.lm_eval)


def measured_here(work: Work, weights: Path) -> dict[str, Any]:
    """The facts, measured by this process."""
    work.import_torch()
    from trainer.parallel import World

    val = validation_data(work.recipe, work.inputs["tokenize"], work.store, work.home / "cache")
    encoding = tokenizer_of(work.recipe.tokens, work.store, work.inputs["tokenize"].prefix)
    with Bars(work.screen) as bars:
        measurement = Measurement(
            work.recipe, encoding, weights, val, work.home / "cache", work.clock, work.check, work.report, bars.update
        )
        return measurement.facts(World.alone(work.recipe.runtime))


def measured_on_ranks(work: Work, weights: Path, processes: int) -> dict[str, Any]:
    """The facts, measured by ranks on this node; the workers of other nodes left after training. Raises the error that
    ended the ranks early."""
    spec = RankSpec(
        started=time.time(),
        reached=work.inputs["train"].fact("steps"),
        recipe=work.recipe,
        store=work.store.uri,
        tokens=work.inputs["tokenize"].prefix,
        prefix=work.plan.prefix,
        attempt=work.attempt.number,
        between_failures=PRIOR_SECONDS_BETWEEN_FAILURES,
        weights=str(weights),
    )
    work.clock.enter("ranks")
    torchrun = start_torchrun(spec, work.folder, work.home, processes, work.stop.grace_seconds, NodeAddress(), port=0)
    stopping = False
    with held(work, torchrun), Bars(work.screen) as bars:
        for event in follow_events(work.folder / EVENTS_FILE, torchrun):
            match event:
                case PhaseChanged(phases, phase):
                    work.rank_phases = phases, phase
                case Progressed(what, done, whole):
                    bars.update(what, done, whole)
                case Row():
                    work.report(event.metrics)
            stopping = stopping or pass_on_stop(work, torchrun, nothing_to_lose=True)
        exit_code = torchrun.wait()
        if exit_code < 0:
            wait_for_orphans(work.folder, work.stop.grace_seconds)
    raise_error_of_ranks(work, exit_code, None, None)
    facts = work.folder / FACTS_FILE
    if not facts.exists():
        raise work.stop.interruption()
    work.clock.enter("evaluate")
    measured: dict[str, Any] = json.loads(facts.read_text())
    return measured


class Bars:
    """A bar on the screen for each measurement, one after the other."""

    def __init__(self, screen: Screen) -> None:
        self.screen, self.what = screen, ""
        self.stack = ExitStack()

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def update(self, what: str, done: int, whole: int) -> None:
        if what != self.what:
            self.stack.close()
            self.what, self.bar = what, self.stack.enter_context(self.screen.bar(what, whole))
        self.bar.update(done, f"{done:,} of {whole:,}")


@dataclass(frozen=True)
class Measurement:
    """The work of one rank. `check` is called before each batch, equally often on every rank; it may raise to end the
    measurement. `report` gets metrics as they are known, `progress` a name, the work done and the whole."""

    recipe: Recipe
    encoding: "tiktoken.Encoding"
    weights: Path
    val: "TokenData"
    cache: Path
    clock: PhaseClock
    check: Callable[[], None]
    report: Callable[[Mapping[str, float]], None]
    progress: Callable[[str, int, int], None]

    def facts(self, world: "World") -> dict[str, Any]:
        """The measures of the weights, and on rank 0 a sample of text. A collective call."""

        import torch

        from trainer.parallel import autocast_on

        recipe = self.recipe
        precision = evaluation_precision(world.device, recipe.train)
        torch.set_float32_matmul_precision("high")  # TF32, if the GPU has it, for products in fp32
        encoding = self.encoding
        model = load_weights(recipe, self.weights, world.device)
        self.clock.enter("evaluate")
        with autocast_on(world.device, precision):
            facts: dict[str, Any] = self.loss(model, encoding, world)
        self.report(facts)
        facts["precision"] = precision
        failpoint("evaluate")
        self.check()
        with autocast_on(world.device, precision):
            facts |= self.benchmarks(model, encoding, world)
        self.check()
        # Every rank makes as many tokens, so that all of them hear a stop before the next one.
        sample = continue_text(model, encoding, "", SAMPLE_TOKENS, recipe.train.seed, self.check)
        if world.rank == 0:
            facts["sample"] = sample
        del model  # a baseline may be larger
        with autocast_on(world.device, precision):
            for source in recipe.evaluate.baselines:
                baseline = baseline_model(source, recipe, world.device)
                measured = self.loss(baseline, encoding, world) | self.benchmarks(baseline, encoding, world)
                facts.setdefault("baselines", {})[name_of(source)] = measured
        return facts

    def loss(self, model: "LanguageModel", encoding: "tiktoken.Encoding", world: "World") -> dict[str, float]:
        """The validation loss in nats per token, and in bits per byte."""

        import torch

        from trainer.evaluate import validation

        sizes, most = torch.tensor(token_bytes(encoding)), self.recipe.evaluate.val_tokens
        loss, bits = validation(model.losses, self.val, most, VAL_BATCH, world, sizes, on_batch=self.check)
        return {"val/loss": loss, "val/bits_per_byte": bits}

    def benchmarks(self, model: "LanguageModel", encoding: "tiktoken.Encoding", world: "World") -> dict[str, Any]:
        """HellaSwag and CORE, as far as the recipe has them."""
        facts: dict[str, Any] = {}
        if source := self.recipe.evaluate.hellaswag:
            facts |= self.hellaswag(source, model, encoding, world)
        self.check()
        if source := self.recipe.evaluate.core:
            facts |= self.core(source, model, encoding, world)
        return facts

    def hellaswag(
        self, source: str, model: "LanguageModel", encoding: "tiktoken.Encoding", world: "World"
    ) -> dict[str, float]:
        """The HellaSwag scores as facts of the artifact."""

        from trainer.hellaswag import hellaswag

        items = hellaswag_items(source, self.cache)

        def progress(done: int) -> None:
            self.progress("hellaswag", done, len(items))

        encode = encoder(encoding, world, self.check)
        score = hellaswag(model, items, encode, world, before_batch=self.check, progress=progress)
        return hellaswag_facts(score) | {"hellaswag_items": score.items}

    def core(
        self, source: str, model: "LanguageModel", encoding: "tiktoken.Encoding", world: "World"
    ) -> dict[str, float | dict[str, float]]:
        """CORE as facts of the artifact: the centred accuracies by task, their mean, and the accuracies themselves."""

        from trainer.core import core

        tasks = core_tasks(source)

        def progress(task: str, done: int) -> None:
            self.progress("CORE", done, len(tasks))

        encode = encoder(encoding, world)  # a thread encodes ahead, so without `check`
        score = core(model, tasks, encode, encoding.eot_token, world, None, self.check, progress)
        return core_facts(score) | {"core_accuracy": dict(score.accuracy)}


def baseline_model(source: str, recipe: Recipe, device: "torch.device") -> "LanguageModel":
    """The model of a baseline in float32, on a device. UserError for weights that are not finite."""
    from trainer.family import plain_model
    from trainer.pieces import Piece
    from trainer.weights import open_weights

    weights = open_weights(brought(source, "evaluate.baselines"), f"evaluate.baselines: {name_of(source)}")
    model = plain_model(config := check_baseline(weights, recipe))
    weights.fill({f"model.{name}": Piece.whole(p) for name, p in model.named_parameters()}, config)
    return model.to(device)


def evaluation_precision(device: "torch.device", train: TrainConfig) -> str:
    """The format of the matrix products: as in training, but bf16 in place of fp8."""
    from trainer.parallel import precision_on

    return "bf16" if train.precision.startswith("fp8") else precision_on(device, train)


def validation_data(recipe: Recipe, tokens: Manifest, store: Store, home_cache: Path) -> "TokenData":
    """The held-out shards, fetched on demand."""

    from trainer.data import TokenData

    cache, model = ShardCache(store, tokens, home_cache, recipe.runtime.data_cache_gb), recipe.model
    shards, weights = shards_in(tokens, "val"), recipe.tokens.weights
    return TokenData(shards, cache.fetch, model.block_size, recipe.train.seed, model.vocab_size, weights)
