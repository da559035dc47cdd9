"""The optimizers of the plain module: AdamW, and Muon with AdamW beside it."""

from collections.abc import Collection, Mapping
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.config import TrainConfig
from trainer.optim import muon
from trainer.optim.rates import Group, Rates, group_of, moments_of


class AdamW:
    """torch's fused AdamW (Loshchilov & Hutter 2019), with the numbers of each group.

    The state is allocated before the first step, so that a checkpoint can fill it. The class `torch.optim.AdamW`
    allocates it in that step, and imports all of torch.compile: on a CPU that takes 2 of the 5 s from the start of a
    process to its first step.
    """

    def __init__(
        self, model: torch.nn.Module, config: TrainConfig, groups: Collection[Group] = get_args(Group)
    ) -> None:
        self.config = config
        self.rates = Rates.adamw(config.learning_rate)
        self.param_groups: list[dict[str, Any]] = []  # GradScaler reads them
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
    """Muon for the matrices of the blocks, AdamW for all other parameters. Every rank moves all matrices."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig) -> None:
        super().__init__(model, config, [group for group in get_args(Group) if group != "matrix"])
        self.matrices = parameters_of(model, "matrix")
        self.momentum: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in self.matrices.values()}
        self.squares = {p: p.new_zeros(max(p.shape), requires_grad=False) for p in self.matrices.values()}

    @torch.no_grad()
    def step(self, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        assert divisor is None and skip is None, "only AdamW takes them"
        super().step()
        rates, directions = self.rates, {}
        for name, p in self.matrices.items():
            assert p.grad is not None
            directions[name] = muon.look_ahead(self.momentum[p], p.grad, rates.momentum)
        muon.to_directions_(directions, {name: self.squares[p] for name, p in self.matrices.items()})
        for name, p in self.matrices.items():
            decay = rates.matrix_decay * muon.factor_of(name, *p.shape)
            muon.move_(p, directions[name], rates.of["matrix"], decay)

    def state(self) -> dict[str, Mapping[Tensor, Tensor]]:
        return super().state() | {"momentum": self.momentum, "squares": self.squares}


def parameters_of(model: torch.nn.Module, group: Group) -> dict[str, Tensor]:
    """The parameters of a group by name."""
    return {name: p for name, p in model.named_parameters() if group_of(name, p.dim()) == group}


def optimizer_for(model: torch.nn.Module, config: TrainConfig) -> AdamW:
    """The optimizer of the configuration."""
    return Muon(model, config) if config.optimizer == "muon" else AdamW(model, config)
