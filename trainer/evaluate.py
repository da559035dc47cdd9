"""The loss on held-out tokens, and bits per byte of their text."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trainer.data import TokenData, to_device
from trainer.parallel import World


@torch.no_grad()
def validation_loss(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    data: TokenData,
    max_tokens: int,
    batch_size: int,
    world: World,
    on_batch: Callable[[], None] = lambda: None,
) -> float:
    """Mean cross-entropy in nats over the first `max_tokens` tokens of a split, in file order.

    `loss_of` returns the mean loss of inputs and targets (B, T). The ranks divide the windows. The mean is over tokens,
    so it does not depend on the number of ranks. `on_batch` is called before each batch, equally often on every rank,
    so it may communicate; it may raise to end the measurement.
    """
    total, count = _zero(world.device), 0
    for tokens, targets in _batches(data, max_tokens, batch_size, world, on_batch):
        total += loss_of(tokens, targets) * targets.numel()
        count += targets.numel()
    loss, tokens_seen = world.sum(float(total), count)
    return loss / tokens_seen


@torch.no_grad()
def validation(
    losses_of: Callable[[Tensor, Tensor], Tensor],
    data: TokenData,
    max_tokens: int,
    batch_size: int,
    world: World,
    token_bytes: Tensor,
    on_batch: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """The loss in nats per token, as `validation_loss`, and the loss in bits per byte of text.

    `losses_of` returns the losses of inputs and targets (B, T), token by token; `token_bytes` has the bytes of every
    token id. Bits per byte do not depend on the tokenizer, so runs with different ones compare. As in nanochat, tokens
    without bytes (end-of-text) do not count for them, neither their losses nor their number.
    """
    bytes_of = token_bytes.to(world.device)
    total, in_text, size, count = (_zero(world.device) for _ in range(4))
    for tokens, targets in _batches(data, max_tokens, batch_size, world, on_batch):
        losses, sizes = losses_of(tokens, targets), bytes_of[targets]
        total += losses.sum()
        in_text += (losses * (sizes > 0)).sum()
        size += sizes.sum()
        count += targets.numel()
    nats, text_nats, text_bytes, tokens_seen = world.sum(*map(float, (total, in_text, size, count)))
    return nats / tokens_seen, text_nats / math.log(2) / text_bytes if text_bytes else math.inf


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)


def _batches(
    data: TokenData, max_tokens: int, batch_size: int, world: World, on_batch: Callable[[], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the first windows, as inputs and targets. Every rank passes as many rounds."""
    places = data.first_windows(max(1, max_tokens // data.block_size))
    windows = places[world.rank :: world.world_size]
    largest_share = -(-len(places) // world.world_size)
    for start in range(0, largest_share, batch_size):
        on_batch()
        if batch := windows[start : start + batch_size]:
            yield to_device(data.windows(batch), world.device)
