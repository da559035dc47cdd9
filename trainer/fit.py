"""How many sequences a rank pushes through at once, where the user leaves it to us.

Bigger micro-batches fill a GPU better, up to 65,536 tokens (64 x 1024, where the peers are measured); beyond
that only memory grows. So: the largest divisor of the rank's share of a step that fits. Memory grows about
linearly with the micro-batch, but how steeply is the engine's own affair (what it recomputes, in how many
chunks the head goes). So it is measured: one and two sequences are pushed through, a line is laid through the
two peaks, the largest size below it is tried, and the line goes on from there, until the next divisor would
not fit. Nothing is added up over the ranks meanwhile, or one that runs out of memory would leave the others waiting.
All decide alike, by the fullest of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import ModelConfig, micro_batch_of
from trainer.errors import UserError
from trainer.parallel import World

Batch = tuple[Tensor, Tensor]
MOST_TOKENS = 65_536  # in one micro-batch
ON_A_CPU = 8  # sequences: more of them in the cache gain nothing
SPARE = 0.06  # of the memory: fragmentation, NCCL's buffers, a checkpoint's copy on its way


@dataclass(frozen=True)
class Fit:
    """Sequences a rank pushes through at once, and how that was found."""

    micro_batch_size: int
    why: str


def fit_micro_batch(
    accumulate: Callable[[Iterator[Batch], int], Tensor], model: ModelConfig, share: int, world: World
) -> Fit:
    """The largest divisor of `share`, a rank's sequences of a step, that fits on every rank's device.

    `accumulate` is the engine's, in rehearsal: all of a step but the update and what the ranks tell each other. All
    ranks call this together. UserError where not even one sequence fits.
    """
    if world.device.type != "cuda":
        size = micro_batch_of(share, ON_A_CPU)
        return Fit(size, f"micro-batches of {size}: the most up to {ON_A_CPU} that divide {share} sequences")

    def peak(size: int) -> int:
        return max(world.gather(peak_bytes(accumulate, model, size, world.device)))

    peak(1)  # the libraries take their own share of the memory with their first call
    world.mean_(torch.zeros(1 << 20, device=world.device))  # and so does NCCL
    free, total = torch.cuda.mem_get_info(world.device)
    room = min(world.gather(free + torch.cuda.memory_reserved(world.device) - int(SPARE * total)))
    most = max(1, MOST_TOKENS // model.block_size)
    size, used = largest_that_fits(peak, share, most, room)
    torch.cuda.empty_cache()
    limit = f"{MOST_TOKENS:,} tokens are enough" if size == micro_batch_of(share, most) else "no more fit"
    gib, of = used / 2**30, room / 2**30
    return Fit(size, f"micro-batches of {size}: {gib:.1f} GiB measured, {of:.1f} may be used; {limit}")


def largest_that_fits(peak: Callable[[int], int], share: int, most: int, room: int) -> tuple[int, int]:
    """The largest divisor of `share` up to `most` whose `peak` lies within `room` bytes, and that peak.

    Tries nothing that the line through the two largest peaks so far says won't fit: not every library gets
    over running out of memory.
    """
    most = micro_batch_of(share, most)
    below = most + 1  # the smallest that was seen not to fit
    fitting = [(0, 0)]
    guess = 1
    while guess > fitting[-1][0]:
        used = peak(guess)
        if used <= room:
            fitting.append((guess, used))
        elif guess == 1:
            raise UserError(
                f"runtime.micro_batch_size: one sequence takes {used / 2**30:.1f} GiB of GPU memory where "
                f"{room / 2**30:.1f} may be used; use runtime.recompute, a smaller model or a larger GPU"
            )
        else:
            below = guess
        (before, low), (size, high) = fitting[-2:]
        more = int((room - high) * (size - before) / max(1, high - low))
        # The line from nothing to the first peak holds weights and moments: too steep for more than one step.
        reach = min(below - 1, 2 if size == 1 else size + more)
        guess = micro_batch_of(share, reach)
        if guess <= size and 8 * reach > 9 * size:  # no divisor, but from farther on the line is a better one
            guess = reach
    size, used = max((size, used) for size, used in fitting if size and share % size == 0)
    return size, used


def peak_bytes(
    accumulate: Callable[[Iterator[Batch], int], Tensor], model: ModelConfig, size: int, device: torch.device
) -> int:
    """The most memory that torch holds on the device while a micro-batch of `size` sequences goes through."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.arange(size * model.block_size, device=device).view(size, model.block_size) % model.vocab_size
    try:
        accumulate(iter(2 * [(tokens, tokens)]), 2)  # two, as in a step: the second finds what the first has left
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        return torch.cuda.mem_get_info(device)[1]
    return torch.cuda.max_memory_reserved(device)
