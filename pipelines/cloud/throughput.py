"""Training speeds of models on GPUs: a few measured runs, and estimates from them for other GPUs.

The estimates use MFU, the share of the GPUs' peak that the model reaches, because it varies less between runs than
speed does. Between measured sizes it is interpolated over the logarithm of the parameters, and beyond them it is
constant. Every doubling of the GPUs has its measured loss. Every GPU is assumed to reach the same MFU. A speed is
`measured` if exactly this run was measured, else `estimated`.

For comparison, llm.c (another trainer, CUDA C) as its author published it: 124M on 8 x A100-80GB in 94 min, 60% MFU;
1558M on 8 x H100 in 24 h, 50%; the latter on 16 x H100 in 12 h, so without loss between two nodes over InfiniBand. So
our estimate is too low on A100. It is a little too high for small models on H100, which has the arithmetic of an H200
and 70% of its memory bandwidth. It is too high on several nodes where NCCL has only TCP between them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipelines.bench.measurements import measurements
from pipelines.recipe import Recipe
from trainer.config import ModelConfig, RuntimeConfig, TrainConfig, check_shares
from trainer.errors import UserError
from trainer.metrics import PEAK_FLOPS

# Dense bf16 peak by SkyPilot's name of the GPU up to a hyphen, FLOP/s. Source: NVIDIA's data sheets.
PEAKS = PEAK_FLOPS | {"B200": 2250e12, "L40S": 362e12, "A10": 125e12, "A10G": 70e12, "L4": 121e12}
# All of them have bf16, which the fused engine needs. The following have the fp8 that it needs; some of them occur in
# private clusters only.
FP8 = ("H100", "H200", "B200", "H20", "H800", "GH200", "GB200", "B300", "GB300")
# The launch of a layer's kernels, forward and backward: no GPU runs a small model faster. Estimated.
SECONDS_PER_LAYER = 1e-3
SMALL_GPU, SMALL_HOURS = "L4:1", 1.0


@dataclass(frozen=True)
class Throughput:
    """A training speed and its source."""

    tokens_per_second: float
    kind: str  # measured, estimated
    source: str


@dataclass(frozen=True)
class MeasuredRun:
    """A measured run."""

    parameters: float
    gpu: str  # "H200:4", on each node
    nodes: int
    engine: str  # as engine_of names it
    mfu: float
    tokens_per_second: float
    source: str


SOURCE = "docs/measurements.md: torch 2.11, CUDA 13"
FIGURES = measurements()
MEASURED = tuple(
    MeasuredRun(
        FIGURES.sizes[speed.size].parameters,
        speed.gpus,
        1,
        f"{speed.engine}" if speed.precision == "bf16" else f"{speed.engine} {speed.precision}",
        speed.mfu,
        speed.tokens_per_second,
        SOURCE,
    )
    for speed in FIGURES.speeds
    if speed.plan and speed.mfu is not None
)
MFU_AT_124M = {known.engine: known.mfu for known in MEASURED if known.parameters < 2e8 and known.gpu == "H200:1"}
EAGER = MFU_AT_124M["eager"] / MFU_AT_124M["compiled"]  # of the compiled speed; taken for all sizes
# The share of the speed that is left with a fixed order of additions (124M), and with recomputed activations (1558M
# fused; elsewhere the forward pass again, a third of the FLOPs: computed, not measured).
DETERMINISTIC = {"fused": FIGURES.value("deterministic_fused_124m")}
DETERMINISTIC |= dict.fromkeys(("compiled", "eager"), FIGURES.value("deterministic_eager_124m"))
RECOMPUTE = {"fused": FIGURES.value("recompute_fused_1558m"), "compiled": 1 / 1.3, "eager": 1 / 1.3}
# The share of the MFU that is left with twice the GPUs, from 1 and 4 at 124M. Baselines differ per engine (fused: the
# same four by themselves; the others: an earlier compiled run); only the ratios are meaningful.
FOUR_COMPILED = next(known.mfu for known in MEASURED if (known.gpu, known.engine) == ("H200:4", "compiled"))
PER_DOUBLING = {"fused": FIGURES.value("four_gpus_fused_124m") ** 0.5}
PER_DOUBLING |= dict.fromkeys(("compiled", "eager"), (FOUR_COMPILED / FIGURES.value("one_gpu_compiled_124m")) ** 0.5)


def peak_of(accelerators: str) -> float | None:
    """FLOP/s of a node such as "A100-80GB:8"; None for an unknown GPU."""
    gpu, _, count = accelerators.partition(":")
    peak = PEAKS.get(gpu.partition("-")[0])
    return None if peak is None else peak * int(count)


def gpu_count(accelerators: str) -> int:
    """ "H100:8" -> 8."""
    return int(accelerators.partition(":")[2])


def check_gpus(model: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, accelerators: str, nodes: int) -> None:
    """UserError if `nodes` nodes with these GPUs are too many for a step's batch, or lack its precision."""
    gpus = 1 if runtime.device == "cpu" else gpu_count(accelerators)
    ranks = gpus if runtime.processes == "auto" else runtime.processes
    check_shares(model, train, nodes * ranks)
    if train.precision.startswith("fp8") and accelerators.partition(":")[0].partition("-")[0] not in FP8:
        raise UserError(f"no hardware for train.precision {train.precision}; these GPUs have it: {', '.join(FP8)}")


def trains_on_a_small_gpu(recipe: Recipe) -> bool:
    """Whether one SMALL_GPU is expected to train the recipe in SMALL_HOURS, so that no larger machine is worth it."""
    try:
        check_gpus(recipe.model, recipe.train, recipe.runtime, SMALL_GPU, 1)
    except UserError:
        return False
    speed = speed_on(recipe.model, recipe.runtime, SMALL_GPU, precision=recipe.train.precision)
    return recipe.train_tokens / speed.tokens_per_second < 3600 * SMALL_HOURS


def engine_of(runtime: RuntimeConfig, precision: str) -> str:
    """The engine of a step on rented GPUs, with its precision if that is fp8."""
    if precision.startswith("fp8"):
        return f"fused {precision}"
    if runtime.engine == "auto":
        return "compiled" if precision in ("fp32", "fp16") else "fused"
    return runtime.engine


def speed_on(
    model: ModelConfig,
    runtime: RuntimeConfig,
    accelerators: str,
    nodes: int = 1,
    own: Iterable[MeasuredRun] = (),
    precision: str = "auto",
) -> Throughput:
    """Tokens a second on `nodes` nodes with these GPUs. UserError for an unknown GPU.

    `own` are measurements of this run, or of one with the same model and runtime. On the same machines they are the
    result; on others they correct the estimate by its error there.
    """
    own = list(own)
    for known in own:
        if (known.gpu, known.nodes) == (accelerators, nodes):
            return Throughput(known.tokens_per_second, "measured", known.source)
    plain = not (runtime.deterministic or runtime.recompute)
    for known in MEASURED if plain else ():
        same = abs(known.parameters / model.parameters - 1) < 0.01 and known.engine == engine_of(runtime, precision)
        if same and (known.gpu, known.nodes) == (accelerators, nodes):
            return Throughput(known.tokens_per_second, "measured", known.source)
    speed = estimate(model, runtime, accelerators, nodes, precision)
    if own:
        estimated = estimate(model, runtime, own[0].gpu, own[0].nodes, precision)
        factor = own[0].tokens_per_second / estimated.tokens_per_second
        source = f"{speed.source}; times {factor:.2f}, as {own[0].source}"
        return replace(speed, tokens_per_second=factor * speed.tokens_per_second, source=source)
    return speed


def estimate(model: ModelConfig, runtime: RuntimeConfig, accelerators: str, nodes: int, precision: str) -> Throughput:
    """The estimated speed on `nodes` nodes with these GPUs. UserError for an unknown GPU."""
    peak = peak_of(accelerators)
    if peak is None:
        raise UserError(f"{accelerators}: the speed of this GPU is unknown; known are {', '.join(PEAKS)}")
    gpus = nodes * gpu_count(accelerators)
    engine = engine_of(runtime, precision).partition(" ")[0]
    mfu = mfu_of(model.parameters, runtime, precision) * PER_DOUBLING[engine] ** math.log2(gpus)
    at_once = 64 if runtime.micro_batch_size == "auto" else runtime.micro_batch_size
    most = gpus * at_once * model.block_size / (model.n_layer * SECONDS_PER_LAYER)
    tokens_per_second = min(most, mfu * nodes * peak / model.flops_per_token)
    basis = f"{mfu:.0%} MFU" if tokens_per_second < most else f"{SECONDS_PER_LAYER * 1e3:.0f} ms a layer"
    return Throughput(tokens_per_second, "estimated", f"{basis}, from 1 and 4 x H200")


def mfu_of(parameters: float, runtime: RuntimeConfig, precision: str) -> float:
    """MFU of one GPU, interpolated over the logarithm of the size between the measured ones of the same engine."""
    engine = engine_of(runtime, precision)
    measured = "compiled" if engine == "eager" else engine
    (small, low), (large, high) = (
        (m.parameters, m.mfu) for m in MEASURED if m.gpu == "H200:1" and m.engine == measured
    )
    engine = engine.partition(" ")[0]
    share = min(1.0, max(0.0, math.log(parameters / small) / math.log(large / small)))
    return (
        (low + share * (high - low))
        * (EAGER if engine == "eager" else 1)
        * (DETERMINISTIC[engine] if runtime.deterministic else 1)
        * (RECOMPUTE[engine] if runtime.recompute else 1)
    )
