"""The memory of a training on each GPU, by arithmetic: for plans, and for the choice of an engine on GPUs. What
really fits, trainer/engines/micro_batch.py measures."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from trainer.config.config import Recompute, RuntimeConfig
from trainer.config.model_config import HEAD_ROWS, ModelConfig

LIBRARIES = 2 << 30  # bytes of CUDA, NCCL and cuBLAS
USABLE = 0.94  # of a GPU's memory, as in trainer/engines/micro_batch.py
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
    """What a training takes on each of `ranks` GPUs in bf16, in the engine fused, sharded or compiled. `once`: sharded
    gathers the weights once a step, see `gathers_once`."""
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
    # Logits in bf16 and their gradients. Sharded has those of HEAD_ROWS tokens, and a gradient of the head's matrix in
    # float32, where that is less (trainer/engines/sharded.py).
    rows = tokens if engine == "compiled" else min(tokens, HEAD_ROWS + model.n_embd)
    head = 4 * rows * model.padded_vocab_size
    inside += max(head, block_again)
    if engine == "compiled":  # autocast has a copy of the weights in bf16
        return Memory(4 * model.parameters + moments, 2.0 * model.parameters, inside)
    # bf16 weights and gradients outside the blocks, and of two blocks, one of whose gradients are reduced in float32.
    block //= runtime.tensor_parallel
    gathered = 4.0 * outside + 2 * 2 * block + 6 * block if ranks > 1 else 0.0
    if once:  # all bf16 weights and float32 gradients
        gathered += 2 * outside + 6 * (model.parameters - outside) / runtime.tensor_parallel
    return Memory((4 * model.parameters + moments) / (runtime.shard_size or ranks), gathered, inside)


def automatic_engine(
    model: ModelConfig,
    runtime: RuntimeConfig,
    precision: str,
    muon: bool,
    ranks: int,
    memory: float | None,
    obstacle: str | None,
) -> tuple[Literal["fused", "sharded", "compiled"], str]:
    """The engine that `auto` takes on `ranks` GPUs with `memory` bytes (None: unknown), and the reason, "" for the
    fastest one. `obstacle`: why fused cannot run. Sharded where the others would not fit, in its precisions."""
    whole: Literal["fused", "compiled"] = "compiled" if obstacle else "fused"
    why = f"not fused: {obstacle}" if obstacle else ""
    needed = memory_of(whole, model, runtime, ranks, muon).total
    if memory is None or ranks == 1 or precision not in ("bf16", "fp32") or needed <= USABLE * memory:
        return whole, why
    too_large = f"{whole} would need about {needed / 1e9:,.0f} of {memory / 1e9:.0f} GB on each GPU"
    return "sharded", f"{why}; {too_large}" if why else too_large


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
