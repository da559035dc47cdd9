"""The GPUs of the market, and whether a training fits them: its precision, its batch and its memory.

GPUs have SkyPilot's names. Those of a node are "A100-80GB:8".
"""

from contextlib import suppress

from pipelines.recipe.recipe import Recipe
from trainer.base.metrics import PEAK_FLOPS
from trainer.config.amounts import check_shares
from trainer.config.errors import UserError
from trainer.engines.memory import USABLE, automatic_engine, memory_of

# Dense bf16 peak by the name up to a hyphen, FLOP/s. Source: NVIDIA's data sheets.
PEAKS = PEAK_FLOPS | {"B200": 2250e12, "L40S": 362e12, "A10": 125e12, "A10G": 70e12, "L4": 121e12, "A6000": 155e12}
PEAKS |= {"V100": 15.7e12, "T4": 8.1e12}  # in fp32: they have no bf16
SIZES = ("A100-80GB", "V100-32GB")  # whose names have their memory
# Bytes of memory. Source: NVIDIA's data sheets.
MEMORY = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "A100-80GB": 80e9, "A100": 40e9, "L40S": 48e9, "A6000": 48e9}
MEMORY |= {"V100-32GB": 32e9, **dict.fromkeys(("A10", "A10G", "L4"), 24e9), **dict.fromkeys(("V100", "T4"), 16e9)}
NO_BF16 = ("V100", "T4")  # which the fused engine needs
# The GPUs with the fp8 that the fused engine needs; some of them occur in private clusters only.
FP8 = ("H100", "H200", "B200", "H20", "H800", "GH200", "GB200", "B300", "GB300")
MOST_NODES = 128  # that a plan tries


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


def engine_of(recipe: Recipe, accelerators: str, nodes: int = 1) -> tuple[str, str]:
    """The engine of a step on rented GPUs, with its precision if that is fp8; and why it is not fused, or ""."""
    model, runtime, precision = recipe.model, recipe.runtime, recipe.train.precision
    if precision.startswith("fp8") and runtime.engine != "sharded":
        return f"fused {precision}", ""
    if runtime.engine != "auto":
        return runtime.engine, "as configured"
    gpu, obstacle = gpu_of(accelerators), model.why_not_fused
    if gpu in NO_BF16:
        obstacle = obstacle or f"{gpu} has no bf16"
    elif precision == "fp32":
        obstacle = obstacle or "it computes in bf16, but train.precision is fp32"
    if precision == "auto":
        precision = "fp32" if gpu in NO_BF16 else "bf16"
    ranks, memory, muon = nodes * gpu_count(accelerators), memory_on(accelerators), recipe.train.optimizer == "muon"
    return automatic_engine(model, runtime, precision, muon, ranks, memory, obstacle)


def check_gpus(recipe: Recipe, accelerators: str, nodes: int) -> str | None:
    """The engine and the memory of each of these GPUs, None if unknown. UserError if `nodes` nodes with them are too
    many for a step's batch, or can't run it."""
    model, train, runtime, gpu = recipe.model, recipe.train, recipe.runtime, gpu_of(accelerators)
    (engine, why), has, ranks = engine_of(recipe, accelerators, nodes), memory_on(accelerators), gpu_count(accelerators)
    check_shares(model, train, nodes * (ranks if runtime.processes == "auto" else runtime.processes))
    if train.precision.startswith("fp8") and gpu not in FP8:
        raise UserError(f"train.precision: {train.precision} needs one of these GPUs: {', '.join(FP8)}")
    if train.optimizer == "muon" and gpu in NO_BF16:
        raise UserError(f"train.optimizer: muon computes in bf16, which {gpu} does not have; use another GPU")
    if has is None or (engine := engine.partition(" ")[0]) not in ("fused", "sharded", "compiled"):
        return None
    needed = memory_of(engine, model, runtime, nodes * ranks, train.optimizer == "muon").total
    if needed > USABLE * has:
        raise UserError(
            f"train: {model.parameters / 1e9:.1f}B parameters take about {needed / 1e9:,.0f} GB on each GPU "
            f"(engine {engine}), and {gpu} has {has / 1e9:.0f}; use more GPUs or nodes, or runtime.recompute"
        )
    return f"{engine}, about {needed / 1e9:.0f} of {has / 1e9:.0f} GB on each GPU with one sequence{why and f'; {why}'}"


def fewest_nodes(recipe: Recipe, accelerators: str) -> int:
    """The fewest nodes with these GPUs that have the memory for a training: a power of two up to MOST_NODES. UserError
    if none do."""
    nodes = 1
    while nodes < MOST_NODES:
        with suppress(UserError):
            check_gpus(recipe, accelerators, nodes)
            return nodes
        nodes *= 2
    check_gpus(recipe, accelerators, nodes)
    return nodes
