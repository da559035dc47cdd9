"""The training loop, from the newest commit to the last step.

`train` is the main path; the functions that it calls follow below. Whenever the process dies, the same call resumes
from the last commit with the same data and, at the same world size, the same losses bit for bit.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from trainer.amounts import batch_tokens_at, check_shares, micro_batch_count, val_tokens
from trainer.checkpoint import Checkpointer
from trainer.commits import TrainState
from trainer.config import RuntimeConfig, TrainConfig
from trainer.data import PendingNumbers, TokenData
from trainer.engine import Batches, Engine, make_engine
from trainer.errors import Diverged, Interrupted, UserError
from trainer.evaluate import validation_loss
from trainer.evaluation import Evaluation
from trainer.events import EventLog, RolledBack, Skipped, Slow, Started
from trainer.fit import Fit, choose_micro_batch, devices_of, memory_settings
from trainer.health import Health, Watchdog, diagnosis
from trainer.metrics import mfu, peak_flops
from trainer.model_config import ModelConfig
from trainer.optim import Rates, rates_at
from trainer.parallel import Agreement, World
from trainer.process import StopSignal, failpoint, log_line
from trainer.save_clock import SaveClock
from trainer.shards import sequences_of
from trainer.weights import Origin, open_weights


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
    evaluation: Evaluation | None = None,
    origin: Callable[[World], Origin] | None = None,
) -> tuple[Engine, TrainState]:
    """Train until `max_steps`, a target of `stop_at` or a stop. Returns the engine with the weights, and the state.

    `origin` is asked where to begin once there is no commit, on every rank at the same time; None: from the seed.

    Diverged if the run diverges and no rollback helps. Its earlier commits stay, and each of them is sound: a state is
    committed once a forward pass over its weights has given a finite loss, of the next step, a validation or a probe.
    """
    check_shares(model_config, config, world.world_size)

    def sequences_at(data_step: int) -> range:
        return sequences_of(data_step, model_config, config, world.rank, world.world_size)

    with Watchdog(runtime, log.clock, world.rank) as watchdog, checkpointer:
        engine = make_engine(model_config, config, runtime, world)
        checkpointer.prepare(engine.pieces())  # while the state is fetched
        state = resume(engine, checkpointer, log)
        if state is None:
            state = begin(engine, model_config, config, checkpointer, world, log, origin)
        fit = choose_micro_batch(engine, model_config, config, runtime, state, world)
        state.micro_batch_size = fit.micro_batch_size
        engine.tokens_at_once = fit.micro_batch_size * model_config.block_size  # for evaluations: these fit
        state.world_size, state.devices = world.world_size, devices_of(world)
        state.memory_settings = memory_settings(engine, runtime)
        log_start(engine, model_config, state, fit, world, log)
        save_clock = SaveClock(
            runtime,
            checkpointer.between_failures,
            rollbacks=config.rollback_above_nats is not None,
            traffic_seconds=checkpointer.traffic_seconds,
        )
        peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None

        saved, agreed, evidence = state.measured, Agreement(), None
        every = evaluation.every if evaluation else None
        saved_here = -1  # the step that this attempt saved last
        failure: Exception | None = None  # of this rank: the next step lacks data
        check = partial(check_all, world, stop, watchdog)
        data.waiting = partial(log.clock.phase, "data")
        log.clock.enter("compile")  # kernels, allocations and the compiler delay the first step
        failpoint("first-step")
        while True:
            # A stop leaves no time for measurements: the next attempt does them, even after the last step.
            if state.val_is_due(config) and not agreed.stop and not evidence:
                tokens, size = val_tokens(model_config, config), fit.micro_batch_size
                val_loss = validate(engine, val_data, state, tokens, size, world, check, log)
                agreed = replace(agreed, stop=val_loss is None)
                evidence = ruined("val/loss", val_loss)
            evaluating = state.evaluation_is_due(every, config) and not agreed.stop and not evidence
            ending = agreed.stop or (state.has_ended(config) and not evaluating)
            unsaved = state.measured != saved
            if (ending or evaluating) and unsaved and state.val_step != state.step and not evidence:
                evidence = ruined("the loss of a probe", probe(engine, data, sequences_at(state.data_step - 1), world))
            if evidence:
                state = roll_back(engine, state, evidence, config, checkpointer, log)
                saved, agreed, evidence = state.measured, replace(agreed, save=False), None
                saved_here = -1
                save_clock.force()  # so that a commit soon records the rollback
                continue
            if ending or evaluating:
                checkpointer.prove()
            checkpointer.settle(log)
            save_clock.uploaded(checkpointer.upload_seconds)
            last = evaluating and state.has_ended(config)
            if (agreed.save or ending or last) and unsaved:
                with log.clock.phase("checkpoint"):
                    if state.step == saved_here:
                        checkpointer.amend(state, engine.pieces(), log)
                    else:
                        proven = ending or evaluating or state.val_step == state.step
                        save_clock.saved(save(engine, state, checkpointer, log, proven))
                    saved, saved_here = state.measured, state.step
            if evaluating and evaluation:
                complete = evaluate(engine, evaluation, state, world, check, log)
                agreed = replace(agreed, stop=not complete, save=False)
                continue
            if ending:
                with log.clock.phase("checkpoint"):
                    if state.has_ended(config) and not agreed.stop:
                        checkpointer.insist(engine.pieces(), log, partial(asked_meanwhile, stop, watchdog))
                    checkpointer.finish(log)
                if failure:
                    raise failure
                return engine, state
            started = time.perf_counter()  # time.time() may jump
            sequences, batch_tokens = sequences_at(state.data_step), batch_tokens_at(state.data_step, config)
            upcoming = sequences_at(state.data_step + 1)
            batches = data.micro_batches(sequences, fit.micro_batch_size, world.device, upcoming)
            # Rank 0 finishes a save last: only it may request the next one, once it is no longer busy. With a commit
            # before it, an evaluation that is killed repeats no step.
            measured_next = bool(every and (state.step + 1) % every == 0)
            due = save_clock.due_at(state.step + 1) or (
                world.rank == 0 and (save_clock.due_now() or measured_next) and not checkpointer.busy
            )
            rates = rates_at(state.step, config)
            next_ones = upcoming if state.step + 1 < config.max_steps else range(0)
            votes = StepVotes(world, stop, due, data, sequences, next_ones)
            verdict, applied = step(
                engine,
                watchdog.each(batches),
                micro_batch_count(len(sequences), fit.micro_batch_size),
                batch_tokens / model_config.block_size / world.world_size,
                rates,
                state.optimizer_steps + 1,
                votes.judge(state, config, engine),
                update_first=update_comes_first(engine, config),
                before_update=checkpointer.before_update,
            )
            agreed, state.health, failure = verdict.agreed, verdict.health, verdict.failure
            state.advance(batch_tokens, applied)
            seconds = time.perf_counter() - started
            log.clock.enter(log.training_phase(state.step))
            watchdog.step_done(seconds)
            tokens_per_second = batch_tokens / seconds
            utilization = mfu(tokens_per_second, model_config, world.world_size, peak) if peak else None
            log_step(log, engine, state.step, verdict, rates.vector, tokens_per_second, utilization)
            evidence = state.health.diverged(config)
            if not state.health.not_finite:
                checkpointer.prove()  # the loss of this step is that of the weights before it
            else:  # the weights may be ruined already
                agreed = replace(agreed, save=False)


@dataclass(frozen=True)
class Verdict:
    """A step as all ranks judge it: their common numbers, the health after it, and its anomaly, if any."""

    agreed: Agreement
    health: Health
    anomaly: str | None = None
    failure: Exception | None = None  # of this rank


@dataclass(frozen=True)
class StepVotes:
    """This rank's part of the exchange after a step, besides loss and norm.

    A rank that cannot get the shards of its next step votes for a stop: so all ranks leave between two steps, with the
    state in the store or on the disk, and not in a step, where the state would be lost.
    """

    world: World
    stop: StopSignal
    save_due: bool
    data: TokenData
    sequences: range
    upcoming: range  # the sequences of the next step; empty if there is none

    def agree(self, numbers: PendingNumbers) -> tuple[Agreement, Exception | None]:
        """With the error of this rank, if it lacks the data of the next step."""
        digest = self.data.digest(self.sequences)  # some ms for 512 sequences, while the GPU computes
        stop = self.stop.asked
        if not stop and self.data.is_late(self.upcoming):
            numbers.values()  # as long as the device computes, the data is not late
        failure = None if stop else self.data.failure(self.upcoming)
        loss, grad_norm = numbers.values()
        agreed = self.world.agree(loss, grad_norm, stop or failure is not None, self.save_due, digest)
        return agreed, failure

    def judge(self, state: TrainState, config: TrainConfig, engine: Engine) -> Callable[[PendingNumbers], Verdict]:
        """A function that exchanges the numbers of the next step between the ranks, and judges them."""

        def verdict(numbers: PendingNumbers) -> Verdict:
            agreed, failure = self.agree(numbers)
            health, anomaly = state.health.after(
                state.step + 1, agreed.loss, agreed.grad_norm, config, engine.overflow_allowed
            )
            return Verdict(agreed, health, anomaly, failure)

        return verdict


def step(
    engine: Engine,
    batches: Batches,
    count: int,
    mean_share: float,
    rates: Rates,
    number: int,
    judge: Callable[[PendingNumbers], Verdict],
    update_first: bool,
    before_update: Callable[[], None] = lambda: None,
) -> tuple[Verdict, bool]:
    """Update `number` (from 1) with `count` micro-batches, weighted as `Engine.accumulate` describes: its verdict, and
    whether the engine applied the update.

    `judge` reads the numbers, which waits for the GPU. With `update_first` the engine gets the update before that, so
    that the GPU has work meanwhile; the engine itself then leaves out an update with numbers that are not finite.
    """
    loss_and_norm = engine.accumulate(batches, count, mean_share, number)
    before_update()
    numbers = PendingNumbers(loss_and_norm)
    if update_first:
        engine.update(rates, loss_and_norm, number)
        verdict = judge(numbers)
        return verdict, verdict.anomaly is None
    verdict = judge(numbers)
    return verdict, engine.update(rates, loss_and_norm, number, apply=verdict.anomaly is None)


def update_comes_first(engine: Engine, config: TrainConfig) -> bool:
    """Whether the engine may get the update before the host reads the numbers. Only the host can detect outliers."""
    return engine.guarded and config.skip_loss_zscore is None and config.skip_grad_norm_zscore is None


def validate(
    engine: Engine,
    data: TokenData,
    state: TrainState,
    max_tokens: int,
    batch_size: int,
    world: World,
    check: Callable[[], None],
    log: EventLog,
) -> float | None:
    """Measure the validation loss; a finite one goes into the log and into `state`.

    None if `check` was Interrupted before its end: then all ranks leave, and the next attempt measures it.
    """
    with log.clock.phase("evaluate"):
        try:
            loss = validation_loss(engine.loss, data, max_tokens, batch_size, world, check)
        except Interrupted:
            return None
        if math.isfinite(loss):
            state.val_loss, state.val_step = loss, state.step
            log.row(state.step, **{"val/loss": loss})
        return loss


def evaluate(
    engine: Engine,
    evaluation: Evaluation,
    state: TrainState,
    world: World,
    check: Callable[[], None],
    log: EventLog,
) -> bool:
    """Evaluate the weights in place; the scores go into the log and into `state`, the texts into the log.

    False if `check` was Interrupted before its end: then all ranks leave, and the next attempt evaluates.
    """
    with log.clock.phase("evaluate"):
        failpoint("scores")
        try:
            scores = evaluation.scores(engine, world, check)
            texts = evaluation.texts(engine, world, check)
        except Interrupted:
            return False
        state.evaluated_step, state.scores = state.step, scores
        log.row(state.step, **scores)
        if texts:
            log.samples(state.step, texts)
    return True


def check_all(world: World, stop: StopSignal, watchdog: Watchdog) -> None:
    """Interrupted on all ranks once one was asked to stop. A collective call, before a batch that is no step."""
    watchdog.progress()
    if world.sum(stop.asked)[0]:
        raise Interrupted


def asked_meanwhile(stop: StopSignal, watchdog: Watchdog) -> bool:
    """Whether a stop was asked for, during a wait that is no hang."""
    watchdog.progress()
    return stop.asked


def probe(engine: Engine, data: TokenData, sequences: range, world: World) -> float:
    """The mean loss of one sequence a rank. A collective call."""
    ((tokens, targets),) = data.micro_batches(sequences[:1], 1, world.device)
    return world.sum(float(engine.loss(tokens, targets)))[0] / world.world_size


def ruined(name: str, loss: float | None) -> str | None:
    """The evidence that the weights are ruined, if a forward pass over them gave a loss that is not finite."""
    return None if loss is None or math.isfinite(loss) else f"{name} is {loss}, so the weights are ruined"


def begin(
    engine: Engine,
    model: ModelConfig,
    config: TrainConfig,
    checkpointer: Checkpointer,
    world: World,
    log: EventLog,
    origin: Callable[[World], Origin] | None,
) -> TrainState:
    """The first state of a run, whose weights and moments are in the engine afterwards.

    UserError if the origin is damaged, or of another model.
    """
    if origin is None:
        engine.initialize(config.seed)
        return TrainState()
    log.clock.enter("download")
    found, pieces, state = origin(world), engine.pieces(), TrainState()
    if found.commit is None:
        assert found.path
        open_weights(found.path, found.where).fill(pieces, model)
    else:
        wanted = {name: piece for name, piece in pieces.items() if found.whole or name.startswith("model.")}
        loaded, damage = checkpointer.load(found.commit, wanted)
        if loaded is None:
            raise UserError(f"{found.where}: the commit is damaged: {damage}; name another one")
        if found.whole:
            state = loaded.on_another_text() if found.other_text else loaded
    engine.restore(state)
    return state


def resume(
    engine: Engine, checkpointer: Checkpointer, log: EventLog, last_step: int | None = None
) -> TrainState | None:
    """Load the newest commit into the engine; with `last_step`, the newest rollback point up to that step."""
    log.clock.enter("download")
    state = checkpointer.load_latest(engine.pieces(), log, last_step)
    if state is not None:
        engine.restore(state)
    return state


def roll_back(
    engine: Engine, diverged: TrainState, evidence: str, config: TrainConfig, checkpointer: Checkpointer, log: EventLog
) -> TrainState:
    """Return to a commit from before the rise of the loss, and skip the data of the steps in between for good.

    A run that is killed before its next commit repeats the rollback by itself: it resumes from the same commit or a
    later one, and diverges again. Diverged if rollbacks are off or used up, or without a commit to return to.
    """
    checkpointer.settle(log, wait=True)
    if config.rollback_above_nats is None or len(diverged.rollbacks) >= config.max_rollbacks:
        raise Diverged(diagnosis(diverged.step, evidence, diverged.rollbacks, config))
    checkpointer.before_update()
    with log.clock.phase("download"):
        state = resume(engine, checkpointer, log, last_step=diverged.health.calm_step or 0)
        if state is None:
            raise Diverged(diagnosis(diverged.step, evidence, diverged.rollbacks, config))
        checkpointer.delete_after(state.step)
    for name in ("micro_batch_size", "world_size", "devices", "memory_settings"):  # of this attempt, not of the commit
        setattr(state, name, getattr(diverged, name))
    left_out = diverged.step - state.step
    log.reached = max(log.reached, diverged.step)
    state.rollbacks = (*diverged.rollbacks, (state.step, left_out))
    state.health = replace(state.health, calm_step=state.step)  # a second rollback may need this commit again
    log.uncommitted.clear()
    log.write(RolledBack(diverged.step, to=state.step, left_out=left_out, reason=evidence))
    return state


def log_step(
    log: EventLog,
    engine: Engine,
    step: int,
    verdict: Verdict,
    learning_rate: float,
    tokens_per_second: float,
    utilization: float | None,
) -> None:
    """Log the row of a step, its anomaly and the engine's warnings."""
    agreed = verdict.agreed
    if verdict.anomaly:
        log.write(Skipped(step, verdict.anomaly))
    for warning in engine.warnings():
        log.write(Slow(step, warning))
    log.row(
        step,
        **{"train/loss": agreed.loss, "train/lr": learning_rate, "train/grad_norm": agreed.grad_norm},
        **{"perf/tokens_per_second": tokens_per_second, "data/digest": agreed.digest},
        **({} if utilization is None else {"perf/mfu": utilization}),
        **({"train/skipped_updates": verdict.health.skipped} if verdict.anomaly else {}),
        **engine.extra_metrics(),
    )


def save(engine: Engine, state: TrainState, checkpointer: Checkpointer, log: EventLog, proven: bool) -> float:
    """Start to commit the run's current state. Returns the seconds that training waited for it."""
    started = time.monotonic()
    engine.record(state)
    checkpointer.save(state, engine.pieces(), log, proven)
    return time.monotonic() - started


def log_start(engine: Engine, model: ModelConfig, state: TrainState, fit: Fit, world: World, log: EventLog) -> None:
    """Log that the ranks are ready for their first step."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    log.write(
        Started(
            step=state.step,
            world_size=world.world_size,
            device=device,
            engine=engine.why,
            precision=engine.precision,
            parameters=model.parameters,
            micro_batch_size=fit.micro_batch_size,
            micro_batch_why=fit.why,
        )
    )
    if world.rank == 0:
        log_line(f"{engine.precision}, {fit.why}; {engine.why}")
