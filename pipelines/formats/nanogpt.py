"""nanoGPT's checkpoint ckpt.pt: the weights and model_args, in float32, for its sample.py.

nanoGPT reads a file of torch.save, which is a pickle. This one has nothing but tensors, numbers and words:
`torch.load(weights_only=True)`, which runs no code, reads it. The vocabulary has no padding: nanoGPT would sample
it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.formats.weights import Weights, require, same

if TYPE_CHECKING:
    from torch import Tensor

FILE = "ckpt.pt"
HEAD = "lm_head.weight"  # tied to the token embedding, stored once


def write(weights: Weights, folder: Path) -> list[Path]:
    """Write ckpt.pt. The tensors are mapped from the file of the training, except for the token embedding."""
    import torch

    state: dict[str, Tensor] = {}
    for name, tensor in weights.each(torch.float32):
        state[f"transformer.{name}"] = tensor.clone() if name == "wte.weight" else tensor
    state[HEAD] = state["transformer.wte.weight"]
    torch.save({"model": state, "model_args": model_args(weights)}, folder / FILE)
    return [folder / FILE]


def model_args(weights: Weights) -> dict[str, Any]:
    """The fields of nanoGPT's GPTConfig."""
    config = weights.config
    return {
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "block_size": config.block_size,
        "bias": True,
        "vocab_size": config.vocab_size,
        "dropout": 0.0,
    }


def verify(weights: Weights, folder: Path) -> None:
    """RuntimeError unless the file, read back without running code, has every trained weight."""
    import torch

    path = folder / FILE
    found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    state: dict[str, Tensor] = found["model"]
    names = {f"transformer.{name}" for name in weights.shapes} | {HEAD}
    require(found["model_args"] == model_args(weights), path, "model_args")
    require(state.keys() == names, path, "the names of the tensors")
    for name, expected in weights.each(torch.float32):
        require(same(state[f"transformer.{name}"], expected), path, name)
    require(same(state[HEAD], weights.tensor("wte.weight")), path, HEAD)
