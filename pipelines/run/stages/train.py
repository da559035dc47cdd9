"""train: ranks over the GPUs of all nodes (or CPU processes), resumed from the newest commit automatically.

`build` runs in the pipeline's process. It starts the ranks of this node, lets the workers start theirs, follows rank 0
(follow.py), and stores the result. `rank` is what each of them does.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.recipe.recipe import Recipe
from pipelines.run.gc import needed_by_runs
from pipelines.run.nodes.address import free_port, processes_on_this_node, this_node
from pipelines.run.nodes.ranks import TrainTask, start_ranks
from pipelines.run.nodes.workers import Workers, write_numbers
from pipelines.run.sample import load_weights
from pipelines.run.stage import Built, Stage, Work
from pipelines.run.stages.follow import attempt_of, follow, task_of
from pipelines.run.stages.hellaswag_core import core_identity, evaluation_in_training, fetch_inputs, hellaswag_identity
from pipelines.run.text.llmc_shards import places_of
from pipelines.run.text.machine import free_memory
from pipelines.run.text.mixture import sources_planned
from pipelines.run.text.tokenizer import tokenizer_of
from pipelines.run.weight_sources import bring, content_identity, find_parent
from pipelines.store.account import traffic_seconds
from pipelines.store.crashes import prior_seconds_between_failures, seconds_between_failures
from pipelines.store.ledger import attempts, latest_number
from pipelines.store.manifest import ArtifactPlan, keep_copy, read_manifest
from pipelines.store.s3_store import open_store
from pipelines.store.shard_cache import ShardCache, shards_in
from trainer.base.metrics import PhaseClock
from trainer.base.process import StopSignal, log_line
from trainer.base.store import LocalStore, Store
from trainer.checkpoint.commits import TrainState, committed_state, series
from trainer.checkpoint.weights import Origin, open_weights, write_weights
from trainer.config.amounts import check_shares, state_bytes
from trainer.config.config import PRIOR_SECONDS_BETWEEN_FAILURES, identity_of
from trainer.config.errors import UserError
from trainer.config.extensions import ENGINES, check_installed
from trainer.config.model_config import ModelConfig, identity_of_model
from trainer.config.source import Source

if TYPE_CHECKING:
    from trainer.base.parallel import World

WEIGHTS_FILE = "model.safetensors"  # that rank 0 of a complete run writes


def plan(recipe: Recipe, plans: dict[str, ArtifactPlan]) -> ArtifactPlan:
    """The identity of the trained weights: tokens, model, training, and the content that it begins with. UserError for
    an engine that no package declares."""
    if recipe.runtime.engine != "auto":
        check_installed(ENGINES, recipe.runtime.engine, "runtime.engine")
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
    if address.count > 1:
        address = replace(address, port=free_port())
    traffic = traffic_seconds(state_bytes(recipe.model, recipe.train), work.attempt.latest)
    task = TrainTask(**saving_task(work, processes), traffic_seconds=traffic)
    with Workers(address, work.attempt, work.stop) if address.count > 1 else nullcontext() as workers:
        if workers:
            write_numbers(work.store, task, address)
        ranks = start_ranks(task, work.folder, work.home, work.stop.grace_seconds, address)
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


def saving_task(work: Work, processes: int) -> dict[str, Any]:
    """The fields of a `SavingTask` in this attempt, with the facts that earlier ones left."""
    reached = max((beat.progress.highest_step or 0 for beat in work.earlier), default=0)
    work.report(highest_step=reached)
    own, prior = work.attempt.latest, PRIOR_SECONDS_BETWEEN_FAILURES
    if own.machine.cloud:  # an own machine fails as rarely as this prior, unless its user ends the run
        prior = prior_seconds_between_failures(own.machine, own.nodes)
    return task_of(work, processes) | {
        "prefix": work.plan.prefix,
        "attempt": work.attempt.number,
        "reached": reached,
        "between_failures": seconds_between_failures((b for b in work.earlier if not b.progress.waiting), prior),
    }


def store_result(work: Work, state: TrainState) -> Built:
    """Upload the final weights."""
    work.report(step=state.step)  # a full disk may have kept the last rows of rank 0 from this process
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


def rank(task: TrainTask, folder: Path, cache: Path, stop: StopSignal, starting: Callable[[str], None]) -> None:
    """Train as one rank of the task's attempt."""
    from trainer.loop.rank import RankJob, run_rank

    recipe, store = task.recipe, open_store(task.store)
    clock = PhaseClock(started=task.started)
    tokens = read_manifest(store, task.tokens)
    assert tokens is not None, task.tokens

    job = RankJob(
        model=recipe.model,
        train=recipe.train,
        runtime=recipe.runtime,
        train_shards=shards_in(tokens, "train"),
        val_shards=shards_in(tokens, "val"),
        fetch=ShardCache(store, tokens, cache, recipe.runtime.data_cache_gb, places_of(recipe.tokens)).fetch,
        store=store,
        prefix=task.prefix,
        folder=folder,
        begin=lambda world: task.attempt,
        superseded=lambda attempt: latest_number(store, task.prefix) > attempt,
        clock=clock,
        reached=task.reached,
        between_failures=task.between_failures,
        traffic_seconds=task.traffic_seconds,
        evaluation=partial(
            evaluation_in_training, recipe, lambda: tokenizer_of(recipe.tokens, store, task.tokens), cache
        ),
        weights=recipe.tokens.weights,
        eot=tokens.facts.get("eot"),
        starting=starting,
        needed=needed_by_runs(store, log_line),
        origin=partial(origin_of, task, store, cache) if recipe.train.init_from or recipe.train.branch_from else None,
    )
    run_rank(job, stop)


def origin_of(task: TrainTask, store: Store, cache: Path, world: "World") -> Origin:
    """Where the run begins. The first rank of each node brings weights from elsewhere; the others wait for it."""
    from trainer.data.shards import shares_of

    train = task.recipe.train
    field, source = ("branch_from", train.branch_from) if train.branch_from else ("init_from", train.init_from)
    assert source
    named = Source.of(source, f"train.{field}")
    where = f"train.{field}: {named.unpinned}"
    if named.step is not None:
        parent = find_parent(store, named, f"train.{field}")
        theirs, ours = parent.run.recipe.tokens.weights, task.recipe.tokens.weights
        same_shares = bool(theirs) == bool(ours) and (not ours or shares_of(theirs) == shares_of(ours))
        new_text = parent.run.record.prefixes["tokenize"] != task.tokens or not same_shares
        return Origin(where, commit=parent.folder, whole=field == "branch_from", other_text=new_text)
    path = bring(source, store, cache, f"train.{field}") if world.local_rank == 0 else None
    paths = world.gather((world.local_rank, path))
    before = [path for local_rank, path in paths[: world.rank + 1] if local_rank == 0]
    return Origin(where, path=before[-1])  # ranks are numbered node by node


STAGE = Stage(plan, build, task=TrainTask, rank=rank)
