"""The largest micro-batch that fits into GPU memory, for `runtime.micro_batch_size: auto`.

Larger micro-batches use a GPU better, up to 65,536 tokens (64 x 1024, the size of the peers' measurements); beyond that
only the memory grows. So a rank divides its share of a step into the fewest micro-batches that fit. Memory grows about
linearly with the micro-batch, but the slope depends on the engine (its recomputation, the chunks of its head), so it
is measured: a step, and a validation batch of the same size. The search runs one and two sequences, extrapolates a line
through the two peaks, tries the largest size below that line, and repeats this until fewer micro-batches would not fit.
The ranks do not communicate inside a trial: a rank that runs out of memory would leave the others waiting. Those of a
collective engine must; its search never tries what may not fit, and a rank without memory for one sequence ends the
run. All ranks use the peak of the fullest rank, so all decide alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.base.parallel import World, device_name
from trainer.checkpoint.commits import TrainState
from trainer.config.amounts import micro_batch_of, sequences_per_step
from trainer.config.config import RuntimeConfig, TrainConfig
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig
from trainer.engines.engine import Engine

MAX_TOKENS = 65_536  # of one micro-batch
CPU_SEQUENCES = 8  # on a CPU: with more of them in the cache, nothing is faster
SPARE_FRACTION = 0.06  # of the memory: fragmentation, NCCL's buffers, a checkpoint's copy


@dataclass(frozen=True)
class Fit:
    """A micro-batch size in sequences, and the reason for it in one line."""

    micro_batch_size: int
    why: str


def choose_micro_batch(
    engine: Engine, model: ModelConfig, config: TrainConfig, runtime: RuntimeConfig, state: TrainState, world: World
) -> Fit:
    """The micro-batch size: the configured one; with `auto`, the largest that fits.

    A run with `auto` that resumes on as many ranks and the same kinds of devices, with the same memory settings, keeps
    its size: another size would add gradients in another order. A collective call. UserError if not even one sequence
    fits.
    """
    if runtime.micro_batch_size != "auto":
        return Fit(runtime.micro_batch_size, f"micro-batches of up to {runtime.micro_batch_size}, as configured")
    fitted = (state.world_size, state.devices, state.memory_settings)
    if state.micro_batch_size and fitted == (world.world_size, devices_of(world), memory_settings(engine, runtime)):
        return Fit(state.micro_batch_size, f"micro-batches of {state.micro_batch_size}, as before the resume")
    share = -(-sequences_per_step(model, config) // world.world_size)  # the largest
    if world.device.type != "cuda":
        size = micro_batch_of(share, CPU_SEQUENCES)
        return Fit(size, f"micro-batches of {size}: {share} sequences in equal parts of up to {CPU_SEQUENCES}")

    def peak(size: int) -> int:
        return max(world.gather(peak_bytes(engine, model, size, world.device)))

    held = min(world.gather(torch.cuda.memory_allocated(world.device))) if engine.collective else 0
    peak(1)  # the libraries allocate their own memory in their first call
    world.mean_(torch.zeros(1 << 20, device=world.device))  # and so does NCCL
    free, total = torch.cuda.mem_get_info(world.device)
    available = min(world.gather(free + torch.cuda.memory_reserved(world.device) - int(SPARE_FRACTION * total)))
    most = max(1, MAX_TOKENS // model.block_size)
    size, used = largest_that_fits(peak, share, most, available, held)
    torch.cuda.empty_cache()
    limit = f"{MAX_TOKENS:,} tokens are enough" if size == micro_batch_of(share, most) else "no more fit"
    used_gib, available_gib = used / 2**30, available / 2**30
    return Fit(
        size, f"micro-batches of {size}: {used_gib:.1f} GiB measured, {available_gib:.1f} GiB available; {limit}"
    )


def devices_of(world: World) -> str:
    """The kinds of devices of all ranks. A collective call."""
    return " and ".join(sorted(set(world.gather(device_name(world.device)))))


def memory_settings(engine: Engine, runtime: RuntimeConfig) -> str:
    """The choices besides the device that decide how much memory a micro-batch takes."""
    options = ", ".join(f"{name} {getattr(runtime, name)}" for name in ("recompute", "reduce_dtype", "deterministic"))
    return f"{engine.why}; {engine.precision}; {options}"


def largest_that_fits(
    peak: Callable[[int], int], share: int, most: int, available: int, held: int = 0
) -> tuple[int, int]:
    """The size of the fewest micro-batches of `share` whose `peak` is at most `available` bytes, and that peak. `most`:
    an upper limit of the size; `held`: bytes before the first trial, which must not fail then.

    It tries no size beyond the line through the two largest peaks so far, because not every library recovers from
    running out of memory.
    """
    most = micro_batch_of(share, most)
    too_large = most + 1  # the smallest size known not to fit
    fitting = [(0, held)]
    guess = 1
    while guess > fitting[-1][0]:
        used = peak(guess)
        if used <= available:
            fitting.append((guess, used))
        elif guess == 1:
            raise UserError(
                f"runtime.micro_batch_size: one sequence takes {used / 2**30:.1f} GiB of GPU memory, and "
                f"{available / 2**30:.1f} GiB are available; use runtime.recompute, a smaller model or a larger GPU"
            )
        else:
            too_large = guess
        (before, low), (size, high) = fitting[-2:]
        more = int((available - high) * (size - before) / max(1, high - low))
        # The first peak includes gradients and, without `held`, weights and moments. The line to it is too steep for
        # more than one step, which may be beyond it unless no trial may fail.
        reach = min(too_large - 1, 2 if size == 1 and not held else size + more)
        guess = micro_batch_of(share, reach)
        if (
            guess <= size and 8 * reach > 9 * size
        ):  # as many micro-batches as before, but a larger trial gives a better line
            guess = reach
    size, used = max((size, used) for size, used in fitting if size and micro_batch_of(share, size) == size)
    return size, used


def peak_bytes(engine: Engine, model: ModelConfig, size: int, device: torch.device) -> int:
    """The peak of the memory that torch reserves on the device to train and to validate with `size` sequences."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.arange(size * model.block_size, device=device).view(size, model.block_size) % model.vocab_size
    try:
        engine.accumulate(
            iter(2 * [(tokens, tokens)]), 2, 2 * size
        )  # two, as in a step: memory of the first stays reserved
        engine.loss(tokens, tokens)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError as error:
        if engine.collective:  # the other ranks wait in this forward pass: end at once, and they end too
            raise UserError(
                f"runtime.micro_batch_size: {size} sequence(s) on each rank do not fit into GPU memory; "
                "use runtime.recompute, more GPUs or a smaller model"
            ) from error
        return torch.cuda.mem_get_info(device)[1]
    return torch.cuda.max_memory_reserved(device)
