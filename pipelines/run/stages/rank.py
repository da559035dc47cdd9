"""A rank of the stage train, evaluate or tune: a process that pipelines/run/nodes/launcher.py forks.

FOLDER is the attempt's folder on this node, with the ranks' spec; rank 0 leaves its events and the final weights
there. CACHE holds verified copies of files of the store, for all processes of this node.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.run.nodes.ranks import ALIVE_SECONDS, RankSpec, leave_error_message, show_alive
from pipelines.run.stages.evaluate import measure
from pipelines.run.stages.follow import FACTS_FILE
from pipelines.run.stages.measures import evaluation_in_training
from pipelines.run.text.llmc_shards import places_of
from pipelines.run.text.tokenizer import tokenizer_of
from pipelines.run.weight_sources import bring, find_parent
from pipelines.store.ledger import latest_number
from pipelines.store.manifest import read_manifest
from pipelines.store.s3_store import open_store
from pipelines.store.shard_cache import ShardCache, shards_in
from trainer.base.events import EVENTS_FILE, EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.process import Background, StopSignal, log_line
from trainer.base.store import Store
from trainer.checkpoint.weights import Origin
from trainer.config.errors import EXIT_DONE, EXIT_FAILED, Interrupted, StaleAttempt
from trainer.config.source import Source
from trainer.loop.watchdog import STARTED, Watchdog

if TYPE_CHECKING:
    from trainer.base.parallel import World


def run(folder: Path, cache: Path, stop: StopSignal) -> int:
    """Train, tune or evaluate as one rank, and return the exit code of this process. Leaves an error in the attempt's
    folder."""
    rank, ended = int(os.environ.get("RANK", "0")), threading.Event()
    try:
        spec = RankSpec.read(folder)
        Background("alive", partial(stay_alive, folder, f"rank {rank}", ended)).start()
        with Watchdog(spec.recipe.runtime, PhaseClock("imports"), rank) as watch:
            (weights_rank if spec.weights else train_rank)(spec, folder, cache, stop, watch.enter)
        return EXIT_DONE
    except StaleAttempt as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED  # the pipeline's process detects by itself that the attempt is stale
    except Exception as error:
        leave_error_message(error, folder)
        raise
    finally:
        ended.set()


def stay_alive(folder: Path, name: str, ended: threading.Event) -> None:
    """Show the command that this process runs and shares its interpreter, as long as it does."""
    show_alive(folder, name)
    while not ended.wait(ALIVE_SECONDS):
        show_alive(folder, name)


def set_environment_of_trl(processes: int) -> None:
    """Set what TRL's packages read when they are imported, and later."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each trainer
    if processes == 1:  # TRL would use every GPU that it sees, and join the ranks that these variables announce
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def train_rank(spec: RankSpec, folder: Path, cache: Path, stop: StopSignal, starting: Callable[[str], None]) -> None:
    """Train as one rank of `spec`'s attempt."""

    from pipelines.run.gc import needed_by_runs
    from trainer.loop.rank import RankJob, run_rank

    recipe, store = spec.recipe, open_store(spec.store)
    clock = PhaseClock(started=spec.started)
    tokens = read_manifest(store, spec.tokens)
    assert tokens is not None, spec.tokens

    job = RankJob(
        model=recipe.model,
        train=recipe.train,
        runtime=recipe.runtime,
        train_shards=shards_in(tokens, "train"),
        val_shards=shards_in(tokens, "val"),
        fetch=ShardCache(store, tokens, cache, recipe.runtime.data_cache_gb, places_of(recipe.tokens)).fetch,
        store=store,
        prefix=spec.prefix,
        folder=folder,
        begin=lambda world: spec.attempt,
        superseded=lambda attempt: latest_number(store, spec.prefix) > attempt,
        clock=clock,
        reached=spec.reached,
        between_failures=spec.between_failures,
        traffic_seconds=spec.traffic_seconds,
        evaluation=partial(
            evaluation_in_training, recipe, lambda: tokenizer_of(recipe.tokens, store, spec.tokens), cache
        ),
        weights=recipe.tokens.weights,
        eot=tokens.facts.get("eot"),
        starting=starting,
        needed=needed_by_runs(store, log_line),
        origin=partial(origin_of, spec, store, cache) if recipe.train.init_from or recipe.train.branch_from else None,
    )
    run_rank(job, stop)


def origin_of(spec: RankSpec, store: Store, cache: Path, world: "World") -> Origin:
    """Where the run begins. The first rank of each node brings weights from elsewhere; the others wait for it."""
    from trainer.data.shards import shares_of

    train = spec.recipe.train
    field, source = ("branch_from", train.branch_from) if train.branch_from else ("init_from", train.init_from)
    assert source
    named = Source.of(source, f"train.{field}")
    where = f"train.{field}: {named.unpinned}"
    if named.step is not None:
        parent = find_parent(store, named, f"train.{field}")
        theirs, ours = parent.run.recipe.tokens.weights, spec.recipe.tokens.weights
        same_shares = bool(theirs) == bool(ours) and (not ours or shares_of(theirs) == shares_of(ours))
        new_text = parent.run.record.prefixes["tokenize"] != spec.tokens or not same_shares
        return Origin(where, commit=parent.folder, whole=field == "branch_from", other_text=new_text)
    path = bring(source, store, cache, f"train.{field}") if world.local_rank == 0 else None
    paths = world.gather((world.local_rank, path))
    before = [path for local_rank, path in paths[: world.rank + 1] if local_rank == 0]
    return Origin(where, path=before[-1])  # ranks are numbered node by node


def weights_rank(spec: RankSpec, folder: Path, cache: Path, stop: StopSignal, starting: Callable[[str], None]) -> None:
    """Tune or measure given weights as one rank; rank 0 leaves its events, the tuned model and the facts in the
    folder."""
    if spec.tune:
        set_environment_of_trl(spec.processes)
        from pipelines.extras.tune.tune_rank import Tuning
    from trainer.base.parallel import World
    from trainer.checkpoint.checkpointer import Checkpointer

    world = World.join(spec.recipe.runtime, starting)
    starting(STARTED)
    log = EventLog(folder / EVENTS_FILE if world.rank == 0 else None, PhaseClock(started=spec.started), spec.reached)
    store = open_store(spec.store)
    with Watchdog(spec.recipe.runtime, log.clock, world.rank) as watchdog, suppress(Interrupted):

        def check() -> None:
            watchdog.progress()
            if world.sum(stop.asked)[0]:
                raise Interrupted

        if not spec.tune:
            facts = measure(spec, store, cache, world, log, check)
            if world.rank == 0:
                (folder / FACTS_FILE).write_text(json.dumps(facts))
        else:
            with Checkpointer(
                store,
                spec.prefix,
                world,
                spec.attempt,
                spec.recipe.runtime.keep_last,
                superseded=lambda: latest_number(store, spec.prefix) > spec.attempt,
            ) as checkpointer:
                try:
                    Tuning(spec, folder, store, world, checkpointer, log, stop, watchdog, check).tune()
                except Interrupted:
                    checkpointer.finish(log)
    world.close()
