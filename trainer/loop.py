"""Training, from the newest commit to the last step.

The loop is the story; everything it calls is a few lines away. Whatever dies and whenever, the same
call goes on from the last commit with the same data and, at the same world size, the same losses bit
for bit.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.checkpoint import (
    Checkpointer,
    TrainState,
    allocate_moments,
    checkpoint_seconds,
    set_optimizer_steps,
    training_tensors,
)
from trainer.config import (
    ModelConfig,
    RuntimeConfig,
    TrainConfig,
    batch_tokens_at,
    grad_accum_steps,
    micro_batch_of,
    sequences_per_step,
)
from trainer.data import TokenData, sequences_of
from trainer.evaluate import validation_loss
from trainer.health import Diverged, Watchdog, diagnosis, is_landmark
from trainer.metrics import EventLog, mfu, peak_flops
from trainer.model import GPT
from trainer.optim import learning_rate_at, make_optimizer, set_learning_rate
from trainer.parallel import Flags, FlatGradients, World, precision_on
from trainer.process import StopSignal, moment

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Run:
    """A training run in the making: what its steps work on."""

    model: GPT
    forward: torch.nn.Module  # the model, compiled or not
    optimizer: torch.optim.AdamW
    gradients: FlatGradients
    scaler: torch.amp.GradScaler
    precision: str
    device: torch.device


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
) -> tuple[GPT, TrainState]:
    """Train until `max_steps` or until asked to stop; the model and where it stands.

    Raises Diverged when the run is ill and nothing helped (the commits before that stay).
    """
    accumulate = grad_accum_steps(model_config, config, runtime, world.world_size)
    per_step = sequences_per_step(model_config, config)
    at_once = per_step // (accumulate * world.world_size)

    def mine_of(step: int) -> range:
        return sequences_of(step, model_config, config, world.rank, world.world_size)

    with Watchdog(runtime, log.clock, world.rank) as watchdog:
        run = prepare(model_config, config, runtime, world.device)
        state = resume(run, checkpointer, log) or TrainState()
        checkpointer.prepare(training_tensors(run.model, run.optimizer))
        announce(run, state, accumulate, world, log)
        due = SaveClock(runtime, checkpointer.between_failures, rollbacks=config.rollback_above_nats is not None)
        peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None

        saved_step, flags = state.step, Flags()
        log.clock.enter("compile")  # the first step pays for kernels, allocations and the compiler
        moment("first-step")
        while True:
            last = state.step >= config.max_steps
            # Asked to stop, there is no time to evaluate, unless nobody would come back to do it.
            if val_is_due(state, config) and (last or not flags.stop):
                with log.clock.phase("evaluate"):
                    state.val_loss = validate(run, config, val_data, at_once, world, watchdog)
                    state.val_step = state.step
                    log.row(state.step, **{"val/loss": state.val_loss})
            checkpointer.settle(log)
            if (flags.save or flags.stop or last) and state.step != saved_step:
                with log.clock.phase("checkpoint"):
                    due.saved(save(run, state, checkpointer, log))
                    saved_step = state.step
            if flags.stop or last:
                with log.clock.phase("checkpoint"):
                    checkpointer.finish(log)
                return run.model, state
            started = time.time()
            lr = learning_rate_at(state.step, config)
            set_learning_rate(run.optimizer, lr)
            mine, batch_tokens = mine_of(state.data_step), batch_tokens_at(state.data_step, config)
            size = micro_batch_of(len(mine), at_once)
            batches = data.micro_batches(mine, size, world.device, then=mine_of(state.data_step + 1))
            loss = backward(run, watchdog.over(batches), len(mine) // size)
            world.mean_(run.gradients.flat)
            grad_norm = clip(run, config.grad_clip)
            # Rank 0 is the last to be done with a save: while it is busy, no other rank may call for the next.
            save_due = due.at(state.step + 1) or (world.rank == 0 and due.now() and not checkpointer.busy)
            flags = world.agree(float(loss), grad_norm, stop.asked, save_due, data.digest(mine))
            state.health, illness = state.health.after(
                state.step + 1, flags.loss, flags.grad_norm, config, overflow_allowed=scale_can_fall(run)
            )
            checkpointer.before_update()
            applied = step(run, skip=illness is not None)
            state.advance(batch_tokens, applied)
            seconds = time.time() - started
            log.clock.enter(log.training_phase(state.step))
            watchdog.stepped(seconds)
            if illness:
                log.event("skipped", step=state.step, reason=illness)
            tokens_per_second = batch_tokens / seconds
            log.row(
                state.step,
                **finite({"train/loss": flags.loss, "train/lr": lr, "train/grad_norm": flags.grad_norm}),
                **{"perf/tokens_per_second": tokens_per_second, "data/digest": flags.digest},
                **({"perf/mfu": mfu(tokens_per_second, model_config, world.world_size, peak)} if peak else {}),
                **({"train/skipped_updates": state.health.skipped} if illness else {}),
            )
            if ruin := state.health.diverged(config):
                state = roll_back(run, state, ruin, config, checkpointer, log)
                saved_step, flags = state.step, replace(flags, save=False)
                due.overdue()  # so that the rollback is soon on record
            elif state.health.not_finite:  # what is committed now may be ruined already
                flags = replace(flags, save=False)


def prepare(model_config: ModelConfig, config: TrainConfig, runtime: RuntimeConfig, device: torch.device) -> Run:
    """The model at its seed, its optimizer with zero moments, its flat gradients."""
    model = GPT(model_config, recompute=runtime.recompute)
    model.initialize(config.seed)
    model.to(device)
    precision = precision_on(device, config)
    optimizer = make_optimizer(model, config)
    allocate_moments(optimizer)
    return Run(
        model=model,
        forward=torch.compile(model) if runtime.engine == "compiled" else model,  # type: ignore[arg-type]
        optimizer=optimizer,
        gradients=FlatGradients.of(model),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        precision=precision,
        device=device,
    )


def resume(run: Run, checkpointer: Checkpointer, log: EventLog, before: int | None = None) -> TrainState | None:
    """Load the newest commit (of a step up to `before`) into the run, if there is one."""
    log.clock.enter("download")
    state = checkpointer.load_latest(training_tensors(run.model, run.optimizer), log, before)
    if state is not None:
        set_optimizer_steps(run.optimizer, state.optimizer_steps)
        if state.loss_scale is not None:
            run.scaler.load_state_dict(
                {
                    **run.scaler.state_dict(),
                    "scale": state.loss_scale,
                    "_growth_tracker": state.loss_scale_growth,
                }
            )
    return state


def roll_back(
    run: Run, ill: TrainState, seen: str, config: TrainConfig, checkpointer: Checkpointer, log: EventLog
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
        state = resume(run, checkpointer, log, before=ill.health.calm_step or 0)
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


def save(run: Run, state: TrainState, checkpointer: Checkpointer, log: EventLog) -> float:
    """Begin to commit the run as it stands; seconds that training waited for it."""
    started = time.monotonic()
    if run.scaler.is_enabled():
        scale = run.scaler.state_dict()
        state.loss_scale, state.loss_scale_growth = scale["scale"], scale["_growth_tracker"]
    checkpointer.save(state, training_tensors(run.model, run.optimizer), log)
    return time.monotonic() - started


def backward(run: Run, micro_batches: Iterator[tuple[Tensor, Tensor]], accumulate: int) -> Tensor:
    """Accumulate the gradient of the mean loss over this rank's micro-batches; that loss."""
    run.model.train()
    run.gradients.zero_()
    total = torch.zeros((), device=run.device)
    for tokens, targets in micro_batches:
        with autocast(run):
            loss = run.forward(tokens, targets) / accumulate
        moment("mid-step")
        run.scaler.scale(loss).backward()
        total += loss.detach()
    return total


def clip(run: Run, grad_clip: float | None) -> float:
    """Clip the averaged gradient; its norm before that."""
    run.scaler.unscale_(run.optimizer)
    return run.gradients.clip_(grad_clip)


def step(run: Run, skip: bool) -> bool:
    """Apply the gradient, unless it is to be skipped; whether it was applied (fp16 may overflow)."""
    scale = run.scaler.get_scale()
    if not skip:
        run.scaler.step(run.optimizer)
    run.scaler.update()
    return not skip and run.scaler.get_scale() >= scale


def scale_can_fall(run: Run) -> bool:
    """Whether a gradient that is not finite may be fp16's overflow: the scaler skips it and scales less."""
    return run.scaler.is_enabled() and run.scaler.get_scale() > 1


def finite(values: dict[str, float]) -> dict[str, float]:
    """Without what JSON has no number for."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def val_is_due(state: TrainState, config: TrainConfig) -> bool:
    """At the start, every `val_every` steps and at the end; once each, also after a resume."""
    if config.val_every is None or state.val_step == state.step:
        return False
    return state.step % config.val_every == 0 or state.step == config.max_steps


def validate(run: Run, config: TrainConfig, data: TokenData, at_once: int, world: World, watchdog: Watchdog) -> float:
    with autocast(run):
        return validation_loss(run.model, data, config.val_tokens, at_once, world, watchdog.beat)


def autocast(run: Run) -> torch.autocast:
    """bf16 or fp16 matrix products over float32 weights; nothing in fp32."""
    return torch.autocast(run.device.type, dtype=AUTOCAST[run.precision], enabled=run.precision != "fp32")


def announce(run: Run, state: TrainState, accumulate: int, world: World, log: EventLog) -> None:
    log.event(
        "start",
        step=state.step,
        world_size=world.world_size,
        device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type,
        precision=run.precision,
        parameters=sum(p.numel() for p in run.model.parameters()),
        grad_accum_steps=accumulate,
    )


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
