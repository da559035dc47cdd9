"""nanoGPT's checkpoint ckpt.pt: the weights and model_args, in float32, for its sample.py.

nanoGPT reads a file of torch.save, which is a pickle. This one has nothing but tensors, numbers and words:
`torch.load(weights_only=True)`, which runs no code, reads it. The vocabulary has no padding: nanoGPT would sample
it.
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile, ZipInfo

from pipelines.formats.weights import Weights, require, same

if TYPE_CHECKING:
    from torch import Tensor

FILE, HOLLOW = "ckpt.pt", "ckpt.hollow"  # torch.save names the archive's folder after the file
LOCAL_HEADER, ALIGNMENT = 30, 64  # bytes: of a zip entry before its name, and of torch's bodies
HEAD = "lm_head.weight"  # tied to the token embedding, stored once


def write(weights: Weights, folder: Path) -> list[Path]:
    """Write ckpt.pt, a tensor at a time: a zip archive with the entries that torch.save gives it.

    torch.save first makes the same archive with holes in place of the numbers.
    """
    path, hollow, names = folder / FILE, folder / HOLLOW, list(weights.shapes)
    save_hollow(weights, hollow)
    with ZipFile(hollow) as entries, path.open("wb") as file, ZipFile(file, "w") as archive:
        for name in entries.namelist():
            info, (place, _, number) = ZipInfo(name), name.rpartition("/")
            # As in torch's archives, an extra field fills the gap before an entry's body.
            gap = -(file.tell() + LOCAL_HEADER + len(name) + 4) % ALIGNMENT
            info.extra = struct.pack("<2sH", b"FB", gap) + bytes(gap)
            if place.endswith("/data"):  # the tensors, in the order of the model
                archive.writestr(info, weights.tensor(names[int(number)]).contiguous().numpy().data.cast("B"))
            else:
                archive.writestr(info, entries.read(name))
    hollow.unlink()
    return [path]


def save_hollow(weights: Weights, path: Path) -> None:
    """Save a checkpoint without numbers."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    config, state = weights.config, {}
    with FakeTensorMode():
        for name, shape in weights.shapes.items():
            rows = (config.vocab_size, *shape[1:]) if name in config.vocabulary_rows else shape
            state[f"transformer.{name}"] = torch.empty(rows, dtype=torch.float32)
    state[HEAD] = state["transformer.wte.weight"]
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"model": state, "model_args": model_args(weights)}, path)


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
