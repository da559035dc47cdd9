"""Training, from the newest commit to the last step.

The loop is the story; everything it calls is a few lines away. Whatever dies and whenever, the same
call goes on from the last commit with the same data and, at the same world size, the same losses bit
for bit.
"""

import math
import time
from dataclasses import dataclass, replace

import torch

from trainer.checkpoint import Checkpointer
from trainer.commits import TrainState, checkpoint_seconds
from trainer.config import (
    ModelConfig,
    RuntimeConfig,
    TrainConfig,
    batch_tokens_at,
    grad_accum_steps,
    micro_batch_of,
    sequences_per_step,
)
from trainer.data import TokenData
from trainer.engine import Batches, Engine, PendingNumbers, make_engine, name_of
from trainer.errors import Diverged
from trainer.evaluate import validation_loss
from trainer.fit import Fit, fit_micro_batch
from trainer.health import Health, Watchdog, diagnosis, is_landmark
from trainer.metrics import EventLog, mfu, peak_flops
from trainer.optim import learning_rate_at
from trainer.parallel import Flags, World
from trainer.process import StopSignal, failpoint, log_line
from trainer.shards import sequences_of


def train(
    model_config: ModelConfig,
    config: TrainConfig,
    runtime: RuntimeConfig,
    data: TokenData,
    val_data: TokenData,
    checkpointer: Checkpointer,
    world: World,
    stop: StopSignal,
    log: EventLog,
) -> tuple[Engine, TrainState]:
    """Train until `max_steps` or until asked to stop; the engine with the weights, and where it stands.

    Raises Diverged when the run is ill and nothing helped (the commits before that stay).
    """
    grad_accum_steps(model_config, config, runtime, world.world_size)  # UserError if it doesn't come out even

    def mine_of(step: int) -> range:
        return sequences_of(step, model_config, config, world.rank, world.world_size)

    with Watchdog(runtime, log.clock, world.rank) as watchdog:
        engine = make_engine(model_config, config, runtime, world)
        state = resume(engine, checkpointer, log)
        if state is None:
            engine.initialize(config.seed)
            state = TrainState()
        fit = fit_here(engine, model_config, config, runtime, state, world)
        at_once = state.micro_batch_size = fit.micro_batch_size
        state.world_size, state.devices = world.world_size, devices_of(world)
        checkpointer.prepare(engine.pieces())
        announce(engine, model_config, state, fit, world, log)
        due = SaveClock(runtime, checkpointer.between_failures, rollbacks=config.rollback_above_nats is not None)
        peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None

        saved_step, flags = state.step, Flags()
        log.clock.enter("compile")  # the first step pays for kernels, allocations and the compiler
        failpoint("first-step")
        while True:
            last = state.step >= config.max_steps
            # Asked to stop, there is no time to evaluate, unless nobody would come back to do it.
            if val_is_due(state, config) and (last or not flags.stop):
                with log.clock.phase("evaluate"):
                    loss_of, beat = engine.loss, watchdog.beat
                    state.val_loss = validation_loss(loss_of, val_data, config.val_tokens, at_once, world, beat)
                    state.val_step = state.step
                    log.row(state.step, **{"val/loss": state.val_loss})
            checkpointer.settle(log)
            if (flags.save or flags.stop or last) and state.step != saved_step:
                with log.clock.phase("checkpoint"):
                    due.saved(save(engine, state, checkpointer, log))
                    saved_step = state.step
            if flags.stop or last:
                with log.clock.phase("checkpoint"):
                    checkpointer.finish(log)
                return engine, state
            started = time.time()
            mine, batch_tokens = mine_of(state.data_step), batch_tokens_at(state.data_step, config)
            size = micro_batch_of(len(mine), at_once)
            batches = data.micro_batches(mine, size, world.device, then=mine_of(state.data_step + 1))
            # Rank 0 is the last to be done with a save: while it is busy, no other rank may call for the next.
            save_due = due.at(state.step + 1) or (world.rank == 0 and due.now() and not checkpointer.busy)
            lr = learning_rate_at(state.step, config)
            wishes = StepVotes(world, stop, save_due, data, mine)
            flags, state.health, illness, applied = step(
                engine, watchdog.over(batches), len(mine) // size, lr, state, config, checkpointer, wishes
            )
            state.advance(batch_tokens, applied)
            seconds = time.time() - started
            log.clock.enter(log.training_phase(state.step))
            watchdog.stepped(seconds)
            if illness:
                log.event("skipped", step=state.step, reason=illness)
            for remark in engine.remarks():
                log.event("slow", step=state.step, reason=remark)
            tokens_per_second = batch_tokens / seconds
            log.row(
                state.step,
                **finite({"train/loss": flags.loss, "train/lr": lr, "train/grad_norm": flags.grad_norm}),
                **{"perf/tokens_per_second": tokens_per_second, "data/digest": flags.digest},
                **({"perf/mfu": mfu(tokens_per_second, model_config, world.world_size, peak)} if peak else {}),
                **({"train/skipped_updates": state.health.skipped} if illness else {}),
                **finite(engine.measures()),
            )
            if ruin := state.health.diverged(config):
                state = roll_back(engine, state, ruin, config, checkpointer, log)
                saved_step, flags = state.step, replace(flags, save=False)
                due.overdue()  # so that the rollback is soon on record
            elif state.health.not_finite:  # what is committed now may be ruined already
                flags = replace(flags, save=False)


@dataclass(frozen=True)
class StepVotes:
    """What this rank brings to the exchange of flags after a step, beside loss and norm."""

    world: World
    stop: StopSignal
    save: bool
    data: TokenData
    sequences: range

    def agree(self, reading: PendingNumbers) -> Flags:
        digest = self.data.digest(self.sequences)  # some ms for 512 of them: the GPU is at work meanwhile
        loss, grad_norm = reading.values()
        return self.world.agree(loss, grad_norm, self.stop.asked, self.save, digest)


def step(
    engine: Engine,
    batches: Batches,
    accumulate: int,
    learning_rate: float,
    state: TrainState,
    config: TrainConfig,
    checkpointer: Checkpointer,
    wishes: StepVotes,
) -> tuple[Flags, Health, str | None, bool]:
    """One update: what the ranks agreed on, the health after it, why it was skipped, whether it was applied.

    PendingNumbers the loss waits for the GPU. A guarded engine is asked for the update before that, so that the GPU has
    work meanwhile, unless outliers are to be skipped, which the host has to find out first.
    """
    number = state.optimizer_steps + 1
    found = engine.accumulate(batches, accumulate, number)
    checkpointer.before_update()
    reading = PendingNumbers(found)
    ahead = engine.guarded and config.skip_loss_zscore is None and config.skip_grad_norm_zscore is None
    if ahead:
        engine.update(learning_rate, found, number)
    flags = wishes.agree(reading)
    health, illness = state.health.after(
        state.step + 1, flags.loss, flags.grad_norm, config, overflow_allowed=engine.overflow_allowed
    )
    if ahead:
        return flags, health, illness, illness is None
    return flags, health, illness, engine.update(learning_rate, found, number, apply=illness is None)


def fit_here(
    engine: Engine, model: ModelConfig, config: TrainConfig, runtime: RuntimeConfig, state: TrainState, world: World
) -> Fit:
    """Sequences a rank pushes through at once: as asked, as before on as many such devices (or gradients would be added
    up in another order), or the most that fit."""
    if runtime.micro_batch_size != "auto":
        return Fit(runtime.micro_batch_size, f"micro-batches of {runtime.micro_batch_size}, as asked")
    if state.micro_batch_size and (state.world_size, state.devices) == (world.world_size, devices_of(world)):
        return Fit(state.micro_batch_size, f"micro-batches of {state.micro_batch_size}, as before")
    share = sequences_per_step(model, config) // world.world_size
    return fit_micro_batch(engine.accumulate, model, share, world)


def devices_of(world: World) -> str:
    """What the ranks run on. All of them have to ask."""
    return " and ".join(sorted(set(world.gather(name_of(world.device)))))


def resume(engine: Engine, checkpointer: Checkpointer, log: EventLog, before: int | None = None) -> TrainState | None:
    """Load the newest commit (of a step up to `before`) into the engine, if there is one."""
    log.clock.enter("download")
    state = checkpointer.load_latest(engine.pieces(), log, before)
    if state is not None:
        engine.loaded(state)
    return state


def roll_back(
    engine: Engine, ill: TrainState, seen: str, config: TrainConfig, checkpointer: Checkpointer, log: EventLog
) -> TrainState:
    """Go back to a commit from before the rise, and leave out the data from there to here for good.

    Killed before the next commit, the run comes here again by itself: it resumes from the commit that it
    returned to, or a later one, and goes the same way from there. Raises Diverged if rollbacks are off or
    did not help.
    """
    checkpointer.settle(log, wait=True)
    if config.rollback_above_nats is None or len(ill.rollbacks) >= config.max_rollbacks:
        raise Diverged(diagnosis(ill.step, seen, ill.rollbacks, config))
    checkpointer.before_update()
    with log.clock.phase("download"):
        state = resume(engine, checkpointer, log, before=ill.health.calm_step or 0)
        if state is None:
            raise Diverged(diagnosis(ill.step, seen, ill.rollbacks, config))
        checkpointer.forget_after(state.step)
    left_out = ill.step - state.step
    log.reached = max(log.reached, ill.step)
    state.rollbacks = (*ill.rollbacks, (state.step, left_out))
    state.health = replace(state.health, calm_step=state.step)  # as was seen later: it may be needed again
    log.uncommitted.clear()
    log.event("rollback", step=ill.step, to=state.step, left_out=left_out, reason=seen)
    return state


def save(engine: Engine, state: TrainState, checkpointer: Checkpointer, log: EventLog) -> float:
    """Begin to commit the run as it stands; seconds that training waited for it."""
    started = time.monotonic()
    engine.saving(state)
    checkpointer.save(state, engine.pieces(), log)
    return time.monotonic() - started


def finite(values: dict[str, float]) -> dict[str, float]:
    """Without what JSON has no number for."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def val_is_due(state: TrainState, config: TrainConfig) -> bool:
    """At the start, every `val_every` steps and at the end; once each, also after a resume."""
    if config.val_every is None or state.val_step == state.step:
        return False
    return state.step % config.val_every == 0 or state.step == config.max_steps


def announce(engine: Engine, model: ModelConfig, state: TrainState, fit: Fit, world: World, log: EventLog) -> None:
    log.event(
        "start",
        step=state.step,
        world_size=world.world_size,
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type,
        engine=engine.why,
        precision=engine.precision,
        parameters=model.parameters,
        micro_batch_size=fit.micro_batch_size,
        micro_batch_why=fit.why,
    )
    if world.rank == 0:
        log_line(f"{engine.precision}, {fit.why}; {engine.why}")


class SaveClock:
    """When the next checkpoint is due: every `checkpoint_minutes`, or as often as loses least; and at some steps."""

    def __init__(self, runtime: RuntimeConfig, between_failures: float, rollbacks: bool) -> None:
        self.minutes, self.between_failures = runtime.checkpoint_minutes, between_failures
        self.keep_every, self.rollbacks = runtime.keep_every_steps, rollbacks
        self.last = time.monotonic()
        self.save_seconds = 1.0  # until a save was measured
        self.first = True

    @property
    def interval(self) -> float:
        """Seconds from one save to the next."""
        if self.minutes == "auto":
            return checkpoint_seconds(self.save_seconds, self.between_failures)
        return 60 * self.minutes

    def now(self) -> bool:
        return time.monotonic() - self.last >= self.interval

    def at(self, step: int) -> bool:
        """Whether the state after `step` updates is one to keep for good, or to return to."""
        return (self.rollbacks and is_landmark(step)) or bool(self.keep_every and step % self.keep_every == 0)

    def overdue(self) -> None:
        self.last = -math.inf

    def saved(self, seconds: float) -> None:
        # The first save may have to wait until its memory is pinned (10 s for 19 GB): no measure of the next.
        cost = min(self.save_seconds, seconds) if self.first else seconds
        self.last, self.save_seconds, self.first = time.monotonic(), max(0.1, cost), False
