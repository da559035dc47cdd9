"""The loss on held-out tokens."""

from collections.abc import Callable
from itertools import islice

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
    count = min(sum(s.windows(data.block_size) for s in data.shards), max(1, max_tokens // data.block_size))
    places = ((s, w) for s, shard in enumerate(data.shards) for w in range(shard.windows(data.block_size)))
    windows = list(islice(places, world.rank, count, world.world_size))
    total = torch.zeros((), dtype=torch.float64 if world.device.type != "mps" else torch.float32, device=world.device)
    largest_share = -(-count // world.world_size)
    for start in range(0, largest_share, batch_size):
        on_batch()
        if batch := windows[start : start + batch_size]:
            tokens, targets = to_device(data.windows(batch), world.device)
            total += loss_of(tokens, targets) * targets.numel()
    loss, tokens_seen = world.sum(float(total), len(windows) * data.block_size)
    return loss / tokens_seen
