"""The memory of a training on each GPU, by arithmetic: for plans, and for the choice between the engines fused and
sharded. What really fits, trainer/micro_batch.py measures."""

from dataclasses import dataclass
from math import prod

from trainer.config import Recompute, RuntimeConfig
from trainer.models.model_config import ModelConfig

LIBRARIES = 2 << 30  # bytes of CUDA, NCCL and cuBLAS
USABLE = 0.94  # of a GPU's memory, as in trainer/micro_batch.py
FUSED_LOGITS = 1 << 30  # the fused engine makes the logits in chunks
FULL_SPEED = 16_384  # tokens of a micro-batch, from which a GPU is about as fast as with more


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU."""

    state: float  # weights, gradients and the optimizer
    gathered: float  # weights of other ranks that compute now, and their gradients
    activations: float  # of a micro-batch

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.activations + LIBRARIES


def memory_of(
    engine: str,
    model: ModelConfig,
    runtime: RuntimeConfig,
    ranks: int,
    muon: bool = False,
    sequences: int = 1,
    once: bool = False,
) -> Memory:
    """What a training takes on each of `ranks` GPUs, in the engine fused or sharded, in bf16. `once`: sharded gathers
    the weights once a step, see `gathers_once`."""
    sizes = {name: prod(shape) for name, shape in model.shapes.items()}
    block = max(sum(n for name, n in sizes.items() if name.startswith(f"h.{i}.")) for i in {0, model.n_layer - 1})
    outside = sum(n for name, n in sizes.items() if not name.startswith("h."))
    tokens = sequences * model.block_size
    again: Recompute = "selective" if engine == "fused" and runtime.recompute else runtime.recompute
    inside = 2 * tokens * numbers_saved(model, again) * model.n_layer
    block_again = 2 * tokens * numbers_saved(model, False) if again else 0
    moments = 12 * model.parameters - (4 * model.matrix_parameters if muon else 0)  # and float32 weights
    if engine == "fused":
        reduced = 2 if runtime.reduce_dtype == "bf16" and ranks > 1 else 0
        return Memory((6 + reduced) * model.parameters + moments / ranks, 0.0, inside + max(FUSED_LOGITS, block_again))
    # bf16 weights and gradients outside the blocks, and of two blocks, one of whose gradients are reduced in float32.
    block //= runtime.tensor_parallel
    gathered = 4.0 * outside + 2 * 2 * block + 6 * block if ranks > 1 else 0.0
    if once:  # all bf16 weights and float32 gradients
        gathered += 2 * outside + 6 * (model.parameters - outside) / runtime.tensor_parallel
    logits = 4 * tokens * model.padded_vocab_size  # compiled: bf16, and their gradients
    return Memory(
        (4 * model.parameters + moments) / (runtime.shard_size or ranks), gathered, inside + max(logits, block_again)
    )


def why_sharded(
    model: ModelConfig, runtime: RuntimeConfig, precision: str, muon: bool, ranks: int, memory: float
) -> str | None:
    """Why the engine `auto` is sharded on GPUs with `memory` bytes where fused runs; None if it is fused."""
    needed = memory_of("fused", model, runtime, ranks, muon).total
    if ranks == 1 or precision not in ("auto", "bf16") or needed <= USABLE * memory:
        return None
    return f"fused would need about {needed / 1e9:.0f} of {memory / 1e9:.0f} GB on each GPU"


def gathers_once(model: ModelConfig, runtime: RuntimeConfig, muon: bool, ranks: int, memory: float) -> bool:
    """Whether the engine sharded gathers the weights once a step and reduces its gradients once: GPUs with `memory`
    bytes have room for these beside a micro-batch at full speed. Gradients that ranks exchange in bf16 would also be
    added up in bf16."""
    sequences = max(1, FULL_SPEED // model.block_size)
    needed = memory_of("sharded", model, runtime, ranks, muon, sequences, once=True).total
    return runtime.reduce_dtype == "fp32" and needed <= USABLE * memory


def numbers_saved(model: ModelConfig, recompute: Recompute) -> int:
    """The numbers of a token that a block keeps for its backward pass: its input; with `selective` also the results of
    its products and of attention; without recomputation also those of norms, rotations and activation."""
    matrices = [shape for name, shape in model.shapes.items() if name.startswith("h.0.") and len(shape) == 2]
    products, attention, inner = sum(rows for rows, _ in matrices), model.attention_width, max(c for _, c in matrices)
    if recompute is True:
        return model.n_embd
    kept = model.n_embd + products + attention
    return kept if recompute else kept + 3 * model.n_embd + 2 * attention + inner
