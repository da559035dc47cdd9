"""Training speeds of models on GPUs, and their memory: measured runs, and estimates from them for other GPUs.

A speed is `measured` where exactly this step was measured (measurements.yaml, by `skytrain bench`). Elsewhere it is MFU
times the GPUs' peak: `estimated` on a kind of GPU that was measured with any model, and `assumed` on every other one,
which is taken to reach the MFU of an H200, or of an H100 where no H200 was measured. The MFU is that of the same
family, interpolated over the logarithm of the parameters; a family without measurements counts as GPT-2. Bench takes
seconds, and a run of minutes is slower because the GPUs get warm: all speeds but those of the user's own runs are
RUN_SHARE of bench's, measured on H100s in bf16.

For comparison, llm.c (another trainer, CUDA C) as its author published it: 124M on 8 x A100-80GB in 94 min, 60% MFU;
1558M on 8 x H100 in 24 h, 50%; the latter on 16 x H100 in 12 h, so without loss between two nodes over InfiniBand. So
our assumption is too low on A100. It is probably too high on small cards, whose power or memory limits them earlier.
Several nodes have TCP between them, and never ran on GPUs: TCP_BYTES_PER_SECOND is an assumption.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pipelines.bench.measurements import measurements
from pipelines.recipe import Recipe
from trainer.amounts import check_shares
from trainer.errors import UserError
from trainer.memory import USABLE, memory_of, why_sharded
from trainer.metrics import PEAK_FLOPS
from trainer.models.model_config import ModelConfig

# Dense bf16 peak by SkyPilot's name of the GPU up to a hyphen, FLOP/s. Source: NVIDIA's data sheets.
PEAKS = PEAK_FLOPS | {"B200": 2250e12, "L40S": 362e12, "A10": 125e12, "A10G": 70e12, "L4": 121e12, "A6000": 155e12}
PEAKS |= {"V100": 125e12, "T4": 65e12}  # in fp16
SIZES = ("A100-80GB", "V100-32GB")  # whose names have their memory
# Bytes of GPU memory, by SkyPilot's name. Source: NVIDIA's data sheets.
MEMORY = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "A100-80GB": 80e9, "A100": 40e9, "L40S": 48e9, "A6000": 48e9}
MEMORY |= {"V100-32GB": 32e9, **dict.fromkeys(("A10", "A10G", "L4"), 24e9), **dict.fromkeys(("V100", "T4"), 16e9)}
NO_BF16 = ("V100", "T4")  # which the fused engine needs
# The GPUs with the fp8 that the fused engine needs; some of them occur in private clusters only.
FP8 = ("H100", "H200", "B200", "H20", "H800", "GH200", "GB200", "B300", "GB300")

FIGURES = measurements()
REFERENCE = "H200"  # measured with every engine
RUN_SHARE = FIGURES.value("run_share")
# The share of the MFU that is left with twice the GPUs, on average over 124M and 1558M.
PER_DOUBLING = {
    "fused": (FIGURES.value("four_gpus_fused_124m") * FIGURES.value("four_gpus_fused_1558m")) ** 0.25,
    "fused fp8": (FIGURES.value("two_gpus_fp8_head_124m") * FIGURES.value("two_gpus_fp8_head_1558m")) ** 0.5,
    "compiled": (0.445 / FIGURES.value("one_gpu_compiled_124m")) ** 0.5,
}
PER_DOUBLING |= {"fused fp8_head": PER_DOUBLING["fused fp8"], "eager": PER_DOUBLING["compiled"]}
PER_DOUBLING["sharded"] = PER_DOUBLING["compiled"]  # assumed, as is its speed: its blocks are compiled alike
# The launch of a layer's kernels, forward and backward: no GPU runs a small model faster. Estimated.
SECONDS_PER_LAYER = 1e-3
TCP_BYTES_PER_SECOND = 5e9  # of a node, in each direction, without EFA, InfiniBand or GPUDirect; assumed
MOST_NODES = 128  # that a plan tries
SMALL_GPU, SMALL_HOURS = "L4:1", 1.0


@dataclass(frozen=True)
class Throughput:
    """A training speed and its source."""

    tokens_per_second: float
    kind: str  # measured, estimated, assumed
    source: str


def gpu_of(accelerators: str) -> str:
    """ "A100-80GB:8" -> "A100", the name in PEAKS."""
    return accelerators.partition(":")[0].partition("-")[0]


def gpu_count(accelerators: str) -> int:
    """ "H100:8" -> 8."""
    return int(accelerators.partition(":")[2])


def gpu_named(card: str) -> str:
    """SkyPilot's name of a card that nvidia-smi names: "NVIDIA A100-SXM4-80GB" -> "A100-80GB". The card's own name,
    without the vendor, for a GPU that is not in PEAKS."""
    words = card.replace("-", " ").split()
    known = [name for name in (*PEAKS, *SIZES) if set(name.replace("-", " ").split()) <= set(words)]
    return max(known, key=len, default=card.strip().removeprefix("NVIDIA "))


def peak_of(accelerators: str) -> float | None:
    """FLOP/s of a node such as "A100-80GB:8"; None for an unknown GPU."""
    peak = PEAKS.get(gpu_of(accelerators))
    return None if peak is None else peak * gpu_count(accelerators)


def memory_on(accelerators: str) -> float | None:
    """Bytes of one GPU of a node such as "A100-80GB:8"; None for an unknown one."""
    name = accelerators.partition(":")[0]
    return MEMORY.get(name, MEMORY.get(gpu_of(name)))


def engine_of(recipe: Recipe, accelerators: str, nodes: int = 1) -> str:
    """The engine of a step on rented GPUs, with its precision if that is fp8."""
    model, runtime, precision = recipe.model, recipe.runtime, recipe.train.precision
    if precision.startswith("fp8") and runtime.engine != "sharded":
        return f"fused {precision}"
    if runtime.engine == "auto":
        in_bf16 = precision not in ("fp32", "fp16") and gpu_of(accelerators) not in NO_BF16
        if not in_bf16 or model.why_not_fused:
            return "compiled"
        ranks, memory, muon = nodes * gpu_count(accelerators), memory_on(accelerators), recipe.train.optimizer == "muon"
        return "sharded" if memory and why_sharded(model, runtime, precision, muon, ranks, memory) else "fused"
    return runtime.engine


def speed_on(
    recipe: Recipe,
    accelerators: str,
    nodes: int = 1,
    own: Mapping[tuple[str, int], Throughput] = MappingProxyType({}),
) -> Throughput:
    """Tokens a second on `nodes` nodes with these GPUs, where the run's `own` speed on such nodes is the best one.

    UserError for an unknown GPU.
    """
    if known := own.get((accelerators, nodes)):
        return known
    peak = peak_of(accelerators)
    if peak is None:
        raise UserError(f"{accelerators}: the speed of this GPU is unknown; known are {', '.join(PEAKS)}")
    model, runtime, gpu, gpus = recipe.model, recipe.runtime, gpu_of(accelerators), nodes * gpu_count(accelerators)
    engine = engine_of(recipe, accelerators, nodes)
    same = (s for s in FIGURES.speeds if s.plan and (s.step, s.gpus) == (engine, accelerators) and nodes == 1)
    for measured in () if runtime.deterministic or runtime.recompute else same:
        size = FIGURES.sizes[measured.size]
        if size.family == model.family and abs(size.parameters / model.parameters - 1) < 0.01:
            return Throughput(RUN_SHARE * measured.tokens_per_second, "measured", "docs/measurements.md")
    mfu = mfu_of(model, engine, gpu) * PER_DOUBLING[engine] ** math.log2(gpus) * RUN_SHARE
    # Elsewhere than in the fused engine (0.975) the forward pass again, a third of the FLOPs: computed, not measured.
    mfu /= 1.3 if runtime.recompute is True and not engine.startswith("fused") else 1.0
    at_once = 64 if runtime.micro_batch_size == "auto" else runtime.micro_batch_size
    most = gpus * at_once * model.block_size / (model.n_layer * SECONDS_PER_LAYER)
    speed, source = mfu * nodes * peak / model.flops_per_token, f"{mfu:.0%} MFU"
    if speed > most:
        speed, source = most, f"{SECONDS_PER_LAYER * 1e3:.0f} ms a layer, to launch its kernels"
    gradient, weights = 2 if runtime.reduce_dtype == "bf16" else 4, 4 if engine == "sharded" else 2
    exchange = model.parameters * (gradient + weights) / TCP_BYTES_PER_SECOND  # seconds a step, beside it; in bf16
    if nodes > 1 and (most := recipe.train.batch_tokens / exchange) < speed:
        speed, source = most, f"{exchange * 1e3:,.0f} ms a step, for TCP between the nodes"
    if points(None, None, gpu):
        return Throughput(speed, "estimated", f"{source}, from runs on {gpu}")
    name = accelerators.partition(":")[0]
    return Throughput(speed, "assumed", f"{source}, as on {REFERENCE}; {name} was never measured")


def mfu_of(model: ModelConfig, engine: str, gpu: str) -> float:
    """MFU of one GPU, interpolated over the logarithm of the size between measured ones of the same engine."""
    import numpy as np

    engine = engine.replace("sharded", "compiled")
    families = (model.family, "gpt2")
    known = (
        points(one, engine, "H100") | points(one, engine, REFERENCE) | points(one, engine, gpu) for one in families
    )
    by_size = dict(sorted(next(filter(None, known)).items()))
    return float(np.interp(math.log(model.parameters), list(by_size), list(by_size.values())))


def points(family: str | None, engine: str | None, gpu: str) -> dict[float, float]:
    """MFU of the measured runs on one GPU by the logarithm of their parameters; None: of any family or engine."""
    return {
        math.log(FIGURES.sizes[speed.size].parameters): speed.mfu
        for speed in FIGURES.speeds
        if speed.plan and speed.mfu is not None and speed.gpus == f"{gpu}:1"
        if family in (None, FIGURES.sizes[speed.size].family) and engine in (None, speed.step)
    }


def memory_there(recipe: Recipe, accelerators: str, nodes: int) -> tuple[str, float, float] | None:
    """The engine, the bytes that it needs on each of these GPUs at least, and those that a GPU has; None if unknown."""
    engine, has = engine_of(recipe, accelerators, nodes).partition(" ")[0], memory_on(accelerators)
    if has is None or engine not in ("fused", "sharded"):
        return None
    muon, ranks = recipe.train.optimizer == "muon", nodes * gpu_count(accelerators)
    return engine, memory_of(engine, recipe.model, recipe.runtime, ranks, muon).total, has


def fewest_nodes(recipe: Recipe, accelerators: str) -> int:
    """The fewest nodes with these GPUs that have the memory for a training: a power of two up to 128. UserError if none
    do."""
    nodes = 1
    while True:
        try:
            check_gpus(recipe, accelerators, nodes)
            return nodes
        except UserError:
            if nodes == MOST_NODES:
                raise
            nodes *= 2


def check_gpus(recipe: Recipe, accelerators: str, nodes: int) -> None:
    """UserError if `nodes` nodes with these GPUs are too many for a step's batch, or can't run it."""
    train, runtime, gpu = recipe.train, recipe.runtime, gpu_of(accelerators)
    processes = 1 if runtime.device == "cpu" else gpu_count(accelerators)
    check_shares(recipe.model, train, nodes * (processes if runtime.processes == "auto" else runtime.processes))
    if train.precision.startswith("fp8") and gpu not in FP8:
        raise UserError(f"train.precision: {train.precision} needs one of these GPUs: {', '.join(FP8)}")
    if train.optimizer == "muon" and gpu in NO_BF16:
        raise UserError(f"train.optimizer: muon computes in bf16, which {gpu} does not have; use another GPU")
    if (there := memory_there(recipe, accelerators, nodes)) and there[1] > USABLE * there[2]:
        engine, needed, has = there
        raise UserError(
            f"train: {recipe.model.parameters / 1e9:.1f}B parameters take about {needed / 1e9:,.0f} GB on each GPU "
            f"(engine {engine}), and {gpu} has {has / 1e9:.0f}; use more GPUs or nodes, or runtime.recompute"
        )


def trains_on_a_small_gpu(recipe: Recipe) -> bool:
    """Whether one SMALL_GPU is expected to train the recipe in SMALL_HOURS, so that no larger machine is worth it."""
    try:
        check_gpus(recipe, SMALL_GPU, 1)
    except UserError:
        return False
    return recipe.train_tokens / speed_on(recipe, SMALL_GPU).tokens_per_second < 3600 * SMALL_HOURS
