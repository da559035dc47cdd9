"""Muon over shards: each matrix goes to the rank that owns it, and its direction comes back.

The momentum is element-wise, so every rank updates its slices of it, wherever the border of a shard cuts a matrix. A
direction needs the whole matrix. So each matrix has an owner, and a step has two all-to-all exchanges: bf16 slices of
the momentum to the owners, and the same slices of the directions back. In each, a rank sends 2 bytes for every element
of its slices, but those that it owns. The owners share the work evenly by its FLOPs, and make matrices of equal
shape orthogonal together.

With one shard, a rank owns all matrices and sends nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.places import Place
from trainer.optim import muon

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Slice:
    """A part of a matrix, at `at` in a rank's buffer of its slices."""

    name: str
    place: Place
    at: int

    @property
    def size(self) -> int:
        return self.place.size

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.at : self.at + self.size]


def slices_of(places: Mapping[str, Sequence[Place]]) -> list[Slice]:
    """The slices of a rank that holds these places of matrices one after the other."""
    slices: list[Slice] = []
    for name, parts in places.items():
        for place in parts:
            slices.append(Slice(name, place, slices[-1].at + slices[-1].size if slices else 0))
    return slices


def owners_of(shapes: Shapes, ranks: int) -> dict[str, int]:
    """The owner of each matrix: the most expensive matrix first, each to the rank with the least work so far."""
    work = {name: prod(shape) * min(shape) for name, shape in shapes.items()}
    load = [0] * ranks
    owners: dict[str, int] = {}
    for name in sorted(work, key=lambda n: (-work[n], n)):
        owners[name] = load.index(min(load))
        load[owners[name]] += work[name]
    return owners


class Owners:
    """One rank's part in the directions of all matrices.

    slices: of every rank, which together are all matrices, and in the same order on every rank. squares: those of
    `muon.to_directions_`, of the matrices that this rank owns, by name. squared: muon's. group: of these ranks; None:
    all.
    """

    def __init__(
        self,
        shapes: Shapes,
        slices: Sequence[Sequence[Slice]],
        rank: int,
        device: torch.device,
        squared: muon.Squared = muon.squared,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        owners = owners_of(shapes, len(slices))
        self.shapes = {name: shape for name, shape in shapes.items() if owners[name] == rank}
        self.squares = {name: torch.zeros(max(shape), device=device) for name, shape in self.shapes.items()}
        self.squared, self.group, self.device = squared, group, device
        self.alone = len(slices) == 1
        self.mine = sorted(slices[rank], key=lambda s: owners[s.name])  # by the rank that gets them; a stable sort
        self.theirs = [s for of_rank in slices for s in of_rank if owners[s.name] == rank]  # by the rank that has them
        self.sends = [sum(s.size for s in self.mine if owners[s.name] == to) for to in range(len(slices))]
        self.receives = [sum(s.size for s in of_rank if owners[s.name] == rank) for of_rank in slices]

    def begin(self, buffer: Tensor) -> "Exchange":
        """Begin to send a buffer of this rank's slices (bf16), after the work that the current stream has by now."""
        return Exchange(self, buffer)


class Exchange:
    """An exchange that has begun. `finish` turns the buffer's slices of the momentum into slices of the directions."""

    def __init__(self, owners: Owners, buffer: Tensor) -> None:
        self.owners, self.buffer = owners, buffer
        if not owners.alone:
            self.outgoing = torch.cat([s.of(buffer) for s in owners.mine]) if owners.mine else buffer.new_empty(0)
            self.incoming = buffer.new_empty(sum(owners.receives))
            self.work = dist.all_to_all_single(
                self.incoming, self.outgoing, owners.receives, owners.sends, group=owners.group, async_op=True
            )

    def finish(self, new: Tensor | float) -> None:
        """Wait for the slices, and exchange their directions. new: the weight of this step in the squares."""
        owners = self.owners
        if owners.alone:
            matrices = {s.name: s.of(self.buffer).view(owners.shapes[s.name]) for s in owners.mine}
            muon.to_directions_(matrices, owners.squares, new, owners.squared)
            return
        self.work.wait()
        matrices = {name: self.buffer.new_empty(shape) for name, shape in owners.shapes.items()}
        parts = [s.place.of(matrices[s.name].view(-1)) for s in owners.theirs]
        received = self.incoming.split([s.size for s in owners.theirs])
        received = [flat.view(part.shape) for flat, part in zip(received, parts, strict=True)]
        if owners.theirs:
            torch._foreach_copy_(parts, received)
            muon.to_directions_(matrices, owners.squares, new, owners.squared)
            torch._foreach_copy_(received, parts)
        dist.all_to_all_single(self.outgoing, self.incoming, owners.sends, owners.receives, group=owners.group)
        if owners.mine:
            sent = self.outgoing.split([s.size for s in owners.mine])
            torch._foreach_copy_([s.of(self.buffer) for s in owners.mine], sent)
