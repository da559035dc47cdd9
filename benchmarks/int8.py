"""Weights in 8 bits beside bf16: size, speed and loss of an exported model.

    python -m benchmarks.int8 EXPORT SHARDS --tokens 1_000_000 --json int8.json

EXPORT is a folder of Hugging Face's format (`skytrain pull RUN EXPORT`), SHARDS holds llm.c's val_*.bin. torchao
quantizes the matrices of the blocks, with one scale for each output row, and computes in bf16. The embedding, which is
also the head, stays in bf16. The module is skytrain's own: transformers' GPT-2 has `Conv1D` in place of `nn.Linear`,
which torchao passes over, so there the same configuration changes nothing.

Neither model is compiled unless `--compile` names a mode of torch.compile. Eager torchao converts the weights to bf16
before each product, so its times are an upper limit; size and loss are the same. The mode reduce-overhead removes the
launches of kernels, which hide the difference at one token, but to compile both models takes minutes.

Three measures of each: the bytes of all weights; the mean loss in nats over the same held-out tokens; the time of two
forward passes: one token (as in decoding, the cost is to read every weight once) and 8 x `block_size` tokens (the cost
is the arithmetic). The times are medians, the two models in alternation.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.config import RuntimeConfig
from trainer.data import TokenData
from trainer.evaluate import validation_loss
from trainer.families.gpt2 import Gpt2Config
from trainer.families.gpt2_module import GPT
from trainer.family import from_hf
from trainer.parallel import World
from trainer.shards import local_shards

BATCH = 8  # sequences


def load(folder: Path) -> GPT:
    """The exported model in bf16."""
    values = json.loads((folder / "config.json").read_text())
    shape = {name: values[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    config = Gpt2Config(**shape, block_size=values["n_positions"])
    model = GPT(config)
    model.load_state_dict(from_hf(load_file(folder / "model.safetensors"), config))
    return model.to(torch.bfloat16).eval()


def quantized(model: GPT) -> GPT:
    """A copy with the matrices of its blocks in int8."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    smaller = copy.deepcopy(model)
    quantize_(smaller, Int8WeightOnlyConfig(), filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return smaller


def bytes_of(model: nn.Module) -> int:
    """The size of all weights, with the scales."""
    return sum(part.numel() * part.element_size() for p in model.parameters() for part in parts_of(p.data))


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors of a quantized one, or the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten else [tensor]


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


@torch.no_grad()
def measure(
    folder: Path, shards: Path, tokens: int, repeats: int, mode: str | None = None
) -> dict[str, dict[str, float]]:
    """The measures by number format. `mode` is one of torch.compile's; None: eager."""
    world = World.alone(RuntimeConfig())
    plain = load(folder).to(world.device)
    models = {"bf16": plain, "int8": quantized(plain)}
    data = TokenData(local_shards(shards, "val"), shards.joinpath, plain.config.block_size, 0)
    results: dict[str, dict[str, float]] = {name: {} for name in models}
    for name, model in models.items():
        results[name]["bytes"] = bytes_of(model)
        results[name]["loss"] = validation_loss(model.loss, data, tokens, BATCH, world)
    for what, shape in (
        ("one token", (1, 1)),
        (f"{BATCH} x {plain.config.block_size}", (BATCH, plain.config.block_size)),
    ):
        ids = torch.zeros(shape, dtype=torch.int64, device=world.device)
        runs = {
            name: torch.compile(model.hidden, mode=mode, dynamic=False) if mode else model.hidden
            for name, model in models.items()
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(repeats + 3):
            for name, run in runs.items():
                taken = milliseconds(partial(run, ids), world.device)
                if number >= 3:
                    times[name].append(taken)
        for name, taken_by in times.items():
            results[name][f"{what}, ms"] = statistics.median(taken_by)
        torch.compiler.reset()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--compile", choices=("default", "reduce-overhead"), help="a mode of torch.compile [eager]")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = measure(options.export, options.shards, options.tokens, options.repeats, options.compile)
    for what in results["bf16"]:
        plain, small = (results[name][what] for name in ("bf16", "int8"))
        print(f"{what:>16}  bf16 {plain:,.4f}  int8 {small:,.4f}  x {small / plain:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, **results}, indent=1))


if __name__ == "__main__":
    main()
