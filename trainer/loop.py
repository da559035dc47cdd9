"""Training, from the newest commit to the last step.

The loop is the story; everything it calls is a few lines away. Whatever dies and whenever, the same
call goes on from the last commit with the same data and, at the same world size, the same losses bit
for bit.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

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
from trainer.config import ModelConfig, RuntimeConfig, TrainConfig, grad_accum_steps, sequences_per_step
from trainer.data import TokenData, sequences_of
from trainer.evaluate import validation_loss
from trainer.metrics import EventLog, mfu, peak_flops
from trainer.model import GPT
from trainer.optim import learning_rate_at, make_optimizer, set_learning_rate
from trainer.parallel import Flags, FlatGradients, World, precision_on
from trainer.process import StopSignal

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

    Raises FloatingPointError when loss or gradient are no longer finite (the commits before it stay).
    """
    accumulate = grad_accum_steps(model_config, config, runtime, world.world_size)
    run = prepare(model_config, config, runtime, world.device)
    state = resume(run, checkpointer, log) or TrainState()
    per_step = sequences_per_step(model_config, config)
    announce(run, state, accumulate, world, log)
    due = SaveClock(runtime)
    peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None

    saved_step, flags = state.step, Flags()
    log.clock.enter("compile")  # the first step pays for kernels, allocations and the compiler
    while True:
        last = state.step >= config.max_steps
        # Asked to stop, there is no time to evaluate, unless nobody would come back to do it.
        if val_is_due(state, config) and (last or not flags.stop):
            with log.clock.phase("evaluate"):
                state.val_loss = validate(run, config, val_data, runtime, world)
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
        mine = sequences_of(state.step, per_step, world.rank, world.world_size)
        loss = backward(run, data.micro_batches(mine, runtime.micro_batch_size, world.device), accumulate)
        world.mean_(run.gradients.flat)
        grad_norm, applied = clip_and_step(run, config.grad_clip)
        state.advance(config.batch_tokens, applied)
        flags = world.agree(float(loss), stop.asked, due.now() and not checkpointer.busy, data.digest(mine))
        tokens_per_second = config.batch_tokens / (time.time() - started)
        log.clock.enter("train")
        log.row(
            state.step,
            **{
                "train/loss": flags.loss,
                "train/lr": lr,
                "train/grad_norm": grad_norm,
                "perf/tokens_per_second": tokens_per_second,
                "data/digest": flags.digest,
            },
            **({"perf/mfu": mfu(tokens_per_second, model_config, world.world_size, peak)} if peak else {}),
        )
        # A gradient that is not finite and was applied has ruined the weights before any loss shows it.
        if not math.isfinite(flags.loss) or (applied and not math.isfinite(grad_norm)):
            checkpointer.settle(log, wait=True)
            raise FloatingPointError(
                f"train/loss is {flags.loss} and train/grad_norm {grad_norm} at step {state.step}; "
                "the last commit stays"
            )


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
        forward=torch.compile(model) if runtime.compile else model,  # type: ignore[arg-type]
        optimizer=optimizer,
        gradients=FlatGradients.of(model),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        precision=precision,
        device=device,
    )


def resume(run: Run, checkpointer: Checkpointer, log: EventLog) -> TrainState | None:
    """Load the newest commit into the run, if there is one."""
    log.clock.enter("download")
    state = checkpointer.load_latest(training_tensors(run.model, run.optimizer), log)
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
        run.scaler.scale(loss).backward()
        total += loss.detach()
    return total


def clip_and_step(run: Run, grad_clip: float | None) -> tuple[float, bool]:
    """Clip and apply the averaged gradient; its norm, and whether it was applied (fp16 may overflow)."""
    run.scaler.unscale_(run.optimizer)
    norm = run.gradients.clip_(grad_clip)
    scale = run.scaler.get_scale()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    return norm, run.scaler.get_scale() >= scale


def val_is_due(state: TrainState, config: TrainConfig) -> bool:
    """At the start, every `val_every` steps and at the end; once each, also after a resume."""
    if config.val_every is None or state.val_step == state.step:
        return False
    return state.step % config.val_every == 0 or state.step == config.max_steps


def validate(run: Run, config: TrainConfig, data: TokenData, runtime: RuntimeConfig, world: World) -> float:
    with autocast(run):
        return validation_loss(run.model, data, config.val_tokens, runtime.micro_batch_size, world)


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
    """When the next checkpoint is due: every `checkpoint_minutes`, or as often as loses least."""

    def __init__(self, runtime: RuntimeConfig) -> None:
        self.minutes = runtime.checkpoint_minutes
        self.last = time.monotonic()
        self.save_seconds = 1.0  # until the first save was measured

    def now(self) -> bool:
        interval = checkpoint_seconds(self.save_seconds) if self.minutes == "auto" else 60 * float(self.minutes)
        return time.monotonic() - self.last >= interval

    def saved(self, seconds: float) -> None:
        self.last, self.save_seconds = time.monotonic(), max(0.1, seconds)
