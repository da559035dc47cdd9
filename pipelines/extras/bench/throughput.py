"""Training speeds of models on GPUs: tokens / second = MFU x peak / FLOPs of a token.

The MFU is that of the nearest step in measurements.yaml, which `skytrain bench` measured: of the same engine, of the
same family or else GPT-2, of the nearest size, on the same GPU or else an H200 or H100. A speed is `measured` if
exactly this step on these GPUs was, `estimated` from another one on this kind of GPU, and `assumed` from one on another
kind.
Bench takes seconds, and a run of minutes is slower because the GPUs get warm: a run has RUN_SHARE of bench's speed,
measured on H100s in bf16, unless the step was measured for a minute and more. The user's own runs are taken as is.

For comparison, llm.c (another trainer, CUDA C) as its author published it: 124M on 8 x A100-80GB in 94 min, 60% MFU;
1558M on 8 x H100 in 24 h, 50%; the latter on 16 x H100 in 12 h, so without loss between two nodes over InfiniBand. So
our assumption is too low on A100. It is probably too high on small cards, whose power or memory limits them earlier.
Several nodes never ran on GPUs; TCP_BYTES_PER_SECOND between them is an assumption.
"""

import math
from dataclasses import dataclass
from math import prod

from pipelines.extras.bench.gpus import PEAKS, check_gpus, engine_of, gpu_count, gpu_of, memory_on, peak_of
from pipelines.extras.bench.measurements import Speed, measurements
from pipelines.recipe.recipe import Recipe
from trainer.config.amounts import micro_batch_count
from trainer.config.errors import UserError
from trainer.config.model_config import ModelConfig
from trainer.engines.memory import USABLE, gathers_once, memory_of

FIGURES = measurements()
RUN_SHARE = FIGURES.value("run_share")
# The share of the MFU that is left with twice the GPUs, on average over the engines that were measured.
PER_DOUBLING = prod(map(FIGURES.value, ("four_gpus_fused_124m", "four_gpus_fused_1558m"))) ** 0.125
PER_DOUBLING *= prod(map(FIGURES.value, ("two_gpus_fp8_head_124m", "two_gpus_fp8_head_1558m"))) ** 0.25
# The launch of a layer's kernels, forward and backward: no GPU runs a step of a small model faster. Estimated.
SECONDS_PER_LAYER = 1e-3
TCP_BYTES_PER_SECOND = 5e9  # of a node, in each direction, without EFA, InfiniBand or GPUDirect; assumed
SMALL_GPU, SMALL_HOURS = "L4:1", 1.0


@dataclass(frozen=True)
class Throughput:
    """A training speed and its source."""

    tokens_per_second: float
    kind: str  # measured, estimated, assumed
    source: str


def nearest_step(model: ModelConfig, engine: str, gpu: str, gpus: int = 1) -> tuple[Speed, float]:
    """The measured step that is most like one on `gpus` GPUs, of those on no more than so many, and its MFU."""
    if engine not in {speed.step for speed in FIGURES.speeds}:
        engine = "compiled"  # assumed: the blocks of sharded are compiled alike, and of others nothing is known

    def distance(speed: Speed) -> tuple[object, ...]:
        size, there = FIGURES.sizes[speed.size], gpu_of(speed.gpus)
        apart = abs(math.log(size.parameters / model.parameters))
        alike = size.family != model.family, size.family != "gpt2", apart, there != gpu, there != "H200"
        return *alike, -gpu_count(speed.gpus)

    few_enough = (s for s in FIGURES.speeds if s.plan and s.step == engine and gpu_count(s.gpus) <= gpus)
    best = min(few_enough, key=distance)
    return best, best.mfu or 0.0


def run_share(step: Speed) -> float:
    """The share of a measured step's speed that a run of minutes has."""
    return 1.0 if step.sustained else RUN_SHARE


def speed_on(recipe: Recipe, accelerators: str, nodes: int = 1, between: float = TCP_BYTES_PER_SECOND) -> Throughput:
    """Tokens a second on `nodes` nodes with these GPUs, each of which sends `between` bytes a second to the others.
    UserError for an unknown GPU."""
    peak = peak_of(accelerators)
    if peak is None:
        raise UserError(f"{accelerators}: the speed of this GPU is unknown; known are {', '.join(PEAKS)}")
    model, runtime, gpus = recipe.model, recipe.runtime, nodes * gpu_count(accelerators)
    (engine, _), batch = engine_of(recipe, accelerators, nodes), recipe.train.batch_tokens
    same = (s for s in FIGURES.speeds if s.plan and (s.step, s.gpus) == (engine, accelerators) and nodes == 1)
    for measured in () if runtime.deterministic or runtime.recompute else same:
        size = FIGURES.sizes[measured.size]
        if size.family == model.family and abs(size.parameters / model.parameters - 1) < 0.01:
            return Throughput(run_share(measured) * measured.tokens_per_second, "measured", "docs/measurements.md")
    step, mfu = nearest_step(model, engine, gpu_of(accelerators), gpus)
    if engine == "sharded" and recipe.train.precision == "fp8":  # assumed: torchao's gains what the fused engine's does
        exact, fp8 = (nearest_step(model, name, "H200")[1] for name in ("fused", "fused fp8"))
        mfu *= fp8 / exact
    mfu *= PER_DOUBLING ** math.log2(gpus / gpu_count(step.gpus)) * run_share(step)
    # Elsewhere than in the fused engine (0.975) the forward pass again, a third of the FLOPs: computed, not measured.
    mfu /= 1.3 if runtime.recompute is True and not engine.startswith("fused") else 1.0
    sent, network = network_bytes(recipe, engine, accelerators, nodes)
    seconds, limit = max(
        (batch * model.flops_per_token / (mfu * nodes * peak), f"{mfu:.0%} MFU"),
        (model.n_layer * SECONDS_PER_LAYER, f"{SECONDS_PER_LAYER * 1e3:.0f} ms a layer, to launch its kernels"),
        (sent / between, network),
    )
    kind = "estimated" if gpu_of(accelerators) == gpu_of(step.gpus) else "assumed"
    return Throughput(batch / seconds, kind, f"{limit}, from {step.size} on {step.gpus}")


def network_bytes(recipe: Recipe, engine: str, accelerators: str, nodes: int) -> tuple[float, str]:
    """The bytes that a node sends in a step over the network, and as many that it receives, in NCCL's rings; and the
    name of this limit."""
    model, runtime, gpus, name = recipe.model, recipe.runtime, gpu_count(accelerators), "the network between nodes"
    reduced, ranks, muon = 2 if runtime.reduce_dtype == "bf16" else 4, nodes * gpus, recipe.train.optimizer == "muon"
    if nodes == 1 or engine != "sharded":  # fused is ZeRO-1; the others all-reduce float32
        per_parameter = reduced + 2 if engine.startswith("fused") else 8
        return float(model.parameters * per_parameter * (nodes > 1)), name
    size, memory = runtime.shard_size or ranks, memory_on(accelerators) or math.inf
    once = gathers_once(model, runtime, muon, ranks, memory)
    share = math.ceil(recipe.train.batch_tokens / model.block_size / ranks)
    one, most = memory_of("sharded", model, runtime, ranks, muon), runtime.micro_batch_size
    if most == "auto":
        room = USABLE * memory - one.total
        most = 1 + max(0, int(min(room / one.activations, share)))
    count = micro_batch_count(share, most)
    between = count if reduced == 2 else 1  # all-reduces of the copies
    sent = 2 * reduced * between * min(1.0, gpus / size) if size < ranks else 0.0
    if size <= gpus:
        return model.parameters * sent, name
    sent += 2 + reduced if once else (2 * 2 + reduced) * count  # weights are gathered forward and backward
    return model.parameters * sent, f"{name}, {'once a step' if once else f'in each of {count} micro-batches'}"


def trains_on_a_small_gpu(recipe: Recipe) -> bool:
    """Whether one SMALL_GPU is expected to train the recipe in SMALL_HOURS, so that no larger machine is worth it."""
    try:
        check_gpus(recipe, SMALL_GPU, 1)
    except UserError:
        return False
    return recipe.train_tokens / speed_on(recipe, SMALL_GPU).tokens_per_second < 3600 * SMALL_HOURS
