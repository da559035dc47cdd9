"""The optimizers of the plain module: AdamW, and Muon with AdamW beside it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.base.places import Place
from trainer.config.config import TrainConfig
from trainer.optim import muon
from trainer.optim.owners import Owners, Shapes, Slice, slices_of
from trainer.optim.rates import Group, Rates, group_of, moments_of


class AdamW:
    """torch's fused AdamW (Loshchilov & Hutter 2019), with the numbers of each group.

    The state is allocated before the first step, so that a checkpoint can fill it. The class `torch.optim.AdamW`
    allocates it in that step, and imports all of torch.compile: on a CPU that takes 2 of the 5 s from the start of a
    process to its first step.
    """

    squares: Mapping[str, Tensor] = {}  # of Muon, whole, by name: of the matrices that this rank owns

    def __init__(
        self, model: torch.nn.Module, config: TrainConfig, groups: Collection[Group] = get_args(Group)
    ) -> None:
        self.config = config
        self.rates = Rates.adamw(config.learning_rate)
        self.param_groups: list[dict[str, Any]] = []
        for group in groups:
            if parameters := list(parameters_of(model, group).values()):
                moments = moments_of(group, config)
                self.param_groups.append({"params": parameters, "moments": moments, "group": group})
        moved = [p for group in self.param_groups for p in group["params"]]
        self.exp_avg: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in moved}
        self.exp_avg_sq: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in moved}
        self.steps: dict[Tensor, Tensor] = {p: torch.zeros((), device=p.device) for p in moved}

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Update the parameters by their gradients, divided by `divisor` if it is given, unless `skip` is 1.0. Both are
        scalars on the device, so the host does not wait for them."""
        for group in self.param_groups:
            parameters, moments = group["params"], group["moments"]
            adamw(
                parameters,
                [p.grad for p in parameters],
                [self.exp_avg[p] for p in parameters],
                [self.exp_avg_sq[p] for p in parameters],
                [],
                [self.steps[p] for p in parameters],
                fused=True,
                grad_scale=divisor,
                found_inf=skip,
                amsgrad=False,
                beta1=moments.beta1,
                beta2=moments.beta2,
                lr=self.rates.of[group["group"]],
                weight_decay=moments.decay,
                eps=moments.epsilon,
                maximize=False,
            )

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far. The bias correction of the moments depends on it."""
        for count in self.steps.values():
            count.fill_(steps)

    def state(self) -> dict[str, Mapping[Tensor, Tensor]]:
        """What a checkpoint has to hold, by kind and parameter."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


class Muon(AdamW):
    """Muon for the matrices of the blocks, AdamW for all other parameters.

    The parameters may be shards: `slices` has the parts of all matrices that every rank of `group` holds, in the order
    of its parameters, and `shapes` the whole ones'. Without them, this rank moves all matrices.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: TrainConfig,
        shapes: Shapes | None = None,
        slices: Sequence[Sequence[Slice]] = (),
        rank: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, config, [group for group in get_args(Group) if group != "matrix"])
        self.matrices = parameters_of(model, "matrix")
        self.momentum = {p: torch.zeros_like(p, requires_grad=False) for p in self.matrices.values()}
        self.shapes = shapes or {name: tuple(p.shape) for name, p in self.matrices.items()}
        slices = slices or [slices_of({name: [Place(0, p.numel())] for name, p in self.matrices.items()})]
        device = next(model.parameters()).device
        self.owners = Owners(self.shapes, slices, rank, device, group=group)
        self.squares = self.owners.squares

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        super().step(divisor, skip)
        rates, applied = self.rates, 1.0 if skip is None else 1.0 - skip
        sizes = [p.numel() for p in self.matrices.values()]
        ahead = torch.empty(sum(sizes), dtype=torch.bfloat16, device=self.owners.device)
        parts = dict(zip(self.matrices, ahead.split(sizes), strict=True))  # in the order of the slices
        for name, p in self.matrices.items():
            assert p.grad is not None
            gradient = p.grad if divisor is None else p.grad / divisor
            if skip is not None:
                gradient = torch.where(skip > 0, self.momentum[p], gradient)  # then the momentum stays
            parts[name].copy_(muon.look_ahead(self.momentum[p], gradient, rates.momentum).view(-1))
        self.owners.begin(ahead).finish((1 - muon.BETA2) * applied)
        for name, p in self.matrices.items():
            decay = rates.matrix_decay * muon.factor_of(name, *self.shapes[name])
            muon.move_(p, parts[name].view(p.shape), rates.of["matrix"] * applied, decay)

    def state(self) -> dict[str, Mapping[Tensor, Tensor]]:
        return super().state() | {"momentum": self.momentum}


def parameters_of(model: torch.nn.Module, group: Group) -> dict[str, Tensor]:
    """The parameters of a group by name."""
    return {name: p for name, p in model.named_parameters() if group_of(name, p.dim()) == group}


def optimizer_for(model: torch.nn.Module, config: TrainConfig) -> AdamW:
    """The optimizer of the configuration."""
    return Muon(model, config) if config.optimizer == "muon" else AdamW(model, config)
