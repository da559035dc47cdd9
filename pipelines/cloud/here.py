"""The expected hours and disk of a run on this machine: `skytrain run` says them before a long run begins.

The speed is that of the run's own attempts on such a machine, that of the plan for these GPUs, or an estimate for CPUs.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.artifacts.manifest import ArtifactPlan
from pipelines.bench.throughput import Throughput, gpu_count, speed_on
from pipelines.cloud.planner import evaluated_tokens, tokenize_hours, tokens_of, training_tokens, workload
from pipelines.job.prices import gpus_here
from pipelines.recipe import Recipe
from pipelines.stage import STAGES
from trainer.amounts import state_bytes
from trainer.errors import UserError
from trainer.store import Store

LONG_HOURS = 24.0  # what takes longer needs the user's consent
SHORT_FLOPS, SHORT_TOKENS = 1e14, 1e9  # an hour of a very slow CPU
CORE_FLOPS = 20e9  # of a training step, a second; 2 cores (torch 2.13) reached 0.4 to 0.7 of a matrix product's speed


@dataclass(frozen=True)
class RunHere:
    """The rest of a run on this machine."""

    machine: str  # "2 CPU cores", "1 x H100:8"
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
    these GPUs is unknown."""
    wanted = STAGES[: STAGES.index(until) + 1]
    if (recipe.train_flops if "train" in wanted else 0.0) < SHORT_FLOPS and tokens_of(recipe) < SHORT_TOKENS:
        return None
    work, cores = workload(recipe, store, plans), os.cpu_count() or 1
    gpus = (None if recipe.runtime.device == "cpu" else gpus_here()) or ""
    try:
        speed = speed_on(recipe.model, recipe.runtime, gpus, nodes, work.own, recipe.train.precision)
    except UserError:
        if gpus:
            return None
        of_cpu = nodes * cores * CORE_FLOPS / recipe.model.flops_per_token
        speed = Throughput(of_cpu, "estimated", f"{CORE_FLOPS / 1e9:.0f} GFLOP/s a core")
    per_hour = 3600 * speed.tokens_per_second
    hours = {
        "tokenize": tokenize_hours(tokens_of(recipe), cores),
        "train": training_tokens(work) / per_hour,
        "evaluate": evaluated_tokens(recipe, gpu_count(gpus) if gpus else 1) / 3 / per_hour,  # the forward pass alone
        "export": 0.0,
    }
    # Shards of two bytes a token; two checkpoints and one being written; the weights twice.
    disk = 2.0 * tokens_of(recipe) + 3 * state_bytes(recipe.model, recipe.train) + 2 * 4 * recipe.model.parameters
    folder = next(folder for folder in (home, *home.parents) if folder.is_dir())
    return RunHere(
        f"{nodes} x {gpus or f'{cores} CPU cores'}",
        {stage: hours[stage] for stage in wanted if stage in work.stages},
        disk,
        shutil.disk_usage(folder).free,
        speed,
    )
