"""The expected hours and disk of a run on this machine: `skytrain run` says them before a long run begins.

The speed is that of the run's own attempts on such a machine, that of the plan for these GPUs, or on a CPU a share of
a matrix product's speed, which is timed here. Work that is done already does not count.
"""

import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.cloud.estimates import (
    Workload,
    evaluated_tokens,
    tokenize_seconds,
    tokens_of,
    training_tokens,
    workload,
)
from pipelines.cloud.prices import gpus_here
from pipelines.cloud.throughput import Throughput, speed_on
from pipelines.nodes.address import processes_on_this_node
from pipelines.recipe import Recipe
from pipelines.stage import STAGES
from pipelines.tracking.ledger import attempts
from trainer.amounts import state_bytes
from trainer.errors import UserError
from trainer.model_config import ModelConfig
from trainer.store import LocalStore, Store

LONG_HOURS = 24.0  # what takes longer needs the user's consent
# Less than this is no reason to import torch (3 s): an hour of a very slow CPU.
SHORT_FLOPS, SHORT_TOKENS = 1e14, 1e9
# The share of a matrix product's speed that a step reaches on a CPU: 0.7 at 124M, 0.4 for smoke (2 cores, torch 2.13).
CPU_SHARE = 0.6
PRODUCT_SIZE, PRODUCT_SECONDS = 1024, 0.5


@dataclass(frozen=True)
class RunHere:
    """The rest of a run on this machine."""

    machine: str  # "2 CPU cores", "1 x H100:8"
    tokens: Mapping[str, int]  # to make and to train on, by stage
    hours: Mapping[str, float]  # by missing stage
    disk_bytes: float  # of shards, checkpoints and results
    free_bytes: float
    speed: Throughput

    @property
    def all_hours(self) -> float:
        return sum(self.hours.values())

    @property
    def is_long(self) -> bool:
        return self.all_hours > LONG_HOURS


def run_here(
    recipe: Recipe, plans: dict[str, ArtifactPlan], store: Store, until: str, home: Path, nodes: int = 1
) -> RunHere | None:
    """The rest of a run up to a stage on `nodes` machines like this one; None if it is surely short, or the speed of
    these GPUs is unknown. UserError if the configured device is not here."""
    wanted = STAGES[: STAGES.index(until) + 1]
    flops = recipe.train_flops if "train" in wanted else 0.0
    if flops < SHORT_FLOPS and tokens_of(recipe) < SHORT_TOKENS:
        return None
    work = workload(recipe, store, plans)
    stages = [stage for stage in wanted if stage in work.stages]
    machine, speed = machine_and_speed(work, nodes)
    if not stages or speed is None:
        return None
    made = max((a.progress.tokens or 0 for a in attempts(store, plans["tokenize"].prefix)), default=0)
    tokens = {"tokenize": max(0, tokens_of(recipe) - made), "train": int(training_tokens(work))}
    gpus = processes_on_this_node(recipe.runtime) if gpus_here() and recipe.runtime.device != "cpu" else 1
    seconds = {
        "tokenize": tokenize_seconds(tokens["tokenize"], os.cpu_count() or 1),
        "train": tokens["train"] / speed.tokens_per_second,
        "evaluate": evaluated_tokens(recipe, gpus) / 3 / speed.tokens_per_second,  # the forward pass alone
        "export": 0.0,
    }
    folder = next(folder for folder in (home, *home.parents) if folder.is_dir())
    return RunHere(
        machine if nodes == 1 else f"{nodes} x {machine}",
        {stage: tokens[stage] for stage in stages if stage in tokens},
        {stage: seconds[stage] / 3600 for stage in stages},
        disk_bytes(recipe, stages, isinstance(store, LocalStore)),
        shutil.disk_usage(folder).free,
        speed,
    )


def machine_and_speed(work: Workload, nodes: int) -> tuple[str, Throughput | None]:
    """This machine, and the speed of the training on it; None for GPUs of unknown speed."""
    from trainer.parallel import device_kind

    recipe = work.recipe
    if device_kind(recipe.runtime) != "cpu":
        ranks, gpu = processes_on_this_node(recipe.runtime), (gpus_here() or "a GPU:1").partition(":")[0]
        machine = f"{gpu}:{ranks}"
        try:
            return machine, speed_on(recipe.model, recipe.runtime, machine, nodes, work.own, recipe.train.precision)
        except UserError:
            return machine, None
    machine = f"{os.cpu_count()} CPU cores"
    if own := next((known for known in work.own_on_cpu if known.nodes == nodes), None):
        return machine, Throughput(own.tokens_per_second, "measured", own.source)
    return machine, speed_on_cpu(recipe.model, nodes)


def speed_on_cpu(model: ModelConfig, nodes: int = 1) -> Throughput:
    """The speed of training on this CPU, by the fastest matrix product within half a second: others may use it too."""
    import torch

    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE) for _ in range(2))
    fastest, until = math.inf, time.perf_counter() + PRODUCT_SECONDS
    while (began := time.perf_counter()) < until:
        a @ b
        fastest = min(fastest, time.perf_counter() - began)
    flops = 2 * PRODUCT_SIZE**3 / fastest
    basis = f"{CPU_SHARE:.0%} of a matrix product timed here ({flops / 1e9:,.0f} GFLOP/s)"
    return Throughput(nodes * CPU_SHARE * flops / model.flops_per_token, "estimated", basis)


def disk_bytes(recipe: Recipe, stages: list[str], local: bool) -> float:
    """What the stages keep on this disk: shards of 2 bytes a token, of which the cache of a bucket may keep fewer; two
    checkpoints and one being written; the weights twice."""
    shards = 2.0 * tokens_of(recipe) if "tokenize" in stages or not local else 0.0
    checkpoints = 3 * state_bytes(recipe.model, recipe.train) if "train" in stages else 0
    return shards + checkpoints + 2 * 4 * recipe.model.parameters
