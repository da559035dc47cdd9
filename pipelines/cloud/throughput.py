"""Training speeds of models on GPUs, and their memory: a few measured runs, and estimates from them for other GPUs.

The estimates use MFU, the share of the GPUs' peak that the model reaches, because it varies less between runs than
speed does. Between measured sizes it is interpolated over the logarithm of the parameters, and beyond them it is
constant. The loss of a doubling of the GPUs is interpolated in the same way. A speed is `measured` if exactly this run
was measured, `estimated` if another one on such a GPU was, and `assumed` on every other GPU: it is taken to reach the
MFU of an H200. `skytrain bench` measured them, in seconds. A run of minutes is slower, because the GPUs get warm: all
speeds but those of the user's own runs are RUN_SHARE of bench's. That was measured on H100s in bf16, and is taken for
all.

For comparison, llm.c (another trainer, CUDA C) as its author published it: 124M on 8 x A100-80GB in 94 min, 60% MFU;
1558M on 8 x H100 in 24 h, 50%; the latter on 16 x H100 in 12 h, so without loss between two nodes over InfiniBand. So
our assumption is too low on A100. It is probably too high on small cards, whose power or memory limits them earlier,
and on several nodes where NCCL has only TCP between them.

The memory has the form of the fused engine's: 18 bytes a parameter, of which the ranks share 12, and a number of bytes
a token for each layer and for the head. These fit every measured peak within 6%. All of these are GPT-2's;
another family's bytes for a layer follow from the tensors that its step keeps (`ModelConfig.kept_share`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipelines.bench.measurements import measurements
from pipelines.recipe import Recipe
from trainer.amounts import check_shares, micro_batch_of, sequences_per_step, state_bytes
from trainer.config import RuntimeConfig, TrainConfig
from trainer.errors import UserError
from trainer.metrics import PEAK_FLOPS
from trainer.model_config import ModelConfig

# Dense bf16 peak by SkyPilot's name of the GPU up to a hyphen, FLOP/s. Source: NVIDIA's data sheets.
PEAKS = PEAK_FLOPS | {"B200": 2250e12, "L40S": 362e12, "A10": 125e12, "A10G": 70e12, "L4": 121e12, "A6000": 155e12}
PEAKS |= {"V100": 125e12, "T4": 65e12}  # in fp16
NO_BF16 = ("V100", "T4")  # which the fused engine needs
# Memory in GiB, as nvidia-smi reports it.
MEMORY_GIB = {
    **{"B200": 179.1, "H200": 140.4, "H100": 79.6, "A100-80GB": 80.0, "A100": 40.0, "L40S": 45.0, "A6000": 48.0},
    **{"L4": 22.5, "A10": 22.5, "A10G": 22.5, "V100-32GB": 32.0, "V100": 16.0, "T4": 15.0},
}
# As in trainer/fit.py, and CUDA's own memory.
MAX_TOKENS, SPARE_FRACTION, LIBRARIES_GIB = 65_536, 0.06, 0.6
# The GPUs with the fp8 that the fused engine needs; some of them occur in private clusters only.
FP8 = ("H100", "H200", "B200", "H20", "H800", "GH200", "GB200", "B300", "GB300")
# The launch of a layer's kernels, forward and backward: no GPU runs a small model faster. Estimated.
SECONDS_PER_LAYER = 1e-3
PER_LAYER = f"{SECONDS_PER_LAYER * 1e3:.0f} ms a layer, to launch its kernels"
SMALL_GPU, SMALL_HOURS = "L4:1", 1.0


@dataclass(frozen=True)
class Throughput:
    """A training speed and its source."""

    tokens_per_second: float
    kind: str  # measured, estimated, assumed
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
    family: str = "gpt2"


SOURCE = "docs/measurements.md: torch 2.11, CUDA 13"
FIGURES = measurements()
ALL_MEASURED = tuple(
    MeasuredRun(
        FIGURES.sizes[speed.size].parameters,
        speed.gpus,
        1,
        f"{speed.engine}" if speed.precision == "bf16" else f"{speed.engine} {speed.precision}",
        speed.mfu,
        speed.tokens_per_second,
        SOURCE,
        FIGURES.sizes[speed.size].family,
    )
    for speed in FIGURES.speeds
    if speed.plan and speed.mfu is not None
)
MEASURED = tuple(known for known in ALL_MEASURED if known.family == "gpt2")  # the estimates start from these
MFU_AT_124M = {known.engine: known.mfu for known in MEASURED if known.parameters < 2e8 and known.gpu == "H200:1"}
EAGER = MFU_AT_124M["eager"] / MFU_AT_124M["compiled"]  # of the compiled speed; taken for all sizes
# The share of the speed that is left with a fixed order of additions (124M), and with recomputed activations (1558M
# fused; elsewhere the forward pass again, a third of the FLOPs: computed, not measured).
DETERMINISTIC = {"fused": FIGURES.value("deterministic_fused_124m")}
DETERMINISTIC |= dict.fromkeys(("compiled", "eager"), FIGURES.value("deterministic_eager_124m"))
RECOMPUTE = {"fused": FIGURES.value("recompute_fused_1558m"), "compiled": 1 / 1.3, "eager": 1 / 1.3}
RUN_SHARE = FIGURES.value("run_share")
# The share of the MFU that is left with twice the GPUs, at 124M and at 1558M: from 1 and 4, in fp8 from 1 and 2.
# Baselines differ per engine (fused: the same GPUs by themselves; the others: an earlier compiled run of 124M); only
# the ratios are meaningful.
SIZES = ("124M", "1558M")
FOUR_COMPILED = next(known.mfu for known in MEASURED if (known.gpu, known.engine) == ("H200:4", "compiled"))
PER_DOUBLING = {"fused": tuple(FIGURES.value(f"four_gpus_fused_{size.lower()}") ** 0.5 for size in SIZES)}
PER_DOUBLING |= dict.fromkeys(
    ("fused fp8", "fused fp8_head"), tuple(FIGURES.value(f"two_gpus_fp8_head_{size.lower()}") for size in SIZES)
)
PER_DOUBLING |= dict.fromkeys(
    ("compiled", "eager"), ((FOUR_COMPILED / FIGURES.value("one_gpu_compiled_124m")) ** 0.5,) * len(SIZES)
)


REFERENCE = "H200"  # measured with every engine
# Bytes a token: for each layer and each number of its width, also with recomputed activations; for each row of the
# vocabulary in the head. The fused engine's from eight measured peaks, the others' from one each.
LAYER_BYTES = {"fused": 33.7, "fused fp8": 31.0, "fused fp8_head": 31.0, "compiled": 26.0, "eager": 48.0}
RECOMPUTED_BYTES = {"fused": 21.8, "fused fp8": 26.0, "fused fp8_head": 26.0, "compiled": 17.0, "eager": 31.0}
HEAD_BYTES = {"fused": 0.86, "compiled": 4.0, "eager": 10.0}


def gpu_of(accelerators: str) -> str:
    """ "A100-80GB:8" -> "A100", the name in PEAKS."""
    return accelerators.partition(":")[0].partition("-")[0]


def gpu_named(card: str) -> str:
    """SkyPilot's name of a card that nvidia-smi names: "NVIDIA A100-SXM4-80GB" -> "A100-80GB". The card's own name,
    without the vendor, for a GPU that is not in PEAKS."""
    words = card.replace("-", " ").split()
    known = [name for name in {**PEAKS, **MEMORY_GIB} if set(name.replace("-", " ").split()) <= set(words)]
    return max(known, key=len, default=card.strip().removeprefix("NVIDIA "))


def peak_of(accelerators: str) -> float | None:
    """FLOP/s of a node such as "A100-80GB:8"; None for an unknown GPU."""
    peak = PEAKS.get(gpu_of(accelerators))
    return None if peak is None else peak * gpu_count(accelerators)


def gpu_count(accelerators: str) -> int:
    """ "H100:8" -> 8."""
    return int(accelerators.partition(":")[2])


def check_gpus(model: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, accelerators: str, nodes: int) -> None:
    """UserError if `nodes` nodes with these GPUs are too many for a step's batch, or lack its precision or memory."""
    gpus = 1 if runtime.device == "cpu" else gpu_count(accelerators)
    ranks = gpus if runtime.processes == "auto" else runtime.processes
    check_shares(model, train, nodes * ranks)
    if train.precision.startswith("fp8") and gpu_of(accelerators) not in FP8:
        raise UserError(f"no hardware for train.precision {train.precision}; these GPUs have it: {', '.join(FP8)}")
    if train.optimizer == "muon" and gpu_of(accelerators) in NO_BF16:
        name = accelerators.partition(":")[0]
        raise UserError(f"train.optimizer: muon computes in bf16, which {name} does not have; use another GPU")
    if runtime.device != "cpu":
        check_memory(model, train, runtime, accelerators, nodes * ranks)


def check_memory(model: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, accelerators: str, ranks: int) -> None:
    """UserError if a micro-batch is expected not to fit on such a GPU, with the largest one that does."""
    available = available_gib(accelerators)
    if available is None:
        return
    size = 1 if runtime.micro_batch_size == "auto" else runtime.micro_batch_size
    needed = memory_gib(model, train, runtime, accelerators, ranks, size)
    if needed <= available:
        return
    gpu = accelerators.partition(":")[0]
    most = fitting_micro_batch(model, train, runtime, accelerators, ranks)
    sequences = "one sequence needs" if size == 1 else f"{size} sequences need"
    remedy = (
        f"{most} fit: --set runtime.micro_batch_size={most}, or auto"
        if most
        else "use runtime.recompute or a larger GPU"
    )
    raise UserError(
        f"runtime.micro_batch_size: {sequences} about {needed:.0f} GiB, and {gpu} has {available:.0f}; {remedy}"
    )


def available_gib(accelerators: str) -> float | None:
    """The memory for training on one of these GPUs; None for an unknown one."""
    name = accelerators.partition(":")[0]
    card = MEMORY_GIB.get(name) or MEMORY_GIB.get(gpu_of(accelerators))
    return None if card is None else (1 - SPARE_FRACTION) * card - LIBRARIES_GIB


def memory_gib(
    model: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, accelerators: str, ranks: int, micro_batch: int
) -> float:
    """The expected peak of one of `ranks` GPUs, with micro-batches of so many sequences."""
    engine = engine_of(model, runtime, train.precision, accelerators)
    plain, sharded = engine.partition(" ")[0], state_bytes(model, train)
    state = 6 * model.parameters + sharded / ranks if plain == "fused" else 4 * model.parameters + sharded
    layer = (RECOMPUTED_BYTES if runtime.recompute else LAYER_BYTES)[engine] * model.n_layer * model.n_embd
    layer *= model.kept_share(engine, runtime.recompute)
    head = HEAD_BYTES[plain] * model.padded_vocab_size
    return (state + micro_batch * model.block_size * (layer + head)) / 2**30


def fitting_micro_batch(
    model: ModelConfig, train: TrainConfig, runtime: RuntimeConfig, accelerators: str, ranks: int
) -> int:
    """The largest micro-batch, in sequences, that is expected to fit on such a GPU; 0: not even one."""
    available = available_gib(accelerators)
    assert available is not None
    none, one = (memory_gib(model, train, runtime, accelerators, ranks, size) for size in (0, 1))
    most = min(MAX_TOKENS // model.block_size, max(0, math.floor((available - none) / (one - none))))
    share = -(-sequences_per_step(model, train) // ranks)
    return micro_batch_of(share, most) if most else 0


def trains_on_a_small_gpu(recipe: Recipe) -> bool:
    """Whether one SMALL_GPU is expected to train the recipe in SMALL_HOURS, so that no larger machine is worth it."""
    try:
        check_gpus(recipe.model, recipe.train, recipe.runtime, SMALL_GPU, 1)
    except UserError:
        return False
    speed = speed_on(recipe.model, recipe.runtime, SMALL_GPU, precision=recipe.train.precision)
    return recipe.train_tokens / speed.tokens_per_second < 3600 * SMALL_HOURS


def engine_of(model: ModelConfig, runtime: RuntimeConfig, precision: str, accelerators: str = "") -> str:
    """The engine of a step on rented GPUs, with its precision if that is fp8. Without `accelerators` they have bf16."""
    if precision.startswith("fp8"):
        return f"fused {precision}"
    if runtime.engine == "auto":
        in_bf16 = precision not in ("fp32", "fp16") and gpu_of(accelerators) not in NO_BF16
        return "fused" if in_bf16 and not model.why_not_fused else "compiled"
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
    result; on others they correct the estimate by its error there. So do the measured runs of this model, those on the
    same GPU first, of these the one with most GPUs, if it is no GPT-2.
    """
    engine = engine_of(model, runtime, precision, accelerators)
    plain = not (runtime.deterministic or runtime.recompute)
    same = [
        replace(known, tokens_per_second=RUN_SHARE * known.tokens_per_second)
        for known in (ALL_MEASURED if plain else ())
        if (known.family, known.engine) == (model.family, engine)
        and abs(known.parameters / model.parameters - 1) < 0.01
    ]
    own = list(own)
    for known in (*own, *same):
        if (known.gpu, known.nodes) == (accelerators, nodes):
            return Throughput(known.tokens_per_second, "measured", known.source)
    speed = estimate(model, runtime, accelerators, nodes, precision)
    nearest = sorted(same, key=lambda known: (gpu_of(known.gpu) != gpu_of(accelerators), -gpu_count(known.gpu)))
    corrections = own if model.family == "gpt2" else [*own, *nearest]
    if other := next((known for known in corrections if peak_of(known.gpu)), None):
        estimated = estimate(model, runtime, other.gpu, other.nodes, precision)
        factor = other.tokens_per_second / estimated.tokens_per_second
        source = f"{speed.source}; times {factor:.2f}, as {other.source}"
        return replace(speed, tokens_per_second=factor * speed.tokens_per_second, source=source)
    if model.family != "gpt2":
        return replace(speed, kind="assumed", source=f"{speed.source}, as a GPT-2 of this size")
    return speed


def estimate(model: ModelConfig, runtime: RuntimeConfig, accelerators: str, nodes: int, precision: str) -> Throughput:
    """The estimated speed on `nodes` nodes with these GPUs. UserError for an unknown GPU."""
    peak = peak_of(accelerators)
    if peak is None:
        raise UserError(f"{accelerators}: the speed of this GPU is unknown; known are {', '.join(PEAKS)}")
    gpus = nodes * gpu_count(accelerators)
    gpu, engine = gpu_of(accelerators), engine_of(model, runtime, precision, accelerators)
    small, large = (FIGURES.sizes[size].parameters for size in SIZES)
    kept_small, kept_large = PER_DOUBLING[engine]
    kept = between(model, (small, kept_small), (large, kept_large))
    mfu = RUN_SHARE * mfu_of(model, runtime, precision, accelerators) * kept ** math.log2(gpus)
    at_once = 64 if runtime.micro_batch_size == "auto" else runtime.micro_batch_size
    most = gpus * at_once * model.block_size / (model.n_layer * SECONDS_PER_LAYER)
    tokens_per_second = min(most, mfu * nodes * peak / model.flops_per_token)
    basis = f"{mfu:.0%} MFU, as on {REFERENCE}" if tokens_per_second < most else PER_LAYER
    if any(gpu_of(known.gpu) == gpu for known in MEASURED):
        several = "2 x H100" if " fp8" in engine else f"4 x {REFERENCE}"
        source = PER_LAYER if tokens_per_second == most else f"{mfu:.0%} MFU, from 1 x {gpu} and {several}"
        return Throughput(tokens_per_second, "estimated", source)
    name = accelerators.partition(":")[0]
    return Throughput(tokens_per_second, "assumed", f"{basis}; {name} was never measured")


def between(model: ModelConfig, smaller: tuple[float, float], larger: tuple[float, float]) -> float:
    """The value at this model's size. Both points are parameters and value; beyond them the value is constant."""
    (small, low), (large, high) = smaller, larger
    share = min(1.0, max(0.0, math.log(model.parameters / small) / math.log(large / small)))
    return low + share * (high - low)


def mfu_of(model: ModelConfig, runtime: RuntimeConfig, precision: str, accelerators: str = f"{REFERENCE}:1") -> float:
    """MFU of one GPU, interpolated over the logarithm of the size between the measured ones of the same engine."""
    engine = engine_of(model, runtime, precision, accelerators)
    measured = measured_mfus("compiled" if engine == "eager" else engine, gpu_of(accelerators))
    engine = engine.partition(" ")[0]
    return (
        between(model, *measured)
        * (EAGER if engine == "eager" else 1)
        * (DETERMINISTIC[engine] if runtime.deterministic else 1)
        * (RECOMPUTE[engine] if runtime.recompute else 1)
    )


def measured_mfus(engine: str, gpu: str) -> list[tuple[float, float]]:
    """Parameters and MFU of both sizes on one GPU: measured there, else on the reference.

    A GPU that was measured with another engine differs from the reference by the same factors with this one.
    """

    def points(engine: str, gpu: str) -> list[tuple[float, float]]:
        return [(m.parameters, m.mfu) for m in MEASURED if (m.gpu, m.engine) == (f"{gpu}:1", engine)]

    if own := points(engine, gpu):
        return own
    base, there, here = points(engine, REFERENCE), points("fused", REFERENCE), points("fused", gpu)
    factors = [own / reference for (_, own), (_, reference) in zip(here, there, strict=True)] if here else [1.0, 1.0]
    return [(parameters, mfu * factor) for (parameters, mfu), factor in zip(base, factors, strict=True)]
