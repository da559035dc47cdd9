"""One rank of a training run: its parts are assembled here, for `python -m trainer` and for the stage `train`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainer.base.events import EVENTS_FILE, Event, EventLog
from trainer.base.metrics import PhaseClock
from trainer.base.parallel import World
from trainer.base.process import StopSignal
from trainer.base.store import Store
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commits import TrainState
from trainer.checkpoint.save_clock import SaveClock
from trainer.checkpoint.weights import Origin, write_weights
from trainer.config.config import PRIOR_SECONDS_BETWEEN_FAILURES, RuntimeConfig, TrainConfig
from trainer.config.model_config import ModelConfig
from trainer.data.batches import TokenData
from trainer.data.shard_maps import Fetch
from trainer.data.shards import Shard
from trainer.eval.evaluation import Evaluation
from trainer.loop.loop import Training
from trainer.loop.watchdog import STARTED

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class RankJob:
    """The task of one rank. `folder` is local to the node, `prefix` is the run's folder in the store.

    `begin` runs once all ranks are connected, before anything else; it returns the attempt's number.
    `superseded` returns whether an attempt newer than this number exists. For `fetch`, see `ShardMaps`.
    """

    model: ModelConfig
    train: TrainConfig
    runtime: RuntimeConfig
    train_shards: list[Shard]
    val_shards: list[Shard]
    fetch: Fetch
    store: Store
    prefix: str
    folder: Path
    begin: Callable[[World], int]
    superseded: Callable[[int], bool]
    clock: PhaseClock = field(default_factory=PhaseClock)
    reached: int = 0  # the highest step of any earlier attempt
    between_failures: float = PRIOR_SECONDS_BETWEEN_FAILURES  # expected, in seconds
    traffic_seconds: float = 0.0  # for which the machines cost as much as the traffic of a checkpoint
    watch: Callable[[Event], None] | None = None  # gets every event of rank 0
    evaluation: Callable[[World], Evaluation] = lambda world: Evaluation()  # while it trains; called after `begin`
    origin: Callable[[World], Origin] | None = None  # of a run that does not begin with weights drawn from its seed
    weights: tuple[float, ...] = ()  # of the sources of a mixture
    eot: int | None = None  # begins the documents of packed shards
    needed: Callable[[str], bool] = lambda folder: False  # whether another run needs this commit
    starting: Callable[[str], None] = lambda phase: None  # told each phase of the start, for a watchdog


def run_rank(job: RankJob, stop: StopSignal) -> tuple[TrainState, bool]:
    """Train from the newest commit until the last step or a stop; rank 0 of a complete run writes the weights. Returns
    the state, and whether the run is complete.

    Raises the errors of `Training.run`.
    """
    model, seed = job.model, job.train.seed
    of_both = (job.fetch, model.block_size, seed, model.vocab_size)
    train_data = TokenData(job.train_shards, *of_both, weights=job.weights, eot=job.eot)
    val_data = TokenData(job.val_shards, *of_both, weights=job.weights)
    world = World.join(job.runtime, job.starting)
    attempt = job.begin(world)
    log = EventLog(job.folder / EVENTS_FILE if world.rank == 0 else None, job.clock, job.reached, job.watch)
    job.starting(STARTED)
    checkpointer = Checkpointer(
        job.store,
        job.prefix,
        world,
        attempt,
        job.runtime.keep_last,
        superseded=lambda: job.superseded(attempt),
        keep_every=job.runtime.keep_every_steps,
        needed=job.needed,
    )
    evaluation = job.evaluation(world)
    settings = (job.model, job.train, job.runtime, train_data, val_data)
    save_clock = SaveClock(job.runtime, job.between_failures, job.traffic_seconds)
    engine, state = Training(*settings, checkpointer, save_clock, world, stop, log, evaluation, job.origin).run()
    done = state.is_complete(job.train, evaluation.every)
    if done:
        log.clock.enter("checkpoint")
        if world.rank == 0:
            write_weights(job.folder / WEIGHTS_FILE, job.model, engine.weights())
        else:
            list(engine.weights())
    world.close()
    return state, done
