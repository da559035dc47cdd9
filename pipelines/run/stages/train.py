"""train: ranks over the GPUs of all nodes (or CPU processes), resumed from the newest commit automatically.

`build` runs in the pipeline's process. It starts the ranks of this node, lets the workers start theirs, follows rank 0
(follow.py), and stores the result. Each rank runs rank.py.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pipelines.recipe.recipe import Recipe
from pipelines.run.nodes.address import NodeAddress, free_port, processes_on_this_node, this_node
from pipelines.run.nodes.ranks import RankSpec, start_ranks
from pipelines.run.nodes.workers import Workers, write_numbers
from pipelines.run.sample import load_weights
from pipelines.run.stage import Built, Work
from pipelines.run.stages.follow import attempt_of, follow
from pipelines.run.stages.measures import core_identity, fetch_inputs, hellaswag_identity
from pipelines.run.text.machine import free_memory
from pipelines.run.text.mixture import sources_planned
from pipelines.run.weight_sources import bring, content_identity
from pipelines.store.account import traffic_seconds
from pipelines.store.crashes import prior_seconds_between_failures, seconds_between_failures
from pipelines.store.ledger import attempts
from pipelines.store.manifest import ArtifactPlan, keep_copy
from pipelines.store.shard_cache import shards_in
from trainer.base.process import steady_time
from trainer.base.store import LocalStore
from trainer.checkpoint.commits import TrainState, committed_state, series
from trainer.checkpoint.weights import open_weights, write_weights
from trainer.config.amounts import check_shares, state_bytes
from trainer.config.config import PRIOR_SECONDS_BETWEEN_FAILURES, identity_of
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig, identity_of_model

WEIGHTS_FILE = "model.safetensors"  # that rank 0 of a complete run writes


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the trained weights: tokens, model, training, and the content that it begins with."""
    train = identity_of(recipe.train)
    begun = {
        field: content_identity(source) for field in ("init_from", "branch_from") if (source := train.pop(field, None))
    }
    identity: dict[str, Any] = {
        "stage": "train",
        "tokens": plans["tokenize"].fingerprint,
        "model": identity_of_model(recipe.model),
        "train": train | begun,
    }
    if weights := recipe.tokens.weights:
        from trainer.data.shards import shares_of

        identity["mixture"] = shares_of(weights)
    evaluate, stop_at = recipe.evaluate, recipe.train.stop_at
    decisive = {}  # the benchmarks whose scores decide the end
    if stop_at and stop_at.hellaswag is not None:
        decisive["hellaswag"] = hellaswag_identity(evaluate.hellaswag)
    if stop_at and stop_at.core is not None:
        decisive["core"] = core_identity(evaluate.core)
    if decisive:
        identity["evaluate"] = {"every": evaluate.every, **decisive}
    return ArtifactPlan("train", recipe.name, identity)


def build(work: Work) -> Built:
    """Train to the last step, or to a target of `stop_at`. Raises the error of the ranks that ended them early."""
    from trainer.data.shards import check_ids

    recipe = work.recipe
    if not recipe.train.max_steps:
        return given_weights(work)
    if work.before_ranks:
        work.before_ranks(work)
    processes = processes_on_this_node(recipe.runtime)
    address = this_node()
    check_shares(recipe.model, recipe.train, processes * address.count)  # UserError now, not in the ranks
    check_memory(recipe, processes)
    tokens = work.inputs["tokenize"]
    for split in ("train", "val"):
        check_ids(shards_in(tokens, split), recipe.model.vocab_size)
    for warning in filter(None, (source.warning for source in sources_planned(recipe, tokens))):
        work.screen.warn(warning)
    if recipe.evaluate.every:
        work.clock.enter("download")
        fetch_inputs(recipe, work.home / "cache")

    work.check()
    work.attempt.check()
    work.clock.enter("ranks")
    spec = rank_spec(work, address, processes)
    with Workers(address, work.attempt, work.stop) if address.count > 1 else nullcontext() as workers:
        if workers:
            write_numbers(work.store, spec)
        ranks = start_ranks(spec, work.folder, work.home, work.stop.grace_seconds, address)
        with attempt_of(work, ranks):
            follow(work, ranks, workers)
    work.clock.enter("upload")
    state = committed_state(work.store, work.plan.prefix)
    complete = state is not None and state.is_complete(recipe.train, recipe.evaluate.every)
    if state is None or not complete or not (work.folder / WEIGHTS_FILE).exists():
        raise work.stop.interruption()
    return store_result(work, state)


def given_weights(work: Work) -> Built:
    """The weights of train.init_from as they are, for tuning."""
    recipe = work.recipe
    work.clock.enter("download")
    given = bring(str(recipe.train.init_from), work.store, work.home / "cache", "train.init_from")
    path = stored_as_ours(given, recipe.model, work.folder / WEIGHTS_FILE)
    return Built([work.upload(path)], {"steps": 0, "tokens": 0, "parameters": recipe.model.parameters})


def stored_as_ours(weights: Path, model: ModelConfig, path: Path) -> Path:
    """Write weights of another layout as a training does. Returns `path`."""
    import torch

    loaded = load_weights(open_weights(weights), model, torch.device("cpu"))
    write_weights(path, model, loaded.named_parameters())
    return path


def check_memory(recipe: Recipe, processes: int) -> None:
    """UserError if this machine is too small to train on its CPU. The ranks measure the memory of a GPU."""
    weights = 4 * recipe.model.parameters
    # Each process has weights and gradients; together they have one optimizer.
    needed, free = state_bytes(recipe.model, recipe.train) + (2 * processes - 1) * weights, free_memory()
    if needed > free:
        from trainer.base.parallel import device_kind  # imports torch

        if device_kind(recipe.runtime) == "cpu":
            what = f"weights, gradients and optimizer of {recipe.model.parameters:,} parameters"
            sizes = f"at least {needed / 1e9:.1f} GB of memory on this CPU, and {free / 1e9:.1f} GB are free"
            raise UserError(f"train: {what} need {sizes}; use a smaller model or a GPU")


def rank_spec(work: Work, address: NodeAddress, processes: int) -> RankSpec:
    """The task of the ranks, with the facts that earlier attempts left."""
    reached = max((beat.progress.highest_step or 0 for beat in work.earlier), default=0)
    work.report(highest_step=reached)
    own, prior = work.attempt.latest, PRIOR_SECONDS_BETWEEN_FAILURES
    if own.machine.cloud:  # an own machine fails as rarely as this prior, unless its user ends the run
        prior = prior_seconds_between_failures(own.machine, own.nodes)
    return RankSpec(
        started=steady_time(),
        reached=reached,
        recipe=work.recipe,
        store=work.store.uri,
        tokens=work.inputs["tokenize"].prefix,
        prefix=work.plan.prefix,
        attempt=work.attempt.number,
        between_failures=seconds_between_failures((b for b in work.earlier if not b.progress.waiting), prior),
        traffic_seconds=traffic_seconds(state_bytes(work.recipe.model, work.recipe.train), own),
        processes=processes,
        port=free_port() if address.count > 1 else 0,
        cluster=address.cluster,
        allow_code=work.allow_code,
    )


def store_result(work: Work, state: TrainState) -> Built:
    """Upload the final weights."""
    rows = series(work.store, work.plan.prefix)
    speeds = sorted(row["perf/tokens_per_second"] for row in rows if "perf/tokens_per_second" in row)
    final = {name: value for row in rows for name, value in row.items()}
    beats = [*attempts(work.store, work.plan.prefix), work.attempt.latest]  # a short run sends its next one at the end
    precisions = {beat.progress.precision for beat in beats if beat.progress.precision}
    facts = {
        "steps": state.step,
        "tokens": state.tokens_seen,
        "parameters": work.recipe.model.parameters,
        "train/loss": final.get("train/loss"),
        "val/loss": final.get("val/loss"),
        "perf/tokens_per_second": speeds[len(speeds) // 2] if speeds else None,  # median over steps
        "skipped_updates": state.health.skipped,
        "precision": " and ".join(sorted(precisions)),
        "reduce_dtype": work.recipe.runtime.reduce_dtype,
    }
    if state.evaluated_step == state.step:
        facts |= state.scores
    if target := state.passed(work.recipe.train):
        facts["stopped_by"] = target
    if state.threads:
        facts["threads"] = state.threads
    weights = work.upload(work.folder / WEIGHTS_FILE)
    if not isinstance(work.store, LocalStore):
        keep_copy(work.folder / WEIGHTS_FILE, weights, work.home / "cache")
    return Built([weights], facts)
