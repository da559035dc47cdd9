"""evaluate: validation loss on the held-out shards, HellaSwag and CORE, as report.json.

All are computed in the precision of the training, which the report names: bf16 on a GPU that has it. The ranks of this
node share the work, which a launcher starts as in train.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from pipelines.recipe.recipe import Recipe
from pipelines.run.nodes.address import processes_on_this_node
from pipelines.run.nodes.ranks import RankTask
from pipelines.run.sample import load_weights
from pipelines.run.stage import Built, Stage, Start, Work
from pipelines.run.stages.follow import FACTS_FILE, facts_of_ranks, task_of
from pipelines.run.stages.hellaswag_core import core_identity, fetch_inputs, hellaswag_identity, measures_of
from pipelines.run.stages.rank import Joined, joined
from pipelines.run.text.llmc_shards import places_of
from pipelines.run.text.tokenizer import token_bytes, tokenizer_of
from pipelines.store.manifest import ArtifactPlan, fetch_folder, read_manifest
from pipelines.store.s3_store import open_store
from pipelines.store.shard_cache import ShardCache, shards_in
from trainer.base.events import Measuring
from trainer.base.process import StopSignal
from trainer.base.record import Count
from trainer.checkpoint.weights import open_weights
from trainer.config.errors import UserError, shown
from trainer.config.extensions import EVALUATIONS, extension

SAMPLE_TOKENS = 100
VAL_BATCH = 8  # sequences
SHOW_SECONDS = 1.0
HARNESS = "lm_eval"  # of the extension that scores `evaluate.lm_eval`


@dataclass(frozen=True, kw_only=True)
class EvaluateTask(RankTask):
    """The task of the ranks that evaluate given weights."""

    weights: str  # a file or a folder of this node
    steps: Count  # of their training


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the evaluation: of the trained weights or, after the export, of the model that tuning made.
    UserError if a benchmark is not on this machine and cannot be had."""
    model = recipe.model_before() if "export" in plans else "train"
    identity = {
        "stage": "evaluate",
        "train": plans[model].fingerprint,
        "val_tokens": recipe.evaluate.val_tokens,
        "hellaswag": hellaswag_identity(recipe.evaluate.hellaswag),
    }
    if recipe.evaluate.core:  # an evaluation without it keeps the fingerprint of before there was CORE
        identity["core"] = core_identity(recipe.evaluate.core)
    if recipe.evaluate.lm_eval:
        # lm-eval splits names at commas, opens those that are files, and runs the code which they name.
        if files := [task for task in recipe.evaluate.lm_eval if re.search(r"[,/\\\[]|\.yaml$", task)]:
            raise UserError(
                f"evaluate.lm_eval: {shown(files[0])}: name tasks of lm-eval, without commas, slashes and brackets; "
                "for tasks of .yaml files, run lm-eval on the export"
            )
        identity["lm_eval"] = sorted({*recipe.evaluate.lm_eval})
    return ArtifactPlan("evaluate", plans[model].label, identity)


def build(work: Work) -> Built:
    """Evaluate the final weights, or the tuned model, on all GPUs of this node, and generate a sample. UserError if an
    input of the evaluation cannot be had."""
    recipe, cache = work.recipe, work.home / "cache"
    work.clock.enter("download")
    check_inputs(recipe, cache)
    wanted, held_out = recipe.evaluate.val_tokens, work.inputs["tokenize"].facts.get("val_tokens", sys.maxsize)
    if held_out < wanted:
        work.screen.note(f"  evaluate reads the {held_out:,} held-out tokens: evaluate.val_tokens is {wanted:,}")
    if "export" in work.inputs:
        made = work.inputs[recipe.model_before()]
        weights = fetch_folder(work.store, made, cache, work.folder / "tuned")
        recipe = recipe.with_vocabulary(made.fact("vocab_size"))
    else:
        weights = work.fetch("train", "model.safetensors")
    # The workers of other nodes left after the training.
    shared = task_of(work, processes_on_this_node(recipe.runtime)) | {"recipe": recipe}
    steps = work.inputs["train"].fact("steps")
    measured = facts_of_ranks(work, EvaluateTask(**shared, weights=str(weights), steps=steps))
    work.clock.enter("evaluate")
    if recipe.evaluate.lm_eval and weights.is_file():
        scores = extension(EVALUATIONS, HARNESS, "evaluate").facts(work, weights)
        work.report(metrics={name: value for name, value in scores.items() if isinstance(value, float)})
        measured |= scores
    path = work.folder / "report.json"
    path.write_text(json.dumps({"run": work.attempt.latest.run, **measured}, indent=1))
    return Built([work.upload(path)], measured)


def check(start: Start) -> None:
    """UserError, before a training, for an input that cannot be had; see `check_inputs`."""
    if not start.launched and "train" in start.todo:
        check_inputs(start.recipe, start.cache)


def check_inputs(recipe: Recipe, cache: Path) -> None:
    """UserError if an item of HellaSwag or CORE cannot be read, or if the harness does not know a task."""
    fetch_inputs(recipe, cache)
    if recipe.evaluate.lm_eval:
        extension(EVALUATIONS, HARNESS, "evaluate").check(recipe.evaluate.lm_eval)


def rank(task: EvaluateTask, folder: Path, cache: Path, stop: StopSignal, starting: Callable[[str], None]) -> None:
    """Evaluate as one rank; rank 0 leaves its events and the facts in the folder."""
    with joined(task, folder, stop, starting, reached=task.steps) as together:
        facts = measured_facts(task, cache, together)
        if together.world.rank == 0:
            (folder / FACTS_FILE).write_text(json.dumps(facts))


def measured_facts(task: EvaluateTask, cache: Path, together: Joined) -> dict[str, Any]:
    """The measures of the task's weights, and a sample of text, by all ranks of this node. A collective call.

    Every rank checks for a stop before each batch, equally often. The log gets the losses as soon as they are known,
    and at most once a second how far the measurement is.
    """
    import torch

    from trainer.base.parallel import autocast_on, precision_on
    from trainer.data.batches import TokenData
    from trainer.eval.evaluation import TextSampler, validation

    recipe, store, weights = task.recipe, open_store(task.store), Path(task.weights)
    world, log, check = together.world, together.log, together.check
    tokens = read_manifest(store, task.tokens)
    assert tokens is not None, task.tokens
    train, encoding = recipe.train, tokenizer_of(recipe.tokens, store, tokens.prefix)
    fetch = ShardCache(store, tokens, cache, recipe.runtime.data_cache_gb, places_of(recipe.tokens)).fetch
    shape = recipe.model.block_size, train.seed, recipe.model.vocab_size
    val = TokenData(shards_in(tokens, "val"), fetch, *shape, recipe.tokens.weights)
    measures = measures_of(recipe, encoding, cache, world, tuned=weights.is_dir())
    shown_at = time.monotonic()

    def checked(what: str, batches: int | None, numbers: Iterator[int]) -> None:
        nonlocal shown_at
        number = next(numbers)
        if time.monotonic() >= shown_at + SHOW_SECONDS:
            shown_at = time.monotonic()
            log.write(Measuring(f"{what}: batch {number:,}" + (f" of {batches:,}" if batches else "")))
        check()

    # As in training, but bf16 in place of fp8; and TF32, if the GPU has it, for products in fp32.
    precision = "bf16" if train.precision.startswith("fp8") else precision_on(world.device, train)
    torch.set_float32_matmul_precision("high")
    model = load_weights(open_weights(weights), recipe.model, world.device)
    log.clock.enter("evaluate")
    with autocast_on(world.device, precision):
        most = recipe.evaluate.val_tokens
        windows = len(val.first_windows(max(1, most // recipe.model.block_size)))
        on_batch = partial(checked, "val loss", -(-windows // (VAL_BATCH * world.world_size)), count(1))
        sizes = torch.tensor(token_bytes(encoding))
        loss, bits = validation(model.losses, val, most, VAL_BATCH, world, sizes, on_batch=on_batch)
        facts: dict[str, Any] = {"val/loss": loss, "val/bits_per_byte": bits}
        log.row(task.steps, facts)
        facts["precision"] = precision
        for name, measure_of in measures.items():
            facts |= measure_of(model, world, partial(checked, name, None, count(1)))
        decode = lambda ids: encoding.decode([one for one in ids if one < encoding.n_vocab])  # noqa: E731
        sampling = TextSampler(encoding.eot_token, decode, train.seed, texts=1, tokens=SAMPLE_TOKENS)
        (facts["sample"],) = sampling.texts_of(model, world, check)
    return facts


STAGE = Stage(plan, build, check=check, task=EvaluateTask, rank=rank)
